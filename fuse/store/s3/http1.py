"""The head of an HTTP/1.1 answer, parsed by hand, and large bodies received in place; the rest is http.client's."""

from __future__ import annotations

import http.client
import os
import re
import select
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..base import Body, FilePart
from .errors import one_line

_MAX_HEADERS = 200
_MAX_LINE_BYTES = 64 << 10
_SENDFILE_BYTES = 4 << 20
_ZEROS = bytes(1 << 16)
_HTTP_10, _HTTP_11 = 10, 11
_BODYLESS = frozenset({204, 304})
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a socket that does not wait raises instead."""
_ANY_END = re.compile(rb"\r?\n\r?\n")


class Head(http.client.HTTPResponse):
    """http.client's answer with its headers parsed by hand: the e-mail parser costs 0.07 ms, a third of a HEAD.

    fields: values by lower-case name, decoded as ISO 8859-1; of a repeated header the last.
    """

    def __init__(self, sock: socket.socket, method: str) -> None:
        super().__init__(sock, method=method)
        self._sock = sock
        self._drained = False
        self.fields: dict[str, str] = {}
        self._bodyless = method == "HEAD"

    def begin(self) -> None:
        """Read the status line and the headers (RFC 9112, sections 4 and 5). Errors: HTTPException, OSError."""
        while True:
            version, status, reason = self._status()
            self.fields = self._fields()
            if status >= 200 or status == http.client.SWITCHING_PROTOCOLS:
                break
        self.version, self.status, self.code, self.reason = version, status, status, reason
        fields = self.fields
        self.chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.will_close = not goes_on(version, fields)
        length = fields.get("content-length", "")
        self.length = int(length) if length.isdecimal() and not self.chunked else None
        if status in _BODYLESS or self._bodyless:
            self.length = 0
        if self.length is None and not self.chunked:
            self.will_close = True

    def take(self, size: int, pace: Callable[[], float]) -> Body:
        """The next `size` bytes of a body that has as many; fewer when it is cut off, or for lack of patience.

        Of a plain connection they are received by calls that wait in the kernel, into memory that nobody has to clear.
        pace: the seconds that the next byte may take, TimeoutError when there are none. Errors: TimeoutError, OSError.
        """
        if isinstance(self._sock, ssl.SSLSocket):
            return self._take_decrypted(size, pace)
        first = b"" if self._drained else self._came_with_head(size)
        if len(first) == size:
            return first
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(pace()))
        self._sock.settimeout(None)
        try:
            if not first:
                return self._sock.recv(size, socket.MSG_WAITALL)
            body = bytearray(size)
            body[: len(first)] = first
            with memoryview(body) as view:
                count = self._sock.recv_into(view[len(first) :], 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError from error
        del body[len(first) + count :]
        return body

    def _came_with_head(self, size: int) -> bytes:
        held = len(self.fp.peek())
        self._drained = held <= size
        return self.fp.read(min(size, held))

    def _take_decrypted(self, size: int, pace: Callable[[], float]) -> Body:
        """A record, of at most 16 KiB, at a time: past the layers of http.client that cost as much as decrypting."""
        first = b"" if self._drained else self._came_with_head(size)
        done = len(first)
        if done == size:
            return first
        body = bytearray(size)
        body[:done] = first
        with memoryview(body) as view:
            while done < size:
                limit(self._sock, pace())
                count = self._sock.recv_into(view[done:], size - done)
                if count == 0:
                    break
                done += count
        del body[done:]
        return body

    def _status(self) -> tuple[int, int, str]:
        return _status(self._line(http.client.RemoteDisconnected))

    def _fields(self) -> dict[str, str]:
        held = self.fp.peek()
        end = held.find(b"\r\n\r\n")
        breaks = held.count(b"\n", 0, max(end, 0))
        plain = breaks == held.count(b"\r\n", 0, max(end, 0)) < _MAX_HEADERS and not held.startswith(b"\r\n")
        if end > 0 and plain:  # nearly always: all of it came with the status line
            return _named(self.fp.read(end + 4)[:end].decode("latin-1").split("\r\n"))
        lines: list[str] = []
        for _ in range(_MAX_HEADERS):
            line = self._line(http.client.HTTPException)
            if not line:
                return _named(lines)
            lines.append(line)
        raise http.client.HTTPException("too many headers")

    def _line(self, cut: type[http.client.HTTPException | http.client.RemoteDisconnected]) -> str:
        """One line without its end; `cut` is raised when the connection ends before it."""
        line = self.fp.readline(_MAX_LINE_BYTES + 1)
        if len(line) > _MAX_LINE_BYTES:
            raise http.client.LineTooLong("header")
        if not line.endswith(b"\n"):
            raise cut("the server hung up before the end of its answer's head")
        return line.rstrip(b"\r\n").decode("latin-1")


class Heard(NamedTuple):
    """The head of one answer among bytes. end: where in them it ends."""

    version: int
    """10 or 11."""
    status: int
    fields: dict[str, str]
    """As Head.fields."""
    end: int

    @property
    def goes_on(self) -> bool:
        """Whether the server leaves the connection open after this answer."""
        return goes_on(self.version, self.fields)


def heard(held: bytes, start: int) -> Heard | None:
    """The head that begins at `start`; None while its end has not come. Errors: HTTPException."""
    end = held.find(b"\r\n\r\n", start)
    after, line_end = end + 4, "\r\n"
    if end < 0 or held.count(b"\n", start, end) != held.count(b"\r\n", start, end):
        found = _ANY_END.search(held, start)
        if found is None:
            if len(held) - start > _MAX_LINE_BYTES:
                raise http.client.LineTooLong("header")
            return None
        (end, after), line_end = found.span(), "\n"
    lines = held[start:end].decode("latin-1").split(line_end)
    if len(lines) > _MAX_HEADERS:
        raise http.client.HTTPException("too many headers")
    version, status, _ = _status(lines[0].rstrip("\r"))
    return Heard(version, status, _named(lines[1:]), after)


def goes_on(version: int, fields: Mapping[str, str]) -> bool:
    """Whether the server leaves the connection open after an answer (RFC 9112, section 9.3)."""
    said = fields.get("connection", "").lower()
    return "close" not in said and (version >= _HTTP_11 or "keep-alive" in said)


def _status(line: str) -> tuple[int, int, str]:
    version, _, rest = line.partition(" ")
    code, _, reason = rest.partition(" ")
    if not (version.startswith("HTTP/1.") and len(code) == 3 and code.isdecimal()):
        raise http.client.BadStatusLine(one_line(line))
    return (_HTTP_11 if version == "HTTP/1.1" else _HTTP_10), int(code), reason


def _named(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found[name.lower()] = value.strip()
    return found


def send_file(sock: socket.socket, part: FilePart, pace: Callable[[], float]) -> None:
    """Send a part from its file's pages, past this process's memory; what the file has lost meanwhile as zeros.

    pace: as of Head.take. Errors: TimeoutError, OSError.
    """
    at, stop = part.start, part.stop
    sock.settimeout(None)
    while at < stop:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(pace()))
        try:
            sent = os.sendfile(sock.fileno(), part.fd, at, min(stop - at, _SENDFILE_BYTES))
            at += sent or sock.send(_ZEROS[: stop - at])
        except BlockingIOError as error:
            raise TimeoutError from error


def is_quiet(sock: socket.socket | None) -> bool:
    """Nothing to read: an idle connection that says something was closed by the server or is out of step.

    With TLS the socket does not tell: bytes may be decrypted already, and session tickets, which come when the server
    likes, mean nothing.
    """
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not isinstance(sock, ssl.SSLSocket):
        return not poll.poll(0)
    if sock.pending():
        return False
    if not poll.poll(0):
        return True
    sock.setblocking(False)
    return has_nothing(sock)


def has_nothing(sock: socket.socket) -> bool:
    """Whether nothing has come to a socket that does not wait. What it reads of that is lost."""
    try:
        sock.recv(1)
    except NOT_NOW:
        return True
    except OSError:
        return False
    return False


def limit(sock: socket.socket, seconds: float) -> None:
    """How long it waits. Setting that is a system call, and it is nearly always the same."""
    if sock.gettimeout() != seconds:
        sock.settimeout(seconds)


def _timeval(seconds: float) -> bytes:
    """For SO_RCVTIMEO and SO_SNDTIMEO; never zero, which means for ever (socket(7))."""
    whole, rest = divmod(max(1000, int(seconds * 1e6)), 1_000_000)
    return struct.pack("@ll", whole, rest)
