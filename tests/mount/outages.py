"""A versitygw that a test stops, makes read-only and starts again, at the same address over the same objects."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from tests.servers import Server, free_port, run_versitygw


class Breakable:
    """States: running, refusing writes (403 at once), frozen (accepts and says nothing), gone (connection refused)."""

    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir
        self._port = free_port()
        self._running = contextlib.ExitStack()
        self._frozen = False
        self.server = self.run()

    def run(self, *options: str) -> Server:
        """Run (again)."""
        self.stop()
        self.server = self._running.enter_context(run_versitygw(*options, port=self._port, data_dir=self._data_dir))
        return self.server

    def refuse_writes(self) -> None:
        """Every change is AccessDenied."""
        self.run("--readonly")

    def stop(self) -> None:
        """End it."""
        self.thaw()
        self._running.close()

    def freeze(self) -> None:
        """SIGSTOP: connections are made, nothing answers."""
        os.kill(self.server.pid, signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        if self._frozen:
            os.kill(self.server.pid, signal.SIGCONT)
            self._frozen = False


@contextlib.contextmanager
def breakable(data_dir: str) -> Iterator[Breakable]:
    """A running server over a directory, ended at the end."""
    made = Breakable(data_dir)
    try:
        yield made
    finally:
        made.stop()
