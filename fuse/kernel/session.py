"""Serves one mount: reads the kernel's requests, calls the file system, and writes the answers.

Each request is a task (Request) of the file system's event loop, which serve() runs. A WRITE keeps its buffer
until it has ended; the number of buffers is bounded.

A change continues when its caller is interrupted. With the answer EINTR the kernel releases its lock on the inode, so
from then on the session keeps the order: requests that would have waited in the kernel for that lock wait here for the
end of the change.

Threads: the thread that calls serve() does everything but the notifier's work; leave() is called by another thread.
Rules of the kernel: Documentation/filesystems/fuse and linux/fuse.h.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from datastore.errors import DatastoreError
from datastore.logs import Limiter, fields
from datastore.retry import Call

from ..errnos import errno_of
from ..loop import Task
from ..ops import Caller, Filesystem, FSError, Ino
from . import abi, reply, wire
from .callers import FollowUps, is_ended
from .dispatch import EXCLUSIVE, ORDERED, Header, Operation, Serving, call_again, inodes_of, operations
from .negotiate import MAX_WRITE, Negotiated, init_reply, negotiate
from .notify import DeviceNotifier
from .passthrough import OpenModes
from .reply import Frame
from .traffic import Traffic

log = logging.getLogger(__name__)

CALLERS_S = 0.25
"""How often the session checks whether waiting callers are being ended, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits of a session. max_write: the most bytes of one READ or WRITE.
    unanswered: at this number of requests in progress, reading pauses. buffers: at this number of WRITE requests that
    hold their bytes (1 MiB each at most), reading pauses. drain_s: how long requests may run on after the unmount."""

    max_write: int = MAX_WRITE
    unanswered: int = 1024
    buffers: int = 64
    drain_s: float = 30.0


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


class Session:
    """Serves one file system on one device descriptor (or any descriptor that keeps message boundaries).
    negotiated: what INIT settled in an earlier process; then the session does not wait for INIT, and asks the kernel to
    send the unanswered requests again. opens_fd: memory that outlives this process, for passthrough.OpenModes, or -1.
    own_fd: a clone of the device (device.clone()) that only this process has, or -1. It is served instead if the kernel
    can't send requests again: then those in flight fail when this process dies, and their callers don't wait for ever.
    ready: called once, on the loop, when INIT is settled."""

    def __init__(
        self,
        device_fd: int,
        filesystem: Filesystem,
        settings: Settings,
        *,
        negotiated: Negotiated | None = None,
        opens_fd: int = -1,
        own_fd: int = -1,
        ready: Callable[[Negotiated], None] = lambda _: None,
    ) -> None:
        self._fd = device_fd
        self._own_fd = own_fd
        self._fs = filesystem
        self._loop = filesystem.loop
        self._settings = settings
        self._ready = ready
        self.negotiated = negotiated
        self.counts = [0] * abi.OPCODE_LIMIT
        self.traffic = Traffic()
        self.modes = OpenModes(device_fd, opens_fd)
        self.notifier = DeviceNotifier(device_fd, self.modes.is_local)
        self._operations = operations(filesystem, self.modes)
        self._take: Callable[[Header], None] = self._handshake if negotiated is None else self._request
        self._follow_ups = FollowUps()
        self._unanswered: dict[int, Request] = {}
        """The requests that did not end in their first step and whose callers wait, by `unique`."""
        self._under_way = 0
        """How many requests that did not end in their first step still run, and how many tasks that undo results."""
        self._going_on: dict[int, Request] = {}
        """The changes that still run though their callers got EINTR, by the inodes that they change."""
        self._looking = False
        """Whether a check for callers that are being ended is scheduled."""
        self._reported: set[str] = set()
        self._limiter = Limiter()
        self._idle: deque[memoryview] = deque()
        """The buffers that no request holds; the next request is read into the first."""
        self._unmade = settings.buffers
        self._reading = False
        """Whether the loop watches the descriptor, because there is room for another request."""
        self._end = ""
        """How the mount ended, or ''. The kernel has ECONNABORTED for an abort and for an unmount: both 'unmounted'."""
        self._over = False

    @property
    def in_flight(self) -> int:
        """How many requests are not answered yet. Any thread may ask."""
        return len(self._unanswered)

    # -- the loop

    def serve(self) -> str:
        """Serve until the mount is gone, let running requests end, stop the file system, and return how it ended."""
        with self._loop.turning():
            self._fs.start(self.notifier)
            if stat.S_ISCHR(os.fstat(self._fd).st_mode):  # the kernel may withdraw a request before it is read
                for fd in {self._fd, self._own_fd} - {-1}:
                    os.set_blocking(fd, False)
            try:
                if self.negotiated is not None:
                    self._settled(self.negotiated)
                    if self.negotiated.has(abi.HAS_RESEND):
                        os.write(self._fd, reply.resend())
                self._read_on()
                while not self._end:
                    self._loop.turn()
                return self._end
            finally:
                self._finish()

    def _finish(self) -> None:
        self._over = True
        self._read_on()
        patience = self._loop.spawn(self._loop.sleep(self._settings.drain_s))
        while self._under_way and not patience.done:
            self._loop.turn()
        if self._under_way:
            log.warning("requests still run after the end", extra=fields(count=self._under_way))
        self.notifier.stop()
        stopping = self._loop.spawn(self._fs.stop())
        while not stopping.done:
            self._loop.turn()
        self._loop.close()
        stopping.result()

    def leave(self, timeout_s: float) -> bool:
        """Read no request any more, so that the next server gets it, and wait for those in progress; return whether
        these were all answered in time. To be called by another thread than the loop's. Idempotent."""
        stopped = threading.Event()

        def stop_reading() -> None:
            if not self._over:
                self._over = True
                self._read_on()
                self._loop.watch(self._fd, self._came, 0)  # only the mount's end is reported
            stopped.set()

        self._loop.soon(stop_reading)
        end = time.monotonic() + timeout_s
        stopped.wait(timeout_s)
        while self._unanswered and time.monotonic() < end:
            time.sleep(0.005)
        return not self._unanswered

    def _came(self) -> None:
        """Read one request and begin to serve it; only one, so that the loop's other work has its turn in between."""
        try:
            length = os.readv(self._fd, (self._idle[0],))
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED, errno.ECONNRESET):
                self._end = "unmounted"
            elif error.errno not in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # ENOENT: interrupted before we read it
                raise
            return
        if not length:
            self._end = "closed"
        if length < abi.HEADER_SIZE:
            return  # there is no `unique` to answer
        header: Header = abi.IN_HEADER.unpack_from(self._idle[0])
        if header[0] == length and header[7] * 8 <= length - abi.HEADER_SIZE:
            self._take(header)
        elif header[1] not in abi.UNANSWERED:
            self.send(header, reply.error(header[2], errno.EINVAL))

    def _read_on(self) -> None:
        """Watch the device while there are a buffer and a place for a request; else requests wait in the kernel."""
        if not self._idle and self._unmade:
            self._unmade -= 1
            # room for the payload and the headers before it, in whole pages as in libfuse
            self._idle.append(new_buffer(self._settings.max_write + 2 * abi.PAGE_SIZE))
        room = bool(self._idle) and self._under_way < self._settings.unanswered and not self._over
        if room and not self._reading:
            self._loop.watch(self._fd, self._came)
        elif self._reading and not room:
            self._loop.unwatch(self._fd)
        self._reading = room

    def _handshake(self, header: Header) -> None:
        try:
            if header[1] != abi.INIT:
                raise ValueError("the first request is no INIT")
            offer = wire.init(self._body(header))
        except wire.NOT_A_REQUEST:
            self.send(header, reply.error(header[2], errno.EIO))
            return
        settled = negotiate(offer, self._settings.max_write)
        self.send(header, init_reply(header[2], settled))
        self._take = self._request
        self._settled(settled)

    def _settled(self, settled: Negotiated) -> None:
        self.negotiated = settled
        if self._own_fd >= 0 and not settled.has(abi.HAS_RESEND):
            if self._reading:
                self._loop.unwatch(self._fd)
            os.dup2(self._own_fd, self._fd, inheritable=False)
            if self._reading:
                self._loop.watch(self._fd, self._came)
        self.modes.enabled = settled.has(abi.PASSTHROUGH) and os.geteuid() == 0
        self.modes.drops_pages = settled.minor >= abi.MINOR_DROPS_PAGES
        self.notifier.start(expire_only=settled.has(abi.HAS_EXPIRE_ONLY))
        self._ready(settled)

    def _body(self, header: Header) -> memoryview:
        """Return what follows the header, without the extensions, which come last."""
        return self._idle[0][abi.HEADER_SIZE : header[0] - header[7] * 8]

    def _request(self, header: Header) -> None:
        opcode = header[1]
        if opcode >= abi.OPCODE_LIMIT:
            self.send(header, reply.error(header[2], errno.ENOSYS))
            return
        self.counts[opcode] += 1
        began_ns = time.monotonic_ns()
        operation = self._operations[opcode]
        if operation is None:
            self._special(header)
            return
        try:
            args = operation.decode(self._idle[0][abi.HEADER_SIZE : header[0] - header[7] * 8])  # as _body()
        except wire.NOT_A_REQUEST:
            self.send(header, reply.error(header[2], errno.EINVAL))
            return
        ino = header[3]
        again = header[2] & abi.UNIQUE_RESEND
        who = (Caller(header[4], header[5], header[6], header[2] ^ again), ino) if operation.by_caller else (ino,)
        serving = call_again(operation, header, who, args, self._fs) if again else operation.method(*who, *args)
        call = self._follow_ups.call_of(header, began_ns / 1e9) if self._follow_ups.remembered else None
        request = Request(self._loop, serving, call, self, header, operation, args, began_ns)
        if not self._going_on or not self._follows(request):
            request.step()
        if not request.done:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        """Register a request that did not end in its first step, or that waits for its first step."""
        request.waits = True
        self._under_way += 1
        self._unanswered[request.header[2]] = request
        if request.header[1] == abi.WRITE:  # only its arguments point into the buffer
            request.buffer = self._idle.popleft()
        self._read_on()
        if not self._looking:
            self._looking = True
            self._loop.later(CALLERS_S, self._look_at_callers)

    def waits_no_more(self, request: Request) -> None:
        """Unregister a request that _wait() registered and that has ended now."""
        self._under_way -= 1
        if request.abandoned:
            self._going_on = {ino: other for ino, other in self._going_on.items() if other is not request}
        else:
            self._unanswered.pop(request.header[2], None)
        if request.buffer is not None:
            self._idle.append(request.buffer)
        self._read_on()

    def _follows(self, request: Request) -> bool:
        """Return whether the request has to wait for an interrupted change of the same inode, after which it begins."""
        if request.header[1] not in ORDERED:
            return False
        first = next(filter(None, map(self._going_on.get, inodes_of(request.header, request.args))), None)
        if first is None:
            return False
        request.begun = False
        first.on_done(partial(self._begin, request))
        return True

    def _begin(self, request: Request) -> None:
        """Begin a request after the change that it waited for has ended, unless its caller was interrupted."""
        if request.abandoned:
            request.drop()
        elif not self._follows(request):
            request.begun = True
            request.step()

    def _special(self, header: Header) -> None:
        """Serve the requests that have no row in the table: FORGET, INTERRUPT, DESTROY, and what is not supported."""
        opcode, body = header[1], self._body(header)
        try:
            if opcode == abi.FORGET:
                self._forget([(header[3], wire.forget(body))])
            elif opcode == abi.BATCH_FORGET:
                self._forget(wire.batch_forget(body))
            elif opcode == abi.INTERRUPT:
                self._interrupt(header, wire.interrupt(body))
            elif opcode not in abi.UNANSWERED:
                number = 0 if opcode == abi.DESTROY else errno.ENOSYS
                self.send(header, reply.error(header[2], number))
        except wire.NOT_A_REQUEST:
            pass

    def _forget(self, pairs: list[tuple[int, int]]) -> None:
        for ino, nlookup in pairs:
            try:
                self._fs.forget(Ino(ino), nlookup)
            except Exception as error:
                self._report(error)

    def _interrupt(self, header: Header, unique: int) -> None:
        """Answer EINTR to a request, unless its caller is known to live on. An unknown request has been answered."""
        request = self._unanswered.get(unique)
        if request is not None and is_ended(header[6] or request.header[6]) is not False:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Answer EINTR to the waiting caller. A request that has begun continues; one that has not never begins."""
        del self._unanswered[request.header[2]]
        request.abandoned = True
        if request.begun and request.header[1] in EXCLUSIVE:
            self._going_on |= dict.fromkeys(inodes_of(request.header, request.args), request)
        self.send(request.header, reply.error(request.header[2], errno.EINTR))

    def _look_at_callers(self) -> None:
        """Answer EINTR to waiting callers that are being ended. An INTERRUPT does not tell of all: the kernel sends one
        per request, even for a signal that ends nobody, and none for pages read ahead, though a reader may wait."""
        self._looking = bool(self._unanswered)
        if not self._looking:
            return
        self._loop.later(CALLERS_S, self._look_at_callers)
        before_ns = time.monotonic_ns() - int(CALLERS_S * 1e9)
        waiting = [request for request in self._unanswered.values() if request.began_ns < before_ns]
        ended = {pid for pid in {request.header[6] for request in waiting} if is_ended(pid)}
        for request in waiting:
            if request.header[6] in ended:
                self._let_go(request)

    # -- answers

    def send(self, header: Header, frame: Frame) -> bool:
        """Write an answer; return False when the kernel no longer waits for it."""
        if not header[2]:
            return True  # a request whose `unique` is 0, for whose answer nobody waits
        try:
            if isinstance(frame, bytes):
                os.write(self._fd, frame)
            else:
                os.writev(self._fd, frame)
        except OSError as error:
            if error.errno == errno.ENOENT:  # the request was interrupted
                return False
            if error.errno not in (errno.ENODEV, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.EPERM):
                self._report(error)
        return True

    def undo(self, undo: Callable[[Header, Any], Serving | None], header: Header, result: Any) -> None:
        """Take back a result that nobody waits for."""
        try:
            rest = undo(header, result)
        except Exception as error:
            self._report(error)
            return
        if rest is not None:
            self._under_way += 1
            self._loop.background(rest).on_done(self._undone)

    def _undone(self) -> None:
        self._under_way -= 1
        self._read_on()

    # -- failures

    def failure(self, request: Request, error: BaseException) -> bytes:
        """Return the answer to a request that failed; count and log what the storage, the system or a defect caused."""
        header, call = request.header, request.call
        first = call.began == request.began_ns / 1e9
        self._follow_ups.failed(header, call, error, first=first, now=time.monotonic())
        number = errno_of(error)
        if number is None:
            self._report(error)
            number = errno.EIO
        if not isinstance(error, FSError) or number == errno.ESTALE:  # other FSErrors are answers, such as ENOTEMPTY
            self.traffic.failed(number)
        told = isinstance(error, DatastoreError | OSError) and not isinstance(error, FSError)
        told = told and number in (errno.EIO, errno.ETIMEDOUT, errno.EACCES)
        if told and self._limiter.allows((type(error), header[1]), time.monotonic()):
            log.error(str(error), extra=fields(request=abi.opcode_name(header[1]), answer=errno.errorcode[number]))
        return reply.error(header[2], number)

    def _report(self, error: BaseException) -> None:
        """Log an error that is a defect of ours, with its traceback, once for each type and place of error."""
        where = traceback.extract_tb(error.__traceback__, limit=-1)
        key = f"{type(error).__name__} {where}" if where else repr(error)
        if key not in self._reported:
            self._reported.add(key)
            log.error("an unexpected error was answered with EIO", exc_info=error)
