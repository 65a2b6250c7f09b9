"""A connection to an NFS server, with many calls in flight, that comes back by itself when it breaks.

A call is put together and sent by the thread that makes it; the client's own thread (`_serve`) waits on the socket,
receives answers, and connects again when the connection broke. What was not answered then is sent again by whoever
waits for it, so that nothing retries below that (libnfs' own reconnecting is not used: it would hide that a request
was sent twice). Threads: any may call; one lock covers everything of libnfs, which knows no threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from datastore.api.source import NFSLocation
from datastore.errors import AccessDenied, DeadlineExceeded, NotFound, ServerFault, StoreError, Unreachable
from datastore.logs import fields

from ..ops import FSError
from ..store.metrics import StoreMetrics
from . import calls, libnfs
from .calls import JUKEBOX, STALE, NFSError, Request

log = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_S = 10.0
"""For one attempt to connect: the portmapper, the mount protocol and NFS itself."""
OUTAGE_S = 600.0
"""How long a call waits for a server that does not answer: a host may restart, and a pod be moved to another node."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
BUSY_PAUSE_S = 0.2
"""Before a call is made again for which the server has asked for patience (JUKEBOX)."""
DEAD_PEER_S = 20
"""A connection on which the server acknowledges nothing for so long is given up."""
TRANSFER_BYTES = 1 << 20
"""Of one READ or WRITE, at most: libnfs' own limit, and the kernel's of a request."""
GROUPS = 16
"""As many supplementary groups as AUTH_SYS can name (RFC 5531)."""
MOUNT_PERMISSION, MOUNT_NOENT, MOUNT_ACCESS = 1, 2, 13
UNDERSTOOD = "Server responded"
"""How libnfs' words for a call begin that the server does not carry out; others are that it takes none from us."""


class Credentials(NamedTuple):
    """Who asks, as AUTH_SYS tells it."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Pending(Generic[T]):
    """A call that was sent, until its answer is there."""

    __slots__ = ("_answered", "broken", "error", "request", "result", "sent_at", "took_s")

    def __init__(self, request: Request[T]) -> None:
        self.request = request  # its arguments are read until it is answered
        self.sent_at = time.monotonic()
        self.took_s = 0.0
        self._answered = threading.Lock()
        self._answered.acquire()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.broken = False
        """The connection broke: the server may have done it, or not."""

    def settle(self, address: int) -> None:
        """Take the answer, which is in memory until this returns."""
        try:
            if number := libnfs.Status.from_address(address).status:
                self.error = NFSError(number)
            else:
                self.result = self.request.read(address)
        except BaseException as defect:  # it must not get into libnfs
            self.error = defect
        self.took_s = time.monotonic() - self.sent_at
        self._answered.release()

    def fail(self, error: BaseException | None) -> None:
        """There is no answer. None: because the connection broke."""
        self.broken, self.error = error is None, error
        self._answered.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether there is an answer."""
        return self._answered.acquire(timeout=max(0.0, timeout_s))


class Client:
    """One server and export."""

    def __init__(self, location: NFSLocation, *, outage_s: float = OUTAGE_S) -> None:
        self.location = location
        self.root = b""
        """The handle of the export's directory, when it is known."""
        self._sizes = (0, 0)
        self.owner = Credentials(os.getuid(), os.getgid())
        """Whom the client asks for by itself."""
        self.metrics = StoreMetrics()
        self.reconnects = -1
        self.on_reconnect: Callable[[], None] = lambda: None
        """Called by the client's thread whenever a broken connection was replaced."""
        self.outage_s = outage_s
        self._library = libnfs.library()
        self.library_name = self._library.name
        self._host = socket.gethostname().encode()[:255]
        self._changed = threading.Condition()
        self._context: Any = None
        self._failure: StoreError | None = None
        """Why there is no connection."""
        self._stopping = False
        self._identity: Credentials | None = None
        self._pending: dict[int, Pending[Any]] = {}
        self._unanswered: list[tuple[Pending[Any], str]] = []
        """What libnfs gave up while it was last called, and in which words."""
        self._next = 1
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        self._answer = libnfs.Callback(self._answered)  # libnfs calls it as long as we live
        self._thread = threading.Thread(target=self._serve, name="nfs", daemon=True)

    # -- for those who call

    def start(self, timeout_s: float | None = None) -> None:
        """Begin to connect. timeout_s: wait for the first connection. Errors: StoreError, why there is none."""
        self._thread.start()
        if timeout_s is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._context or self._failure, timeout_s)
            if self._context is None:
                raise self._failure or self._silent(timeout_s)

    def stop(self) -> None:
        """End the connection; calls that are under way fail. Idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(CONNECT_S)

    def call(self, request: Request[T], credentials: Credentials | None = None) -> T:
        """One call, waited for. Errors: NFSError; StoreError when the server did not answer in time."""
        return self.gather((request,), credentials)[0]

    def gather(self, requests: Sequence[Request[T]], credentials: Credentials | None = None) -> list[T]:
        """Several calls at once; their results in the same order. Errors: as of call(), of the first that fails."""
        until = time.monotonic() + self.outage_s
        identity = credentials or self.owner
        lost = ""
        self.metrics.silence.asked()
        try:
            pending = [self._send(request, identity, until) for request in requests]
            return [self._result(each, identity, until) for each in pending]
        except StoreError as error:
            lost = str(error)
            raise
        finally:
            self.metrics.silence.ended(lost)

    def sizes(self) -> tuple[int, int]:
        """The most that one READ may ask for, and one WRITE may have. Errors: StoreError when the server never told."""
        if self._sizes == (0, 0):
            with self._changed:
                self._await_context(time.monotonic() + self.outage_s)
        return self._sizes

    def _await_context(self, until: float) -> None:
        """Wait for a connection; the lock is held. Errors: StoreError; ENOTCONN when the mount ends."""
        if self._context is None and not self._changed.wait_for(
            lambda: self._context or self._stopping, until - time.monotonic()
        ):
            raise self._failure or self._silent(self.outage_s)
        if self._stopping:
            raise FSError(errno.ENOTCONN)

    def _send(self, request: Request[T], identity: Credentials, until: float) -> Pending[T]:
        with self._changed:
            self._await_context(until)
            if identity != self._identity:
                self._identify(identity)
            pending, key = Pending(request), self._next
            self._next += 1
            self._pending[key] = pending
            arguments = ctypes.addressof(request.arguments)
            if self._library.nfs[request.procedure](self._context, self._answer, arguments, key):
                del self._pending[key]
                raise FSError(errno.ENAMETOOLONG)  # names and targets are all that may not fit its buffer of 4 KiB
            self._work(select.POLLOUT)
            if self._context is not None and self._library.events(self._context) & select.POLLOUT:
                self._wake()  # the socket's buffer is full
        return pending

    def _result(self, pending: Pending[T], identity: Credentials, until: float) -> T:
        repeated = False
        while True:
            if not pending.wait(until - time.monotonic()):
                raise self._silent(self.outage_s)
            error = pending.error
            if pending.broken:
                repeated = True
                lost = self._failure or Unreachable(f"the connection to the NFS server {self.location.server} was lost")
                self.metrics.record_retry(pending.request.procedure, lost)
                pending = self._send(pending.request, identity, until)
                continue
            self.metrics.record(pending.request.procedure, pending.took_s, error=type(error).__name__ if error else "")
            if not isinstance(error, NFSError):
                if error is not None:
                    raise error
                return pending.result  # type: ignore[return-value]
            elif error.status == JUKEBOX and time.monotonic() + BUSY_PAUSE_S < until:
                time.sleep(BUSY_PAUSE_S)
            elif error.status == STALE and self._export_is_away(pending.request, until):
                time.sleep(min(BUSY_PAUSE_S, max(0.0, until - time.monotonic())))
            else:
                error.repeated = repeated
                raise error
            pending = self._send(pending.request, identity, until)

    def _export_is_away(self, request: Request[Any], until: float) -> bool:
        """Whether not only one file is stale but all are: a server that has started and does not export it yet.

        Then the connection is made anew, which waits for the export.
        """
        if time.monotonic() >= until:
            return False
        pending = self._send(calls.getattr(self.root), self.owner, until)
        if not pending.wait(until - time.monotonic()):
            return False
        error = pending.error
        if pending.broken or not isinstance(error, NFSError) or error.status != STALE:
            return False
        with self._changed:
            self._break("the server does not export it")
        return True

    def _silent(self, waited_s: float) -> StoreError:
        return DeadlineExceeded(f"the NFS server {self.location.server} did not answer for {waited_s:.0f} s")

    def _identify(self, identity: Credentials) -> None:
        groups = identity.groups[:GROUPS]
        named = (ctypes.c_uint32 * len(groups))(*groups)
        made = self._library.make_auth(self._host, identity.uid, identity.gid, len(groups), named)
        self._library.set_auth(self._context, made)  # it destroys the former one
        self._identity = identity

    def _answered(self, _context: int, status: int, address: int | None, key: int) -> None:
        """libnfs has an answer, or gives a call up. Whoever called into libnfs holds the lock."""
        pending = self._pending.pop(key)
        if status == libnfs.STATUS_SUCCESS and address:
            pending.settle(address)
        else:
            self._unanswered.append((pending, ctypes.string_at(address).decode(errors="replace") if address else ""))

    def _work(self, events: int) -> None:
        """Let libnfs send and receive; the lock is held. What it gives up was refused, or the connection broke."""
        if self._library.service(self._context, events) < 0:
            self._break(self._words(self._context))
            return
        if any(not words.startswith(UNDERSTOOD) for _, words in self._unanswered):
            self._break("the server does not export it to this machine")  # or not yet; connecting anew will tell
            return
        unanswered, self._unanswered = self._unanswered, []
        for pending, words in unanswered:
            log.error("a request was refused", extra=fields(call=pending.request.procedure, why=words))
            pending.fail(FSError(errno.EIO, words))

    # -- the client's thread

    def _serve(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            began = time.monotonic()
            try:
                context = self._connect()
            except (StoreError, NFSError) as error:
                self._failed(error)
            else:
                self._connected(context)
                self._receive(context)
            if time.monotonic() - began > CONNECT_S:
                pause_s = FIRST_PAUSE_S
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        with self._changed:
            self._break("the mount ends")
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _connected(self, context: Any) -> None:
        with self._changed:
            self._context, self._identity, self._failure = context, None, None
            self.reconnects += 1
            self._changed.notify_all()
        if self.reconnects:
            log.warning("connected again", extra=fields(server=self.location.server))
            self.on_reconnect()

    def _failed(self, error: StoreError | NFSError) -> None:
        if isinstance(error, NFSError):
            error_of_store: StoreError = Unreachable(
                f"{self.location} does not answer as an export: {os.strerror(error.errno or errno.EIO)}"
            )
        else:
            error_of_store = error
        with self._changed:
            if str(error_of_store) != str(self._failure):
                log.error(str(error_of_store))
            self._failure = error_of_store
            self.metrics.silence.failed(error_of_store)
            self._changed.notify_all()

    def _receive(self, context: Any) -> None:
        """Take answers, until the connection breaks or we are to stop."""
        library = self._library
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        descriptor = library.fd(context)
        while not self._stopping:
            with self._changed:
                if self._context is not context:
                    return
                poll.register(descriptor, library.events(context))
            ready = dict(poll.poll())
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if descriptor in ready:
                with self._changed:
                    if self._context is context:
                        self._work(_events(ready[descriptor]))

    def _break(self, why: str) -> None:
        """Give the connection up; the lock is held. Who waits for an answer is told."""
        context, self._context = self._context, None
        if context is None:
            return
        if not self._stopping:
            log.warning("the connection is lost", extra=fields(server=self.location.server, why=why))
        self._failure = Unreachable(f"the connection to the NFS server {self.location.server} is lost: {why}")
        self.metrics.silence.failed(self._failure)
        self._library.destroy(context)
        unanswered, self._unanswered = self._unanswered, []
        for pending, _ in unanswered:
            pending.fail(None)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_w, b"\0")

    # -- connecting

    def _connect(self) -> Any:
        """A context that is connected to the export, whose root answers. Errors: StoreError, NFSError."""
        if self.root:
            with contextlib.suppress(NFSError, StoreError):  # the mount protocol says why not, or tells another root
                return self._dial_nfs()
        self.root = self._mount()
        return self._dial_nfs()

    def _dial_nfs(self) -> Any:
        """A context whose server has been asked for the root, and for how much a READ or WRITE may move."""
        context = self._dial(libnfs.NFS_PROGRAM, self.location.port)
        try:
            request = calls.fsinfo(self.root)
            pending = Pending(request)
            function, arguments = self._library.nfs["fsinfo"], ctypes.addressof(request.arguments)
            self._ask(context, "NFS", pending, lambda answer: function(context, answer, arguments, None))
            if pending.error is not None:
                raise pending.error
        except BaseException:
            self._library.destroy(context)
            raise
        sizes = pending.result or (0, 0)
        read_bytes, write_bytes = (max(4096, min(each or TRANSFER_BYTES, TRANSFER_BYTES)) for each in sizes)
        self._sizes = read_bytes, write_bytes
        return context

    def _mount(self) -> bytes:
        """The root's handle, by the MOUNT protocol."""
        context = self._dial(libnfs.MOUNT_PROGRAM, self.location.mount_port)
        try:
            pending = Pending(Request("mount", libnfs.Status(), _root))
            self._ask(
                context,
                "MOUNT",
                pending,
                lambda answer: self._library.mount(context, answer, os.fsencode(self.location.path), None),
            )
        finally:
            self._library.destroy(context)
        if isinstance(pending.error, NFSError):
            raise self._refused(pending.error.status)
        if pending.error is not None:
            raise pending.error
        return pending.result or b""

    def _refused(self, status: int) -> StoreError:
        server, path = self.location.server, self.location.path
        if status in (MOUNT_ACCESS, MOUNT_PERMISSION):
            more = "" if os.geteuid() == 0 else ", or it lacks the option insecure, without which only root mounts it"
            return AccessDenied(
                f"the NFS server {server} does not let this machine mount {path}: there is no such export, or this"
                f" machine is not among its clients{more} (exportfs -v on the server shows all this)"
            )
        if status == MOUNT_NOENT:
            return NotFound(f"the NFS server {server} has no {path} (showmount --exports {server} lists its exports)")
        return ServerFault(f"the NFS server {server} can't mount {path}: MOUNT answered {status}")

    def _dial(self, program: int, port: int) -> Any:
        """A new context, connected to a program of the server."""
        context = self._library.init()
        if not context:
            raise MemoryError
        server = self.location.server.encode()
        pending = Pending(Request("null", libnfs.Status(), lambda _: None))

        def begin(answer: Any) -> int:
            if port:
                return int(self._library.connect_port(context, server, port, program, libnfs.VERSION, answer, None))
            return int(self._library.connect_program(context, server, program, libnfs.VERSION, answer, None))

        try:
            self._ask(context, "a connection", pending, begin, connecting=True)
        except BaseException:
            self._library.destroy(context)
            raise
        self._tune(self._library.fd(context))
        return context

    def _ask(
        self,
        context: Any,
        what: str,
        pending: Pending[Any],
        begin: Callable[[Any], int],
        *,
        connecting: bool = False,
    ) -> None:
        """Send one request on a context of our own and wait for its answer. Errors: Unreachable, DeadlineExceeded."""
        said: list[int] = []

        def take(_context: int, status: int, address: int | None, _key: int | None) -> None:
            said.append(status)
            if status == libnfs.STATUS_SUCCESS and address and not connecting:
                pending.settle(address)

        answer = libnfs.Callback(take)
        until = time.monotonic() + CONNECT_S
        if begin(answer):
            raise self._unreachable(context)
        while not said and not self._stopping:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"the NFS server {self.location.server} does not answer a request for {what}")
            descriptor = self._library.fd(context)
            poll = select.poll()
            poll.register(descriptor, self._library.events(context))
            poll.register(self._wake_r, select.POLLIN)
            ready = dict(poll.poll(left_s * 1000))
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if descriptor in ready and self._library.service(context, _events(ready[descriptor])) < 0 and not said:
                raise self._unreachable(context)
        if self._stopping or said[0] != libnfs.STATUS_SUCCESS:
            raise self._unreachable(context)

    def _unreachable(self, context: Any) -> StoreError:
        return Unreachable(f"the NFS server {self.location.server} can't be reached: {self._words(context)}")

    def _words(self, context: Any) -> str:
        return (self._library.error(context) or b"it closed the connection").decode(errors="replace")

    @staticmethod
    def _tune(descriptor: int) -> None:
        """What libnfs leaves at the system's defaults."""
        with socket.socket(fileno=os.dup(descriptor)) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, seconds in (("TCP_KEEPIDLE", DEAD_PEER_S // 2), ("TCP_KEEPINTVL", DEAD_PEER_S // 4)):
                if hasattr(socket, name):
                    same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000)


def _events(ready: int) -> int:
    """Of an error and the end of a connection, libnfs would tell only the second."""
    return ready & ~select.POLLHUP if ready & select.POLLERR else ready


def _root(address: int) -> bytes:
    root: Any = libnfs.MountResult.from_address(address).root
    return ctypes.string_at(root.address, root.length)
