"""The memory that requests are read into.

A server that is killed while the kernel copies a request into pages that are not there yet loses that request: getting
a page fails for a process that is to die, and the caller gets EIO instead of the next server's answer (fuse_dev_do_read
in fs/fuse/dev.c). So every page of a buffer is there before the first read into it.
"""

from __future__ import annotations

import mmap
from collections import deque

from . import abi


class Buffers:
    """At most `count` of `size` bytes, each made when it is needed. take(): one thread; give_back(): any."""

    def __init__(self, count: int, size: int) -> None:
        self._unmade = count
        self._size = size
        self._idle: deque[memoryview] = deque()

    @property
    def has_one(self) -> bool:
        """Whether one is free."""
        return bool(self._idle or self._unmade)

    def take(self) -> memoryview:
        """One that nobody uses: there must be one."""
        if self._idle:
            return self._idle.pop()  # the last first: few requests at once need few buffers
        self._unmade -= 1
        memory = mmap.mmap(-1, self._size)
        memory[:: abi.PAGE_SIZE] = bytes(-(-self._size // abi.PAGE_SIZE))
        return memoryview(memory)

    def give_back(self, buffer: memoryview) -> None:
        """Its request has been answered."""
        self._idle.append(buffer)
