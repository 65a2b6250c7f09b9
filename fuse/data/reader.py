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

from datastore.errors import CorruptBody, DeadlineExceeded, PreconditionFailed, TransientStoreError
from datastore.retry import carried, current_call

from ..loop import Loop
from ..ops import Blocking
from ..store.base import Body, ByteRange, ObjectInfo, ObjectStore, ObjectVersion
from .assembly import Assembly, runs
from .blockcache import BlockCache
from .counts import ReadCounts
from .keeping import Keeping
from .pieces import Piece, PieceTable, cut
from .readahead import Readers, WindowSettings

Read = bytes | memoryview
_BEHIND_BYTES = 8 << 20
"""So far behind a reader in sequence memory is let go of: others may follow closely, and what came last is not on disk
yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How reads are turned into requests; sizes in bytes."""

    deadline_s: float = 120.0
    """Longest wait of one read; above the store's own deadline with its retries, which normally speaks first."""
    fetch_limit: int = 16
    """Jobs of the reader in the executor at once, waiting ones included; beyond, nothing is read ahead."""
    whole_bytes: int = 4 << 20
    """Objects up to this size are fetched by one GET without a range."""
    range_bytes: int = 8 << 20
    """Largest single range."""
    piece_bytes: int = 1 << 20
    """A range is handed on in pieces of this size as they come: what the kernel asks for at most in one request."""
    window: WindowSettings = field(default_factory=WindowSettings)


class LeftAlone(TransientStoreError):
    """Bytes that were to be fetched ahead were not."""


class Reader:
    """INVARIANT: a piece of the table is unclaimed only while a job for it is queued or its requester is at work."""

    def __init__(
        self,
        store: ObjectStore,
        cache: BlockCache | None,
        executor: Executor,
        *,
        memory_bytes: int = 160 << 20,
        settings: ReadSettings | None = None,
        asking: Callable[[], Callable[[ObjectInfo], None]] | None = None,
    ) -> None:
        """executor: may be the one that runs the Blocking functions. memory_bytes: what is held or on its way.

        asking: called before an object is fetched whole; gives what is told what the store says of it.
        """
        self.loop: Loop | None = None
        """What waits for the answers to many requests; without one, the thread that asks does."""
        self._asking = asking
        self._store = store
        self._cache = cache
        self._executor = executor
        self.settings = settings or ReadSettings()
        self._table = PieceTable(memory_bytes)
        self.counts = ReadCounts()
        self._lock = threading.Lock()
        self._queued = 0
        self._keeping = Keeping(cache, executor)

    def open(self, version: ObjectVersion) -> ReadStream:
        """A stream for one file handle; fetches nothing yet."""
        return ReadStream(self, version)

    def fetch(self, version: ObjectVersion, offset: int, size: int) -> bytes:
        """The bytes, waiting here; shorter only at the object's end. Raises as ReadStream.read's function does."""
        stop = min(offset + size, version.size)
        step = 4 * self.settings.range_bytes  # in flight at once: four ranges
        align = self.settings.window.align_bytes
        parts = []
        while offset < stop:
            end = min(stop, offset + step)
            wanted = ByteRange(offset // align * align, min(version.size, -(-end // align) * align))
            parts.append(self.obtain(version, wanted, ByteRange(offset, end)))
            offset = end
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def bring(self, version: ObjectVersion, arrived: Callable[[], None]) -> None:
        """Fetch a whole small version by this thread, unless it is held. arrived: called when a GET has brought it.

        Raises as ReadStream.read's function does.
        """
        if self.holds(version, 0, version.size):
            return
        pieces, _ = self._table.request(version, 0, version.size, self._step(version))

        def keep(piece: Piece) -> None:
            arrived()
            self._keeping.later(piece)

        self._fetch_unclaimed(pieces, keep)
        for piece in pieces:
            piece.wait(self.settings.deadline_s)

    def bring_many(self, feed: Callable[[], ObjectVersion | None], arrived: Callable[[ObjectVersion], None]) -> None:
        """Fetch whole small versions that nobody waits for yet, by this thread, until there is no other one.

        It ends early when the cache's disk is far behind; called again, it first writes what waits for that.
        arrived: called once for each, also if it did not come: who asks for it then starts anew.
        """
        if self._keeping.is_full:
            self._keeping.write()
        claimed: dict[ObjectVersion, tuple[Piece, Callable[[ObjectInfo], None] | None]] = {}

        def following() -> ObjectVersion | None:
            while not self._keeping.is_full and (version := feed()) is not None:
                piece = None if self.holds(version, 0, version.size) else self._claimed(version)
                if piece is not None:
                    claimed[version] = piece, self._asking() if self._asking is not None else None
                    return version
                arrived(version)
            return None

        def take(version: ObjectVersion, answer: tuple[Body, ObjectInfo] | None) -> None:
            piece, learn = claimed.pop(version)
            if answer is None:
                self._leave(piece)
            else:
                self._table.finish(piece, answer[0])
                if learn is not None:
                    learn(answer[1])
            arrived(version)
            if answer is not None:
                self._keeping.later(piece, more=True)

        try:
            self._store.get_many(following, take, self.loop)
        finally:
            self._keeping.flush()
            for version, (piece, _) in claimed.items():
                self._leave(piece)
                arrived(version)

    def _leave(self, piece: Piece) -> None:
        """Who waits for it fetches it himself, and is told what is the matter."""
        self._table.fail(piece, LeftAlone(f"'{piece.version.key}' was not fetched ahead", key=piece.version.key))

    def _claimed(self, version: ObjectVersion) -> Piece | None:
        """The whole version as a piece that is this thread's to fetch; None: somebody else fetches some of it."""
        pieces, _ = self._table.request(version, 0, version.size, self._step(version))
        return pieces[0] if len(pieces) == 1 and pieces[0].claim() else None

    def prefetch(self, version: ObjectVersion, progress: Callable[[int], None] | None = None) -> bool:
        """Bring the whole version into the disk cache; whether it is all there now (False: no cache, or no room).

        progress(n): n more bytes are there; called from several threads, one at a time. StoreError; idempotent.
        """
        if self._cache is None:
            return False
        step = version.size if version.size <= self.settings.whole_bytes else self.settings.range_bytes
        starts = range(0, version.size, max(step, 1))
        work = _Work(ByteRange(start, min(start + step, version.size)) for start in starts)
        jobs = [self.queue(self._fill, self._cache, version, work, progress) for _ in range(len(work.ranges) - 1)]
        self._fill(self._cache, version, work, progress)
        running = [job for job in jobs if job is not None and not job.cancel()]
        if wait(running, timeout=self.settings.deadline_s).not_done:
            raise DeadlineExceeded(f"'{version.key}' did not arrive in time", key=version.key)
        if work.error is not None:
            raise work.error
        return self._cache.present(version)

    def give(self, version: ObjectVersion, body: bytes) -> None:
        """The bytes of a whole version that we wrote ourselves: held in memory as if they had been read."""
        _, fresh = self._table.request(version, 0, version.size, max(version.size, 1))
        for piece in fresh:
            if piece.claim():
                self._table.finish(piece, body[piece.start : piece.stop])

    def forget(self, version: ObjectVersion) -> None:
        """Drop what memory holds of this version (the disk cache keeps it); idempotent."""
        self._table.forget(version)

    def passed(self, version: ObjectVersion, start: int, stop: int) -> None:
        """A reader in sequence has these bytes behind it: memory lets go of what the disk cache has."""
        self._table.passed(version, start, stop)

    @property
    def held_bytes(self) -> int:
        """Of pieces, in memory or on their way."""
        return self._table.held_bytes

    def limit_memory(self, memory_bytes: int) -> None:
        """Hold no more than this from now on."""
        self._table.limit(memory_bytes)

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

    def start(self, version: ObjectVersion, ranges: Iterable[ByteRange], dropped: threading.Event) -> int | None:
        """Begin fetching ranges that nobody waits for; where it stopped for want of room, None when all are begun.

        dropped: set when they became useless.
        """
        for each in ranges:
            if self._cache is not None and self._cache.holds(version, each.start, each.stop):
                continue
            if self._queued >= self.settings.fetch_limit or not self._table.has_room(each.stop - each.start):
                return each.start
            _, fresh = self._table.request(version, each.start, each.stop, self.settings.piece_bytes)
            left_out = None
            for run in runs(fresh, self.settings.range_bytes):
                if left_out is not None or self.queue(self._fetch_ahead, run, dropped) is None:
                    left_out = run[0].start if left_out is None else left_out
                    self._discard(run)
            if left_out is not None:
                return left_out
        return None

    def obtain(self, version: ObjectVersion, wanted: ByteRange, needed: ByteRange) -> Read:
        """The bytes `needed`, waiting here; fetches `wanted`, which covers them, where it isn't held or on its way.

        Raises what the fetch raised, for all who wait for it (the next read tries again): PreconditionFailed and
        NotFound when the version is gone, CorruptBody when the body is short, DeadlineExceeded.
        """
        try:
            return self._obtain(version, wanted, needed)
        except LeftAlone:
            pass
        except TransientStoreError:
            if current_call() is None:
                raise
        # It may have been fetched for somebody who came earlier: what is left of this call's budget is its own.
        return self._obtain(version, wanted, needed)

    def _obtain(self, version: ObjectVersion, wanted: ByteRange, needed: ByteRange) -> Read:
        body = self.held(version, needed.start, needed.stop)
        if body is not None:
            return body
        deadline_s = time.monotonic() + self.settings.deadline_s
        pieces, fresh = self._table.request(version, wanted.start, wanted.stop, self._step(version))
        needed_pieces = [piece for piece in pieces if piece.start < needed.stop and piece.stop > needed.start]
        mine = {piece: run for run in runs(fresh, self.settings.range_bytes) for piece in run}
        first = next((mine[piece] for piece in needed_pieces if piece in mine), None)
        never = threading.Event()
        idle = [run for run in _distinct(mine) if run is first or self.queue(self._fetch_ahead, run, never) is None]
        try:
            for piece in sorted(needed_pieces, key=lambda piece: mine.get(piece) is not first):
                self._fetch_unclaimed(mine.get(piece, [piece]), keep=self._keeping.later)
                piece.wait(deadline_s - time.monotonic())
        finally:
            for run in idle:
                self._discard([piece for piece in run if piece.body is None])
        return cut(needed_pieces, needed.start, needed.stop)

    def queue(self, job: Callable[..., object], *args: object) -> Future[object] | None:
        """Give the executor a job; None when it has enough of ours or is shut down."""
        with self._lock:
            if self._queued >= self.settings.fetch_limit:
                return None
            self._queued += 1
        try:
            future = self._executor.submit(carried(job), *args)
        except RuntimeError:  # shut down: whoever waits does the work
            self._job_done(None)
            return None
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _future: Future[object] | None) -> None:
        with self._lock:
            self._queued -= 1

    def _step(self, version: ObjectVersion) -> int:
        """How large pieces are: small objects are one, so that the cache can put them in place in one go."""
        return self.settings.piece_bytes if version.size > self.settings.whole_bytes else self.settings.range_bytes

    def _discard(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._table.discard(piece)

    def _fetch_ahead(self, run: list[Piece], dropped: threading.Event) -> None:
        if dropped.is_set():
            self._discard(run)
        else:
            self._fetch_unclaimed(run, keep=self._keeping.now)

    def _fetch_unclaimed(self, run: list[Piece], keep: Callable[[Piece], None]) -> None:
        """Fetch the pieces of a run that no other thread has claimed; each is kept when it has arrived."""
        for claimed in runs([piece for piece in run if piece.claim()], self.settings.range_bytes):
            self._fetch(claimed, keep)

    def _fetch(self, run: list[Piece], keep: Callable[[Piece], None]) -> None:
        """Fetch adjoining pieces that this thread has claimed by one GET, and settle them one by one as they come."""

        def done(piece: Piece, body: Body) -> None:
            self._table.finish(piece, body)
            keep(piece)

        if len(run) == 1:
            try:
                body = self._get(run[0].version, run[0].start, run[0].stop)
            except BaseException as error:
                self._table.fail(run[0], error)
            else:
                done(run[0], body)
            return
        assembly = Assembly(run, done)
        try:
            version, start, stop = run[0].version, run[0].start, run[-1].stop
            byte_range = _range(version, start, stop)
            self._store.get(version.key, byte_range=byte_range, if_match=version.etag, sink=assembly.take)
            assembly.check()
        except BaseException as error:
            for piece in assembly.missing:
                self._table.fail(piece, error)

    def _get(self, version: ObjectVersion, start: int, stop: int) -> Body:
        byte_range = _range(version, start, stop)
        learn = self._asking() if byte_range is None and self._asking is not None else None
        body, answer = self._store.get(version.key, byte_range=byte_range, if_match=version.etag)
        if answer.etag and answer.etag != version.etag:  # a server that ignores If-Match
            raise PreconditionFailed(f"'{version.key}' was replaced while it was read", key=version.key)
        if len(body) != stop - start:
            raise CorruptBody(
                f"bytes {start}-{stop - 1} of '{version.key}': {len(body)} bytes came instead of {stop - start}",
                key=version.key,
            )
        if learn is not None:
            learn(answer)
        return body

    def _fill(
        self, cache: BlockCache, version: ObjectVersion, work: _Work, progress: Callable[[int], None] | None
    ) -> None:
        """Take ranges off `work` and put them into the cache until none is left or one fails."""
        try:
            while (each := work.take()) is not None:
                if not cache.holds(version, each.start, each.stop) and not cache.write(
                    version, each.start, self._get(version, each.start, each.stop)
                ):
                    work.stop(None)
                elif progress is not None:
                    with work.turn:
                        progress(each.stop - each.start)
        except BaseException as error:
            work.stop(error)


def _range(version: ObjectVersion, start: int, stop: int) -> ByteRange | None:
    """What a GET of [start, stop) asks for; None: the whole object."""
    return None if start == 0 and stop == version.size else ByteRange(start, stop)


def _distinct(mine: dict[Piece, list[Piece]]) -> list[list[Piece]]:
    """The runs, each once."""
    return [run for piece, run in mine.items() if run[0] is piece]


class _Work:
    """Ranges that several threads share out among themselves. turn: held while progress is told."""

    def __init__(self, ranges: Iterable[ByteRange]) -> None:
        self.ranges = deque(ranges)
        self.turn = threading.Lock()
        self.error: BaseException | None = None

    def take(self) -> ByteRange | None:
        """The next range, None when there is none."""
        try:
            return self.ranges.popleft()
        except IndexError:
            return None

    def stop(self, error: BaseException | None) -> None:
        """Leave the rest; the first error is kept."""
        self.error = self.error or error
        self.ranges.clear()


class ReadStream:
    """One file handle's reads. read() is for one thread (the loop); close() for any."""

    def __init__(self, reader: Reader, version: ObjectVersion) -> None:
        self.version = version
        self._reader = reader
        self._ahead = Readers(version.size, reader.settings.window)
        self._small = version.size <= reader.settings.whole_bytes
        self._closed = threading.Event()

    def read(self, offset: int, size: int) -> Read | Blocking[Read]:
        """Up to `size` bytes, shorter only at the object's end: at once when held, else Blocking.

        The function raises as Reader.obtain does.
        """
        stop = min(offset + size, self.version.size)
        if offset >= stop:
            return b""
        wanted = ByteRange(0, self.version.size)
        if not self._small:
            wanted, ahead = self._ahead.plan(offset, size)
            if self._ahead.window_bytes:
                self._reader.passed(self.version, max(0, offset - 2 * _BEHIND_BYTES), offset - _BEHIND_BYTES)
            if ahead and not self._closed.is_set():
                left_out = self._reader.start(self.version, ahead, self._closed)
                if left_out is not None:
                    self._ahead.retract(left_out)
        body = self._reader.held(self.version, offset, stop)
        counts = self._reader.counts
        if body is not None:
            counts.hits += 1
            counts.hit_bytes += stop - offset
            return body
        counts.misses += 1
        counts.miss_bytes += stop - offset
        return Blocking(partial(self._reader.obtain, self.version, wanted, ByteRange(offset, stop)))

    def close(self) -> None:
        """Stop reading ahead: what is queued and nobody waits for is dropped; idempotent. Reads still work."""
        self._closed.set()
        if self._small:  # the next one is received into the same memory: fresh pages took a twelfth of its time
            self._reader.passed(self.version, 0, self.version.size)
