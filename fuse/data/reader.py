"""Reads object versions for file handles: from memory, from the disk cache, else from the store, ahead of the reader.

Shell. On the loop: what is held is answered without waiting for anything. Fetches are shared by all streams
(pieces.py); each GET carries If-Match, so bytes of two versions never meet. Large bodies are received in lanes. What
arrives is given to its waiters first and written to the disk cache after. Reading ahead is a favour: it is left out
when fetch_limit of such fetches run, or half the memory is on its way. Retries are the store's business
(store/retrying.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

from datastore.errors import CorruptBody, TransientStoreError
from datastore.retry import current_call

from ..loop import Loop, Semaphore, all_of, now, running
from ..store.base import Body, ByteRange, ObjectInfo, ObjectStore, ObjectVersion
from .assembly import Assembly, check_version, runs
from .blockcache import BlockCache
from .blockfile import BLOCK_BYTES
from .extents import on_grid
from .keeping import Keeping
from .pieces import Piece, PieceTable, cut
from .readahead import USUAL, ReadAhead, ReadSettings, Run

Read = bytes | memoryview
_BEHIND_BYTES = 8 << 20
"""So far behind a reader in sequence memory is let go of: others may follow closely, and what came last is not on disk
yet."""
_SHARING_MAX = 8
"""Of more readers in sequence some have stopped, as far as anybody can tell; none gets less than such a share."""
_BRING_S = 60.0
"""So long bring_many() asks for others at most: each call of the store finds anew how many connections are of use."""
_LOOP_BYTES = 1 << 20
"""So many bytes of one GET are received on the loop at most."""
_PIECE_BYTES = 1 << 20
"""A range is handed on in pieces of this size as they come: what the kernel asks for at most in one request."""


class LeftAlone(TransientStoreError):
    """Bytes that were to be fetched ahead were not."""


class Reader:
    """INVARIANT: a piece of the table has arrived, or a task or bring_many() is about to fetch it or to fail it."""

    def __init__(
        self,
        store: ObjectStore,
        cache: BlockCache,
        loop: Loop,
        *,
        memory_bytes: int = 160 << 20,
        settings: ReadSettings = USUAL,
        asking: Callable[[], Callable[[ObjectInfo], None]] = lambda: lambda _: None,
    ) -> None:
        """memory_bytes: what is held or on its way.

        asking: called before an object is fetched, on the loop or in a lane; gives what is told on the loop what the
        store says of one that was fetched whole.
        """
        self.loop = loop
        self.settings = settings
        self.counts = dict.fromkeys(("hits", "misses", "hitBytes", "missBytes"), 0)
        """Reads answered at once, and those that waited for the store; bytes asked for. Not the kernel's own."""
        self._asking = asking
        self._store = store
        self._cache = cache
        self.table = PieceTable(memory_bytes)
        self._ahead = 0
        """Fetches that were begun before anybody waited for them."""
        self._in_sequence: OrderedDict[Run, ReadStream] = OrderedDict()
        """Who reads in sequence; who read last is the last."""
        self._filling = Semaphore(self.settings.fetch_limit)
        self._keeping = Keeping(cache, loop)

    def open(self, version: ObjectVersion) -> ReadStream:
        """A stream for one file handle; fetches nothing yet."""
        return ReadStream(self, version)

    async def fetch(self, version: ObjectVersion, offset: int, size: int) -> bytes:
        """The bytes; shorter only at the object's end. Raises as obtain() does."""
        stop = min(offset + size, version.size)
        step = 4 * self.settings.range_bytes  # in flight at once: four ranges
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

    async def bring(self, version: ObjectVersion) -> None:
        """Fetch a whole small version, unless it is held. Raises as obtain() does."""
        if not self._cache.present(version):
            for piece in self._coming(version, 0, version.size):
                await piece

    async def bring_many(
        self, feed: Callable[[], ObjectVersion | None], arrived: Callable[[ObjectVersion], None]
    ) -> None:
        """Fetch whole small versions that nobody waits for yet, until there is no other one.

        It ends early now and then, and when the cache's disk is far behind; called again, it first waits for that.
        arrived: called once for each, also if it did not come: who asks for it then starts anew.
        """
        if self._keeping.is_full:
            await self._keeping.caught_up()
        until = self.loop.clock() + _BRING_S
        claimed: dict[ObjectVersion, Piece] = {}
        learn = self._asking()

        def following() -> ObjectVersion | None:
            while not self._keeping.is_full and self.loop.clock() < until and (version := feed()) is not None:
                piece = None if self._cache.present(version) else self.table.claim(version)
                if piece is not None:
                    claimed[version] = piece
                    return version
                arrived(version)
            return None

        def take(version: ObjectVersion, answer: tuple[Body, ObjectInfo] | None) -> None:
            piece = claimed.pop(version)
            if answer is None:  # who waits for it fetches it himself, and is told what is the matter
                self.table.fail(piece, _left_alone(piece))
            else:
                self.table.finish(piece, answer[0])
                learn(answer[1])
                self._keeping.later(piece, more=True)
            arrived(version)

        try:
            await self._store.get_many(following, take)
        finally:
            self._keeping.flush()
            for version in list(claimed):
                take(version, None)

    async def prefetch(self, version: ObjectVersion, progress: Callable[[int], None] | None = None) -> bool:
        """Bring the whole version into the disk cache; whether it is all there now (False: no room).

        progress(n): n more bytes are there. StoreError; idempotent.
        """
        step = max(1, version.size if version.size <= self.settings.whole_bytes else self.settings.range_bytes)
        left = on_grid(0, version.size, step)

        async def fill() -> None:
            with closing(left):  # who fails, or finds no room, ends the others as well
                for start, stop in left:
                    async with self._filling:
                        there = await self.loop.lane(self._fill, version, start, stop)
                    if not there:
                        return
                    if progress is not None:
                        progress(stop - start)

        await all_of([self.loop.spawn(fill()) for _ in range(min(-(-version.size // step), self.settings.fetch_limit))])
        return await self.loop.on_disk(self._cache.present, version)

    def give(self, version: ObjectVersion, body: bytes) -> None:
        """The bytes of a whole version that we wrote ourselves: held in memory as if they had been read."""
        piece = self.table.claim(version)
        if piece is not None:
            self.table.finish(piece, body)

    def held(self, version: ObjectVersion, start: int, stop: int) -> Read | None:
        """[start, stop) inside the object, when memory or the disk cache has it. Never waits for the store."""
        body = self.table.find(version, start, stop)
        return self._cache.read(version, start, stop - start) if body is None else body

    @property
    def share_bytes(self) -> int:
        """The most to read ahead of each who reads in sequence, half the memory in all: what is dropped before it is
        read must be read from the disk, on the loop."""
        return self.table.half_bytes // max(1, len(self._in_sequence))

    def reads_on(self, stream: ReadStream, run: Run) -> None:
        """It reads in sequence, until its stream has ended."""
        self._in_sequence[run] = stream
        self._in_sequence.move_to_end(run)
        if len(self._in_sequence) > _SHARING_MAX:
            self._in_sequence.popitem(last=False)

    def ended(self, stream: ReadStream) -> None:
        """It reads no more. Idempotent."""
        for run in [run for run, reading in self._in_sequence.items() if reading is stream]:
            del self._in_sequence[run]

    def start(self, version: ObjectVersion, ranges: Iterable[ByteRange], dropped: Callable[[], bool]) -> int | None:
        """Begin fetching ranges that nobody waits for; where it stopped for want of room, None when all are begun.

        dropped: whether they have become useless; asked just before each is fetched, perhaps by a lane.
        """
        for each in ranges:
            if self._cache.holds(version, each.start, each.stop):
                continue
            if self._ahead >= self.settings.fetch_limit or not self.table.has_room(each.stop - each.start):
                return each.start
            _, fresh = self.table.request(version, each.start, each.stop, _PIECE_BYTES)
            for run in runs(fresh, self.settings.range_bytes):
                self._ahead += 1
                self.loop.spawn(self._fetch_ahead(run, dropped))
        return None

    async def obtain(self, version: ObjectVersion, wanted: ByteRange, needed: ByteRange) -> Read:
        """The bytes `needed`, which are not held; fetches `wanted`, which covers them, where it isn't on its way.

        Raises what the fetch raised, for all who wait for it (the next read tries again): PreconditionFailed and
        NotFound when the version is gone, CorruptBody when the body is short.
        """
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
                # It may have been fetched for somebody who came earlier: what is left of this call's budget is its own.
                if again or current_call() is None:
                    raise
            again = True

    def _coming(self, version: ObjectVersion, start: int, stop: int) -> list[Piece]:
        """The pieces that cover [start, stop). Those that were not there are fetched from now on."""
        pieces, fresh = self.table.request(version, start, stop, self._step(version))
        for run in runs(fresh, self.settings.range_bytes):
            self.loop.spawn(self._fetch(run))
        return pieces

    def _step(self, version: ObjectVersion) -> int:
        """How large pieces are: small objects are one, so that the cache can put them in place in one go."""
        return _PIECE_BYTES if version.size > self.settings.whole_bytes else self.settings.range_bytes

    async def _fetch_ahead(self, run: list[Piece], dropped: Callable[[], bool]) -> None:
        await self.loop.pause()  # what is waited for goes first
        await self._fetch(run, dropped)
        self._ahead -= 1

    async def _fetch(self, run: list[Piece], dropped: Callable[[], bool] = lambda: False) -> None:
        """Fetch adjoining pieces that are this task's to fetch, by one GET; each is kept when it has arrived."""
        try:
            if len(run) == 1 and run[0].size <= _LOOP_BYTES:
                body = await self._ask(run, dropped)
            else:
                body = await self.loop.lane(lambda: now(self._ask(run, dropped)))
            if body is not None:
                self.table.finish(run[0], body)
                self._keeping.later(run[0])
        except BaseException as error:
            for piece in run:
                if not piece.done:
                    self.table.fail(piece, error)

    async def _ask(self, run: list[Piece], dropped: Callable[[], bool]) -> Body | None:
        """The body of a single piece. Of several, by a lane, each is handed on as it comes, and then kept."""
        if dropped():
            raise _left_alone(run[0])
        version, start, stop = run[0].version, run[0].start, run[-1].stop
        if len(run) == 1:
            return await self._get(version, start, stop)

        def done(piece: Piece, body: Body) -> None:
            self.loop.soon(partial(self._arrived, piece, body))
            self._keeping.now(piece, body)

        assembly = Assembly(run, done)
        byte_range = _range(version, start, stop)
        await self._store.get(version.key, byte_range=byte_range, if_match=version.etag, sink=assembly.take)
        assembly.check()
        return None

    def _arrived(self, piece: Piece, body: Body) -> None:
        if not piece.done:  # else its lane was given up
            self.table.finish(piece, body)

    async def _get(self, version: ObjectVersion, start: int, stop: int) -> Body:
        """By one GET, all at once."""
        byte_range = _range(version, start, stop)
        learn = self._asking() if byte_range is None else None
        body, answer = await self._store.get(version.key, byte_range=byte_range, if_match=version.etag)
        check_version(version, answer)
        if len(body) != stop - start:
            raise CorruptBody(
                f"bytes {start}-{stop - 1} of '{version.key}': {len(body)} bytes came instead of {stop - start}",
                key=version.key,
            )
        if learn is not None and running() is None:
            self.loop.soon(partial(learn, answer))
        elif learn is not None:
            learn(answer)
        return body

    def _fill(self, version: ObjectVersion, start: int, stop: int) -> bool:
        """By a lane: put a range into the cache; whether it is there."""
        cache = self._cache
        return cache.holds(version, start, stop) or cache.write(version, start, now(self._get(version, start, stop)))


def _left_alone(piece: Piece) -> LeftAlone:
    return LeftAlone(f"'{piece.version.key}' was not fetched ahead", key=piece.version.key)


def _range(version: ObjectVersion, start: int, stop: int) -> ByteRange | None:
    """What a GET of [start, stop) asks for; None: the whole object."""
    return None if start == 0 and stop == version.size else ByteRange(start, stop)


class ReadStream:
    """One file handle's reads."""

    def __init__(self, reader: Reader, version: ObjectVersion) -> None:
        self.version = version
        self._reader = reader
        small = version.size <= reader.settings.whole_bytes
        self._ahead = None if small else ReadAhead(version.size, reader.settings)
        self._closed = False

    async def read(self, offset: int, size: int) -> Read:
        """Up to `size` bytes, shorter only at the object's end: at once when held. Raises as Reader.obtain does."""
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
        """Stop reading ahead: what is not begun yet is dropped, unless it is needed. Idempotent; reads still work."""
        self._closed = True
        if self._ahead is not None:
            self._reader.ended(self)
        else:  # the next one is received into the same memory: fresh pages took a twelfth of its time
            self._reader.table.passed(self.version, 0, self.version.size)
