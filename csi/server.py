"""gRPC over Unix sockets: starts and stops a process's services."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from datastore.errors import MountFailed
from datastore.logs import fields

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""How long running calls may take when the process is asked to end; the mount daemon finishes a mount anyway."""
MESSAGE_BYTES = 4 << 20

Services = Callable[[grpc.aio.Server], None]
"""A function that adds its services to a server."""


class GrpcServer:
    """A gRPC server at one socket. start() replaces the socket of an earlier process; stop() is idempotent."""

    def __init__(self, path: Path, *services: Services) -> None:
        self.path = path
        self._services = services
        self._server: Any = None

    async def start(self) -> None:
        """Errors: MountFailed."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MESSAGE_BYTES)])
        for add in self._services:
            add(server)
        umask = os.umask(0o077)  # the socket is made inside the library
        try:
            if not server.add_insecure_port(f"unix:{self.path}"):
                raise MountFailed(f"can't listen on {self.path}")
            await server.start()
        except RuntimeError as error:
            raise MountFailed(f"can't listen on {self.path}: {error}") from error
        finally:
            os.umask(umask)
        self._server = server
        log.info("gRPC is served", extra=fields(socket=self.path))

    async def stop(self) -> None:
        """Stop, after waiting up to STOP_TIMEOUT_S for running calls."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_TIMEOUT_S)
            self.path.unlink(missing_ok=True)
