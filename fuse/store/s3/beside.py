"""Connections that are made while others are used."""

from __future__ import annotations

import os
import threading

from datastore.errors import StoreError

from .connections import Connections
from .http1 import Connection


class Beside:
    """Connections made by threads of their own, so that those that are there can go on. Each has a place.

    What comes after the end is kept for others.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._arrived: list[Connection | StoreError] = []
        self._over = False
        self.coming = 0
        self.error: StoreError | None = None
        """Why one could not be made."""
        self.fd = -1

    def connect(self, deadline: float) -> int:
        """Begin; the descriptor that is readable when one came or failed."""
        if self.fd < 0:
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.coming += 1
        threading.Thread(target=self._connect, args=(deadline,), name="connect", daemon=True).start()
        return self.fd

    def arrived(self) -> list[Connection]:
        """Those that came since."""
        with self._lock:
            os.eventfd_read(self.fd)
            arrived, self._arrived = self._arrived, []
        self.coming -= len(arrived)
        errors = [failed for failed in arrived if isinstance(failed, StoreError)]
        self.error = errors[0] if errors else self.error
        return [connection for connection in arrived if not isinstance(connection, StoreError)]

    def end(self) -> None:
        """Nobody waits for them any more."""
        with self._lock:
            self._over = True
            if self.fd >= 0:
                os.close(self.fd)
        for connection in self._arrived:
            self._keep(connection)

    def _connect(self, deadline: float) -> None:
        try:
            connection: Connection | StoreError = self._connections.connect(deadline)
        except StoreError as error:
            connection = error
            self._connections.leave_place()
        with self._lock:
            if not self._over:
                self._arrived.append(connection)
                os.eventfd_write(self.fd, 1)
                return
        self._keep(connection)

    def _keep(self, connection: Connection | StoreError) -> None:
        if not isinstance(connection, StoreError):
            self._connections.give_back(connection, keep=True)
            self._connections.leave_place()
