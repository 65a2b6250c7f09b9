"""A connection to an NFS server with many calls in flight, which reconnects when it breaks.

The calling thread encodes and sends a call; the client's own thread (`_serve`) waits on the socket, receives answers,
and reconnects after the connection broke. Then each calling thread whose call has no answer sends that call again.
Nothing retries below that: libnfs' own reconnecting is not used, because it would hide that a request was sent twice.
Any thread may call; one lock covers the connection's libnfs context, because libnfs is not thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import select
import socket
import stat
import struct
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
"""The timeout, in seconds, of each step of connecting: to reach a program (with the portmapper), MOUNT, and FSINFO."""
FIRST_CONNECTION_S = 15.0
"""How long a new mount, or `doctor`, waits for the first attempt to connect."""
OUTAGE_S = 600.0
"""How long a call waits for a server that does not answer: its host may restart, or its pod move to another node."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
BUSY_PAUSE_S = 0.2
"""The pause before a call is sent again because the server said "try later" (JUKEBOX) or does not export yet."""
DEAD_PEER_S = 20
"""A connection is given up when the server acknowledges nothing for this many seconds."""
TRANSFER_BYTES = 1 << 20
"""The most bytes of one READ or WRITE: libnfs' own limit, and the kernel's limit for a FUSE request."""
GROUPS = 16
"""How many supplementary groups AUTH_SYS can carry (RFC 5531)."""
MOUNT_PERMISSION, MOUNT_NOENT, MOUNT_ACCESS = 1, 2, 13
ERRNO_SAID = re.compile(r"(?:errno:|\()(\d+)\)?\.?(?: Closing socket\.)?$")
"""The errno in an error text of libnfs, as in `rpc_service: socket error Connection refused(111).`"""
NOT_FOUND = "Can not resolv"
NOT_SERVED = ("Program is not available", "Program not available", "Program version mismatch")
"""Parts of libnfs' error texts: a name without an address; a server without the program, or without version 3 of it."""
AUTH_TAKEN = {0, 1}
"""Credentials of AUTH_NONE and AUTH_SYS (RFC 5531), with which we can call."""
FLAVOR = struct.Struct("=i")
UNDERSTOOD = "Server responded"
"""How libnfs' error text begins if the server refused this call; another text means that it takes no calls at all."""


class Credentials(NamedTuple):
    """The user and groups of a call, as AUTH_SYS carries them."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Pending(Generic[T]):
    """A call that was sent; it ends with an answer, an error or a broken connection."""

    __slots__ = ("_answered", "broken", "error", "request", "result", "sent_at", "took_s")

    def __init__(self, request: Request[T]) -> None:
        self.request = request  # kept alive: libnfs reads its arguments until the answer is there
        self.sent_at = time.monotonic()
        self.took_s = 0.0
        self._answered = threading.Lock()
        self._answered.acquire()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.broken = False
        """The connection broke: the server may or may not have carried out the call."""

    def settle(self, address: int) -> None:
        """Read the answer at `address`, where libnfs keeps it only until this method returns."""
        try:
            if number := libnfs.Status.from_address(address).status:
                self.error = NFSError(number)
            else:
                self.result = self.request.read(address)
        except BaseException as defect:  # no exception may propagate into libnfs
            self.error = defect
        self.took_s = time.monotonic() - self.sent_at
        self._answered.release()

    def fail(self, error: BaseException | None) -> None:
        """End the call without an answer. error: the reason; None if the connection broke."""
        self.broken, self.error = error is None, error
        self._answered.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the call has ended; return False after the timeout."""
        return self._answered.acquire(timeout=max(0.0, timeout_s))


class Client:
    """The client of one export of one server."""

    def __init__(self, location: NFSLocation, *, outage_s: float = OUTAGE_S) -> None:
        self.location = location
        self.root = b""
        """The file handle of the exported directory; b'' until it is known."""
        self._sizes = (0, 0)
        self.owner = Credentials(os.getuid(), os.getgid())
        """The credentials of calls that are not made for a user: those of this process."""
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
        """The calls that libnfs gave up while it was last called, with its error texts."""
        self._next = 1
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        self._answer = libnfs.Callback(self._answered)  # kept alive: libnfs may call it at any time
        self._thread = threading.Thread(target=self._serve, name="nfs", daemon=True)

    # -- for callers

    def start(self, timeout_s: float | None = None) -> None:
        """Begin to connect. timeout_s: how long to wait for the first attempt. Errors: StoreError when that fails."""
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
        """Make one call and return its result. Errors: NFSError; StoreError when the server did not answer in time."""
        return self.gather((request,), credentials)[0]

    def gather(self, requests: Sequence[Request[T]], credentials: Credentials | None = None) -> list[T]:
        """Make several calls at once; return the results in that order. Errors: as call(), for the first that fails."""
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
        """Return the most bytes of one READ and of one WRITE. Errors: StoreError when no server told in time."""
        if self._sizes == (0, 0):
            with self._changed:
                self._await_context(time.monotonic() + self.outage_s)
        return self._sizes

    def _await_context(self, until: float) -> None:
        """Wait for a connection; the caller holds the lock. Errors: StoreError; ENOTCONN when the mount ends."""
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
                raise FSError(errno.ENAMETOOLONG)  # only a name or a link target can overflow libnfs' buffer of 4 KiB
            self._work(select.POLLOUT)
            if self._context is not None and self._library.events(self._context) & select.POLLOUT:
                self._wake()  # the socket's buffer is full: the client's thread sends the rest
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
        """Return whether the whole export is stale, not only one file: a restarted server may not export it yet.
        If so, drop the connection, because reconnecting waits for the export."""
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
        self._library.set_auth(self._context, made)  # libnfs frees the previous credentials
        self._identity = identity

    def _answered(self, _context: int, status: int, address: int | None, key: int) -> None:
        """Take an answer, or a call that libnfs gives up. libnfs runs this in a thread that holds the lock."""
        pending = self._pending.pop(key)
        if status == libnfs.STATUS_SUCCESS and address:
            pending.settle(address)
        else:
            self._unanswered.append((pending, ctypes.string_at(address).decode(errors="replace") if address else ""))

    def _work(self, events: int) -> None:
        """Let libnfs send and receive; the caller holds the lock. Fail refused calls, or drop a broken connection."""
        if self._library.service(self._context, events) < 0:
            self._break(self._words(self._context))
            return
        if any(not words.startswith(UNDERSTOOD) for _, words in self._unanswered):
            self._break("the server does not export it to this machine")  # or not yet: reconnecting will show
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
        """Receive answers until the connection breaks or the client is to stop."""
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
        """Drop the connection and wake all threads that wait for an answer. The caller holds the lock."""
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
        """Return a libnfs context that is connected to the export. Errors: StoreError, NFSError."""
        if self.root:
            with contextlib.suppress(NFSError, StoreError):  # _mount() then raises the reason, or gets a new handle
                return self._dial_nfs()
        self.root = self._mount()
        return self._dial_nfs()

    def _dial_nfs(self) -> Any:
        """Return a context connected to NFS, and take the largest READ and WRITE from an FSINFO of the root. Errors:
        NotFound if the root is no directory: some servers export a file, too."""
        context = self._dial(libnfs.NFS_PROGRAM, self.location.port)
        try:
            if not stat.S_ISDIR(self._answer_of(context, calls.getattr(self.root)).mode):
                raise NotFound(f"{self.location.path} of the NFS server {self.location.server} is no directory")
            sizes = self._answer_of(context, calls.fsinfo(self.root))
        except BaseException:
            self._library.destroy(context)
            raise
        read_bytes, write_bytes = (max(4096, min(each or TRANSFER_BYTES, TRANSFER_BYTES)) for each in sizes)
        self._sizes = read_bytes, write_bytes
        return context

    def _answer_of(self, context: Any, request: Request[T]) -> T:
        """Make one call on a context that only this thread uses; return its result. Errors: StoreError, NFSError."""
        pending = Pending(request)
        function, arguments = self._library.nfs[request.procedure], ctypes.addressof(request.arguments)
        self._ask(context, "NFS", pending, lambda answer: function(context, answer, arguments, None))
        if pending.error is not None:
            raise pending.error
        return pending.result  # type: ignore[return-value]

    def _mount(self) -> bytes:
        """Return the root's file handle, which the MOUNT protocol tells."""
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
        root, flavors = pending.result or (b"", [])
        if flavors and not AUTH_TAKEN & set(flavors):
            server, path = self.location.server, self.location.path
            raise AccessDenied(
                f"the NFS server {server} gives {path} only to clients with Kerberos, which we don't have: the export"
                " needs sec=sys, alone or beside others (exportfs -v on the server shows this)"
            )
        return root

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
        """Return a new context that is connected to an RPC program of the server. port 0: ask the portmapper for it."""
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
        """Send one request on a context that only this thread uses, and wait for the answer.

        connecting: the answer has no result. Errors: Unreachable, DeadlineExceeded.
        """
        said: list[int] = []
        refusal = b""

        def take(_context: int, status: int, address: int | None, _key: int | None) -> None:
            nonlocal refusal
            said.append(status)
            if status != libnfs.STATUS_SUCCESS and address:
                refusal = ctypes.string_at(address)
            elif address and not connecting:
                pending.settle(address)

        answer = libnfs.Callback(take)
        until = time.monotonic() + CONNECT_S
        if begin(answer):
            raise self._unreachable(context)
        while not said and not self._stopping:
            left_s = until - time.monotonic()
            if left_s <= 0:
                ports = self._ports() if connecting else ""
                raise DeadlineExceeded(
                    f"the NFS server {self.location.server} does not answer a request for {what}{ports}"
                )
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
            raise self._unreachable(context, refusal)

    def _unreachable(self, context: Any, refusal: bytes = b"") -> StoreError:
        """Return why there is no connection. refusal: libnfs' error text, if it has handed one out with the answer."""
        server, said = self.location.server, (refusal or self._library.error(context) or b"").decode(errors="replace")
        if NOT_FOUND in said:
            return Unreachable(f"the NFS server {server} is not found: no address is known for this name")
        if any(each in said for each in NOT_SERVED):
            return Unreachable(
                f"the NFS server {server} does not serve version 3 of NFS and MOUNT, by which an export is mounted"
                f" without root, or without NFS in the kernel (rpcinfo -p {server} shows what it serves)"
            )
        return Unreachable(f"the NFS server {server} can't be reached: {_plain(said)}{self._ports()}")

    def _ports(self) -> str:
        """Return which ports are needed, if the server is asked for them."""
        needs = (
            f"version 3 needs rpcbind (port 111), mountd and nfsd there: rpcinfo -p {self.location.server} shows all"
        )
        return "" if self.location.port else f"; {needs}"

    def _words(self, context: Any) -> str:
        return _plain((self._library.error(context) or b"").decode(errors="replace"))

    @staticmethod
    def _tune(descriptor: int) -> None:
        """Set the socket options that libnfs leaves at the system's defaults."""
        with socket.socket(fileno=os.dup(descriptor)) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, seconds in (("TCP_KEEPIDLE", DEAD_PEER_S // 2), ("TCP_KEEPINTVL", DEAD_PEER_S // 4)):
                if hasattr(socket, name):
                    same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000)


def _events(ready: int) -> int:
    """Return the events to pass to libnfs: no POLLHUP beside POLLERR, because libnfs would then hide the error."""
    return ready & ~select.POLLHUP if ready & select.POLLERR else ready


def _plain(said: str) -> str:
    """Return an error text of libnfs in the system's words, if it has an errno."""
    number = ERRNO_SAID.search(said)
    return os.strerror(int(number[1])) if number else said or "it closed the connection"


def _root(address: int) -> tuple[bytes, list[int]]:
    """Return the root's handle and the kinds of credentials that the export takes; none: the server does not tell."""
    answer: Any = libnfs.MountResult.from_address(address)
    flavors = ctypes.string_at(answer.flavors.address, 4 * answer.flavors.length) if answer.flavors.length else b""
    return ctypes.string_at(answer.root.address, answer.root.length), [each for (each,) in FLAVOR.iter_unpack(flavors)]
