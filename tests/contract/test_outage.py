"""A server that goes away and comes back: calls wait inside their budget and then succeed (versitygw, restarted)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datastore.fuse.loop import pause
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.retrying import Retrier
from datastore.fuse.store.s3 import open_s3
from tests.contract.conftest import location_of
from tests.patience import eventually
from tests.servers import free_port, make_bucket, run_versitygw


@pytest.mark.usefixtures("versitygw")
def test_calls_outlast_a_restart_of_the_server(tmp_path: Path) -> None:
    port = free_port()
    failed: set[int] = set()

    async def sleep(seconds: float) -> None:
        failed.add(threading.get_ident())
        await pause(min(seconds, 0.2))

    with run_versitygw(port=port, data_dir=str(tmp_path)) as server:
        location = location_of(server, make_bucket(server, "outage"))
        retrying = open_s3(location, retrier=Retrier(budget_s=120, sleep=sleep))
        store = BlockingStore(retrying)
        store.put("before", b"kept", WriteOptions())
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(store.get, "before")
        writing = pool.submit(store.put, "during", b"new", WriteOptions(if_none_match=True, metadata={"a": "1"}))
        eventually(lambda: len(failed) == 2, "both find that the server is away")
        with run_versitygw(port=port, data_dir=str(tmp_path)):
            assert bytes(reading.result(150)[0]) == b"kept"
            assert writing.result(150).etag == store.head("during").etag
    assert retrying.metrics.snapshot()["get"]["retries"]
    store.close()
