"""HTTP/1.1 over a bounded pool of keep-alive connections: bytes out, bytes in, no knowledge of S3.

Threads and tasks: any number may call `send`; each has a connection to itself meanwhile. Every wait is bounded: for a
place in the pool, to connect, for each read or write, and for the call as a whole. So is every answer, by its request:
what a server sends beyond that is not read. No redirect is followed; whoever asked sees it as an answer.
"""

from __future__ import annotations

from functools import partial

from datastore.errors import CorruptBody, DeadlineExceeded, Unreachable

from ..base import FilePart, in_memory
from .connections import Connections
from .errors import UNANNOUNCED, connection_words
from .http1 import Connection, CutShort, Heard, Incoming, NotHttp, TooMuch
from .messages import SMALL_BYTES, Answer, Outlet, Request

_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 4 << 10
"""Of an answer; S3's heads have 1 to 2 KiB."""
_OBJECT_BYTES = 128 << 10
"""Room for one of which nobody knows the size."""
_HUNG_UP = (BrokenPipeError, ConnectionResetError, *UNANNOUNCED)
_BODYLESS = frozenset({204, 304})


class Transport(Connections):
    """Requests to one route."""

    async def send(self, request: Request, head: bytes) -> Answer:
        """One exchange. head: the request line and all headers, as Connections.head() makes them.

        Errors: Unreachable, DeadlineExceeded, CorruptBody.
        """
        await self.take_place()
        try:
            answer, connection = await self.exchange(request, head)
            if connection is not None:
                self.give_back(connection)
            return answer
        finally:
            self.leave_place()

    async def exchange(
        self, request: Request, head: bytes, held: Connection | None = None
    ) -> tuple[Answer, Connection | None]:
        """The same for who has a place in the pool: the answer, and the connection if it can be used again.

        held: that of an earlier exchange. A kept connection that the server had meanwhile closed is replaced once, when
        nothing of an answer has come and the request is repeatable; that is part of keep-alive, not a retry.
        """
        size = len(request.body) + request.expected_bytes
        long_s = self.limits.long_s if request.is_long else 0.0
        deadline = self._clock() + self.limits.call_s + long_s + size / self.limits.body_floor
        kept = held or self.take_idle()
        done = None
        if kept is not None:
            done = await self._exchange(kept, request, head, deadline, may_be_stale=request.repeatable)
        if done is None:
            done = await self._exchange(await self.connect(deadline), request, head, deadline)
        assert done is not None
        return done

    async def _exchange(
        self, connection: Connection, request: Request, head: bytes, deadline: float, *, may_be_stale: bool = False
    ) -> tuple[Answer, Connection | None] | None:
        """Send, and read the answer. The head and a small body travel together, so that the server wakes once.

        may_be_stale: None when the connection broke before any byte of an answer.

        A server may refuse before it has read the whole body, and hang up, and its answer is then what counts.
        """
        keep, all_sent = False, True
        pace = partial(self._left_s, deadline, 0.0)
        body = request.body
        try:
            try:
                if isinstance(body, FilePart) and (connection.secure or len(body) > SMALL_BYTES):
                    await connection.send(head, pace)
                    await connection.send_file(body, pace)
                elif len(body) <= SMALL_BYTES:
                    await connection.send(head + in_memory(body) if body else head, pace)
                else:
                    await connection.send_joined(head, in_memory(body), pace)
            except _HUNG_UP:
                all_sent = False
            if request.is_long:
                pace = partial(self._left_s, deadline, self.limits.long_s)
            incoming = Incoming(connection, pace, _room(request))
            try:
                heard = await incoming.head()
            except (ConnectionError, *UNANNOUNCED):
                if may_be_stale:
                    return None
                raise
            if request.method == "HEAD" or heard.status in _BODYLESS:
                answer, whole = Answer(heard.status, heard.fields, b""), True
            else:
                answer, whole = await _answer(incoming, heard, request)
            keep = all_sent and whole and heard.goes_on and incoming.is_taken
            return answer, connection if keep else None
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.where()}: no answer in time to {request.method}") from error
        except CutShort as error:
            raise CorruptBody(f"{self.where()}: the answer to {request.method} was cut short") from error
        except TooMuch as error:
            raise CorruptBody(
                f"{self.where()}: the answer to {request.method} is larger than {request.most_bytes} bytes"
            ) from error
        except (NotHttp, OSError) as error:
            raise Unreachable(f"{self.where()}: {connection_words(error)}") from error
        finally:
            if not keep:
                connection.close()

    def _left_s(self, deadline: float, patience_s: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        return min(left, self.limits.idle_s + patience_s)


def _room(request: Request) -> int:
    """So much is received at once: a small answer comes whole, of one that is poured only its beginning."""
    if request.outlet is not None:
        return SMALL_BYTES
    body = request.expected_bytes or (_OBJECT_BYTES if request.method == "GET" else 0)
    return _HEAD_BYTES + min(body, _PIECE_BYTES)


async def _answer(incoming: Incoming, head: Heard, request: Request) -> tuple[Answer, bool]:
    """The answer with its body, and whether that was taken whole. Of an error as much as may be said about one.

    Errors: TooMuch, and those of Incoming.
    """
    status, fields = head.status, head.fields
    refused = status >= 300
    most_bytes = SMALL_BYTES if refused else request.most_bytes
    length = head.length
    if length is None:
        take = incoming.take_chunks if head.is_chunked else incoming.take_rest
        try:
            return Answer(status, fields, await take(most_bytes)), head.is_chunked
        except TooMuch:
            if not refused:
                raise
            return Answer(status, fields, b""), False
    if length > most_bytes and not refused:
        raise TooMuch
    if request.outlet is not None and request.outlet.status == status and length > SMALL_BYTES:
        await _pour(incoming, fields, length, request.outlet)
        return Answer(status, fields, b"", length), True
    return Answer(status, fields, await incoming.take(min(length, most_bytes))), length <= most_bytes


async def _pour(incoming: Incoming, fields: dict[str, str], length: int, outlet: Outlet) -> None:
    done = 0
    while done < length:
        at = outlet.start + done
        size = min(length - done, _PIECE_BYTES - at % _PIECE_BYTES)
        outlet.take(fields, length, done, await incoming.take(size))
        done += size
