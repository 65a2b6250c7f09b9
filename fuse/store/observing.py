"""Counts what a store is asked: calls, bytes, time and errors by class, per method; for status, metrics and tests.

Bodies wait here until they may be sent (pacing.py). That counts neither as time of the store nor as its silence.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from datastore.errors import StoreError
from datastore.histogram import Histogram
from datastore.retry import current_call

from ..loop import Loop
from .base import (
    Body,
    ByteRange,
    ETag,
    FilePart,
    GetFeed,
    GetSink,
    HeadSink,
    ObjectInfo,
    ObjectStore,
    ObjectVersion,
    PartNumber,
    Shown,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
)
from .forwarding import ForwardingStore
from .pacing import UploadPace
from .silence import Silence

T = TypeVar("T")


@dataclass(slots=True)
class _Tally:
    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    latency: Histogram = field(default_factory=Histogram)


class StoreMetrics:
    """The tallies of one store. Thread-safe; numbers only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = {}
        self.silence = Silence()

    def record(self, method: str, seconds: float, *, sent: int = 0, received: int = 0, error: str = "") -> None:
        """One call that ended; error is the class name of what it raised."""
        with self._lock:
            tally = self._tally(method)
            tally.calls += 1
            tally.sent_bytes += sent
            tally.received_bytes += received
            tally.seconds += seconds
            tally.slowest_s = max(tally.slowest_s, seconds)
            tally.latency.add(max(0, int(seconds * 1e9)))
            if error:
                tally.errors[error] += 1

    def record_retry(self, method: str, error: StoreError) -> None:
        """One failure inside a call that was tried again; fits RetryingStore.on_retry."""
        with self._lock:
            self._tally(method).retries[type(error).__name__] += 1

    def _tally(self, method: str) -> _Tally:
        tally = self._tallies.get(method)
        if tally is None:
            tally = self._tallies[method] = _Tally()
        return tally

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """By method: calls, sent_bytes, received_bytes, seconds, slowest_s, errors and retries by class name, buckets.

        The edges of the buckets are datastore.histogram.EDGES_S; a call counts with all its retries.
        """
        with self._lock:
            return {
                method: {
                    "calls": tally.calls,
                    "sent_bytes": tally.sent_bytes,
                    "received_bytes": tally.received_bytes,
                    "seconds": round(tally.seconds, 6),
                    "slowest_s": round(tally.slowest_s, 6),
                    "errors": dict(tally.errors),
                    "retries": dict(tally.retries),
                    "buckets": tally.latency.buckets(),
                }
                for method, tally in sorted(self._tallies.items())
            }


class ObservingStore(ForwardingStore):
    """Times and counts each call. clock: monotonic seconds."""

    def __init__(
        self, inner: ObjectStore, metrics: StoreMetrics | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.metrics = metrics or StoreMetrics()
        self.upload_pace = UploadPace()
        self._clock = clock

    def head_many(self, objects: Sequence[Shown], sink: HeadSink) -> None:
        """See ObjectStore. Each is counted as a HEAD that took from the beginning of the call to its answer."""
        started = self._clock()

        def counted(number: int, answer: ObjectInfo | StoreError) -> None:
            error = type(answer).__name__ if isinstance(answer, StoreError) else ""
            self.metrics.record("head", self._clock() - started, error=error)
            sink(number, answer)

        self.inner.head_many(objects, counted)

    def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """See ObjectStore."""
        sunk = 0

        def counted(info: ObjectInfo, offset: int, body: Body) -> None:
            nonlocal sunk
            sunk += len(body)
            if sink is not None:
                sink(info, offset, body)

        passed = None if sink is None else counted
        return self._around(
            "get",
            lambda: self.inner.get(key, byte_range=byte_range, if_match=if_match, sink=passed),
            received=lambda answer: len(answer[0]) + sunk,
        )

    def get_many(self, feed: GetFeed, sink: GetSink, loop: Loop | None = None) -> None:
        """See ObjectStore. Each is counted as a GET; what failed, as one that said nothing."""
        begun: dict[ObjectVersion, float] = {}

        def begin() -> ObjectVersion | None:
            wanted = feed()
            if wanted is not None:
                begun[wanted] = self._clock()
            return wanted

        def counted(wanted: ObjectVersion, answer: tuple[Body, ObjectInfo] | None) -> None:
            received, error = (0, "Unfetched") if answer is None else (len(answer[0]), "")
            self.metrics.record("get", self._clock() - begun.pop(wanted), received=received, error=error)
            sink(wanted, answer)

        self.inner.get_many(begin, counted, loop)

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """See ObjectStore."""
        self._await_pace(len(body))
        return self._around("put", lambda: self.inner.put(key, body, options), sent=len(body))

    def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """See ObjectStore."""
        self._await_pace(len(body))
        return self._around("upload_part", lambda: self.inner.upload_part(key, upload_id, number, body), sent=len(body))

    def _await_pace(self, size_bytes: int) -> None:
        if self.upload_pace.take(size_bytes) and (call := current_call()) is not None:
            call.began = time.monotonic()  # the store was not asked: the call has all its time to try

    def _around(
        self, method: str, call: Callable[[], T], *, sent: int = 0, received: Callable[[T], int] | None = None
    ) -> T:
        started = self._clock()
        try:
            answer = call()
        except BaseException as error:
            self.metrics.record(method, self._clock() - started, error=type(error).__name__)
            raise
        got = received(answer) if received is not None else 0
        self.metrics.record(method, self._clock() - started, sent=sent, received=got)
        return answer
