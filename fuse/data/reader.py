"""Reads object versions for file handles: from memory, from the disk cache, else from the store, with readahead.

Does I/O. For the event loop's thread: bytes that are held are returned without waiting. All streams share the fetches
(pieces.py); each GET carries If-Match, so that bytes of two versions are never mixed. Pool threads ("lanes") receive
the large bodies. Bytes that arrive go to their readers first, then to the disk cache. Prefetches are optional: none
begins while FETCH_LIMIT of them are under way, or fetches take half of the memory. store/retrying.py does the retries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

from datastore.errors import CorruptBody, PreconditionFailed, TransientStoreError
from datastore.retry import current_call

from ..loop import Loop, Semaphore, all_of, now, running
from ..store.base import Body, ByteRange, ObjectInfo, ObjectStore, ObjectVersion
from . import readahead
from .blockcache import BlockCache
from .blockfile import BLOCK_BYTES
from .extents import on_grid
from .keeping import Keeping
from .pieces import Piece, PieceTable, cut, runs
from .readahead import ReadAhead, Run

Read = bytes | memoryview
_BEHIND_BYTES = 8 << 20
"""How far behind a sequential reader its pieces are dropped from memory, in bytes; not at once, because other readers
may follow closely, and the latest pieces are not on disk yet."""
_SHARING_MAX = 8
"""The most sequential readers that share the readahead memory; of more, some have probably stopped reading."""
_LOOP_BYTES = 1 << 20
"""The largest body that is received on the event loop; a pool thread receives a larger one."""
_PIECE_BYTES = 1 << 20
"""The size of a large object's pieces, each usable as soon as it has arrived: the most that the kernel asks for in one
request."""


class LeftAlone(TransientStoreError):
    """The prefetch of these bytes was dropped; a reader that waits for them fetches them itself."""


class Reader:
    """INVARIANT: each piece in the table has arrived, or a task is about to fetch it or to fail it."""

    def __init__(
        self,
        store: ObjectStore,
        cache: BlockCache,
        loop: Loop,
        *,
        memory_bytes: int = 160 << 20,
        asking: Callable[[], Callable[[ObjectInfo], None]] = lambda: lambda _: None,
    ) -> None:
        """memory_bytes: the most for the pieces in memory, including those that are being fetched.
        asking: called before an object is fetched, on the loop or in a pool thread; the function that it returns is
        called on the loop with the object's facts, if the object was fetched whole."""
        self.loop = loop
        self.counts = dict.fromkeys(("hits", "misses", "hitBytes", "missBytes"), 0)
        """How many reads were answered at once and how many waited for the store, and the bytes that they asked for.
        Reads that the kernel answers by itself are not counted."""
        self._asking = asking
        self._store = store
        self._cache = cache
        self.table = PieceTable(memory_bytes)
        self._ahead = 0
        """How many prefetches are under way."""
        self._in_sequence: OrderedDict[Run, ReadStream] = OrderedDict()
        """The sequential readers; the last one has read last."""
        self._filling = Semaphore(readahead.FETCH_LIMIT)
        self._keeping = Keeping(cache, loop)

    def open(self, version: ObjectVersion) -> ReadStream:
        """Return a stream for one file handle; this fetches nothing yet."""
        return ReadStream(self, version)

    async def fetch(self, version: ObjectVersion, offset: int, size: int) -> bytes:
        """Return the bytes; fewer only at the object's end. Errors: as obtain()."""
        stop = min(offset + size, version.size)
        step = 4 * readahead.RANGE_BYTES  # four range requests are under way at once
        parts = list[Read]()
        while offset < stop:
            end = min(stop, offset + step)
            body = self.held(version, offset, end)
            if body is None:
                wanted = ByteRange(
                    offset // BLOCK_BYTES * BLOCK_BYTES, min(version.size, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
                )
                body = await self.obtain(version, wanted, ByteRange(offset, end))
            parts.append(body)
            offset = end
        return await self.loop.on_disk(b"".join, parts) if len(parts) > 1 else b"".join(parts)

    async def bring(self, version: ObjectVersion, *, ahead: bool = False) -> ObjectInfo | None:
        """Fetch a whole small version, and return what the store says of it now; None if the version is held, or if
        another call fetches it, which has ended then. ahead: nobody waits for it yet, so this first waits for the
        cache's disk when that is far behind; the caller fetches others, and then calls keep_rest().
        Errors: as obtain()."""
        if ahead and self._keeping.is_full:
            await self._keeping.caught_up()
        if self._cache.present(version):
            return None
        piece = self.table.claim(version)
        if piece is not None:
            answer = await self._fetch([piece], more=ahead)
            await piece
            return answer
        for piece in self._coming(version, 0, version.size):
            await piece
        return None

    def keep_rest(self) -> None:
        """Have the disk cache take what bring(ahead=True) has fetched."""
        self._keeping.flush()

    async def prefetch(self, version: ObjectVersion, progress: Callable[[int], None] | None = None) -> bool:
        """Bring the whole version into the disk cache; return whether all is there now (False: no room). Idempotent.
        progress(n): called when n more bytes are there. Errors: StoreError."""
        left = on_grid(0, version.size, readahead.RANGE_BYTES)

        async def fill() -> None:
            with closing(left):  # ends the other tasks too, when one fails or finds no room
                for start, stop in left:
                    async with self._filling:
                        there = await self.loop.lane(self._fill, version, start, stop)
                    if not there:
                        return
                    if progress is not None:
                        progress(stop - start)

        ranges = -(-version.size // readahead.RANGE_BYTES)
        await all_of([self.loop.spawn(fill()) for _ in range(min(ranges, readahead.FETCH_LIMIT))])
        return await self.loop.on_disk(self._cache.present, version)

    def give(self, version: ObjectVersion, body: bytes) -> None:
        """Hold in memory the bytes of a whole version that this mount has written, as if they had been read."""
        piece = self.table.claim(version)
        if piece is not None:
            self.table.finish(piece, body)

    def held(self, version: ObjectVersion, start: int, stop: int) -> Read | None:
        """Return [start, stop) of the object if memory or the disk cache has it, else None; never ask the store."""
        body = self.table.find(version, start, stop)
        return self._cache.read(version, start, stop - start) if body is None else body

    @property
    def share_bytes(self) -> int:
        """The most bytes to read ahead of each sequential reader, half of the memory for all: a piece that is dropped
        before it is read has to be read from the disk, on the event loop."""
        return self.table.half_bytes // max(1, len(self._in_sequence))

    def reads_on(self, stream: ReadStream, run: Run) -> None:
        """Note that a reader of this stream reads sequentially; it gets a share of the memory until ended()."""
        self._in_sequence[run] = stream
        self._in_sequence.move_to_end(run)
        if len(self._in_sequence) > _SHARING_MAX:
            self._in_sequence.popitem(last=False)

    def ended(self, stream: ReadStream) -> None:
        """Note that the stream will not read any more. Idempotent."""
        for run in [run for run, reading in self._in_sequence.items() if reading is stream]:
            del self._in_sequence[run]

    def start(self, version: ObjectVersion, ranges: Iterable[ByteRange], dropped: Callable[[], bool]) -> int | None:
        """Begin to prefetch ranges; return the offset at which there was no room for more, None when all are begun.
        dropped: whether they have become useless; called just before each is fetched, perhaps in a pool thread."""
        for each in ranges:
            if self._cache.holds(version, each.start, each.stop):
                continue
            if self._ahead >= readahead.FETCH_LIMIT or not self.table.has_room(each.stop - each.start):
                return each.start
            _, fresh = self.table.request(version, each.start, each.stop, _PIECE_BYTES)
            for run in runs(fresh, readahead.RANGE_BYTES):
                self._ahead += 1
                self.loop.spawn(self._fetch_ahead(run, dropped))
        return None

    async def obtain(self, version: ObjectVersion, wanted: ByteRange, needed: ByteRange) -> Read:
        """Return the bytes `needed`, which are not held. Fetch `wanted`, which covers them, unless it is on its way.
        Errors: those of the fetch, in all its waiters (the next read tries again): PreconditionFailed and NotFound when
        the version is gone, CorruptBody when the body is too short, other StoreErrors."""
        again = False
        while True:
            try:
                coming = self._coming(version, wanted.start, wanted.stop)
                pieces = [piece for piece in coming if piece.start < needed.stop and piece.stop > needed.start]
                for piece in pieces:
                    await piece
                return cut(pieces, needed.start, needed.stop)
            except LeftAlone:
                pass
            except TransientStoreError:
                # The fetch may have spent the retry budget of an earlier call; this call has a budget of its own.
                if again or current_call() is None:
                    raise
            again = True

    def _coming(self, version: ObjectVersion, start: int, stop: int) -> list[Piece]:
        """Return the pieces that cover [start, stop); begin to fetch those that are new."""
        pieces, fresh = self.table.request(version, start, stop, self._step(version))
        for run in runs(fresh, readahead.RANGE_BYTES):
            self.loop.spawn(self._fetch(run))
        return pieces

    def _step(self, version: ObjectVersion) -> int:
        """The size of new pieces. A small object is a single piece, so that one write puts it into the disk cache."""
        return _PIECE_BYTES if version.size > readahead.WHOLE_BYTES else readahead.RANGE_BYTES

    async def _fetch_ahead(self, run: list[Piece], dropped: Callable[[], bool]) -> None:
        await self.loop.pause()  # fetches that a reader waits for go first
        await self._fetch(run, dropped)
        self._ahead -= 1

    async def _fetch(
        self, run: list[Piece], dropped: Callable[[], bool] = lambda: False, *, more: bool = False
    ) -> ObjectInfo | None:
        """Fetch new, adjoining pieces by one GET; each that arrives is written to the disk cache too (more: see
        Keeping.later()). Return what the store says of the object if the GET of a single piece succeeds."""
        try:
            if len(run) == 1 and run[0].size <= _LOOP_BYTES:
                found = await self._ask(run, dropped)
            else:
                found = await self.loop.lane(lambda: now(self._ask(run, dropped)))
            if found is not None:
                self.table.finish(run[0], found[0])
                self._keeping.later(run[0], more=more)
                return found[1]
        except BaseException as error:
            for piece in run:
                if not piece.done:
                    self.table.fail(piece, error)
        return None

    async def _ask(self, run: list[Piece], dropped: Callable[[], bool]) -> tuple[Body, ObjectInfo] | None:
        """Return the answer for a single piece. Several are fetched in a pool thread: each is handed to the loop as it
        arrives, then written to the disk cache; the result is None."""
        if dropped():
            raise _left_alone(run[0])
        version, start, stop = run[0].version, run[0].start, run[-1].stop
        if len(run) == 1:
            return await self._get(version, start, stop)
        byte_range, missing = _range(version, start, stop), deque(run)

        def take(info: ObjectInfo, offset: int, body: Body) -> None:
            """Take a part of the body (see Sink). It has whole pieces: both end at whole MiB of the object, or where
            the range ends. Another attempt of the GET brings pieces again that an earlier one has brought."""
            _check_version(version, info, part=byte_range is not None)
            at = start + offset
            end = at + len(body)
            if end > stop:
                raise _wrong_length(version, start, stop, "the body is longer than asked for")
            while missing and missing[0].stop <= end:
                piece = missing.popleft()
                content = memoryview(body)[piece.start - at : piece.stop - at]
                self.loop.soon(partial(self._arrived, piece, content))
                self._keeping.now(piece, content)

        await self._store.get(version.key, byte_range=byte_range, if_match=version.etag, sink=take)
        if missing:
            raise _wrong_length(version, start, stop, "the body ended too early")
        return None

    def _arrived(self, piece: Piece, body: Body) -> None:
        if not piece.done:  # otherwise the loop has abandoned the pool thread, and the piece has failed
            self.table.finish(piece, body)

    async def _get(self, version: ObjectVersion, start: int, stop: int) -> tuple[Body, ObjectInfo]:
        """Return [start, stop) by one GET."""
        byte_range = _range(version, start, stop)
        learn = self._asking() if byte_range is None else None
        body, answer = await self._store.get(version.key, byte_range=byte_range, if_match=version.etag)
        _check_version(version, answer, part=byte_range is not None)
        if len(body) != stop - start:
            raise _wrong_length(version, start, stop, f"{len(body)} bytes came instead of {stop - start}")
        if learn is not None and running() is None:
            self.loop.soon(partial(learn, answer))
        elif learn is not None:
            learn(answer)
        return body, answer

    def _fill(self, version: ObjectVersion, start: int, stop: int) -> bool:
        """Put a range into the disk cache; return whether it is there. For a pool thread."""
        cache = self._cache
        return cache.holds(version, start, stop) or cache.write(version, start, now(self._get(version, start, stop))[0])


def _left_alone(piece: Piece) -> LeftAlone:
    return LeftAlone(f"'{piece.version.key}' was not fetched ahead", key=piece.version.key)


def _check_version(version: ObjectVersion, info: ObjectInfo, *, part: bool) -> None:
    """Check that an answer is of this version. part: it has a part of the object, and so says the size of the whole.
    Errors: PreconditionFailed if not: the server has ignored If-Match, or said another size of the ETag before."""
    if (info.etag and info.etag != version.etag) or (part and info.size != version.size):
        raise PreconditionFailed(f"'{version.key}' was replaced while it was read", key=version.key)


def _wrong_length(version: ObjectVersion, start: int, stop: int, what: str) -> CorruptBody:
    return CorruptBody(f"bytes {start}-{stop - 1} of '{version.key}': {what}", key=version.key)


def _range(version: ObjectVersion, start: int, stop: int) -> ByteRange | None:
    """Return the range for a GET of [start, stop); None: the whole object, without a range."""
    return None if start == 0 and stop == version.size else ByteRange(start, stop)


class ReadStream:
    """The reads of one file handle."""

    def __init__(self, reader: Reader, version: ObjectVersion) -> None:
        self.version = version
        self._reader = reader
        small = version.size <= readahead.WHOLE_BYTES
        self._ahead = None if small else ReadAhead(version.size)
        self._closed = False

    async def read(self, offset: int, size: int) -> Read:
        """Return `size` bytes, fewer only at the object's end; at once if they are held. Errors: as Reader.obtain()."""
        stop = min(offset + size, self.version.size)
        if offset >= stop:
            return b""
        wanted = None
        if self._ahead is not None:
            wanted, ahead = self._ahead.plan(offset, size, self._reader.share_bytes)
            if self._ahead.present.window_bytes:
                if not self._closed:
                    self._reader.reads_on(self, self._ahead.present)
                self._reader.table.passed(self.version, max(0, offset - 2 * _BEHIND_BYTES), offset - _BEHIND_BYTES)
            if ahead and not self._closed:
                left_out = self._reader.start(self.version, ahead, lambda: self._closed)
                if left_out is not None:
                    self._ahead.retract(left_out)
        body = self._reader.held(self.version, offset, stop)
        counts = self._reader.counts
        if body is not None:
            counts["hits"] += 1
            counts["hitBytes"] += stop - offset
            return body
        counts["misses"] += 1
        counts["missBytes"] += stop - offset
        whole = ByteRange(0, self.version.size)
        return await self._reader.obtain(self.version, wanted or whole, ByteRange(offset, stop))

    def close(self) -> None:
        """Stop the readahead: a prefetch that has not begun yet is dropped. Idempotent; reads still work."""
        self._closed = True
        if self._ahead is not None:
            self._reader.ended(self)
        else:  # so that the next file is received into the same memory: fresh pages took a twelfth of its time
            self._reader.table.passed(self.version, 0, self.version.size)
