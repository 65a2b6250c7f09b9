"""The bounded pool of keep-alive connections to one route: who is connected to, through what, and for how long."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from datastore.errors import DeadlineExceeded, InvalidRequest, Unreachable

from ...loop import Future, Loop, now, running
from .dialing import allowed, dial, look_up
from .errors import connection_words, one_line
from .http1 import Connection, Incoming, NotHttp


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """connections: open at once (64: more only queue in the server). connect_s: TCP and TLS. idle_s: between two
    bytes in either direction. call_s: a whole call, and body_floor bytes per second are allowed for besides, and long_s
    where the server copies 5 GiB or joins 10,000 parts before it answers (250 s at 20 MB/s).
    keep_s: an idle connection is not used again after this, since servers close theirs after 5 to 60 s."""

    connections: int = 64
    connect_s: float = 5.0
    idle_s: float = 20.0
    call_s: float = 30.0
    body_floor: int = 256 << 10
    long_s: float = 300.0
    keep_s: float = 55.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; authorization is the header's value or ''."""

    host: str
    port: int
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Whom to connect to, and how. refusal: why an address of the host may not be connected to, '': it may."""

    host: str
    port: int
    secure: bool
    proxy: Proxy | None = None
    refusal: Callable[[str], str] | None = None


def trust(ca_bundle: str = "") -> ssl.SSLContext:
    """Verifying TLS: the system's roots, and those of `ca_bundle` (PEM) besides. Errors: InvalidRequest."""
    if not ca_bundle:
        return _system_trust()
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cadata=ca_bundle)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidRequest(f"caBundle holds no PEM certificate: {one_line(str(error))}") from error
    return context


@lru_cache(maxsize=1)
def _system_trust() -> ssl.SSLContext:
    """Shared: the system's roots take 0.8 MiB each time, and a controller has many clients."""
    return ssl.create_default_context()


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
    return Proxy(parts.hostname, port, authorization)


class _Turn:
    """A task that waits for a place."""

    __slots__ = ("_connections", "_loop", "_until", "given")

    def __init__(self, connections: Connections, loop: Loop, limit_s: float) -> None:
        self._connections = connections
        self._loop = loop
        self._until = loop.clock() + limit_s
        self.given: Future[bool] = Future()
        loop.waits.add(self)

    def give(self) -> bool:
        """Any thread."""
        return self._loop.soon(partial(self._end, given=True))

    def look(self, now: float) -> None:
        """See Bounded."""
        if now >= self._until and self._connections.withdraw(self.give):
            self._end(given=False)

    def _end(self, *, given: bool) -> None:
        self._loop.waits.remove(self)
        self.given.set_result(given)


class Connections:
    """The connections of one route. A connection that was taken belongs to one thread, or to one task of a loop.

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
        self._lock = threading.Lock()
        self._free = self.limits.connections
        self._waiting: deque[Callable[[], bool | None]] = deque()
        """Gives a place to who asked for it; False when he is no more."""
        self._idle: dict[Loop | None, list[tuple[Connection, float]]] = {None: []}
        """By the loop whose they are; None: those that block."""
        self._closed = False

    async def take_place(self) -> None:
        """Wait for the right to one connection, given in the order of asking. leave_place() has to follow.

        Errors: DeadlineExceeded.
        """
        loop, limit_s = running(), self.limits.call_s
        with self._lock:
            if self._free:
                self._free -= 1
                return
            if loop is None:
                there = threading.Event()
                give: Callable[[], bool | None] = there.set
            else:
                turn = _Turn(self, loop, limit_s)
                give = turn.give
            self._waiting.append(give)
        if not (await turn.given if loop is not None else there.wait(limit_s) or not self.withdraw(give)):
            raise DeadlineExceeded(f"{self.where()}: all {self.limits.connections} connections stayed busy")

    def leave_place(self) -> None:
        """It is free for others."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                give = self._waiting.popleft()
            if give() is not False:
                return

    def withdraw(self, give: Callable[[], bool | None]) -> bool:
        """Ask for a place no longer; False when it was just given."""
        with self._lock:
            if give not in self._waiting:
                return False
            self._waiting.remove(give)
            return True

    def close(self) -> None:
        """Close idle connections; those in use are closed when they come back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {None: []}
        for connection, _ in chain.from_iterable(idle.values()):
            connection.close()

    def head(self, method: str, target: str, headers: Mapping[str, str], length: int | None = None) -> bytes:
        """Request line and headers as this route wants them. length: of the body, None: it has none.

        Errors: InvalidRequest for a value that headers can't carry.
        """
        proxy = None if self.route.secure else self.route.proxy
        where = target if proxy is None else f"http://{headers['host']}{target}"
        lines = [f"{method} {where} HTTP/1.1", *[f"{name}: {value}" for name, value in headers.items()]]
        if length is not None:
            lines.append(f"content-length: {length}")
        if proxy is not None and proxy.authorization:
            lines.append(f"proxy-authorization: {proxy.authorization}")
        together = "".join(lines)
        if not (together.isascii() and together.isprintable()):
            raise InvalidRequest(f"{method} {one_line(target)}: a header is not printable ASCII")
        return "\r\n".join([*lines, "", ""]).encode()

    async def connect(self, deadline: float) -> Connection:
        """A new connection. Errors: Unreachable, DeadlineExceeded, EndpointNotAllowed."""
        loop, dialed = running(), partial(self._dial, deadline)
        return Connection(dialed() if loop is None else await loop.aside(dialed, "connect"), loop)

    def _dial(self, deadline: float) -> socket.socket:
        limit_s = min(self.limits.connect_s, max(deadline - self._clock(), 0.001))
        until = self._clock() + limit_s
        made: socket.socket | None = None
        try:
            proxy, refusal = self.route.proxy, self.route.refusal
            if proxy is None:
                made = dial(self.route.host, self.route.port, limit_s, refusal=refusal, clock=self._clock)
            else:
                # The proxy is the administrator's, and looks the host up itself; what we know of it counts as well.
                with suppress(socket.gaierror, TimeoutError):
                    if refusal is not None:
                        allowed(self.route.host, look_up(self.route.host, self.route.port, limit_s / 2), refusal)
                made = dial(proxy.host, proxy.port, _left_s(until, self._clock), clock=self._clock)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.route.secure:
                if proxy:
                    now(self._tunnel(Connection(made), proxy, lambda: _left_s(until, self._clock)))
                made.settimeout(_left_s(until, self._clock))
                made = (self._tls or trust()).wrap_socket(made, server_hostname=self.route.host.rstrip("."))
            return made
        except BaseException as error:
            if made is not None:
                made.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{self.where()}: no connection within {limit_s:.0f} s") from error
            if isinstance(error, NotHttp | OSError):
                raise Unreachable(f"{self.where()}: {connection_words(error)}") from error
            raise

    async def _tunnel(self, connection: Connection, proxy: Proxy, pace: Callable[[], float]) -> None:
        """CONNECT (RFC 9110, section 9.3.6). Errors: TimeoutError, OSError, NotHttp."""
        name = f"[{self.route.host}]" if ":" in self.route.host else self.route.host
        lines = [f"CONNECT {name}:{self.route.port} HTTP/1.1", f"Host: {name}:{self.route.port}"]
        if proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
        await connection.send("\r\n".join([*lines, "", ""]).encode(), pace)
        incoming = Incoming(connection, pace)
        status = (await incoming.head()).status
        if status != 200 or not incoming.is_taken:
            raise NotHttp(f"the proxy refuses with status {status}")

    def take_idle(self) -> Connection | None:
        """The connection used last that is still quiet and open."""
        loop = running()
        while True:
            with self._lock:
                idle = self._idle.get(loop)
                if not idle:
                    return None
                connection, since = idle.pop()
            if self._clock() - since < self.limits.keep_s and connection.is_quiet():
                return connection
            connection.close()

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next one."""
        loop = running()
        with self._lock:
            if not self._closed:
                if loop is not None and loop not in self._idle:
                    self._idle[loop] = []
                    loop.at_end(partial(self._forget, loop))
                self._idle[loop].append((connection, self._clock()))
                return
        connection.close()

    def _forget(self, loop: Loop) -> None:
        """It turns no more, and has closed its connections."""
        with self._lock:
            self._idle.pop(loop, None)

    def where(self) -> str:
        """The route, for a message."""
        scheme = "https" if self.route.secure else "http"
        via = f" through proxy {self.route.proxy.host}:{self.route.proxy.port}" if self.route.proxy else ""
        return f"{scheme}://{self.route.host}:{self.route.port}{via}"


def _left_s(until: float, clock: Callable[[], float]) -> float:
    left = until - clock()
    if left <= 0:
        raise TimeoutError
    return left
