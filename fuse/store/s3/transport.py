"""HTTP/1.1 over a bounded pool of keep-alive connections: bytes out, bytes in, no knowledge of S3.

http.client, because for small bodies it costs half the CPU of urllib3 (0.12 against 0.26 ms per GET, measured).
Threads: any number may call `send`; each has a connection to itself meanwhile. Every wait is bounded: for a place in
the pool, to connect, for each read or write, and for the call as a whole.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from datastore.errors import CorruptBody, DeadlineExceeded, InvalidRequest, Unreachable

from ..base import Body, FilePart, in_memory
from .errors import connection_words, one_line
from .http1 import Head, is_quiet, send_file

_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
"""Up to here one read is cheapest; above, the bytes are received in place."""
_MAX_UNSIZED_BYTES = 64 << 20
"""Bound of an answer that does not say its length: listings and errors, which are at most a few MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """connections: open at once (64: more only queue in the server). connect_s: TCP and TLS. idle_s: between two
    bytes in either direction. call_s: a whole call, and body_floor bytes per second are allowed for besides.
    keep_s: an idle connection is not used again after this, since servers close theirs after 5 to 60 s."""

    connections: int = 64
    connect_s: float = 5.0
    idle_s: float = 20.0
    call_s: float = 30.0
    body_floor: int = 256 << 10
    keep_s: float = 55.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; authorization is the header's value or ''."""

    host: str
    port: int
    url: str
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Whom to connect to, and how."""

    host: str
    port: int
    secure: bool
    proxy: Proxy | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """status, headers by lower-case name, and the whole body; poured: how much of it went to the request's outlet."""

    status: int
    headers: Mapping[str, str]
    body: Body
    poured: int = 0


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a large body goes while it comes. status: of the answer that is meant, others are kept whole.

    start: where in the object the body begins: it is cut at whole MiB of that. take: given the headers, the body's
    length, where in the body these bytes are, and the bytes.
    """

    status: int
    start: int
    take: Callable[[Mapping[str, str], int, int, Body], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What to send. target: encoded path and query; repeatable: sending it twice is as good as once."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: Body | FilePart = b""
    repeatable: bool = True
    expected_bytes: int = 0
    """About how large the answer is, for the deadline."""
    patience_s: float = 0.0
    """Longer than usual between two bytes: the server copies or joins objects before it answers."""
    outlet: Outlet | None = None


def trust(ca_bundle: str = "") -> ssl.SSLContext:
    """Verifying TLS: the system's roots, and those of `ca_bundle` (PEM) besides. Errors: InvalidRequest."""
    context = ssl.create_default_context()
    if ca_bundle:
        try:
            context.load_verify_locations(cadata=ca_bundle)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidRequest(f"caBundle holds no PEM certificate: {one_line(str(error))}") from error
    return context


def proxy_for(host: str, *, secure: bool) -> Proxy | None:
    """What HTTP_PROXY, HTTPS_PROXY and NO_PROXY say about a host. Errors: InvalidRequest."""
    url = getproxies().get("https" if secure else "http", "")
    if not url or proxy_bypass(host):
        return None
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError as error:
        raise InvalidRequest("the proxy in HTTP_PROXY or HTTPS_PROXY is not a URL") from error
    if parts.scheme != "http" or not parts.hostname:
        raise InvalidRequest("the proxy in HTTP_PROXY or HTTPS_PROXY must be an http:// URL")
    authorization = ""
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(login.encode()).decode()
    return Proxy(parts.hostname, port, parts.geturl(), authorization)


class Transport:
    """Connections to one route.

    INVARIANT places given out + places free == limits.connections; an idle connection holds no place.
    """

    def __init__(
        self,
        route: Route,
        *,
        tls: ssl.SSLContext | None = None,
        limits: TransportLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.route = route
        self.limits = limits or TransportLimits()
        self._tls = tls
        self._clock = clock
        self._places = threading.BoundedSemaphore(self.limits.connections)
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._closed = False

    def send(self, request: Request) -> Answer:
        """One exchange. Errors: Unreachable, DeadlineExceeded, CorruptBody.

        A kept connection that the server had meanwhile closed is replaced once, when nothing of an answer has come
        and the request is repeatable; that is part of keep-alive, not a retry.
        """
        size = len(request.body) + request.expected_bytes
        deadline = self._clock() + self.limits.call_s + request.patience_s + size / self.limits.body_floor
        if not self._places.acquire(timeout=self.limits.call_s):
            raise DeadlineExceeded(f"{self._where()}: all {self.limits.connections} connections stayed busy")
        try:
            kept = self._take_idle()
            if kept is not None:
                try:
                    return self._exchange(kept, request, deadline)
                except _Stale as stale:
                    if not request.repeatable:
                        raise Unreachable(f"{self._where()}: {connection_words(stale.reason)}") from stale.reason
            try:
                return self._exchange(self._connect(deadline), request, deadline)
            except _Stale as stale:
                raise Unreachable(f"{self._where()}: {connection_words(stale.reason)}") from stale.reason
        finally:
            self._places.release()

    def close(self) -> None:
        """Close idle connections; those in use are closed when they come back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, request: Request, deadline: float) -> Answer:
        try:
            response, all_sent = self._converse(connection, request, deadline)
            with response:
                answer = self._answer(connection, response, deadline, request.outlet)
        except TimeoutError as error:
            connection.close()
            raise DeadlineExceeded(f"{self._where()}: no answer in time to {request.method}") from error
        except (http.client.IncompleteRead, _CutShort) as error:
            connection.close()
            raise CorruptBody(f"{self._where()}: the answer to {request.method} was cut short") from error
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise Unreachable(f"{self._where()}: {connection_words(error)}") from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection, keep=all_sent and not response.will_close)
        return answer

    def _converse(self, connection: http.client.HTTPConnection, request: Request, deadline: float) -> tuple[Head, bool]:
        """Send, and receive the head of the answer. Errors: _Stale when no byte of an answer came.

        A server may refuse before it has read the whole body, and hang up: its answer is then what counts.
        """
        try:
            self._pace(connection, deadline)
            all_sent = True
            try:
                self._send(connection.sock, request, deadline)
            except (BrokenPipeError, ConnectionResetError):
                all_sent = False
            self._pace(connection, deadline, request.patience_s)
            response = Head(connection.sock, method=request.method)
            try:
                response.begin()
            except BaseException:
                response.close()
                raise
            return response, all_sent
        except (http.client.RemoteDisconnected, ConnectionError) as error:
            raise _Stale(error) from error

    def _send(self, sock: socket.socket, request: Request, deadline: float) -> None:
        """The head and a small body travel together, so that the server wakes once; a large one in pieces, each with
        its own limit."""
        head, encrypted = self._head(request), isinstance(sock, ssl.SSLSocket)
        if isinstance(request.body, FilePart) and not encrypted:
            sock.sendall(head)
            send_file(sock, request.body, partial(self._left_s, deadline))
            return
        view = memoryview(in_memory(request.body))
        if len(view) <= _SMALL_BYTES:
            sock.sendall(b"".join((head, view)))
            return
        done = 0
        if encrypted:
            sock.sendall(head)
        else:
            sent = sock.sendmsg((head, view[:_PIECE_BYTES]))
            sock.sendall(head[sent:])
            done = max(0, sent - len(head))
        while done < len(view):
            self._limit(sock, self._left_s(deadline))
            sock.sendall(view[done : done + _PIECE_BYTES])
            done += _PIECE_BYTES

    def _head(self, request: Request) -> bytes:
        """Request line and headers. Errors: InvalidRequest for a value that headers can't carry."""
        proxy = None if self.route.secure else self.route.proxy
        target = f"http://{request.headers['host']}{request.target}" if proxy else request.target
        values = [f"{name}: {value}" for name, value in request.headers.items()]
        if request.body or request.method in {"PUT", "POST"}:
            values.append(f"content-length: {len(request.body)}")
        if proxy and proxy.authorization:
            values.append(f"proxy-authorization: {proxy.authorization}")
        lines = [f"{request.method} {target} HTTP/1.1", *values]
        together = "".join(lines)
        if not (together.isascii() and together.isprintable()):
            raise InvalidRequest(f"{request.method} {one_line(target)}: a header is not printable ASCII")
        return "\r\n".join([*lines, "", ""]).encode()

    def _answer(
        self, connection: http.client.HTTPConnection, response: Head, deadline: float, outlet: Outlet | None
    ) -> Answer:
        status, fields, length = response.status, response.fields, response.length
        if length is None:
            return Answer(status, fields, self._read_unsized(connection, response, deadline))
        if length <= _SMALL_BYTES:
            return Answer(status, fields, response.read())
        if outlet is None or outlet.status != status:
            return Answer(status, fields, self._taken(response, length, deadline))
        done = 0
        while done < length:
            at = outlet.start + done
            size = min(length - done, _PIECE_BYTES - at % _PIECE_BYTES)
            outlet.take(fields, length, done, self._taken(response, size, deadline))
            done += size
        return Answer(status, fields, b"", done)

    def _taken(self, response: Head, size: int, deadline: float) -> Body:
        """The next `size` bytes of a body."""
        body = response.take(size, partial(self._left_s, deadline))
        if len(body) == size:
            return body
        parts, missing = [body], size - len(body)
        while missing:
            more = response.take(missing, partial(self._left_s, deadline))
            if not more:
                raise _CutShort
            parts.append(more)
            missing -= len(more)
        return b"".join(parts)

    def _read_unsized(self, connection: http.client.HTTPConnection, response: Head, deadline: float) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while piece := response.read(_PIECE_BYTES):
            pieces.append(piece)
            total += len(piece)
            if total > _MAX_UNSIZED_BYTES:
                raise _CutShort
            self._pace(connection, deadline)
        return b"".join(pieces)

    def _pace(self, connection: http.client.HTTPConnection, deadline: float, patience_s: float = 0.0) -> None:
        """The next wait may take idle_s (and patience_s), and no longer than the call has left."""
        self._limit(connection.sock, self._left_s(deadline, patience_s))

    @staticmethod
    def _limit(sock: socket.socket, seconds: float) -> None:
        """Setting a timeout is a system call, and it is nearly always idle_s."""
        if sock.gettimeout() != seconds:
            sock.settimeout(seconds)

    def _left_s(self, deadline: float, patience_s: float = 0.0) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return min(left, self.limits.idle_s + patience_s)

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        route, proxy = self.route, self.route.proxy
        limit = min(self.limits.connect_s, max(deadline - self._clock(), 0.001))
        host, port = (proxy.host, proxy.port) if proxy else (route.host, route.port)
        connection: http.client.HTTPConnection
        if route.secure:
            connection = http.client.HTTPSConnection(host, port, timeout=limit, context=self._tls or trust())
            if proxy:
                extra = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
                connection.set_tunnel(route.host, route.port, headers=extra)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=limit)
        try:
            connection.connect()
        except TimeoutError as error:
            connection.close()
            raise DeadlineExceeded(f"{self._where()}: no connection within {limit:.0f} s") from error
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise Unreachable(f"{self._where()}: {connection_words(error)}") from error
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _take_idle(self) -> http.client.HTTPConnection | None:
        """The connection used last that is still quiet and open."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if self._clock() - since < self.limits.keep_s and is_quiet(connection.sock):
                return connection
            connection.close()

    def _give_back(self, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed:
                self._idle.append((connection, self._clock()))
                return
        connection.close()

    def _where(self) -> str:
        scheme = "https" if self.route.secure else "http"
        via = f" through proxy {self.route.proxy.host}:{self.route.proxy.port}" if self.route.proxy else ""
        return f"{scheme}://{self.route.host}:{self.route.port}{via}"


class _Stale(Exception):
    """The connection broke before any byte of an answer."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _CutShort(Exception):
    """Less body than was promised, or more than is sane."""
