"""Writes fetched pieces to the disk cache, after their readers have got them."""

from __future__ import annotations

from ..loop import Loop, Task
from ..store.base import Body, ObjectVersion
from .blockcache import SMALL_BYTES, BlockCache
from .blockfile import whole_blocks
from .pieces import Piece

_LATER_BYTES = 32 << 20
"""The bytes of waiting pieces at which is_full is true: a further piece is written at once, by a pool thread (lane) of
its own, and nothing more is fetched ahead."""
_BATCH_BYTES = 4 << 20
"""The bytes of waiting pieces for which a thread is woken although more pieces follow."""


class Keeping:
    """For the event loop's thread, except now(). While pieces wait, one task has pool threads write them."""

    def __init__(self, cache: BlockCache, loop: Loop) -> None:
        self._cache = cache
        self._loop = loop
        self._waiting: list[Piece] = []
        self._bytes = 0
        """The bytes of the pieces that wait, and of those that the task is having written."""
        self._writing: Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the disk is so far behind that only what a reader waits for should be fetched."""
        return self._bytes >= _LATER_BYTES

    def now(self, piece: Piece, body: Body) -> None:
        """Write a piece in this thread, a pool thread, which has just received its body."""
        if _is_whole(piece) and self._cache.write(piece.version, piece.start, body):
            self._loop.soon(piece.set_kept)

    def later(self, piece: Piece, *, more: bool = False) -> None:
        """Have an arrived piece written, together with others that arrive at about the same time.
        The cache takes only whole blocks, so the part of a block that a first random read fetches is not written.
        more: other pieces follow, and then flush(), because to wake a thread for each costs as much as to write it; the
        caller has to check is_full before it fetches the next."""
        if not _is_whole(piece):
            return
        if not more and self.is_full:
            self._loop.background(self._write([piece]))
            return
        self._waiting.append(piece)
        self._bytes += piece.size
        if not more or self._bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Have all waiting pieces written."""
        if self._waiting and self._writing is None:
            self._writing = self._loop.background(self._write_all())

    async def caught_up(self) -> None:
        """Wait until no piece waits to be written."""
        self.flush()
        if self._writing is not None:
            await self._writing

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting, size = self._waiting, [], self._bytes
                try:
                    await self._write(batch)
                finally:
                    self._bytes -= size
        finally:
            self._writing = None

    async def _write(self, batch: list[Piece]) -> None:
        for piece in await self._loop.on_disk(self._kept_of, batch):
            piece.set_kept()

    def _kept_of(self, batch: list[Piece]) -> list[Piece]:
        """Write the pieces, those of small versions all together; return those that are kept now. For a pool thread."""
        kept, small, bodies = list[Piece](), list[Piece](), list[tuple[ObjectVersion, int, Body]]()
        for piece in batch:
            written = piece.version, piece.start, piece.result()
            if piece.version.size < SMALL_BYTES:
                small.append(piece)
                bodies.append(written)
            elif self._cache.write(*written):
                kept.append(piece)
        return kept + small if bodies and self._cache.write_small(bodies) else kept


def _is_whole(piece: Piece) -> bool:
    first, last = whole_blocks(piece.start, piece.stop, piece.version.size)
    return first < last
