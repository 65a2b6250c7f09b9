"""Files of the cache directory that stay open while they are used."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

TOUCH_S = 30.0
"""How often a file in use says so on disk, and how often it is looked for those that others evicted."""


class OpenFile:
    """Closed with its last user, also once it is evicted."""

    __slots__ = ("fd", "touched_s")

    def __init__(self, fd: int, touched_s: float = float("-inf")) -> None:
        """touched_s: when it last said on disk that it is in use; fd: becomes its own."""
        self.fd = fd
        self.touched_s = touched_s

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def unlinked(self) -> bool:
        """Whether somebody evicted it: what is written now is lost, what is read is still right."""
        return os.fstat(self.fd).st_nlink == 0


Name = TypeVar("Name", bound=Hashable)
File = TypeVar("File", bound=OpenFile)


class OpenFiles(Generic[Name, File]):
    """The files that were used last, `most` of them. Safe for threads; none is closed while one waits for the lock."""

    def __init__(self, most: int, monotonic: Callable[[], float]) -> None:
        self._most = most
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._files: OrderedDict[Name, File] = OrderedDict()
        self._tidy_due_s = monotonic() + TOUCH_S

    def find(self, name: Name, opened: Callable[[Name], File]) -> File:
        """The file, which says on disk now and then that it is in use. What `opened` raises; OSError."""
        now_s = self._monotonic()
        if now_s >= self._tidy_due_s:
            self.tidy()
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
        if file is None:
            file = self.keep(name, opened(name))
        if now_s >= file.touched_s + TOUCH_S:
            file.touched_s = now_s
            os.utime(file.fd)
        return file

    def keep(self, name: Name, file: File) -> File:
        """It was just opened; the one that another thread was quicker to open."""
        with self._lock:
            kept = self._files.setdefault(name, file)
            surplus = [self._files.popitem(last=False) for _ in range(len(self._files) - self._most)]
        del surplus
        return kept

    def drop(self, name: Name) -> None:
        """Let go of one; idempotent."""
        with self._lock:
            file = self._files.pop(name, None)
        del file

    def tidy(self) -> None:
        """Let go of what others evicted, so that the disk gets it back; find() does so every TOUCH_S."""
        self._tidy_due_s = self._monotonic() + TOUCH_S
        with self._lock:
            evicted = [name for name, file in self._files.items() if file.unlinked]
        for name in evicted:
            self.drop(name)

    def close(self) -> None:
        """Let go of all; idempotent, it stays usable."""
        with self._lock:
            files, self._files = self._files, OrderedDict()
        del files
