"""The pace of uploads (docs/SEMANTICS.md, S-195)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from datastore.fuse.loop import now
from datastore.fuse.store.base import PartNumber, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.pacing import UploadPace
from datastore.fuse.store.retrying import Retrier, RetryingStore
from datastore.retry import Call, one_call
from tests.clock import ManualClock
from tests.memorystore import MemoryStore
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.unit.store.scripted import Wait


def paced(clock: ManualClock, bytes_per_s: int) -> UploadPace:
    """Who waits for it moves the clock, a little too far: it counts whole nanoseconds."""

    async def sleep(seconds: float) -> None:
        clock.advance(seconds + 1e-6)

    return UploadPace(bytes_per_s, clock.monotonic, sleep)


def seconds_of(clock: ManualClock, pace: UploadPace, *sizes: int) -> float:
    began = clock.monotonic()
    for size in sizes:
        now(pace.take(size))
    return clock.monotonic() - began


@promise("S-195")
def test_what_is_sent_one_after_the_other_keeps_the_rate() -> None:
    """Nothing is saved up while nothing is sent."""
    clock = ManualClock()
    pace = paced(clock, 10_000)
    assert seconds_of(clock, pace, 1000, 1000, 500, 500, 1) == pytest.approx(0.3, abs=1e-4)
    clock.advance(3600)
    assert seconds_of(clock, pace, 1000, 1000, 1000) == pytest.approx(0.2, abs=1e-4)


@promise("S-195")
def test_who_waits_at_once_shares_the_rate(wait: Wait) -> None:
    pace, began = UploadPace(2_500), time.monotonic()
    with ThreadPoolExecutor(5) as threads:
        assert sum(threads.map(lambda _: wait(pace.take(500)), range(5))) >= 4, "all but the first one waited"
    assert 0.8 <= time.monotonic() - began < PATIENCE_S


@promise("S-195")
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_new_limit_counts_for_who_waits(limit: int, wait: Wait) -> None:
    pace = UploadPace(1)
    now(pace.take(3600))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait, pace.take(1))
        time.sleep(0.1)
        assert not waiting.done()
        pace.limit(limit)
        assert waiting.result(PATIENCE_S)


@promise("S-195")
def test_bodies_and_parts_are_paced_and_nothing_else() -> None:
    """Nor is the wait counted as time of the store, or of what a call may take for its tries."""
    clock = ManualClock()
    retrying = RetryingStore(MemoryStore(), Retrier(clock=clock.monotonic))
    retrying.upload_pace = paced(clock, 100)
    store = BlockingStore(retrying)
    asked_at = time.monotonic()
    call = Call(asked_at - 1000)
    began = clock.monotonic()
    with one_call(call):
        store.put("a", b"x" * 10, WriteOptions())
        store.put("b", b"x" * 10, WriteOptions())
        upload = store.create_upload("c", WriteOptions())
        store.upload_part("c", upload, PartNumber(1), b"x" * 10)
    store.get("a")
    store.copy("a", "d")
    store.head("a")
    assert clock.monotonic() - began == pytest.approx(0.2, abs=1e-4)
    assert call.began >= asked_at
    assert {told["seconds"] for told in retrying.metrics.snapshot().values()} == {0}
