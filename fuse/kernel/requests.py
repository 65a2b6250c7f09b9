"""One request of the kernel: the memory that it is read into, and the task that answers when it ends."""

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
    """`size` bytes whose pages are all there before the first read into it.

    A server that is killed while the kernel copies a request into pages that are not there yet loses that request:
    getting a page fails for a process that is to die, and the caller gets EIO instead of the next server's answer
    (fuse_dev_do_read in fs/fuse/dev.c).
    """
    memory = mmap.mmap(-1, size)
    memory[:: abi.PAGE_SIZE] = bytes(-(-size // abi.PAGE_SIZE))
    return memoryview(memory)


@dataclass(eq=False)
class Request(Task[Any]):
    """What it asks the store for is a call of its own, unless it was made with that of an earlier request.

    buffer: its bytes, while it still needs them (WRITE). begun: it does not wait for the end of another one.
    waits: it did not end in its first step. abandoned: its caller has been let go, and nobody wants its result.
    """

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
        """Made when it is asked for: what memory answers needs none."""
        if self._call is None:
            self._call = Call(self.began_ns / 1e9)
        return self._call

    def _settle(self, result: Any, error: BaseException | None) -> None:
        """Encode the answer and send it, or take back what nobody waits for."""
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
        if header[1] == abi.RELEASE:  # not before: if we die in between it is sent again, and would count twice
            session.modes.released(header[3])
        session.traffic.answered(header, self.began_ns, frame)
        if not sent and error is None and operation.undo is not None:
            session.undo(operation.undo, header, result)
        if self.waits:
            session.waits_no_more(self)
        if self._callbacks is not None:
            super()._settle(None, error)

    def drop(self) -> None:
        """End it, which has not begun."""
        self._coroutine.close()
        self.set_error(FSError(errno.EINTR))
