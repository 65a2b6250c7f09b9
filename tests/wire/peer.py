"""A session whose kernel is the test: a socket that keeps message boundaries stands for /dev/fuse."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass

from datastore.fuse.kernel.negotiate import Negotiated
from datastore.fuse.kernel.session import Session, Settings
from datastore.fuse.ops import Filesystem
from tests.wire import frames

TIMEOUT_S = 30.0
LIMIT = 2 << 20


@dataclass(frozen=True)
class Answer:
    """A reply or, with unique 0, a notification (then error is its code)."""

    error: int
    unique: int
    body: bytes


class Peer:
    """The kernel's end. Use it as a context manager; leaving it ends the session as a closed device does."""

    def __init__(
        self, filesystem: Filesystem, settings: Settings | None = None, *, negotiated: Negotiated | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
        self._theirs = theirs
        self.session = Session(
            theirs.fileno(), filesystem, settings or Settings(drain_s=TIMEOUT_S), negotiated=negotiated
        )
        self.end = ""
        self._thread = threading.Thread(target=self._serve, name="session")
        self._thread.start()

    def _serve(self) -> None:
        self.end = self.session.serve()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._thread.join(2 * TIMEOUT_S)
        self._theirs.close()
        assert not self._thread.is_alive(), "the session did not end"

    def init(self) -> Answer:
        self.send(frames.init())
        return self.receive()

    def fileno(self) -> int:
        """Of the kernel's end, for select()."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def receive(self) -> Answer:
        frame = self._socket.recv(LIMIT)
        length, error, unique = struct.unpack_from("<IiQ", frame)
        assert length == len(frame), "the length in the header is the frame's"
        return Answer(error, unique, frame[16:])

    def ask(self, frame: bytes) -> Answer:
        self.send(frame)
        return self.receive()
