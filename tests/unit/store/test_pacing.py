"""The pace of uploads (docs/SEMANTICS.md, S-195)."""

from __future__ import annotations

import threading
import time

import pytest

from datastore.fuse.store.base import PartNumber, WriteOptions
from datastore.fuse.store.pacing import UploadPace
from datastore.fuse.store.retrying import RetryingStore
from datastore.retry import Call, Retrier, one_call
from tests.clock import ManualClock
from tests.memorystore import MemoryStore
from tests.patience import PATIENCE_S
from tests.promises import promise


def paced(clock: ManualClock, bytes_per_s: int) -> UploadPace:
    """Who waits for it moves the clock, a little too far: it counts whole nanoseconds."""
    pace = UploadPace(bytes_per_s, clock.monotonic)

    def wait(timeout: float | None = None) -> bool:
        clock.advance((timeout or 0.0) + 1e-6)
        return False

    pace._changed.wait = wait  # type: ignore[method-assign]
    return pace


def seconds_of(clock: ManualClock, pace: UploadPace, *sizes: int) -> float:
    began = clock.monotonic()
    for size in sizes:
        pace.take(size)
    return clock.monotonic() - began


@promise("S-195")
def test_what_is_sent_one_after_the_other_keeps_the_rate() -> None:
    clock = ManualClock()
    assert seconds_of(clock, paced(clock, 10_000), 1000, 1000, 500, 500, 1) == pytest.approx(0.3, abs=1e-4)


@promise("S-195")
def test_nothing_is_saved_up_while_nothing_is_sent() -> None:
    clock = ManualClock()
    pace = paced(clock, 10_000)
    clock.advance(3600)
    assert seconds_of(clock, pace, 1000, 1000, 1000) == pytest.approx(0.2, abs=1e-4)


@promise("S-195")
def test_who_waits_at_once_shares_the_rate() -> None:
    pace = UploadPace(10_000)
    threads = [threading.Thread(target=pace.take, args=(500,)) for _ in range(5)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.2 <= time.monotonic() - began < PATIENCE_S


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
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


@promise("S-195")
def test_bodies_and_parts_are_paced_and_nothing_else() -> None:
    """Nor is the wait counted as time of the store, or of what a call may take for its tries."""
    clock = ManualClock()
    store = RetryingStore(MemoryStore(), Retrier(clock=clock.monotonic))
    store.upload_pace = paced(clock, 100)
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
    assert {method: told["slowest_s"] for method, told in store.metrics.snapshot().items() if told["slowest_s"]} == {}
