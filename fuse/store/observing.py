"""Counts what a store is asked: calls, bytes, time and errors by class, per method; for status, metrics and tests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from datastore.errors import StoreError
from datastore.histogram import Histogram

from .base import (
    Body,
    ByteRange,
    Capabilities,
    DeleteFailure,
    ETag,
    FilePart,
    ListPage,
    ObjectInfo,
    ObjectStore,
    PartNumber,
    PendingUpload,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
)

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

    def record(self, method: str, seconds: float, *, sent: int = 0, received: int = 0, error: str = "") -> None:
        """One call that ended; error is the class name of what it raised."""
        with self._lock:
            tally = self._tallies.setdefault(method, _Tally())
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
            self._tallies.setdefault(method, _Tally()).retries[type(error).__name__] += 1

    def calls(self, method: str) -> int:
        """How often a method of ObjectStore was called."""
        with self._lock:
            tally = self._tallies.get(method)
            return 0 if tally is None else tally.calls

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


class ObservingStore:
    """Wraps a store; implements ObjectStore. clock: monotonic seconds."""

    def __init__(
        self, inner: ObjectStore, metrics: StoreMetrics | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self.metrics = metrics or StoreMetrics()
        self._clock = clock

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do."""
        return self._inner.capabilities

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        max_keys: int = 1000,
        unless: bytes = b"",
    ) -> ListPage:
        """See ObjectStore."""
        return self._timed(
            "list_page",
            lambda: self._inner.list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, max_keys=max_keys, unless=unless
            ),
        )

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore."""
        return self._timed("head", lambda: self._inner.head(key))

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
        return self._timed(
            "get",
            lambda: self._inner.get(key, byte_range=byte_range, if_match=if_match, sink=passed),
            received=lambda answer: len(answer[0]) + sunk,
        )

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """See ObjectStore."""
        return self._timed("put", lambda: self._inner.put(key, body, options), sent=len(body))

    def copy(
        self, source: str, target: str, *, replace: WriteOptions | None = None, if_source_match: ETag | None = None
    ) -> WriteResult:
        """See ObjectStore."""
        return self._timed(
            "copy", lambda: self._inner.copy(source, target, replace=replace, if_source_match=if_source_match)
        )

    def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """See ObjectStore."""
        self._timed("delete", lambda: self._inner.delete(key, if_match=if_match))

    def delete_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectStore."""
        return self._timed("delete_many", lambda: self._inner.delete_many(keys))

    def create_upload(self, key: str, options: WriteOptions) -> UploadId:
        """See ObjectStore."""
        return self._timed("create_upload", lambda: self._inner.create_upload(key, options))

    def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """See ObjectStore."""
        return self._timed("upload_part", lambda: self._inner.upload_part(key, upload_id, number, body), sent=len(body))

    def upload_part_copy(
        self,
        key: str,
        upload_id: UploadId,
        number: PartNumber,
        source: str,
        byte_range: ByteRange,
        if_source_match: ETag | None,
    ) -> ETag:
        """See ObjectStore."""
        return self._timed(
            "upload_part_copy",
            lambda: self._inner.upload_part_copy(key, upload_id, number, source, byte_range, if_source_match),
        )

    def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """See ObjectStore."""
        return self._timed("complete_upload", lambda: self._inner.complete_upload(key, upload_id, parts, options))

    def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """See ObjectStore."""
        self._timed("abort_upload", lambda: self._inner.abort_upload(key, upload_id))

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See ObjectStore."""
        return iter(self._timed("pending_uploads", lambda: list(self._inner.pending_uploads(prefix))))

    def close(self) -> None:
        """See ObjectStore."""
        self._inner.close()

    def _timed(
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
