"""No tenant has the controller or a node connect to what stays inside, however he writes it (S-203)."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from datastore.api.endpoints import EndpointPolicy
from datastore.api.source import S3Location
from datastore.controller.datastores.effective import effective_spec
from datastore.controller.datastores.prober import BackendProber
from datastore.controller.datastores.settings import Settings
from datastore.errors import DatastoreError, EndpointNotAllowed, StoreError
from datastore.fuse.loop import now
from datastore.fuse.store.s3 import probe
from datastore.fuse.store.s3.caller import gather
from datastore.fuse.store.s3.messages import Request
from datastore.fuse.vfs.build import build_mount
from tests.adapter import open_adapter
from tests.hostile import servers
from tests.hostile.asking import KEYS, PATIENT, QUICK
from tests.hostile.servers import hostile
from tests.mounted import spec_at
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import OF_CLASS, SHARED, body, storage_class
from tests.unit.store.scripted import resolving

TENANT = EndpointPolicy()
SPELLINGS = [
    ("data", "127.0.0.1"),
    ("data", "localhost"),
    ("data", "127.1"),
    ("data", "2130706433"),
    ("data", "0x7f000001"),
    ("data", "017700000001"),
    ("data", "0x7f.0.0.1"),
    ("data", "0.0.0.0"),
    ("data", "[::ffff:127.0.0.1]"),
    ("data", "[::ffff:7f00:1]"),
    ("127", "0.1"),
]
"""Ways to write this machine: a bucket and the endpoint's host. The last is one when the bucket is put before it."""


def location_of(bucket: str, host: str, port: int, policy: EndpointPolicy | None) -> S3Location:
    endpoint, path_style = f"http://{host}:{port}", (host[-1].isdigit() and bucket == "data") or "localhost" in host
    return S3Location(bucket=bucket, endpoint=endpoint, force_path_style=path_style, credentials=KEYS, policy=policy)


@promise("S-203")
@pytest.mark.parametrize(("bucket", "host"), SPELLINGS)
def test_this_machine_is_not_asked_however_it_is_written(bucket: str, host: str) -> None:
    with hostile(servers.page) as server:
        with pytest.raises(EndpointNotAllowed, match="ALLOW_RANGES"):
            probe(location_of(bucket, host, server.port, TENANT), writable=False, deadline_s=60)
        with pytest.raises(EndpointNotAllowed):
            list_once(location_of(bucket, host, server.port, TENANT))
        assert server.heads == []
        with suppress(StoreError):  # on a laptop it is asked, so that the test would see it
            probe(location_of(bucket, host, server.port, None), writable=False, deadline_s=60)
        assert len(server.heads) == 1


def list_once(location: S3Location) -> None:
    """Ask for a listing."""
    with closing(open_adapter(location, limits=PATIENT)) as store:
        now(store.list_page(""))


@promise("S-203")
def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that says something else each time gains nothing."""
    with hostile(servers.page) as server:
        asked = resolving(monkeypatch, [("203.0.113.1", None)], [("127.0.0.1", None)], [("127.0.0.1", None)])
        policy = EndpointPolicy(deny_ranges=("203.0.113.0/24",))
        with closing(open_adapter(location_of("data", "s3.evil.example", server.port, policy), limits=QUICK)) as store:
            for _ in range(3):
                with pytest.raises(EndpointNotAllowed):
                    now(store.list_page(""))
    assert asked == ["data.s3.evil.example"] * 3
    assert server.heads == []


@promise("S-203")
def test_of_several_addresses_those_that_may_be_asked_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile(servers.page) as server, hostile(servers.page, "127.0.0.2") as other:
        resolving(monkeypatch, [("127.0.0.1", None), ("127.0.0.2", None)])
        policy = EndpointPolicy(allow_ranges=("127.0.0.2",))
        with pytest.raises(StoreError, match="a web page"):
            list_once(location_of("data", "s3.example", other.port, policy))
    assert (len(server.heads), len(other.heads)) == (0, 1)


@promise("S-203")
def test_a_region_leads_through_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, [("169.254.169.254", None)])
    caller = gather(S3Location(bucket="data", credentials=KEYS, policy=TENANT), QUICK)
    transport = caller.connect(caller.endpoint.in_region("eu-west-3"))
    with pytest.raises(EndpointNotAllowed, match="link-local"):
        now(transport.send(Request(method="GET"), b""))


@promise("S-203")
@pytest.mark.parametrize("host", ["169.254.169.254", "s3.example"])
def test_a_proxy_is_not_asked_for_what_may_not_be(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """As far as it is known here where a name leads."""
    with hostile(servers.page) as proxy:
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        if not host[0].isdigit():
            resolving(monkeypatch, [("169.254.169.254", None)])
        with pytest.raises(EndpointNotAllowed):
            list_once(location_of("data", host, 80, TENANT))
    assert proxy.heads == []


def test_through_a_proxy_a_name_that_only_it_knows_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile(servers.page) as proxy:
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        with pytest.raises(StoreError, match="a web page"):
            list_once(location_of("data", "s3.nowhere.invalid", 80, TENANT))
    assert proxy.heads[0].startswith(b"GET http://data.s3.nowhere.invalid/")


@promise("S-116")
def test_an_endpoint_that_is_not_named_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolving(monkeypatch, [("203.0.113.1", None)])
    only = EndpointPolicy(endpoints=("https://*.example.org",))
    with pytest.raises(EndpointNotAllowed, match="ALLOW_ENDPOINTS"):
        list_once(location_of("data", "s3.example", 80, only))
    assert asked == []


class Secrets:
    """A cluster in which each Secret has keys."""

    async def get(self, *_: object) -> dict[str, Any]:
        metadata = {"name": "keys", "namespace": "team"}
        data = {"AWS_ACCESS_KEY_ID": "YQ==", "AWS_SECRET_ACCESS_KEY": "Yg=="}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


@promise("S-203", "S-116")
@pytest.mark.parametrize("of_class", [False, True])
def test_the_controller_asks_for_users_by_the_policy_and_for_classes_without(of_class: bool) -> None:
    with hostile(servers.page) as server:
        asked_for = body({"s3": {"bucket": "data", "credentialsSecret": "keys", "endpoint": server.endpoint}})
        classed = storage_class(**SHARED, endpoint=server.endpoint)
        given, its_class = (body(OF_CLASS), classed) if of_class else (asked_for, None)
        wanted = effective_spec(given, its_class, Settings())

        async def look() -> DatastoreError | None:
            prober = BackendProber(Secrets(), Settings(), lambda: ())  # type: ignore[arg-type]
            try:
                return (await prober.look(wanted, lambda: None, made=False)).error
            finally:
                prober.close()

        error = asyncio.run(look())
    assert isinstance(error, EndpointNotAllowed) is not of_class
    assert bool(server.heads) is of_class


@promise("S-203", "S-133")
def test_a_mount_on_a_node_does_not_ask(tmp_path: Path) -> None:
    with hostile(servers.page) as server:
        spec = spec_at(tmp_path, location_of("data", "127.0.0.1", server.port, TENANT))
        for resumed in (False, True):
            with pytest.raises(EndpointNotAllowed):
                now(build_mount(spec, resumed=resumed).filesystem.core.store.list_page(""))
    assert server.heads == []
