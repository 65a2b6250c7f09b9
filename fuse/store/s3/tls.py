"""TLS over a connected socket: many records are received at once and decrypted in memory.

ssl.SSLSocket takes two system calls for each record, and servers send records of 4 or 16 KiB.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from ..base import Body

_AT_ONCE = 128 << 10
"""How many bytes are received, or encrypted and sent, by one system call."""


class TlsSocket:
    """The client's side of one connection. `sock` decides whether its calls block. Errors of all calls: OSError."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, left_s: Callable[[], float]) -> None:
        """Shake hands. left_s: the seconds that are left; it raises TimeoutError when there are none."""
        self.sock = sock
        self._received, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._outgoing, server_hostname=host)
        self._sealed = memoryview(b"")
        """Encrypted bytes that are not sent yet."""
        self._accepted = 0
        """How many bytes of the caller's are in _sealed."""
        while True:
            try:
                sock.settimeout(left_s())
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(self._outgoing.read())
                self._receive()
            except ssl.SSLError:
                with suppress(OSError):
                    sock.sendall(self._outgoing.read())  # the server learns why
                raise
        sock.sendall(self._outgoing.read())

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes were received that recv() has not looked at."""
        return bool(self._received.pending or self._tls.pending())

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return what has come, `size` bytes at most, b"" at the end. Further errors: as of recv_into()."""
        body = bytearray(size)
        return bytes(memoryview(body)[: self.recv_into(memoryview(body), 0, flags)])

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Fill the view with what has come; return how many bytes that were, 0 at the end.
        Further errors: BlockingIOError, as of the socket; SSLWantReadError when a record has come in part: call again.
        """
        done = self._decrypt(view) if self.holds_bytes else 0
        if not done and not self._received.eof:
            self._receive(flags)
            done = self._decrypt(view)
            if not done and not self._received.eof:
                raise ssl.SSLWantReadError
        return done

    def send(self, body: Body) -> int:
        """Send; return how many bytes were taken. After BlockingIOError or 0 call it again with the same bytes."""
        if not self._sealed:
            self._accepted, view = 0, memoryview(body)[:_AT_ONCE]
            while self._accepted < len(view):
                self._accepted += self._tls.write(view[self._accepted :])
            self._sealed = memoryview(self._outgoing.read())
        self._sealed = self._sealed[self.sock.send(self._sealed) :]
        return 0 if self._sealed else self._accepted

    def _receive(self, flags: int = 0) -> None:
        came = self.sock.recv(_AT_ONCE, flags)
        if came:
            self._received.write(came)
        else:
            self._received.write_eof()

    def _decrypt(self, view: memoryview) -> int:
        """Fill the view from the records that have come as a whole; return how many bytes that were."""
        done = 0
        with suppress(ssl.SSLWantReadError, ssl.SSLEOFError):
            while done < len(view):
                count = self._tls.read(len(view) - done, view[done:])
                if not count:  # close_notify
                    self._received.write_eof()
                    break
                done += count  # type: ignore[operator]  # with a buffer it is a count, which typeshed does not know
        return done
