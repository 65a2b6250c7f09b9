"""A server that takes other keys from now on: a credentials file that is rewritten is enough (versitygw, restarted)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from datastore.api.source import S3Location
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3 import open_s3
from tests.promises import promise
from tests.servers import Server, free_port, make_bucket, run_versitygw

CALLS: dict[str, Callable[[BlockingStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key"),
    "put": lambda store: store.put("key", b"body", WriteOptions()),
    "list": lambda store: store.list_page(""),
}


def write_keys(home: Path, server: Server) -> None:
    text = f"[default]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
    (home / "credentials").write_text(text)


@promise("S-65")
@pytest.mark.parametrize("name", CALLS)
def test_renewed_keys_are_found_when_the_old_ones_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versitygw: Server
) -> None:
    """The first call after the change succeeds, whatever it is."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    data = tmp_path / "data"
    data.mkdir()
    port = free_port()
    with run_versitygw(port=port, data_dir=str(data)) as server:
        write_keys(tmp_path, server)
        bucket = make_bucket(server, "renewal")
        location = S3Location(bucket=bucket, endpoint=server.endpoint, region="us-east-1", force_path_style=True)
        store = BlockingStore(open_s3(location))
        store.put("key", b"body", WriteOptions())
    with run_versitygw(port=port, data_dir=str(data), secret_key="another-secret") as server:
        write_keys(tmp_path, server)
        CALLS[name](store)
        assert bytes(store.get("key")[0]) == b"body"
    store.close()
