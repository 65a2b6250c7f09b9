"""A Unix socket in a private directory that answers one request per connection, each in a thread, at most CLIENTS."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from datastore.errors import DatastoreError, MountFailed

from . import frames

log = logging.getLogger(__name__)

CLIENTS = 64
REQUEST_TIMEOUT_S = 10.0

Handler = Callable[[frames.Message, socket.socket], None]
"""Answers a request on the connection. A DatastoreError that it raises becomes the answer."""


class UnixServer:
    """Threads: one accepts, one serves each client. stop() is idempotent and bounded."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path = path
        self._handler = handler
        self._slots = threading.BoundedSemaphore(CLIENTS)
        self._listener: socket.socket | None = None
        self._acceptor = threading.Thread(target=self._accept, name=f"accept-{path.name}", daemon=True)

    def start(self) -> None:
        """Listen, in place of an earlier process. Errors: MountFailed."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(CLIENTS)
        except OSError as error:
            listener.close()
            raise MountFailed(f"can't listen on {self.path}: {error.strerror or error}") from error
        self._listener = listener
        self._acceptor.start()

    def stop(self) -> None:
        """Take no more requests; those under way go on."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(REQUEST_TIMEOUT_S)
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
            threading.Thread(target=self._serve, args=(client,), name=f"serve-{self.path.name}", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                if _uid_of(client) not in {0, os.getuid()}:
                    return
                request, descriptors = frames.receive(client, REQUEST_TIMEOUT_S)
                for descriptor in descriptors:
                    os.close(descriptor)
                self._answer(request, client)
        except DatastoreError as error:
            log.debug("a client left: %s", error)
        finally:
            self._slots.release()

    def _answer(self, request: frames.Message, client: socket.socket) -> None:
        try:
            self._handler(request, client)
        except DatastoreError as error:
            frames.send(client, {"error": str(error), "kind": type(error).__name__})
        except Exception as error:  # the edge of this thread: a client always gets its answer
            log.exception("a request failed")
            frames.send(client, {"error": f"a defect: {type(error).__name__}", "kind": "MountFailed"})


def _uid_of(client: socket.socket) -> int:
    """unix(7), SO_PEERCRED: pid, uid, gid."""
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
