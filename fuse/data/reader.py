"""Reads object versions for file handles: from memory, from the disk cache, else from the store, ahead of the reader.

Shell. ReadStream.read() is for the loop thread and never waits for the store: what is held is answered at once, the
rest by a Blocking function. Fetches are shared by all streams (pieces.py); each GET carries If-Match, so bytes of two
versions never meet. What arrives is given to its waiters first and written to the disk cache after. Reading ahead is
a favour: it is left out when fetch_limit jobs are queued or half the memory is on its way. What was asked for is
fetched by the asking thread itself when the pool is saturated. Retries are the store's business (store/retrying.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial

from datastore.errors import CorruptBody, DeadlineExceeded, PreconditionFailed

from ..ops import Blocking
from ..store.base import Body, ByteRange, ObjectInfo, ObjectStore
from .blockcache import BlockCache
from .pieces import Piece, PieceTable, cut
from .readahead import ReadAhead, Span, WindowSettings
from .version import ObjectVersion

Read = bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How reads are turned into requests; sizes in bytes."""

    deadline_s: float = 120.0
    """Longest wait of one read; above the store's own deadline with its retries, which normally speaks first."""
    fetch_limit: int = 16
    """Jobs of the reader in the executor at once, waiting ones included; beyond, nothing is read ahead."""
    whole_bytes: int = 4 << 20
    """Objects up to this size are fetched by one GET without a range."""
    range_bytes: int = 4 << 20
    """Largest single range of fetch() and prefetch()."""
    window: WindowSettings = field(default_factory=WindowSettings)


class Reader:
    """INVARIANT: a piece of the table is unclaimed only while a job for it is queued or its requester is at work."""

    def __init__(
        self,
        store: ObjectStore,
        cache: BlockCache | None,
        executor: Executor,
        *,
        memory_bytes: int = 128 << 20,
        settings: ReadSettings | None = None,
        learn: Callable[[ObjectInfo], None] | None = None,
    ) -> None:
        """executor: may be the one that runs the Blocking functions. memory_bytes: what is held or on its way.

        learn: told what the store says of an object that is fetched whole.
        """
        self._learn = learn
        self._store = store
        self._cache = cache
        self._executor = executor
        self._settings = settings or ReadSettings()
        self._table = PieceTable(memory_bytes)
        self._lock = threading.Lock()
        self._queued = 0

    @property
    def settings(self) -> ReadSettings:
        """As given."""
        return self._settings

    def open(self, version: ObjectVersion) -> ReadStream:
        """A stream for one file handle; fetches nothing yet."""
        return ReadStream(self, version)

    def fetch(self, version: ObjectVersion, offset: int, size: int) -> bytes:
        """The bytes, waiting here; shorter only at the object's end. Raises as ReadStream.read's function does."""
        stop = min(offset + size, version.size)
        step = 4 * self._settings.range_bytes  # in flight at once: four ranges
        align = self._settings.window.align_bytes
        parts = []
        while offset < stop:
            end = min(stop, offset + step)
            wanted = Span(offset // align * align, min(version.size, -(-end // align) * align))
            parts.append(self.obtain(version, wanted, Span(offset, end)))
            offset = end
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def prefetch(self, version: ObjectVersion, progress: Callable[[int], None] | None = None) -> bool:
        """Bring the whole version into the disk cache; whether it is all there now (False: no cache, or no room).

        progress(n): n more bytes are there; called from several threads, one at a time. StoreError; idempotent.
        """
        if self._cache is None:
            return False
        step = version.size if version.size <= self._settings.whole_bytes else self._settings.range_bytes
        work = _Work(Span(start, min(start + step, version.size)) for start in range(0, version.size, max(step, 1)))
        jobs = [self.queue(self._fill, self._cache, version, work, progress) for _ in range(len(work.spans) - 1)]
        self._fill(self._cache, version, work, progress)
        running = [job for job in jobs if job is not None and not job.cancel()]
        if wait(running, timeout=self._settings.deadline_s).not_done:
            raise DeadlineExceeded(f"'{version.key}' did not arrive in time", key=version.key)
        if work.error is not None:
            raise work.error
        return self._cache.present(version)

    def forget(self, version: ObjectVersion) -> None:
        """Drop what memory holds of this version (the disk cache keeps it); idempotent."""
        self._table.forget(version)

    def held(self, version: ObjectVersion, start: int, stop: int) -> Read | None:
        """[start, stop) inside the object, when memory or the disk cache has it. Never waits for the store."""
        body = self._table.find(version, start, stop)
        if body is None and self._cache is not None:
            return self._cache.read(version, start, stop - start)
        return body

    def holds(self, version: ObjectVersion, start: int, stop: int) -> bool:
        """Whether held() would have [start, stop), without reading it (what is corrupt is fetched again)."""
        if self._table.find(version, start, stop) is not None:
            return True
        return self._cache is not None and self._cache.holds(version, start, stop)

    def start(self, version: ObjectVersion, spans: Iterable[Span], dropped: threading.Event) -> int | None:
        """Begin fetching ranges that nobody waits for; where it stopped for want of room, None when all are begun.

        dropped: set when they became useless.
        """
        for span in spans:
            if self._cache is not None and self._cache.holds(version, span.start, span.stop):
                continue
            if self._queued >= self._settings.fetch_limit or not self._table.has_room(span.stop - span.start):
                return span.start
            _, fresh = self._table.request(version, span.start, span.stop, self._settings.range_bytes)
            for piece in fresh:
                if self.queue(self._fetch_ahead, piece, dropped) is None:
                    self._table.discard(piece)
                    return piece.start
        return None

    def obtain(self, version: ObjectVersion, wanted: Span, needed: Span) -> Read:
        """The bytes `needed`, waiting here; fetches `wanted`, which covers them, where it isn't held or on its way.

        Raises what the fetch raised, for all who wait for it (the next read tries again): PreconditionFailed and
        NotFound when the version is gone, CorruptBody when the body is short, DeadlineExceeded.
        """
        body = self.held(version, needed.start, needed.stop)
        if body is not None:
            return body
        deadline_s = time.monotonic() + self._settings.deadline_s
        pieces, fresh = self._table.request(version, wanted.start, wanted.stop, self._settings.range_bytes)
        needed_pieces = [piece for piece in pieces if piece.start < needed.stop and piece.stop > needed.start]
        first = next((piece for piece in fresh if piece in needed_pieces), None)
        never = threading.Event()
        idle = [piece for piece in fresh if piece is first or self.queue(self._fetch_ahead, piece, never) is None]
        try:
            for piece in sorted(needed_pieces, key=lambda piece: piece is not first):
                if piece.claim():
                    self._fetch(piece)
                    self._keep_later(piece)
                    idle = [other for other in idle if other is not piece]
                piece.wait(deadline_s - time.monotonic())
        finally:
            for piece in idle:
                self._table.discard(piece)
        return cut(needed_pieces, needed.start, needed.stop)

    def queue(self, job: Callable[..., object], *args: object) -> Future[object] | None:
        """Give the executor a job; None when it has enough of ours or is shut down."""
        with self._lock:
            if self._queued >= self._settings.fetch_limit:
                return None
            self._queued += 1
        try:
            future = self._executor.submit(job, *args)
        except RuntimeError:  # shut down: whoever waits does the work
            self._job_done(None)
            return None
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _future: Future[object] | None) -> None:
        with self._lock:
            self._queued -= 1

    def _fetch_ahead(self, piece: Piece, dropped: threading.Event) -> None:
        if dropped.is_set():
            self._table.discard(piece)
        elif piece.claim():
            self._fetch(piece)
            self._keep(piece)

    def _fetch(self, piece: Piece) -> None:
        """Fetch a piece that this thread has claimed, and settle it."""
        try:
            body = self._get(piece.version, piece.start, piece.stop)
        except BaseException as error:
            self._table.fail(piece, error)
        else:
            self._table.finish(piece, body)

    def _get(self, version: ObjectVersion, start: int, stop: int) -> Body:
        whole = start == 0 and stop == version.size
        byte_range = None if whole else ByteRange(start, stop)
        body, answer = self._store.get(version.key, byte_range=byte_range, if_match=version.etag)
        if answer.etag and answer.etag != version.etag:  # a server that ignores If-Match
            raise PreconditionFailed(f"'{version.key}' was replaced while it was read", key=version.key)
        if len(body) != stop - start:
            raise CorruptBody(
                f"bytes {start}-{stop - 1} of '{version.key}': {len(body)} bytes came instead of {stop - start}",
                key=version.key,
            )
        if whole and self._learn is not None:
            self._learn(answer)
        return body

    def _keep_later(self, piece: Piece) -> None:
        if self._cache is not None and piece.body is not None and self.queue(self._keep, piece) is None:
            self._keep(piece)

    def _keep(self, piece: Piece) -> None:
        if self._cache is not None and piece.body is not None:
            self._cache.write(piece.version, piece.start, piece.body)

    def _fill(
        self, cache: BlockCache, version: ObjectVersion, work: _Work, progress: Callable[[int], None] | None
    ) -> None:
        """Take ranges off `work` and put them into the cache until none is left or one fails."""
        try:
            while (span := work.take()) is not None:
                if not cache.holds(version, span.start, span.stop) and not cache.write(
                    version, span.start, self._get(version, span.start, span.stop)
                ):
                    work.stop(None)
                elif progress is not None:
                    with work.turn:
                        progress(span.stop - span.start)
        except BaseException as error:
            work.stop(error)


class _Work:
    """Ranges that several threads share out among themselves. turn: held while progress is told."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = deque(spans)
        self.turn = threading.Lock()
        self.error: BaseException | None = None

    def take(self) -> Span | None:
        """The next range, None when there is none."""
        try:
            return self.spans.popleft()
        except IndexError:
            return None

    def stop(self, error: BaseException | None) -> None:
        """Leave the rest; the first error is kept."""
        self.error = self.error or error
        self.spans.clear()


class ReadStream:
    """One file handle's reads. read() is for one thread (the loop); close() for any."""

    def __init__(self, reader: Reader, version: ObjectVersion) -> None:
        self.version = version
        self._reader = reader
        self._ahead = ReadAhead(version.size, reader.settings.window)
        self._small = version.size <= reader.settings.whole_bytes
        self._closed = threading.Event()

    def read(self, offset: int, size: int) -> Read | Blocking[Read]:
        """Up to `size` bytes, shorter only at the object's end: at once when held, else Blocking (interruptible).

        The function raises as Reader.obtain does.
        """
        stop = min(offset + size, self.version.size)
        if offset >= stop:
            return b""
        wanted = Span(0, self.version.size)
        if not self._small:
            wanted, ahead = self._ahead.plan(offset, size)
            if ahead and not self._closed.is_set():
                left_out = self._reader.start(self.version, ahead, self._closed)
                if left_out is not None:
                    self._ahead.retract(left_out)
        body = self._reader.held(self.version, offset, stop)
        if body is not None:
            return body
        return Blocking(partial(self._reader.obtain, self.version, wanted, Span(offset, stop)), interruptible=True)

    def close(self) -> None:
        """Stop reading ahead: what is queued and nobody waits for is dropped; idempotent. Reads still work."""
        self._closed.set()
