"""What has been fetched on its way to the disk cache, after its readers have it."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Executor

from .blockcache import BlockCache
from .blockfile import holds_block
from .pieces import Piece

_LATER_BYTES = 32 << 20
"""Of pieces that wait; beyond, who fetched one writes it himself, and who fetches many fetches no more."""
_BATCH_BYTES = 1 << 20
"""Of pieces that are worth waking a thread, though others follow."""


class Keeping:
    """Threads: any. The lock is a leaf. executor: one of its threads writes all that waits."""

    def __init__(self, cache: BlockCache | None, executor: Executor) -> None:
        self._cache = cache
        self._executor = executor
        self._lock = threading.Lock()
        self._waiting: deque[Piece] = deque()
        self._bytes = 0
        self._busy = False
        """A job is at it, or about to be."""

    @property
    def is_full(self) -> bool:
        """Whether the disk is so far behind that nothing more is to be fetched ahead of it."""
        return self._bytes >= _LATER_BYTES

    def now(self, piece: Piece) -> None:
        """Write it by this thread. The disk cache takes whole blocks only: a first random read is not for it."""
        if self._cache is not None and piece.body is not None and _is_whole(piece):
            piece.kept = self._cache.write(piece.version, piece.start, piece.body)

    def later(self, piece: Piece, *, more: bool = False) -> None:
        """Have it written while its readers go on, by one job for all that come together.

        more: others follow, and flush() after them: to wake a thread for each costs as much as to write it. Who says so
        never waits for the disk here, and looks at is_full before he fetches the next.
        """
        if self._cache is None or piece.body is None or not _is_whole(piece):
            return
        with self._lock:
            full = self.is_full and not more
            if not full:
                self._waiting.append(piece)
                self._bytes += piece.size
        if full:
            self.now(piece)
        elif not more or self._bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Have all that waits written."""
        with self._lock:
            begin = bool(self._waiting) and not self._busy
            self._busy = self._busy or begin
        if begin:
            try:
                self._executor.submit(self.write)
            except RuntimeError:  # shut down
                self.write()

    def write(self) -> None:
        """Write all that waits by this thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                piece = self._waiting.popleft()
            self.now(piece)
            with self._lock:
                self._bytes -= piece.size


def _is_whole(piece: Piece) -> bool:
    return holds_block(piece.start, piece.stop, piece.version.size)
