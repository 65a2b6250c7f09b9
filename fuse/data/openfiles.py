"""Keeps the most recently used files of the cache directory open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

TOUCH_S = 30.0
"""The seconds between two updates of the mtime of a file in use, and between two searches for evicted files."""


class OpenFile:
    """An open file; its descriptor is closed with the last reference, even if the file was evicted before."""

    __slots__ = ("fd", "touched_s")

    def __init__(self, fd: int, touched_s: float = float("-inf")) -> None:
        """fd: owned by this object from now on. touched_s: monotonic seconds of the last update of the file's mtime."""
        self.fd = fd
        self.touched_s = touched_s

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def unlinked(self) -> bool:
        """Whether the file was evicted: what is written to it from now on is lost, what is read is still right."""
        return os.fstat(self.fd).st_nlink == 0


Name = TypeVar("Name", bound=Hashable)
File = TypeVar("File", bound=OpenFile)


class OpenFiles(Generic[Name, File]):
    """The `most` most recently used files. Safe for threads; no file is closed while the lock is held."""

    def __init__(self, most: int, monotonic: Callable[[], float]) -> None:
        self._most = most
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._files: OrderedDict[Name, File] = OrderedDict()
        self._tidy_due_s = monotonic() + TOUCH_S

    def find(self, name: Name, opened: Callable[[Name], File]) -> File:
        """Return the file, opened by `opened` if need be, and set its mtime every TOUCH_S to tell evictors of its use.
        Errors: OSError, and what `opened` raises."""
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
        """Add a file that was just opened; return it, or the file that another thread added under this name before."""
        with self._lock:
            kept = self._files.setdefault(name, file)
            surplus = [self._files.popitem(last=False) for _ in range(len(self._files) - self._most)]
        del surplus
        return kept

    def drop(self, name: Name) -> None:
        """Remove a file from the table; idempotent."""
        with self._lock:
            file = self._files.pop(name, None)
        del file

    def tidy(self) -> None:
        """Drop the files that were evicted, which frees their disk space; find() calls this every TOUCH_S."""
        self._tidy_due_s = self._monotonic() + TOUCH_S
        with self._lock:
            evicted = [name for name, file in self._files.items() if file.unlinked]
        for name in evicted:
            self.drop(name)

    def close(self) -> None:
        """Drop all files; idempotent. The table stays usable."""
        with self._lock:
            files, self._files = self._files, OrderedDict()
        del files
