"""A Unix stream socket for one user: one thread accepts clients, and each is served by a thread of its own.

The control socket of a mount server and the sockets between the CSI driver's processes are built on it, and define
their own protocols.
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
"""The longest path of a Unix socket, in bytes, without the terminating zero (unix(7))."""
ACCEPT_END_S = 5.0
AGAIN_S = 0.1
"""The wait before the next client is accepted, after the system had no descriptor or memory for a client."""

Serve = Callable[[socket.socket], None]
"""Serves one client until the client is done. An OSError or DatastoreError that it raises ends only this client."""


class UnixListener:
    """Listens at `path` (mode 0600) until stop(). It serves only root and this user, at most `clients` at a time."""

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
        """Whether clients can connect: from bind() or start() until stop()."""
        return self._listener is not None

    def start(self) -> None:
        """Listen and serve; a socket that an earlier process left at the path is replaced. Errors: MountFailed."""
        if self._listener is None:
            self.bind()
        self._acceptor.start()

    def bind(self) -> None:
        """Listen; clients wait until start(). For a process that may not make a socket later. Errors: MountFailed."""
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

    def stop(self, timeout_s: float = 5.0) -> None:
        """Accept no more clients, and wait up to timeout_s until the present ones are served. Idempotent."""
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
        while (listener := self._listener) is not None:
            try:
                client, _ = listener.accept()
            except OSError as error:
                if self._listener is not None:  # not by stop(): the system has no room for a client
                    log.warning("no client of %s can be taken just now: %s", self.path.name, error)
                    time.sleep(AGAIN_S)
                continue
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name=f"serve-{self.path.name}", daemon=True)
            self._clients.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no room for a thread
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
    """Connect a socket to the listener at a path of any length. Errors: OSError."""
    with _address(path) as address:
        stream.connect(address)


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield an address for a path of any length; past the kernel's limit, by a descriptor of its directory."""
    if len(os.fsencode(path)) <= ADDRESS_BYTES:
        yield str(path)
        return
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory_fd}/{path.name}"
    finally:
        os.close(directory_fd)


def _is_one_of_us(client: socket.socket) -> bool:
    """Return whether the client is root or this user (unix(7), SO_PEERCRED: pid, uid, gid). Where the system lacks that
    (macOS), return True; only the mode of the file keeps other users out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[1] in {0, os.getuid()}
