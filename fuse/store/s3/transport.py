"""HTTP/1.1 over a bounded pool of keep-alive connections: bytes out, bytes in, no knowledge of S3.

http.client, because for small bodies it costs half the CPU of urllib3 (0.12 against 0.26 ms per GET, measured).
Threads: any number may call `send`; each has a connection to itself meanwhile. Every wait is bounded: for a place in
the pool, to connect, for each read or write, and for the call as a whole.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial

from datastore.errors import CorruptBody, DeadlineExceeded, Unreachable

from ..base import Body, FilePart, in_memory
from .connections import Connections, Route, TransportLimits
from .errors import UNANNOUNCED, connection_words
from .http1 import Head, limit, send_file
from .messages import Answer, Outlet, Request
from .pipelining import Pipelining

_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
"""Up to here one read is cheapest; above, the bytes are received in place."""
_HUNG_UP = (BrokenPipeError, ConnectionResetError, *UNANNOUNCED)
_MAX_UNSIZED_BYTES = 64 << 20
"""Bound of an answer that does not say its length: listings and errors, which are at most a few MiB."""


class Transport:
    """Requests to one route."""

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
        self.connections = Connections(route, tls=tls, limits=self.limits, clock=clock)
        self.pipelining = Pipelining(self.connections, clock)
        self._clock = clock

    def send(self, request: Request) -> Answer:
        """One exchange. Errors: Unreachable, DeadlineExceeded, CorruptBody.

        A kept connection that the server had meanwhile closed is replaced once, when nothing of an answer has come
        and the request is repeatable; that is part of keep-alive, not a retry.
        """
        size = len(request.body) + request.expected_bytes
        deadline = self._clock() + self.limits.call_s + request.patience_s + size / self.limits.body_floor
        self.connections.take_place()
        try:
            kept = self.connections.take_idle()
            if kept is not None:
                try:
                    return self._exchange(kept, request, deadline)
                except _Stale as stale:
                    if not request.repeatable:
                        raise Unreachable(f"{self.where()}: {connection_words(stale.reason)}") from stale.reason
            try:
                return self._exchange(self.connections.connect(deadline), request, deadline)
            except _Stale as stale:
                raise Unreachable(f"{self.where()}: {connection_words(stale.reason)}") from stale.reason
        finally:
            self.connections.leave_place()

    def close(self) -> None:
        """See Connections."""
        self.connections.close()

    def where(self) -> str:
        """The route, for a message."""
        return self.connections.where()

    def _exchange(self, connection: http.client.HTTPConnection, request: Request, deadline: float) -> Answer:
        try:
            response, all_sent = self._converse(connection, request, deadline)
            with response:
                answer = self._answer(connection, response, deadline, request.outlet)
        except TimeoutError as error:
            connection.close()
            raise DeadlineExceeded(f"{self.where()}: no answer in time to {request.method}") from error
        except (http.client.IncompleteRead, _CutShort) as error:
            connection.close()
            raise CorruptBody(f"{self.where()}: the answer to {request.method} was cut short") from error
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise Unreachable(f"{self.where()}: {connection_words(error)}") from error
        except BaseException:
            connection.close()
            raise
        self.connections.give_back(connection, keep=all_sent and not response.will_close)
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
            except _HUNG_UP:
                all_sent = False
            self._pace(connection, deadline, request.patience_s)
            response = Head(connection.sock, method=request.method)
            try:
                response.begin()
            except BaseException:
                response.close()
                raise
            return response, all_sent
        except (http.client.RemoteDisconnected, ConnectionError, *UNANNOUNCED) as error:
            raise _Stale(error) from error

    def _send(self, sock: socket.socket, request: Request, deadline: float) -> None:
        """The head and a small body travel together, so that the server wakes once; a large one in pieces, each with
        its own limit."""
        length = len(request.body) if request.body or request.method in {"PUT", "POST"} else None
        head = self.connections.head(request.method, request.target, request.headers, length)
        encrypted = isinstance(sock, ssl.SSLSocket)
        if isinstance(request.body, FilePart) and not encrypted:
            sock.sendall(head)
            send_file(sock, request.body, partial(self._left_s, deadline))
            return
        if len(request.body) <= _SMALL_BYTES:
            sock.sendall(b"".join((head, in_memory(request.body))))
            return
        done = 0
        if encrypted:
            sock.sendall(head)
        else:
            view = memoryview(in_memory(request.body))
            sent = sock.sendmsg((head, view[:_PIECE_BYTES]))
            sock.sendall(head[sent:])
            done = max(0, sent - len(head))
        for piece in _pieces(request.body, done):
            limit(sock, self._left_s(deadline))
            sock.sendall(piece)

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
        limit(connection.sock, self._left_s(deadline, patience_s))

    def _left_s(self, deadline: float, patience_s: float = 0.0) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return min(left, self.limits.idle_s + patience_s)


def _pieces(body: Body | FilePart, start: int) -> Iterator[memoryview]:
    """What is sent of a body under a limit of its own each; of a file from its beginning."""
    if isinstance(body, FilePart):
        yield from body.pieces()
        return
    view = memoryview(body)
    for at in range(start, len(view), _PIECE_BYTES):
        yield view[at : at + _PIECE_BYTES]


class _Stale(Exception):
    """The connection broke before any byte of an answer."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _CutShort(Exception):
    """Less body than was promised, or more than is sane."""
