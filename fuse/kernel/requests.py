"""One request of the kernel: the buffer that it is read into, and the task that serves it and sends the answer."""

from __future__ import annotations

import errno
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datastore.retry import Call

from ..loop import Task
from ..ops import FSError
from . import abi
from .dispatch import Header, Operation
from .reply import Frame

if TYPE_CHECKING:
    from .session import Session


def new_buffer(size: int) -> memoryview:
    """Return a buffer of `size` bytes whose pages are all allocated before the first read into it.
    A server that is killed while the kernel copies a request into pages that are not allocated loses that request: a
    dying process gets no page, and the caller gets EIO, not the next server's answer (fuse_dev_do_read, fs/fuse/dev.c).
    """
    memory = mmap.mmap(-1, size)
    memory[:: abi.PAGE_SIZE] = bytes(-(-size // abi.PAGE_SIZE))
    return memoryview(memory)


@dataclass(eq=False)
class Request(Task[Any]):
    """The task that serves one request of the kernel, and sends the answer when it ends.
    buffer: holds the bytes of a WRITE until that ends. begun: False while the task waits for another request's end.
    waits: the task did not end in its first step. abandoned: its caller got EINTR, and nobody wants its result."""

    session: Session
    header: Header
    operation: Operation
    args: Any
    began_ns: int
    buffer: memoryview | None = None
    begun: bool = True
    waits: bool = False
    abandoned: bool = False

    @property
    def call(self) -> Call:
        """The retry.Call for which the storage is asked: that of an earlier request, or one made at the first use."""
        if self._call is None:
            self._call = Call(self.began_ns / 1e9)
        return self._call

    def _settle(self, result: Any, error: BaseException | None) -> None:
        """Encode the answer and send it; undo the result if nobody waits for it any more."""
        self.done = True
        session, header, operation = self.session, self.header, self.operation
        frame: Frame = b""
        if error is None:
            try:
                if operation.explain is None:
                    frame = operation.encode(header[2], result)
                else:
                    frame = operation.explain(header, self.args, result)
            except Exception as defect:
                error = defect
        if error is not None:
            frame = session.failure(self, error)
        sent = not self.abandoned and session.send(header, frame)
        if header[1] == abi.RELEASE:  # after the answer: if we died in between, it would be sent again and count twice
            session.modes.released(header[3])
        session.traffic.answered(header, self.began_ns, frame)
        if not sent and error is None and operation.undo is not None:
            session.undo(operation.undo, header, result)
        if self.waits:
            session.waits_no_more(self)
        if self._callbacks is not None:
            super()._settle(None, error)

    def drop(self) -> None:
        """End a request that has not begun."""
        self._coroutine.close()
        self.set_error(FSError(errno.EINTR))
