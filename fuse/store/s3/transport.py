"""HTTP/1.1 over a bounded pool of keep-alive connections: bytes out, bytes in, no knowledge of S3.

Any number of threads and tasks may call `send`; each call has a connection to itself. Every wait has a timeout: for a
place in the pool, to connect, for each read or write, and for the call as a whole. Each request also bounds its answer:
what a server sends beyond that is not read. Redirects are not followed: the caller gets them as answers.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from datastore.errors import CorruptBody, DeadlineExceeded, InvalidRequest, Unreachable

from ...loop import Loop, Wait, running
from ..base import FilePart, in_memory
from .dialing import Route, connected
from .errors import UNANNOUNCED, connection_words, one_line
from .http1 import Connection, CutShort, Incoming, NotHttp, Pace, TooMuch
from .messages import SMALL_BYTES, Answer, Request

_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 4 << 10
"""Room for the head of an answer, in bytes; S3 sends 1 to 2 KiB."""
_OBJECT_BYTES = 128 << 10
"""Room for an object whose size is not known, in bytes."""
_HUNG_UP = (BrokenPipeError, ConnectionResetError, *UNANNOUNCED)
_BODYLESS = frozenset({204, 304})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """connections: open at once (64: more would only queue in the server). connect_s: for TCP and TLS. idle_s: between
    two bytes in either direction. call_s: for a whole call, plus the time of its bodies at body_floor bytes per second
    (all connections share one line, which may be slow), plus long_s where the server copies 5 GiB or joins 10,000 parts
    before it answers (250 s at 20 MB/s). passed_on: bytes per second at which a proxy that first takes a whole body
    passes it on at least, before there is an answer.
    keep_s: an idle connection is not used again after this time, since servers close theirs after 5 to 60 s."""

    connections: int = 64
    connect_s: float = 5.0
    idle_s: float = 20.0
    call_s: float = 30.0
    body_floor: int = 1 << 10
    long_s: float = 300.0
    passed_on: int = 256 << 10
    keep_s: float = 55.0


class Transport:
    """Sends requests to one route. A connection in use belongs to one thread, or to one task of an event loop.

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
        """Functions that give a waiting caller a place, in the order of asking; False: the caller's loop has ended."""
        self._idle: dict[Loop | None, list[tuple[Connection, float]]] = {None: []}
        """Idle connections with the time of their last use, by the event loop that owns them; None: blocking ones."""
        self._closed = False

    async def take_place(self) -> None:
        """Wait for a place, the right to one connection. Places are given in the order of asking; leave_place() must
        follow. Errors: DeadlineExceeded."""
        loop, limit_s = running(), self.limits.call_s
        with self._lock:
            if self._free:
                self._free -= 1
                return
            given = threading.Event() if loop is None else Wait(loop)
            give = partial(given.loop.soon, given.end) if isinstance(given, Wait) else given.set
            self._waiting.append(give)
        try:
            if isinstance(given, Wait):
                await given.begin(limit_s)
            elif not given.wait(limit_s):
                raise TimeoutError
        except TimeoutError:
            with self._lock:
                if give not in self._waiting:  # the place has just been given
                    return
                self._waiting.remove(give)
            raise DeadlineExceeded(f"{self.route}: all {self.limits.connections} connections stayed busy") from None

    def leave_place(self) -> None:
        """Give the place back, to the caller that has waited longest if there is one."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                give = self._waiting.popleft()
            if give() is not False:
                return

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {None: []}
        for connection, _ in chain(*idle.values()):  # a copy: a loop that ends deletes its entry
            connection.close()

    def head(self, method: str, target: str, headers: Mapping[str, str], length: int | None = None) -> bytes:
        """Return the request line and headers as this route needs them. length: of the body; None: there is no body.
        Errors: InvalidRequest when a header can't carry its value."""
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

    async def send(self, request: Request, head: bytes) -> Answer:
        """Send a request and return its answer. head: the request line and all headers, as head() makes them.

        If the server has closed an idle connection, a new connection is used, once, provided that nothing of an answer
        has come and the request is repeatable; that is part of keep-alive, not a retry.
        Errors: Unreachable, DeadlineExceeded, CorruptBody.
        """
        await self.take_place()
        connection: Connection | None = None
        keep = False
        try:
            connection = self._take_idle()
            may_be_stale = connection is not None and request.repeatable
            limits, size = self.limits, len(request.body) + request.expected_bytes
            long_s = limits.long_s if request.is_long else len(request.body) / limits.passed_on
            deadline = self._clock() + limits.call_s + long_s + size / limits.body_floor

            def pace() -> float:
                return self._left_s(deadline, long_s)

            while True:
                if connection is None:
                    connection = await self.connect(deadline)
                all_sent = await _send(connection, request, head, partial(self._left_s, deadline, 0.0))
                incoming = Incoming(connection, pace, _room(request))
                try:
                    await incoming.head()
                    break
                except (ConnectionError, *UNANNOUNCED):
                    if not may_be_stale:
                        raise
                connection.close()
                connection, may_be_stale = None, False
            if request.method == "GET" and not request.expected_bytes:  # a whole object: the head says how much comes
                deadline += _object_bytes(incoming, request) / self.limits.body_floor
            if request.method == "HEAD" or incoming.status in _BODYLESS:
                answer, whole = Answer(incoming.status, incoming.fields, b""), True
            else:
                answer, whole = await _answer(incoming, request)
            keep = all_sent and whole and incoming.goes_on and incoming.is_taken
            return answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.route}: no answer in time to {request.method}") from error
        except CutShort as error:
            raise CorruptBody(f"{self.route}: the answer to {request.method} was cut short") from error
        except TooMuch as error:
            raise CorruptBody(
                f"{self.route}: the answer to {request.method} is larger than {request.most_bytes} bytes"
            ) from error
        except (NotHttp, OSError) as error:
            raise Unreachable(f"{self.route}: {connection_words(error)}") from error
        finally:
            if keep and connection is not None:
                self.give_back(connection)
            elif connection is not None:
                connection.close()
            self.leave_place()

    async def connect(self, deadline: float) -> Connection:
        loop, limit_s = running(), min(self.limits.connect_s, max(deadline - self._clock(), 0.001))
        dialed = partial(connected, self.route, self._tls, limit_s, self._clock)
        return Connection(dialed() if loop is None else await loop.aside(dialed, "connect"), loop)

    def _take_idle(self) -> Connection | None:
        """Return the most recently used connection that is still quiet and open, if any."""
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
        """Keep a connection for the next request."""
        loop = running()
        with self._lock:
            if not self._closed:
                if loop is not None and loop not in self._idle:
                    self._idle[loop] = []
                    loop.at_end(partial(self._idle.__delitem__, loop))  # its connections then close themselves
                self._idle[loop].append((connection, self._clock()))
                return
        connection.close()

    def _left_s(self, deadline: float, patience_s: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return min(left, self.limits.idle_s + patience_s)


def _room(request: Request) -> int:
    """Return how many bytes to receive at once: all of a small answer, only the beginning of one with an outlet."""
    if request.outlet is not None:
        return SMALL_BYTES
    body = request.expected_bytes or (_OBJECT_BYTES if request.method == "GET" else 0)
    return _HEAD_BYTES + min(body, _PIECE_BYTES)


def _object_bytes(incoming: Incoming, request: Request) -> int:
    """Return how many bytes of an object are announced; 0 for what is small, refused, or more than is accepted."""
    length = incoming.length or 0
    return length if incoming.status < 300 and SMALL_BYTES < length <= request.most_bytes else 0


async def _send(connection: Connection, request: Request, head: bytes, pace: Pace) -> bool:
    """Send a request; return whether all was sent. A server may refuse and close the connection before it has read the
    body, and then its answer counts. The head and a small body are sent together, so that the server wakes once."""
    body = request.body
    try:
        if isinstance(body, FilePart) and (connection.secure or len(body) > SMALL_BYTES):
            await connection.send(head, pace)
            await connection.send_file(body, pace)
        elif len(body) <= SMALL_BYTES:
            await connection.send(head + in_memory(body) if body else head, pace)
        else:
            await connection.send_joined(head, in_memory(body), pace)
    except _HUNG_UP:
        return False
    return True


async def _answer(incoming: Incoming, request: Request) -> tuple[Answer, bool]:
    """Return the answer with its body, and whether the body was read whole: of a refusal, SMALL_BYTES at most.
    Errors: TooMuch, and those of Incoming."""
    status, fields = incoming.status, incoming.fields
    refused = status >= 300
    most_bytes = SMALL_BYTES if refused else request.most_bytes
    length = incoming.length
    if length is None:
        take = incoming.take_chunks if incoming.is_chunked else incoming.take_rest
        try:
            return Answer(status, fields, await take(most_bytes)), incoming.is_chunked
        except TooMuch:
            if not refused:
                raise
            return Answer(status, fields, b""), False
    if length > most_bytes and not refused:
        raise TooMuch
    if request.outlet is not None and request.outlet.status == status and length > SMALL_BYTES:
        done, start = 0, request.outlet.start
        while done < length:
            size = min(length - done, _PIECE_BYTES - (start + done) % _PIECE_BYTES)
            request.outlet.take(fields, length, done, await incoming.take(size))
            done += size
        return Answer(status, fields, b""), True
    return Answer(status, fields, await incoming.take(min(length, most_bytes))), length <= most_bytes
