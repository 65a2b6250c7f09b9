"""A Unix stream socket for one user that serves each client in a thread of its own, at most so many at a time.

Under the control socket of a mount server and the sockets between the driver's processes; what is said on a connection
is theirs. Threads: one accepts, one serves each client.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from datastore.errors import DatastoreError, MountFailed

log = logging.getLogger(__name__)

ADDRESS_BYTES = 107
"""Of a Unix socket's path, without the zero (unix(7))."""
ACCEPT_END_S = 5.0

Serve = Callable[[socket.socket], None]
"""Talks with one client, until it has said all. An OSError or DatastoreError of it ends only this client."""


class UnixListener:
    """Listens at `path`, 0600, until stop(). Whoever is neither root nor this user is turned away."""

    def __init__(self, path: Path, serve: Serve, *, clients: int) -> None:
        self.path = path
        self._talk = serve
        self._slots = threading.BoundedSemaphore(clients)
        self._backlog = clients
        self._listener: socket.socket | None = None
        self._clients: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name=f"accept-{path.name}", daemon=True)

    @property
    def listening(self) -> bool:
        """From start() to stop()."""
        return self._listener is not None

    def start(self) -> None:
        """Serve, in place of an earlier process that died. Errors: MountFailed."""
        if self._listener is None:
            self.bind()
        self._acceptor.start()

    def bind(self) -> None:
        """Listen; who connects waits for start(). For a process that may make no socket later. Errors: MountFailed."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self.path) as address:
                listener.bind(address)
            self.path.chmod(0o600)
            listener.listen(self._backlog)
        except OSError as error:
            listener.close()
            raise MountFailed(f"can't listen on {self.path}: {error.strerror or error}") from error
        self._listener = listener

    def stop(self, timeout_s: float) -> None:
        """Take no more clients, and wait so long for the present ones to have their answer. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(ACCEPT_END_S)
        end = time.monotonic() + timeout_s
        for thread in list(self._clients):
            thread.join(max(0.0, end - time.monotonic()))
        listener.close()

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # stop()
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name=f"serve-{self.path.name}", daemon=True)
            self._clients.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system starts no thread just now
                log.warning("a client of %s is turned away: %s", self.path.name, error)
                self._clients.discard(thread)
                self._slots.release()
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                if _is_one_of_us(client):
                    self._talk(client)
        except (OSError, DatastoreError) as error:
            log.debug("a client of %s left: %s", self.path.name, error)
        finally:
            self._clients.discard(threading.current_thread())
            self._slots.release()


def connect(stream: socket.socket, path: Path) -> None:
    """To who listens at a path of any length. Errors: OSError."""
    with _address(path) as address:
        stream.connect(address)


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Of a path of any length: past the kernel's limit through a descriptor of the directory."""
    if len(os.fsencode(path)) <= ADDRESS_BYTES:
        yield str(path)
        return
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory_fd}/{path.name}"
    finally:
        os.close(directory_fd)


def _is_one_of_us(client: socket.socket) -> bool:
    """By unix(7), SO_PEERCRED: pid, uid, gid. Where that is unknown (macOS) the file's mode alone keeps others out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[1] in {0, os.getuid()}
