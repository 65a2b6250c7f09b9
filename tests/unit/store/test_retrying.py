"""The retry layer: who is asked again, how long, and what a repeated write's refusal means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.errors import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    PreconditionFailed,
    ServerFault,
    StoreError,
    Throttled,
    Unreachable,
)
from datastore.fuse.loop import now
from datastore.fuse.store.base import ByteRange, ETag, ObjectStore, PartNumber, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.retrying import Retrier, RetryingStore
from datastore.retry import Call, one_call
from tests.faulty import Fault, FaultyStore, from_nth, nth
from tests.memorystore import MemoryBucket, MemoryStore
from tests.promises import promise

PLAIN = WriteOptions()
ONCE = WriteOptions(if_none_match=True, metadata={"mtime": "1.5"})


class ManualTime:
    """Sleeping moves the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def retrier(self, budget_s: float) -> Retrier:
        return Retrier(budget_s=budget_s, clock=lambda: self.now, sleep=self.sleep, jitter=lambda: 0.5)


class Retrying(BlockingStore):
    """One whose time passes only while it waits for another try."""

    def __init__(self, inner: ObjectStore, time: ManualTime | None = None, budget_s: float = 60.0) -> None:
        self.retrying = RetryingStore(inner, (time or ManualTime()).retrier(budget_s))
        super().__init__(self.retrying)

    @property
    def told(self) -> Mapping[str, Mapping[str, Any]]:
        return self.retrying.metrics.snapshot()


def filled(bucket: MemoryBucket | None = None, body: bytes = b"content", options: WriteOptions = PLAIN) -> MemoryStore:
    """A store with one object."""
    made = MemoryStore(bucket)
    now(made.put("key", body, options))
    return made


CALLS: list[Callable[[BlockingStore], object]] = [
    lambda s: s.list_page(""),
    lambda s: s.head("key"),
    lambda s: s.get("key", byte_range=ByteRange(0, 3)),
    lambda s: s.put("new", b"x", PLAIN),
    lambda s: s.put("new", b"x", ONCE),
    lambda s: s.copy("key", "copy"),
    lambda s: s.delete("key"),
    lambda s: s.delete_many(["key"]),
    lambda s: s.create_upload("new", PLAIN),
    lambda s: s.abort_upload("key", s.create_upload("key", PLAIN)),
    lambda s: s.pending_uploads(""),
]


class TestRetrying:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("after", [False, True])
    def test_every_call_survives_one_transient_failure(
        self, call: Callable[[BlockingStore], object], after: bool
    ) -> None:
        """And is counted once, however often it was tried."""
        faulty = FaultyStore(filled(), nth(0, Unreachable("down"), after=after))
        store = Retrying(faulty)
        call(store)
        assert len(faulty.calls) >= 2
        seen = store.told[faulty.calls[0]]
        assert (seen["calls"], seen["retries"]) == (1, {"Unreachable": 1})

    @pytest.mark.parametrize("call", CALLS)
    def test_a_permanent_failure_is_raised_at_once(self, call: Callable[[BlockingStore], object]) -> None:
        faulty = FaultyStore(MemoryStore(), from_nth(0, StoreError("no")))
        with pytest.raises(StoreError, match="no"):
            call(Retrying(faulty))
        assert len(faulty.calls) == 1

    def test_the_budget_bounds_all_tries_and_the_last_error_is_raised(self) -> None:
        time = ManualTime()
        store = Retrying(FaultyStore(MemoryStore(), from_nth(0, ServerFault("500"))), time)
        with pytest.raises(ServerFault, match="500"):
            store.head("key")
        assert 50.0 < time.now - 100.0 <= 60.0
        assert time.sleeps[:4] == pytest.approx([0.075, 0.15, 0.3, 0.6])
        assert max(time.sleeps) == 6.0

    def test_each_failure_that_is_tried_again_is_counted(self) -> None:
        faulty = FaultyStore(MemoryStore(), lambda n, _: Fault(Throttled("slow down")) if n < 3 else None)
        store = Retrying(faulty)
        store.list_page("")
        assert store.told["list_page"]["retries"] == {"Throttled": 3}


class TestOneCall:
    """S-109: what is asked for one call of a program shares one budget."""

    @promise("S-64", "S-109")
    def test_a_second_request_has_what_the_first_has_left(self) -> None:
        """The call fails after 60 s, not after 60 s for each request; a request is tried once at least."""
        time = ManualTime()
        faulty = FaultyStore(MemoryStore(), from_nth(0, Unreachable("gone")))
        store = Retrying(faulty, time)
        with one_call(Call(time.now)):
            with pytest.raises(Unreachable):
                store.head("key")
            tries = len(faulty.calls)
            with pytest.raises(Unreachable):
                store.list_page("")
        assert time.now - 100.0 <= 60.0
        assert len(faulty.calls) > tries > 5

    def test_an_answer_begins_a_new_budget(self) -> None:
        """An upload may take hours: each of its requests outlives an outage."""
        time = ManualTime()
        store = Retrying(FaultyStore(MemoryStore(), _outages(5, each=8)), time)
        with one_call(Call(time.now)):
            for _ in range(5):
                store.list_page("")
        assert time.now - 100.0 > 60.0

    @promise("S-109")
    def test_who_waited_for_one_that_failed_has_less(self) -> None:
        """A lock that a failing call held for a minute is part of the wait."""
        time = ManualTime()
        faulty = FaultyStore(MemoryStore(), from_nth(1, Unreachable("gone")))
        store = Retrying(faulty, time)
        store.list_page("")
        waiting = Call(time.now)
        with one_call(Call(time.now)), pytest.raises(Unreachable):
            store.head("key")
        tries = len(faulty.calls)
        with one_call(waiting), pytest.raises(Unreachable):
            store.head("key")
        assert time.now - 100.0 <= 60.0
        assert len(faulty.calls) - tries <= 8

    def test_who_waited_for_work_has_all_of_it(self) -> None:
        time = ManualTime()
        store = Retrying(FaultyStore(MemoryStore(), _outages(2, each=8)), time)
        waiting = Call(time.now)
        time.now += 300.0  # somebody uploads a large file meanwhile
        store.list_page("")
        with one_call(waiting):
            store.list_page("")

    def test_a_request_that_was_at_work_for_long_is_tried_again(self) -> None:
        """A part that is sent for two minutes and then cut off: nobody has waited for an answer in vain yet."""
        time = ManualTime()

        def slow_and_cut(number: int, _method: str) -> Fault | None:
            if number:
                return None
            time.now += 120.0
            return Fault(Unreachable("reset"))

        Retrying(FaultyStore(MemoryStore(), slow_and_cut), time).list_page("")


def _outages(count: int, *, each: int) -> Callable[[int, str], Fault | None]:
    """So often the store is away for so many requests, and answers one in between."""

    def plan(number: int, _method: str) -> Fault | None:
        away = number % (each + 1) < each and number < count * (each + 1)
        return Fault(Unreachable("away")) if away else None

    return plan


LOST = Unreachable("lost")


class TestAmbiguousWrites:
    def test_a_create_whose_answer_was_lost_is_a_success(self) -> None:
        inner = MemoryStore()
        faulty = FaultyStore(inner, nth(0, DeadlineExceeded("lost"), after=True))
        written = Retrying(faulty).put("key", b"ours", ONCE)
        assert written.etag == hashlib.md5(b"ours").hexdigest() == now(inner.head("key")).etag
        assert faulty.calls == ["put", "put", "head"]

    @pytest.mark.parametrize("dated", [True, False])
    def test_where_etags_are_no_md5_the_time_of_the_change_tells_whose_an_object_is(self, dated: bool) -> None:
        """As with SSE-KMS on Amazon S3."""
        options = WriteOptions(metadata={"ctime": "1.000000001"} if dated else {"mode": "420"}, if_none_match=True)
        other = Fault(alter=lambda info: info._replace(etag=ETag("0" * 32)))
        plan = nth(0, LOST, after=True)
        store = FaultyStore(MemoryStore(), lambda index, method: other if method == "head" else plan(index, method))
        if dated:
            assert Retrying(store).put("key", b"ours", options).etag == "0" * 32
        else:
            with pytest.raises(AlreadyExists):
                Retrying(store).put("key", b"ours", options)

    @pytest.mark.parametrize("theirs", [(b"theirs", ONCE), (b"ours", WriteOptions(metadata={"mtime": "9.9"}))])
    def test_another_clients_object_is_not_taken_for_ours(self, theirs: tuple[bytes, WriteOptions]) -> None:
        faulty = FaultyStore(filled(None, *theirs), nth(0, DeadlineExceeded("lost")))
        with pytest.raises(AlreadyExists):
            Retrying(faulty).put("key", b"ours", ONCE)

    def test_a_taken_key_is_refused_without_a_question_when_nothing_was_lost(self) -> None:
        faulty = FaultyStore(filled(None, b"ours", ONCE), nth(0, Throttled("slow down")))
        with pytest.raises(AlreadyExists):
            Retrying(faulty).put("key", b"ours", ONCE)
        assert faulty.calls == ["put", "put"]

    def test_a_replacement_whose_answer_was_lost_is_a_success_unless_another_was_faster(self) -> None:
        inner = filled()
        old = now(inner.head("key")).etag
        written = Retrying(FaultyStore(inner, nth(0, LOST, after=True))).put("key", b"new", WriteOptions(if_match=old))
        assert written.etag == now(inner.head("key")).etag == hashlib.md5(b"new").hexdigest()
        with pytest.raises(PreconditionFailed):
            Retrying(FaultyStore(inner, nth(0, LOST))).put("key", b"newer", WriteOptions(if_match=old))

    @pytest.mark.parametrize("options", [PLAIN, WriteOptions(if_none_match=True)])
    def test_a_completion_whose_answer_was_lost_is_a_success(self, options: WriteOptions) -> None:
        inner = MemoryStore(MemoryBucket(min_part_bytes=1))
        upload = now(inner.create_upload("key", PLAIN))
        parts = [(PartNumber(n), now(inner.upload_part("key", upload, PartNumber(n), b"part"))) for n in (1, 2)]
        faulty = FaultyStore(inner, nth(0, ServerFault("lost"), after=True))
        written = Retrying(faulty).complete_upload("key", upload, parts, options)
        assert written.etag == now(inner.head("key")).etag
        assert now(inner.get("key"))[0] == b"partpart"

    @pytest.mark.parametrize("etag", ["not-an-md5", "0" * 32])
    def test_a_completion_of_an_upload_that_another_dropped_is_not_found(self, etag: str) -> None:
        inner = filled()
        upload = now(inner.create_upload("key", PLAIN))
        now(inner.abort_upload("key", upload))
        faulty = FaultyStore(inner, nth(0, ServerFault("lost")))
        with pytest.raises(NotFound):
            Retrying(faulty).complete_upload("key", upload, [(PartNumber(1), ETag(etag))], PLAIN)


class TestPolicy:
    @given(attempt=st.integers(1, 10_000), fraction=st.floats(0, 1, exclude_max=True))
    def test_delays_grow_within_their_bounds(self, attempt: int, fraction: float) -> None:
        retrier = Retrier(first_delay_s=0.1, max_delay_s=8.0, jitter=lambda: fraction)
        delay = retrier.delay_s(attempt)
        assert 0.05 <= delay <= 8.0
        assert delay <= retrier.delay_s(attempt + 1)

    def test_no_budget_means_one_try(self) -> None:
        faulty = FaultyStore(MemoryStore(), nth(0, Unreachable("down")))
        with pytest.raises(Unreachable):
            Retrying(faulty, budget_s=0.0).head("key")
        assert faulty.calls == ["head"]


class TestObserving:
    def test_calls_bytes_time_and_errors_are_counted(self) -> None:
        ticks = iter(range(100))
        retrying = RetryingStore(MemoryStore(), Retrier(clock=lambda: float(next(ticks))))
        store = BlockingStore(retrying)
        store.put("key", b"12345", PLAIN)
        store.get("key", byte_range=ByteRange(1, 3))
        store.get("key")
        with pytest.raises(NotFound):
            store.head("missing")
        seen = retrying.metrics.snapshot()
        assert seen["put"]["sent_bytes"] == 5
        assert (seen["get"]["calls"], seen["get"]["received_bytes"], seen["get"]["seconds"]) == (2, 7, 2.0)
        assert seen["head"]["errors"] == {"NotFound": 1}
        assert "list_page" not in seen
