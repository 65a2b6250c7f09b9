"""A Unix socket in a private directory that answers one request per connection, at most CLIENTS at a time."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from datastore.errors import DatastoreError
from datastore.listening import UnixListener

from . import frames

log = logging.getLogger(__name__)

CLIENTS = 64
REQUEST_TIMEOUT_S = 10.0

Handler = Callable[[frames.Message, socket.socket], None]
"""Answers a request on the connection. A DatastoreError that it raises becomes the answer."""


class UnixServer:
    """Threads: those of UnixListener. stop() is idempotent and bounded."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path = path
        self._handler = handler
        self._listener = UnixListener(path, self._serve, clients=CLIENTS)

    def start(self) -> None:
        """Listen, in place of an earlier process. Errors: MountFailed."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._listener.start()

    def stop(self) -> None:
        """Take no more requests; those under way go on."""
        self._listener.stop(0.0)

    def _serve(self, client: socket.socket) -> None:
        request, descriptors = frames.receive(client, REQUEST_TIMEOUT_S)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            self._handler(request, client)
        except DatastoreError as error:
            frames.send(client, {"error": str(error), "kind": type(error).__name__})
        except Exception as error:  # the edge of this thread: a client always gets its answer
            log.exception("a request failed")
            frames.send(client, {"error": f"a defect: {type(error).__name__}", "kind": "MountFailed"})
