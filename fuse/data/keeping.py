"""What has been fetched on its way to the disk cache, after its readers have it."""

from __future__ import annotations

from ..loop import Loop, Task
from ..store.base import Body, ObjectVersion
from .blockcache import SMALL_BYTES, BlockCache
from .blockfile import whole_blocks
from .pieces import Piece

_LATER_BYTES = 32 << 20
"""Of pieces that wait; beyond, each goes to a lane of its own, and who fetches many fetches no more."""
_BATCH_BYTES = 4 << 20
"""Of pieces that are worth waking a thread, though others follow."""


class Keeping:
    """On the loop, but for now(): as long as something waits, one task has lanes write it."""

    def __init__(self, cache: BlockCache, loop: Loop) -> None:
        self._cache = cache
        self._loop = loop
        self._waiting: list[Piece] = []
        self._bytes = 0
        """Of what waits, and of what the task has in a lane."""
        self._writing: Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the disk is so far behind that nothing more is to be fetched ahead of it."""
        return self._bytes >= _LATER_BYTES

    def now(self, piece: Piece, body: Body) -> None:
        """Write it by this thread, a lane, which has just received it."""
        if _is_whole(piece) and self._cache.write(piece.version, piece.start, body):
            self._loop.soon(piece.set_kept)

    def later(self, piece: Piece, *, more: bool = False) -> None:
        """Have one that has arrived written, by one lane for all that come together.

        The disk cache takes whole blocks only: a first random read is not for it.
        more: others follow, and flush() after them: to wake a thread for each costs as much as to write it. Who says so
        looks at is_full before he fetches the next.
        """
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
        """Have all that waits written."""
        if self._waiting and self._writing is None:
            self._writing = self._loop.background(self._write_all())

    async def caught_up(self) -> None:
        """Wait until the disk has all that waits for it."""
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
        """By a lane: write them, the small ones all together; those that are kept now."""
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
