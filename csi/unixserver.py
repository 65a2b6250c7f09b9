"""A Unix socket in a private directory that answers one request per connection, at most CLIENTS at a time."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from datastore.errors import DatastoreError
from datastore.listening import UnixListener

from . import frames

log = logging.getLogger(__name__)

CLIENTS = 64
REQUEST_TIMEOUT_S = 10.0

Handler = Callable[[frames.Message, socket.socket], None]
"""Answers a request on the connection. A DatastoreError that it raises is sent as the answer."""


class UnixServer:
    """Threads: those of UnixListener. stop() is idempotent and bounded."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path = path
        self._handler = handler
        self._listener = UnixListener(path, self._serve, clients=CLIENTS)

    def start(self) -> None:
        """Listen; an earlier process's socket is replaced. Errors: MountFailed."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._listener.start()

    def stop(self) -> None:
        """Take no more requests; requests that are being answered continue."""
        self._listener.stop(0.0)

    def _serve(self, client: socket.socket) -> None:
        if started_by_us(client):
            log.warning("a request of our own mount process was refused")
            return
        request, descriptors = frames.receive(client, REQUEST_TIMEOUT_S)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            self._handler(request, client)
        except DatastoreError as error:
            frames.send(client, {"error": str(error), "kind": type(error).__name__})
        except Exception as error:  # the thread's outermost level: a client always gets an answer
            log.exception("a request failed")
            frames.send(client, {"error": f"a defect: {type(error).__name__}", "kind": "MountFailed"})


def started_by_us(client: socket.socket) -> bool:
    """Return whether the client is a descendant of this process: a mount's supervisor or server. These ask nothing.

    An attacker in such a process would ask for the keys and descriptors of all mounts. Sources: SO_PEERCRED in unix(7)
    (the client's pid; 0 for another container's process), proc_pid_stat(5). True also for a process that has ended.
    """
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, own = struct.unpack("3i", raw)[0], os.getpid()
    while pid not in (0, own):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return True
        if pid == own:
            return True
    return False
