"""A proxy between an NFS client and its server that loses chosen requests or answers, as a broken connection does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from tests.nfs.host.guest import Guest

NFS_PROGRAM = 100003
PROCEDURES = (
    "null", "getattr", "setattr", "lookup", "access", "readlink", "read", "write", "create", "mkdir", "symlink",
    "mknod", "remove", "rmdir", "rename", "link", "readdir", "readdirplus", "fsstat", "fsinfo", "pathconf", "commit",
)  # fmt: skip
Plan = Callable[[str], str]
"""The name of a call -> '' to let it through, 'request' or 'answer' to lose that and break the connection."""


class RpcProxy:
    """Listens on two ports of `host`: for NFS, which is spoilt, and for the mount protocol. plan: replaced any time."""

    def __init__(self, server: Guest, host: str = "127.0.0.1") -> None:
        self.host = host
        self.plan: Plan = lambda _: ""
        self.calls: list[str] = []
        self._server = server.address
        mount_port = int(server.shell("rpcinfo -p | awk '$1==100005 && $2==3 && $3==\"tcp\" {print $4; exit}'"))
        self._listeners = [socket.create_server((host, 0)) for _ in range(2)]
        self.port, self.mount_port = (each.getsockname()[1] for each in self._listeners)
        self._sockets: set[socket.socket] = set()
        for listener, port in zip(self._listeners, (2049, mount_port), strict=True):
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def lose(self, what: str, *calls: str, times: int = 1) -> None:
        """Lose the next `times` of each of these calls: its 'request' or its 'answer'."""
        left = dict.fromkeys(calls, times)

        def plan(call: str) -> str:
            if not left.get(call):
                return ""
            left[call] -= 1
            return what

        self.plan = plan

    def hang_up(self) -> None:
        """Break all connections."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End."""
        for listener in self._listeners:
            listener.close()
        self.hang_up()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self._server, port), timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            lost: set[int] = set()
            self._sockets |= {near, far}
            for one, other, check in ((near, far, self._asked), (far, near, self._answered)):
                threading.Thread(target=self._pump, args=(one, other, check, lost), daemon=True).start()

    def _pump(
        self, one: socket.socket, other: socket.socket, check: Callable[[bytes, set[int]], bool], lost: set[int]
    ) -> None:
        """Pass whole messages on until one is lost, or an end closes."""
        with contextlib.suppress(OSError):
            while (message := _message(one)) and check(message, lost):
                other.sendall(message)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._sockets.discard(one)
        one.close()

    def _asked(self, message: bytes, lost: set[int]) -> bool:
        number, _, _, program, _, procedure = struct.unpack_from(">6I", message, 4)
        if program != NFS_PROGRAM:
            return True
        call = PROCEDURES[procedure]
        self.calls.append(call)
        verdict = self.plan(call)
        if verdict == "answer":
            lost.add(number)
        return verdict != "request"

    def _answered(self, message: bytes, lost: set[int]) -> bool:
        return struct.unpack_from(">I", message, 4)[0] not in lost


def _message(sock: socket.socket) -> bytes:
    """One RPC message with its record marks, b'' at the end."""
    whole = b""
    while True:
        mark = _exactly(sock, 4)
        (size,) = struct.unpack(">I", mark) if mark else (0,)
        body = _exactly(sock, size & 0x7FFFFFFF) if mark else b""
        if not body:
            return b""
        whole += mark + body
        if size >> 31:
            return whole


def _exactly(sock: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        piece = sock.recv(min(1 << 20, size - len(got)))
        if not piece:
            return b""
        got += piece
    return bytes(got)


@contextlib.contextmanager
def proxied(server: Guest) -> Iterator[RpcProxy]:
    """A proxy for a test."""
    proxy = RpcProxy(server)
    try:
        yield proxy
    finally:
        proxy.close()
