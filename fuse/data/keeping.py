"""What has been fetched on its way to the disk cache, after its readers have it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .blockcache import BlockCache
from .blockfile import holds_block
from .pieces import Piece

_LATER_MAX = 16
"""Pieces that wait; beyond, who fetched one writes it himself."""


class Keeping:
    """Threads: any. The lock is a leaf. queue(job): has a thread run it; False when none is to be had."""

    def __init__(self, cache: BlockCache | None, queue: Callable[[Callable[[], None]], bool]) -> None:
        self._cache = cache
        self._queue = queue
        self._lock = threading.Lock()
        self._waiting: deque[Piece] = deque()
        self._busy = False
        """A job is at it, or about to be."""

    def now(self, piece: Piece) -> None:
        """Write it by this thread. The disk cache takes whole blocks only: a first random read is not for it."""
        if self._cache is not None and piece.body is not None and _is_whole(piece):
            piece.kept = self._cache.write(piece.version, piece.start, piece.body)

    def later(self, piece: Piece) -> None:
        """Have it written while its readers go on, by one job for all that come together."""
        if self._cache is None or piece.body is None or not _is_whole(piece):
            return
        with self._lock:
            full = len(self._waiting) >= _LATER_MAX
            if not full:
                self._waiting.append(piece)
            begin = not full and not self._busy
            self._busy = self._busy or begin
        if full:
            self.now(piece)
        elif begin and not self._queue(self._all):
            self._all()

    def _all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                piece = self._waiting.popleft()
            self.now(piece)


def _is_whole(piece: Piece) -> bool:
    return holds_block(piece.start, piece.stop, piece.version.size)
