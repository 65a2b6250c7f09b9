"""The pace of uploads (docs/SEMANTICS.md, S-195)."""

from __future__ import annotations

import threading
import time

import pytest

from datastore.fuse.store.base import PartNumber, WriteOptions
from datastore.fuse.store.observing import ObservingStore
from datastore.fuse.store.pacing import UploadPace
from datastore.retry import Call, one_call
from tests.memorystore import MemoryStore
from tests.promises import promise


def seconds_of(pace: UploadPace, *sizes: int) -> float:
    began = time.monotonic()
    for size in sizes:
        pace.take(size)
    return time.monotonic() - began


@promise("S-195")
def test_what_is_sent_one_after_the_other_keeps_the_rate() -> None:
    pace = UploadPace(10_000)
    assert 0.3 <= seconds_of(pace, 1000, 1000, 500, 500, 1) < 3


@promise("S-195")
def test_nothing_is_saved_up_while_nothing_is_sent() -> None:
    now = 100.0
    pace = UploadPace(10_000, lambda: now + time.monotonic())
    now += 3600
    assert 0.2 <= seconds_of(pace, 1000, 1000, 1000) < 3


@promise("S-195")
def test_who_waits_at_once_shares_the_rate() -> None:
    pace = UploadPace(10_000)
    threads = [threading.Thread(target=pace.take, args=(500,)) for _ in range(5)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.2 <= time.monotonic() - began < 3


@promise("S-195")
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_new_limit_counts_for_who_waits(limit: int) -> None:
    pace = UploadPace(1)
    pace.take(3600)
    waiting = threading.Thread(target=pace.take, args=(1,), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    pace.limit(limit)
    waiting.join(10)
    assert not waiting.is_alive()


@promise("S-195")
def test_bodies_and_parts_are_paced_and_nothing_else() -> None:
    """Nor is the wait counted as time of the store, or of what a call may take for its tries."""
    store = ObservingStore(MemoryStore())
    store.upload_pace.limit(100)
    call = Call(time.monotonic() - 1000)
    with one_call(call):
        store.put("a", b"x" * 10, WriteOptions())
        began = time.monotonic()
        store.put("b", b"x" * 10, WriteOptions())
        upload = store.create_upload("c", WriteOptions())
        store.upload_part("c", upload, PartNumber(1), b"x" * 10)
    assert time.monotonic() - began >= 0.2
    assert call.began >= began
    began = time.monotonic()
    store.get("a")
    store.copy("a", "d")
    store.head("a")
    assert time.monotonic() - began < 0.1
    assert store.metrics.snapshot()["put"]["slowest_s"] < 0.1
