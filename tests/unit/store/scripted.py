"""A server that plays a script: the n-th request on any connection gets the n-th answer, or each what a rule says."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import pytest

from datastore.fuse.loop import now
from datastore.fuse.store.s3.dialing import Route, trust
from datastore.fuse.store.s3.messages import Answer, Request
from datastore.fuse.store.s3.transport import Transport
from tests.authority import Identity
from tests.patience import PATIENCE_S

HOST = {"host": "h"}
T = TypeVar("T")


class Wait(Protocol):
    """What a coroutine returns or raises, when it has ended."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class PlainTransport(Transport):
    """One whose requests need no signature. wait: how their answers are waited for."""

    def __init__(self, to: int | Route, wait: Wait = now, **options: Any) -> None:
        """to: a port of this machine, or another route."""
        super().__init__(Route("127.0.0.1", to, "tls" in options) if isinstance(to, int) else to, **options)
        self._wait = wait

    def begin(
        self, request: Request, target: str = "/k", headers: Mapping[str, str] = HOST
    ) -> Coroutine[Any, Any, Answer]:
        """The exchange, which begins when somebody awaits it."""
        length = len(request.body) if request.body or request.method in {"PUT", "POST"} else None
        return self.send(request, self.head(request.method, target, headers, length))

    def ask(self, request: Request, target: str = "/k", headers: Mapping[str, str] = HOST) -> Answer:
        """The answer."""
        return self._wait(self.begin(request, target, headers))


class Transports:
    """Makes them, and closes them at its end."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._made: list[PlainTransport] = []

    def to(self, to: int | Route, **options: Any) -> PlainTransport:
        self._made.append(PlainTransport(to, self._wait, **options))
        return self._made[-1]

    def close(self) -> None:
        async def close() -> None:
            for each in self._made:
                each.close()

        self._wait(close())


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent; close: hang up afterwards; early: without waiting for the request's body."""

    data: bytes
    close: bool = False
    early: bool = False


def http(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


HANG_UP = Reply(b"", close=True)
SILENCE = Reply(b"")
Rule = Callable[[bytes, int], Reply | bytes]


class ScriptedServer:
    """Listens while the block runs. requests: what was received, heads and bodies; connections: how many were made;
    opened: how many are.

    together: the most requests that had come on a connection before one of them was answered. A rule is given the head
    of a request and how many of its connection came before it.
    """

    def __init__(self, replies: Sequence[Reply | bytes] | Rule, identity: Identity | None = None) -> None:
        """identity: what it shows; it speaks TLS then."""
        self.together = 0
        self.requests: list[bytes] = []
        self.connections = 0
        self.opened = 0
        self._rule = replies if callable(replies) else None
        self._replies = [] if callable(replies) else list(replies)
        self._tls = None if identity is None else context_of(identity)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> ScriptedServer:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._sockets:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
                finally:
                    connection.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(connection)
                self.connections += 1
                self.opened += 1
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._sockets.append(connection)
            self._converse(connection)
        except OSError:
            connection.close()
        finally:
            with self._lock:
                self.opened -= 1

    def _converse(self, connection: socket.socket) -> None:
        pending = b""
        for number in itertools.count():
            while b"\r\n\r\n" not in pending:
                pending += received(connection)
            with self._lock:
                self.together = max(self.together, pending.count(b"\r\n\r\n"))
            head, _, pending = pending.partition(b"\r\n\r\n")
            found = self._rule(head, number) if self._rule is not None else self._next()
            reply = found if isinstance(found, Reply) else Reply(found)
            length = content_length(head)
            while len(pending) < length and not reply.early:
                pending += received(connection)
            with self._lock:
                self.requests.append(head + b"\r\n\r\n" + pending[:length])
            pending = pending[length:]
            connection.sendall(reply.data)
            if reply.close:
                connection.shutdown(socket.SHUT_RDWR)
                connection.close()
                return

    def _next(self) -> Reply | bytes:
        with self._lock:
            return self._replies.pop(0) if self._replies else HANG_UP


Address = tuple[str, int | None]


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[Address]) -> list[str]:
    """Each look-up of a name gets the next answer, IPv4 addresses with a port or that which was asked for; the last one
    again and again. The names that were looked up."""
    asked: list[str] = []

    def found(host: str, port: int, *, flags: int = 0, **_: Any) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        asked.append(host)
        addresses = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, to or port)) for address, to in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return asked


Served = Callable[..., contextlib.AbstractContextManager[tuple[PlainTransport, ScriptedServer]]]
"""Makes a server of answers and a transport to it."""
Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def talking(*talks: Talk, identity: Identity | None = None) -> Iterator[int]:
    """The port of a server that says on its n-th connection what the n-th of `talks` says. identity: it speaks TLS."""

    def run() -> None:
        for talk in talks:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), wrapped(connection) as spoken:
                talk(spoken)

    def wrapped(connection: socket.socket) -> socket.socket:
        return connection if context is None else context.wrap_socket(connection, server_side=True)

    context = None if identity is None else context_of(identity)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)


def trusting(identity: Identity | None) -> dict[str, ssl.SSLContext]:
    """The options of a transport to such a server."""
    return {} if identity is None else {"tls": trust(identity.authority.read_text())}


def context_of(identity: Identity) -> ssl.SSLContext:
    """Of a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    return context


def received(connection: socket.socket) -> bytes:
    """Errors: OSError, also at its end."""
    more = connection.recv(65536)
    if not more:
        raise ConnectionError
    return more


def content_length(head: bytes) -> int:
    """Of a request."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
