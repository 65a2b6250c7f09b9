"""One request of the kernel: the memory that it is read into, and the task that answers when it ends."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Coroutine
from typing import Any

from datastore.retry import Call

from ..loop import Loop, Task
from ..ops import FSError
from . import abi
from .dispatch import Header, Operation


def new_buffer(size: int) -> memoryview:
    """`size` bytes whose pages are all there before the first read into it.

    A server that is killed while the kernel copies a request into pages that are not there yet loses that request:
    getting a page fails for a process that is to die, and the caller gets EIO instead of the next server's answer
    (fuse_dev_do_read in fs/fuse/dev.c).
    """
    memory = mmap.mmap(-1, size)
    memory[:: abi.PAGE_SIZE] = bytes(-(-size // abi.PAGE_SIZE))
    return memoryview(memory)


class Request(Task[Any]):
    """buffer: its bytes, while it still needs them (WRITE). begun: it does not wait for the end of another one.
    waits: it did not end in its first step. abandoned: its caller has been let go, and nobody wants its result.
    """

    __slots__ = ("_answer", "abandoned", "args", "began_ns", "begun", "buffer", "header", "operation", "waits")

    def __init__(
        self,
        loop: Loop,
        coroutine: Coroutine[Any, Any, Any],
        call: Call | None,
        header: Header,
        operation: Operation,
        args: Any,
        began_ns: int,
        answer: Callable[[Request, Any, BaseException | None], None],
    ) -> None:
        """call: one that began earlier, when this is a second request of it. answer(request, result, error)."""
        Task.__init__(self, loop, coroutine, call)  # super() takes longer
        self.header = header
        self.operation = operation
        self.args = args
        self.began_ns = began_ns
        self._answer = answer
        self.buffer: memoryview | None = None
        self.begun = True
        self.waits = self.abandoned = False

    @property
    def call(self) -> Call:
        """Made when it is asked for: what memory answers needs none."""
        if self._call is None:
            self._call = Call(self.began_ns / 1e9)
        return self._call

    def set_result(self, result: Any) -> None:
        """It has ended well. The result is for the answer alone."""
        self.done = True
        self._answer(self, result, None)
        if self._callbacks is not None:
            self._settle()

    def set_error(self, error: BaseException) -> None:
        """It has failed."""
        self.done = True
        self._answer(self, None, error)
        if self._callbacks is not None:
            self._settle()

    def drop(self) -> None:
        """End it, which has not begun."""
        self._coroutine.close()
        self.set_error(FSError(errno.EINTR))
