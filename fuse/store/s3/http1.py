"""HTTP/1.1 over one connection (RFC 9112): sends a request and receives its answer; a deadline bounds every wait.

http.client is not used: it bounds neither the size of an answer nor the time that its bytes take, and its layers cost
more than the parsing: without them a cold file of 100 KiB takes an eighth less CPU time of the mount server.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import socket
import ssl
import struct
import sys
import termios
from collections.abc import Callable
from itertools import count

from ...loop import Loop, Wait
from ..base import Body, FilePart
from .errors import UNANNOUNCED
from .tls import TlsSocket

HEAD_BYTES = 64 << 10
"""The largest head of an answer in bytes, interim answers included. S3's heads have 1 to 4 KiB."""
_MAX_HEADERS = 200
_RECEIVED_BYTES = 64 << 10
"""The most bytes that are received at once while the end of the answer is not known; a small answer comes whole."""
_RECORD_BYTES = 16 << 10
"""The most bytes that TLS returns at once; a larger buffer would only take time to clear."""
_SENT_BYTES = 1 << 20
"""The most bytes that are passed to the kernel at once; a blocking connection checks its deadline before each piece."""
_SENDFILE_BYTES = 4 << 20
_FRAMING_BYTES = 64 << 10
"""Bytes allowed for chunks' sizes, besides a quarter of the largest body: tiny chunks would keep the mount busy."""
_CHUNKS_AT_ONCE = 256
"""How many chunks are taken before other tasks may run: 256 chunks of one byte take 3 ms."""
_ZEROS = bytes(1 << 16)
_SWITCHING_PROTOCOLS = 101
_HEAD_END = re.compile(rb"\n(?:\r\n|\n)")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LENGTH = re.compile(r"[0-9]{1,18}")

Pace = Callable[[], float]
"""Returns the seconds that the next byte may take. Errors: TimeoutError when none are left."""


class NotHttp(Exception):
    """The server sent no HTTP answer, or one whose head or framing is larger than allowed."""


class CutShort(Exception):
    """The connection ended before the body did."""


class TooMuch(Exception):
    """The body is larger than the caller accepts."""


class Connection:
    """A connected socket, plain or TLS, for one thread or one task at a time. Without an event loop its calls block;
    with one they await, and the connection is closed when the loop ends. Errors of all calls: TimeoutError, OSError.
    """

    __slots__ = ("_change", "_held", "_limit_s", "_loop", "_sent_at_once", "_stream", "_tls", "secure", "sock")

    def __init__(self, stream: socket.socket | TlsSocket, loop: Loop | None = None) -> None:
        self._stream = stream
        self._tls = stream if isinstance(stream, TlsSocket) else None
        self.sock = sock = stream.sock if isinstance(stream, TlsSocket) else stream
        self.secure = self._tls is not None
        self._limit_s = -2.0
        self._held = 0
        """Of a blocking connection: the bytes that were not acknowledged before the present call."""
        self._loop = loop
        self._sent_at_once = False
        if loop is not None:
            sock.setblocking(False)
            self._change = Wait(loop)
            """The wait for a change of the socket's state, reported once (EPOLLET in epoll(7)): before it waits, a task
            has to use the socket until EAGAIN, or to send a request whose answer it waits for."""
            loop.watch(sock.fileno(), self._change.end, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
            loop.at_end(self.close)

    def close(self) -> None:
        """Idempotent."""
        if self._loop is not None and self.sock.fileno() >= 0:
            self._loop.never(self.close)
            self._loop.unwatch(self.sock.fileno())
        self.sock.close()

    def _limit(self, seconds: float) -> None:
        """Set how long the next call may block; an unchanged limit is not set again, which would take system calls.

        The kernel waits, which takes one system call a piece, where Python's own timeout takes two.
        """
        self._held = self._unacknowledged()
        if seconds == self._limit_s:
            return
        if self._limit_s < 0:
            self.sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, _timeval(seconds))
        self._limit_s = seconds

    async def _ready(self, pace: Pace) -> None:
        """Wait until a call is worth another try; a blocking connection has waited in the kernel. That the other side
        takes what was sent is no silence: the kernel may hold a MiB of it, for which a slow line needs a minute.
        Errors: TimeoutError."""
        limit_s, held = pace(), self._held
        if self._loop is not None:
            held = self._unacknowledged()
            try:
                await self._change.begin(limit_s)
                return
            except TimeoutError:
                pass
        if self._unacknowledged() >= held:
            raise TimeoutError

    def _unacknowledged(self) -> int:
        """Return how many bytes the kernel holds that the other side has not acknowledged (SIOCOUTQ in tcp(7))."""
        return int.from_bytes(fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    async def give_way(self, pace: Pace) -> None:
        """Let other tasks of the loop run while much data comes at once. Errors: TimeoutError when no time is left."""
        if self._loop is not None:
            pace()
            await self._loop.pause()

    async def receive(self, size: int, pace: Pace, flags: int = 0) -> bytes:
        """Return the next bytes, b"" at the end. After a send that never waited, the answer can't be there yet: wait
        first. After a send that waited, the loop may have reported the answer already: try to receive it first."""
        if self._loop is not None and self._sent_at_once:
            self._sent_at_once = False
            await self._ready(pace)
        while True:
            if self._loop is None:
                self._limit(pace())
            try:
                return self._stream.recv(size, flags)
            except BlockingIOError:
                await self._ready(pace)
            except ssl.SSLWantReadError:
                await self.give_way(pace)

    async def receive_into(self, view: memoryview, pace: Pace) -> int:
        """Fill a view, or as much of it as comes before the end; return how many bytes came.
        A plain blocking connection needs one call, which waits in the kernel for all bytes."""
        done, flags = 0, 0 if self.secure else socket.MSG_WAITALL
        while done < len(view):
            if self._loop is None:
                self._limit(pace())
            try:
                count = self._stream.recv_into(view[done:], 0, flags)
            except BlockingIOError:
                await self._ready(pace)
                continue
            except ssl.SSLWantReadError:
                await self.give_way(pace)
                continue
            if not count:
                break
            done += count
        return done

    async def send(self, body: Body, pace: Pace) -> None:
        """Send the whole body."""
        left: Body = body
        waited = self._sent_at_once = False
        while left:
            if self._loop is None:
                self._limit(pace())
            try:
                sent = self._stream.send(left if len(left) <= _SENT_BYTES else memoryview(left)[:_SENT_BYTES])
                left = memoryview(left)[sent:] if sent < len(left) else b""
            except BlockingIOError:
                waited = True
                await self._ready(pace)
        self._sent_at_once = not waited

    async def send_joined(self, head: bytes, body: Body, pace: Pace) -> None:
        """Send both without copying them; a plain connection sends them by one call, so that the server wakes once."""
        view, sent = memoryview(body), 0
        if not self.secure:
            if self._loop is None:
                self._limit(pace())
            try:
                sent = self.sock.sendmsg((head, view[:_SENT_BYTES]))
            except BlockingIOError:
                await self._ready(pace)
        if sent < len(head):
            await self.send(head[sent:], pace)
        await self.send(view[max(0, sent - len(head)) :], pace)

    async def send_file(self, part: FilePart, pace: Pace) -> None:
        """Send a part of a file, with zeros for bytes that the file has lost by being shortened.
        A plain blocking connection sends from the page cache by sendfile(2), past this process's memory."""
        if self._loop is not None:
            await self.send(part.read(), pace)  # by one send(): receive() has to know whether it waited
            return
        if self.secure:
            for piece in part.pieces():
                await self.send(piece, pace)
            return
        at, stop = part.start, part.stop
        while at < stop:
            self._limit(pace())
            try:
                sent = os.sendfile(self.sock.fileno(), part.fd, at, min(stop - at, _SENDFILE_BYTES))
                at += sent or self.sock.send(_ZEROS[: stop - at])
            except BlockingIOError:
                await self._ready(pace)

    def is_quiet(self) -> bool:
        """Whether there is nothing to read; else the server closed this idle connection, or is out of step.

        With TLS the socket does not tell: session tickets, which may come at any time, mean nothing.
        """
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        came = bool(poll.poll(0))
        if self._tls is None or not (came or self._tls.holds_bytes):
            return not came
        try:
            self._tls.recv(1, socket.MSG_DONTWAIT)  # the byte is lost, but the connection is not used again
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False


class Incoming:
    """The answer to one request, read as it comes. Errors of all methods: TimeoutError, OSError, NotHttp, CutShort."""

    __slots__ = ("_at", "_connection", "_held", "_pace", "_room", "fields", "goes_on", "is_chunked", "status")

    def __init__(self, connection: Connection, pace: Pace, room: int = _RECEIVED_BYTES) -> None:
        """room: how many bytes are received at once before the answer's length is known (not over TLS)."""
        self._room = _RECORD_BYTES if connection.secure else room
        self._connection = connection
        self._pace = pace
        self._held = b""
        """Bytes that were received; from _at on they are not taken yet."""
        self._at = 0
        self.status = 0
        self.fields: dict[str, str] = {}
        """Header values by lower-case name, decoded as ISO 8859-1; of a repeated header the last value."""
        self.is_chunked = False
        """The body comes in chunks, each with its own size."""
        self.goes_on = False
        """The server leaves the connection open after this answer (RFC 9112, section 9.3)."""

    @property
    def is_taken(self) -> bool:
        """Whether all received bytes were taken; bytes that are left over belong to no request."""
        return self._at == len(self._held)

    @property
    def length(self) -> int | None:
        """The body's announced bytes; None: it is chunked, or ends with the connection. Errors: NotHttp."""
        said = self.fields.get("content-length")
        if said is None or self.is_chunked:
            return None
        if not _LENGTH.fullmatch(said):
            raise NotHttp("a Content-Length that is no number")
        return int(said)

    async def head(self) -> None:
        """Take the head of the final answer. Further errors: UNANNOUNCED and ConnectionError when no byte has come."""
        while True:
            if self._held and self._take_head():
                if self.status >= 200 or self.status == _SWITCHING_PROTOCOLS:
                    return
                if self._at > HEAD_BYTES:
                    raise NotHttp("interim answers without an end")
                continue
            try:
                piece = await self._connection.receive(self._room, self._pace)
                if not piece:
                    raise ConnectionError("the server hung up before it answered")
            except (ConnectionError, *UNANNOUNCED) as error:
                if self._held:
                    raise NotHttp("the server hung up before the end of its answer's head") from error
                raise
            self._held += piece

    def _take_head(self) -> bool:
        """Take the head of one answer; return False if its end has not come yet. Errors: NotHttp."""
        held, start = self._held, self._at
        end = _HEAD_END.search(held, start)
        if end is None:
            if len(held) - start > HEAD_BYTES:
                raise NotHttp("a head without an end")
            return False
        self._at = end.end()
        if self._at - start > HEAD_BYTES:
            raise NotHttp("a head that is too long")
        first, *lines = held[start : end.start()].decode("latin-1").split("\n")
        if len(lines) >= _MAX_HEADERS:
            raise NotHttp("too many headers")
        version, _, rest = first.rstrip("\r").partition(" ")
        code = rest.partition(" ")[0]
        if not (version.startswith("HTTP/1.") and len(code) == 3 and code.isdecimal()):
            raise NotHttp("what it answers is no HTTP: check the endpoint's host and port")
        fields: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        said = fields.get("connection", "").lower()
        self.status, self.fields = int(code), fields
        self.is_chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self.goes_on = "close" not in said and (version == "HTTP/1.1" or "keep-alive" in said)
        return True

    async def take(self, size: int) -> Body:
        """Return the next `size` bytes of a body."""
        first = memoryview(self._held)[self._at : self._at + size]
        self._at += len(first)
        if len(first) == size:
            return first
        if not first and not self._connection.secure:
            first = memoryview(await self._connection.receive(size, self._pace, socket.MSG_WAITALL))
            if len(first) == size:
                return first
        body = bytearray(size)
        body[: len(first)] = first
        with memoryview(body) as view:
            count = await self._connection.receive_into(view[len(first) :], self._pace)
        if len(first) + count < size:
            raise CutShort
        return body

    async def take_chunks(self, most_bytes: int) -> bytes:
        """Return a chunked body (RFC 9112, section 7.1). Further errors: TooMuch."""
        body, framing = bytearray(), 0
        for number in count(1):
            if number % _CHUNKS_AT_ONCE == 0:
                await self._connection.give_way(self._pace)
            line = await self._line()
            found = _CHUNK_SIZE.fullmatch(line)
            if found is None:
                raise NotHttp("a chunk without a size")
            framing += len(line) + 2
            size = int(found[1], 16)
            if len(body) + size > most_bytes or framing > _FRAMING_BYTES + most_bytes // 4:
                raise TooMuch
            if size == 0:
                break
            body += await self.take(size)
            if (await self._line()).strip():
                raise NotHttp("a chunk that is longer than its size")
        trailers = 0
        while line := (await self._line()).strip():
            trailers += len(line) + 2
            if trailers > HEAD_BYTES:
                raise NotHttp("trailers without an end")
        return bytes(body)

    async def take_rest(self, most_bytes: int) -> bytes:
        """Return a body that ends with the connection. Further errors: TooMuch."""
        body = bytearray(self._held[self._at :])
        self._at = len(self._held)
        while len(body) <= most_bytes:
            await self._connection.give_way(self._pace)
            piece = await self._connection.receive(self._room, self._pace)
            if not piece:
                return bytes(body)
            body += piece
        raise TooMuch

    async def _line(self) -> bytes:
        """Return one line with its line end."""
        while (end := self._held.find(b"\n", self._at)) < 0:
            if len(self._held) - self._at > HEAD_BYTES:
                raise NotHttp("a line without an end")
            piece = await self._connection.receive(self._room, self._pace)
            if not piece:
                raise CutShort
            self._held = self._held[self._at :] + piece
            self._at = 0
        line = self._held[self._at : end + 1]
        self._at = end + 1
        return line


def _timeval(seconds: float) -> bytes:
    """Return the value for SO_RCVTIMEO and SO_SNDTIMEO; never zero, which means no timeout (socket(7))."""
    whole, rest = divmod(max(1000, int(seconds * 1e6)), 1_000_000)
    return struct.pack("@ll", whole, rest)
