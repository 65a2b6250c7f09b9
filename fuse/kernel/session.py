"""One mount's conversation with the kernel: read a request, call the file system, answer.

Threads: serve() turns the loop (fuse/loop.py); it alone reads the device and calls the Filesystem. Workers run
Blocking results and answer them. The notifier has a thread of its own. A request's buffer belongs to it until it is
answered; there is a bounded number of them. Rules of the kernel: Documentation/filesystems/fuse and linux/fuse.h.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from datastore.errors import DatastoreError
from datastore.logs import Limiter, fields

from ..errnos import errno_of
from ..loop import Loop
from ..ops import Blocking, Filesystem, FSError, Ino, UsesLoop, resolve
from . import abi, reply, wire
from .buffers import Buffers
from .dispatch import Header, Operation, Operations, call_again
from .followups import FollowUps
from .interrupts import is_ended
from .negotiate import Negotiated, Wanted, init_reply, negotiate, version_reply
from .notify import DeviceNotifier
from .passthrough import OpenModes
from .pool import Pool, Task
from .reply import Frame
from .traffic import Traffic

log = logging.getLogger(__name__)

CALLERS_S = 0.25
"""How often it is looked whether who waits is ended meanwhile."""


class End(Enum):
    """Why a session is over. An aborted connection is unmounted: the kernel has ECONNABORTED for either."""

    UNMOUNTED = "unmounted"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """workers: threads for what waits. unanswered: requests in the pool and its queue, then reading pauses.

    buffers: WRITE requests that may hold their bytes at once, 1 MiB each at most; then reading pauses.
    drain_s: seconds for running requests to end after the unmount.
    """

    wanted: Wanted = field(default_factory=Wanted)
    workers: int = 32
    unanswered: int = 1024
    buffers: int = 64
    drain_s: float = 30.0


class Session:
    """Serves one file system on one device descriptor (or any that keeps message boundaries).

    negotiated: what INIT settled in an earlier process; then the kernel is not waited for, and it is asked to send the
    unanswered requests again. opens_fd: memory that outlives us (passthrough.OpenModes), or -1. ready: called once on
    the loop thread when INIT is settled.
    """

    def __init__(
        self,
        device_fd: int,
        filesystem: Filesystem,
        settings: Settings,
        *,
        negotiated: Negotiated | None = None,
        opens_fd: int = -1,
        ready: Callable[[Negotiated], None] = lambda _: None,
    ) -> None:
        self._fd = device_fd
        self._fs = filesystem
        self._settings = settings
        self._resumed = negotiated
        self._ready = ready
        self.negotiated = negotiated
        self.counts = [0] * abi.OPCODE_LIMIT
        self.traffic = Traffic()
        self.modes = OpenModes(device_fd, opens_fd)
        self.notifier = DeviceNotifier(device_fd, self.modes.is_local)
        self.pool = Pool(settings.workers, settings.unanswered, self._answer, self._freed)
        self._operations = Operations(filesystem, self.modes).table()
        self._take: Callable[[int], None] = self._request
        self._deferred: deque[Callable[[], None]] = deque()
        self._follow_ups = FollowUps()
        self._over = threading.Event()
        self._reported: set[str] = set()
        self._limiter = Limiter()
        self._limiter_lock = threading.Lock()
        size = settings.wanted.max_write + 2 * abi.PAGE_SIZE  # payload and its header, page-aligned as libfuse has it
        self._buffers = Buffers(settings.buffers, size)
        self._view, self._has_view = self._buffers.take(), True
        self._loop = Loop()
        self._readable = False
        """There is a request to be read."""
        self._paused = False
        """None is read, for there is no room."""

    # -- the loop

    def serve(self) -> End:
        """Answer requests until the mount is gone; then let running ones end and stop the file system."""
        if isinstance(self._fs, UsesLoop):
            self._fs.use_loop(self._loop)
        self._fs.start(self.notifier)
        threading.Thread(target=self._watch_callers, name="fuse-callers", daemon=True).start()
        if stat.S_ISCHR(os.fstat(self._fd).st_mode):  # the kernel may take back a request that was to be read
            os.set_blocking(self._fd, False)
        self._loop.watch(self._fd, self._came)
        try:
            return self._converse()
        finally:
            self._over.set()
            self._loop.close()
            if not self.pool.stop(self._settings.drain_s):
                log.warning("requests still run after the end", extra=fields(count=len(self.pool)))
            self._drain()
            self.notifier.stop()
            self._fs.stop()

    def _converse(self) -> End:
        settled = self._resumed or self._handshake()
        if isinstance(settled, End):
            return settled
        self.negotiated = settled
        self.modes.enabled = settled.has(abi.PASSTHROUGH) and os.geteuid() == 0
        self.modes.drops_pages = settled.minor >= abi.MINOR_DROPS_PAGES
        self.notifier.start(expire_only=settled.has(abi.HAS_EXPIRE_ONLY))
        self._ready(settled)
        if self._resumed and settled.has(abi.HAS_RESEND):
            os.write(self._fd, reply.resend())
        while True:
            end = self._receive()
            if isinstance(end, End):
                return end
            self._take(end)

    def leave(self, timeout_s: float) -> bool:
        """Answer no new request: the kernel sends them again to the next server. Whether all others were answered."""
        self._take = self._leave_alone
        end = time.monotonic() + timeout_s
        while len(self.pool) and time.monotonic() < end:
            time.sleep(0.005)
        return not len(self.pool)

    def _leave_alone(self, length: int) -> None:
        header = self._header(length)
        if header is not None and header[1] in (abi.FORGET, abi.BATCH_FORGET):  # these are sent once
            self._special(header, length - header[7] * 8)

    def _receive(self) -> int | End:
        """The length of the next request, now in the current buffer."""
        while True:
            if self._deferred:
                self._drain()
            if not self._has_room():
                self._await_room()
            self._loop.turn()
            if not self._readable:
                continue
            self._readable = False
            try:
                length = os.readv(self._fd, (self._view,))
            except OSError as error:
                if error.errno in (errno.ENODEV, errno.ECONNABORTED, errno.ECONNRESET):
                    return End.UNMOUNTED
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # ENOENT: interrupted before we read it
                    continue
                raise
            return length or End.CLOSED

    def _came(self) -> None:
        self._readable = True

    def _await_room(self) -> None:
        """Read nothing until what came before has been answered: the kernel then waits, too."""
        self._loop.unwatch(self._fd)
        self._paused = True  # before the look: who makes room after it wakes us
        while not self._has_room():
            self._loop.turn()
        self._paused = False
        self._loop.watch(self._fd, self._came)

    def _has_room(self) -> bool:
        """For one more request: memory to read it into, and a place in the pool."""
        if not self._has_view and self._buffers.has_one:
            self._view, self._has_view = self._buffers.take(), True
        return self._has_view and self.pool.has_room

    def _freed(self) -> None:
        """On a worker: there is room again."""
        if self._paused:
            self._loop.wake()

    def _handshake(self) -> Negotiated | End:
        while True:
            length = self._receive()
            if isinstance(length, End):
                return length
            header = self._header(length)
            if header is None:
                continue
            offer = wire.init(self._view, length) if header[1] == abi.INIT else wire.MALFORMED
            if isinstance(offer, wire.Malformed):
                self._send(header, reply.error(header[2], errno.EIO))
            elif offer.major > abi.MAJOR:
                self._send(header, version_reply(header[2]))
            else:
                wanted = self._settings.wanted
                settled = negotiate(offer, wanted)
                self._send(header, init_reply(header[2], settled, wanted))
                return settled

    def _header(self, length: int) -> Header | None:
        """The header of a request of `length` bytes; None when it is not one, answered where that is possible."""
        if length < abi.HEADER_SIZE:
            return None  # no number to answer
        header: Header = abi.IN_HEADER.unpack_from(self._view)
        if header[0] == length and header[7] * 8 <= length - abi.HEADER_SIZE:
            return header
        if header[1] not in (abi.FORGET, abi.BATCH_FORGET):
            self._send(header, reply.error(header[2], errno.EINVAL))
        return None

    def _request(self, length: int) -> None:
        header = self._header(length)
        if header is None:
            return
        opcode = header[1]
        if opcode >= abi.OPCODE_LIMIT:
            self._send(header, reply.error(header[2], errno.ENOSYS))
            return
        self.counts[opcode] += 1
        began_ns = time.monotonic_ns()
        operation = self._operations[opcode]
        end = length - header[7] * 8  # extensions stand last; none is asked for
        if operation is None:
            self._special(header, end)
            return
        args = operation.decode(self._view, end)
        if args is wire.MALFORMED:
            self._send(header, reply.error(header[2], errno.EINVAL))
            return
        try:
            if header[2] & abi.UNIQUE_RESEND or self.pool.going_on:
                result = self._call_in_order(operation, header, args)
            else:
                result = operation.call(header, args)
            if type(result) is Blocking:
                self._submit(began_ns, header, operation, args, result)
                return
            frame = operation.encode(header, args, result)
        except Exception as error:
            self._send(header, self._failure(header, error))
            return
        sent = self._send(header, frame)
        if opcode == abi.RELEASE:  # not before: if we die in between it is sent again, and would count twice
            self.modes.released(header[3])
        self.traffic.at_once(header, began_ns, frame)
        if not sent and operation.undo is not None:
            self._undo(operation, header, args, result)

    def _call_in_order(self, operation: Operation, header: Header, args: Any) -> Any:
        """A request that was sent again, or that may have to wait for the end of an interrupted change."""
        if header[2] & abi.UNIQUE_RESEND:
            return call_again(operation, header, args, self._fs)
        if self.pool.behind(header, args):
            return Blocking(lambda: resolve(operation.call(header, args)))
        return operation.call(header, args)

    def _special(self, header: Header, end: int) -> None:
        """What is not answered, and what is not supported."""
        opcode = header[1]
        if opcode == abi.FORGET:
            nlookup = wire.forget(self._view, end)
            if not isinstance(nlookup, wire.Malformed):
                self._forget(header[3], nlookup)
        elif opcode == abi.BATCH_FORGET:
            pairs = wire.batch_forget(self._view, end)
            for ino, nlookup in () if isinstance(pairs, wire.Malformed) else pairs:
                self._forget(ino, nlookup)
        elif opcode == abi.INTERRUPT:
            self._interrupt(header, wire.interrupt(self._view, end))
        elif opcode == abi.DESTROY:
            self._send(header, reply.empty(header[2]))
        elif opcode != abi.NOTIFY_REPLY:
            self._send(header, reply.error(header[2], errno.ENOSYS))

    def _forget(self, ino: int, nlookup: int) -> None:
        try:
            self._fs.forget(Ino(ino), nlookup)
        except Exception as error:
            self._report(error)

    def _interrupt(self, header: Header, unique: int | wire.Malformed) -> None:
        """Let go a caller that waits. A request we don't know has been answered; its INTERRUPT needs no answer."""
        task = None if isinstance(unique, wire.Malformed) else self.pool.task(unique)
        if task is not None and is_ended(header[6] or task.header[6]) is not False:
            self._let_go(task)

    def _let_go(self, task: Task) -> None:
        if self.pool.abandon(task):
            self._send(task.header, reply.error(task.header[2], errno.EINTR))

    def _watch_callers(self) -> None:
        """Let go of those of whose end no INTERRUPT tells.

        The kernel sends one for a request, be it for a signal that ends nobody, and none for pages that are read ahead,
        though their reader may wait for them.
        """
        while not self._over.wait(CALLERS_S):
            before_ns = time.monotonic_ns() - int(CALLERS_S * 1e9)
            waiting = [task for task in self.pool.unanswered() if task.header[2] and task.began_ns < before_ns]
            ended = {pid for pid in {task.header[6] for task in waiting} if is_ended(pid)}
            for task in waiting:
                if task.header[6] in ended:
                    self._let_go(task)

    # -- answers

    def _submit(self, began_ns: int, header: Header, operation: Operation, args: Any, blocking: Blocking[Any]) -> None:
        buffer = None
        if header[1] == abi.WRITE:  # the only one whose arguments point into the buffer
            buffer, self._has_view = self._view, False
        call = self._follow_ups.call_of(header, began_ns / 1e9)
        self.pool.submit(Task(header, operation, args, blocking, buffer, began_ns, call))

    def _answer(self, task: Task, result: Any, error: BaseException | None) -> None:
        """On a worker: encode and send, or take back what nobody waits for."""
        frame: Frame
        try:
            frame = (
                self._failure(task.header, error) if error else task.operation.encode(task.header, task.args, result)
            )
        except Exception as defect:
            error = defect
            frame = self._failure(task.header, defect)
        if error is not None:
            first = task.call.began == task.began_ns / 1e9
            self._follow_ups.failed(task.header, task.call, error, first=first, now=time.monotonic())
        sent = self.pool.finish(task) and self._send(task.header, frame)
        if task.header[1] == abi.RELEASE and task.header[2]:
            self.modes.released(task.header[3])
        self.traffic.later(task.header, task.began_ns, frame)
        if not sent and error is None and task.operation.undo is not None:
            self._deferred.append(lambda: self._undo(task.operation, task.header, task.args, result))
        if task.buffer is not None:
            self._buffers.give_back(task.buffer)

    def _send(self, header: Header, frame: Frame) -> bool:
        """Write an answer; False when the kernel no longer waits for it."""
        if not header[2]:
            return True  # our own background work, and requests without a number: nobody waits
        try:
            if isinstance(frame, bytes):
                os.write(self._fd, frame)
            else:
                os.writev(self._fd, frame)
        except OSError as error:
            if error.errno == errno.ENOENT:  # interrupted meanwhile
                return False
            if error.errno not in (errno.ENODEV, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.EPERM):
                self._report(error)
        return True

    def _undo(self, operation: Operation, header: Header, args: Any, result: Any) -> None:
        assert operation.undo is not None  # both callers have looked
        try:
            rest = operation.undo(header, args, result)
        except Exception as error:
            self._report(error)
            return
        if type(rest) is Blocking:
            silent = (*header[:2], 0, *header[3:])
            unsaid = Operation(wire.nothing, _unused, _silence)
            self.pool.submit(Task(silent, unsaid, (), rest, None, time.monotonic_ns()))

    def _drain(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    # -- failures

    def _failure(self, header: Header, error: BaseException) -> bytes:
        number = errno_of(error)
        if number is None:
            self._report(error)
            number = errno.EIO
        if not isinstance(error, FSError) or number == errno.ESTALE:  # the rest are answers, such as ENOTEMPTY
            self.traffic.failed(number)
        told = isinstance(error, DatastoreError | OSError) and not isinstance(error, FSError)
        if told and number in (errno.EIO, errno.ETIMEDOUT, errno.EACCES):
            with self._limiter_lock:
                allowed = self._limiter.allows((type(error), header[1]), time.monotonic())
            if allowed:
                log.error(str(error), extra=fields(request=abi.opcode_name(header[1]), answer=errno.errorcode[number]))
        return reply.error(header[2], number)

    def _report(self, error: BaseException) -> None:
        """A defect of ours: once with its traceback."""
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        key = f"{type(error).__name__} {where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else repr(error)
        if key not in self._reported:
            self._reported.add(key)
            log.error("an unexpected error was answered with EIO", exc_info=error)


def _unused(_header: Header, _args: object) -> None:
    """The call of a task that is made from its Blocking alone."""


def _silence(_header: Header, _args: object, _result: object) -> bytes:
    """The answer to nobody."""
    return b""
