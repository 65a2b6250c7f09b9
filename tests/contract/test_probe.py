"""A wrong key, bucket, region or endpoint is named within the deadline, with the server's own words (real servers)."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import (
    BucketNotFound,
    CredentialsInvalid,
    DeadlineExceeded,
    InvalidRequest,
    StoreError,
    Unreachable,
    WrongRegion,
)
from datastore.fuse.loop import now
from datastore.fuse.store.base import Capabilities
from datastore.fuse.store.s3 import probe
from datastore.secret import Secret
from tests.adapter import open_adapter
from tests.authority import HERE, Authority
from tests.contract.conftest import location_of
from tests.promises import promise
from tests.servers import Server, free_port, make_bucket, run_minio, run_versitygw
from tests.unit.store.scripted import SILENCE, ScriptedServer, http

NOBODY = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("s"))
NOWHERE = "http://no-such-host.invalid:9000"
BUSY_S = 60.0
"""So late may a busy machine be; what is silent here stays so for ever."""
LONG_S = 60.0
"""More than an answer takes, however busy the machine is."""


@pytest.fixture(scope="module", params=["versitygw", "minio"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def location(server: Server) -> S3Location:
    return location_of(server, make_bucket(server, "probed"))


def seen(server: Server) -> Capabilities:
    """What the probe finds out."""
    if server.name == "minio":
        return Capabilities(listed_metadata=True, hides_below_files=True)
    return Capabilities(max_new_segment_bytes=227, unlisted_segment=".sgwtmp")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def refused(location: S3Location, kind: type[StoreError], *words: str, deadline_s: float = LONG_S) -> None:
    with within(deadline_s + BUSY_S), pytest.raises(kind) as raised:
        probe(location, writable=True, deadline_s=deadline_s)
    text = str(raised.value)
    assert type(raised.value) is kind
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_right_location_is_accepted_and_nothing_is_written(location: S3Location, server: Server) -> None:
    assert probe(location, writable=True, deadline_s=LONG_S) == seen(server)
    store = open_adapter(location)
    assert now(store.list_page("")).objects == []
    store.close()


def test_a_wrong_secret_names_the_key(location: S3Location, server: Server) -> None:
    keys = StaticCredentials(access_key_id=server.access_key, secret_access_key=Secret("wrong"))
    refused(
        replace(location, credentials=keys),
        CredentialsInvalid,
        f"the secret access key is wrong for access key id {server.access_key}",
        "server says: SignatureDoesNotMatch",
    )


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"credentials": NOBODY}, CredentialsInvalid, ["access key id AKID is not known", "server says:"]),
        ({"bucket": "missing"}, BucketNotFound, ["spec.s3.bucket", "s3://missing/", "NoSuchBucket"]),
        (
            {"region": "eu-north-9"},
            WrongRegion,
            ["spec.s3.region", "us-east-1", "server says: AuthorizationHeaderMalformed"],
        ),
        ({"endpoint": NOWHERE}, Unreachable, [NOWHERE, "does not resolve"]),
    ],
)
def test_a_wrong_setting_is_named(
    location: S3Location, changes: dict[str, Any], kind: type[StoreError], words: list[str]
) -> None:
    refused(replace(location, **changes), kind, *words)


def test_a_bucket_is_created_only_when_asked_and_writable(location: S3Location, server: Server) -> None:
    wanted = replace(location, bucket="created", create=True)
    with pytest.raises(BucketNotFound):
        probe(wanted, writable=False, deadline_s=LONG_S)
    probe(wanted, writable=True, deadline_s=LONG_S)
    probe(wanted, writable=True, deadline_s=LONG_S)
    assert probe(replace(wanted, create=False), writable=False, deadline_s=LONG_S) == seen(server)


def test_a_region_that_was_not_named_is_learned(
    location: S3Location, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    assert probe(replace(location, region="", credentials=None), writable=False, deadline_s=LONG_S) == seen(server)


def test_nobody_listening_is_named(location: S3Location) -> None:
    where = f"http://127.0.0.1:{free_port()}"
    refused(replace(location, endpoint=where), Unreachable, where, "connection refused", "check the endpoint")


def test_https_to_a_plain_server_says_tls(location: S3Location) -> None:
    where = location.endpoint.replace("http:", "https:")
    refused(replace(location, endpoint=where), Unreachable, "does not speak TLS")


def of_nobody(server: ScriptedServer, create: bool = False) -> S3Location:
    endpoint = f"http://127.0.0.1:{server.port}"
    return S3Location(bucket="data", endpoint=endpoint, credentials=NOBODY, create=create)


def test_a_silent_server_ends_at_the_deadline() -> None:
    with ScriptedServer([SILENCE]) as silent:
        refused(of_nobody(silent), DeadlineExceeded, f":{silent.port}", deadline_s=2.0)


@pytest.mark.parametrize(
    "answer",
    [http(200, b"<html>Welcome!</html>"), http(404, b"<html>No</html>"), http(403), http(302, b"", "Location: /")],
)
def test_a_web_server_is_no_s3_server(answer: bytes) -> None:
    with ScriptedServer([answer] * 2) as web:
        words = "spec.s3.endpoint", "does not answer like an S3 server"
        refused(of_nobody(web, create=True), InvalidRequest, *words)


@promise("S-200")
def test_an_endpoint_that_redirects_to_https_is_named() -> None:
    with ScriptedServer([http(301, b"<html>Moved</html>", "Location: https://s3.lab.example/data")] * 2) as web:
        refused(of_nobody(web), InvalidRequest, "spec.s3.endpoint", "redirects to https://s3.lab.example, ")


def test_a_credential_helper_that_hangs_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = tmp_path / "waits"
    os.mkfifo(waits)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {waits}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    writer = os.open(waits, os.O_RDWR)
    try:
        refused(S3Location(bucket="data"), CredentialsInvalid, "check credential_process", deadline_s=0.5)
    finally:
        waits.unlink()  # and the helper ends, however late it began
        os.close(writer)


def test_no_credentials_at_all_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    refused(S3Location(bucket="data"), CredentialsInvalid, "no credentials found")


def test_virtual_hosts_and_a_proxy_reach_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    found = http(200, b"body", 'ETag: "e"', "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT")
    with ScriptedServer([http(200, b"<ListBucketResult/>"), found]) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        store = open_adapter(S3Location(bucket="data", endpoint="http://s3.lab.example:9000", credentials=NOBODY))
        now(store.list_page(""))
        body, _ = now(store.get("a/b c"))
        store.close()
    assert bytes(body) == b"body"
    assert server.requests[0].startswith(b"GET http://data.s3.lab.example:9000/?encoding-type=url")
    assert server.requests[1].startswith(b"GET http://data.s3.lab.example:9000/a/b%20c ")


@pytest.mark.parametrize("name", ["versitygw", "minio"])
def test_http_to_a_port_that_speaks_tls_says_try_https(
    name: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("datastore.fuse.store.s3.probe"), "_TLS_S", LONG_S)
    with {"versitygw": run_versitygw, "minio": run_minio}[name](identity=authority.issue("probed", HERE)) as server:
        plain = server.endpoint.replace("https://", "http://")
        location = S3Location(bucket="bucket", endpoint=plain, force_path_style=True, credentials=NOBODY)
        refused(location, InvalidRequest, f"this port speaks TLS: try {server.endpoint}")


def test_what_is_no_http_is_said_without_its_bytes() -> None:
    with ScriptedServer([b"\x00\xff\xfe\x80 raw\r\n\r\n"] * 3) as server, pytest.raises(Unreachable) as raised:
        probe(of_nobody(server), writable=False, deadline_s=LONG_S)
    assert "what it answers is no HTTP: check the endpoint's host and port" in str(raised.value)
    assert "raw" not in str(raised.value)
    assert str(raised.value).isascii()
