"""What a mount server tells of itself: its process, and the Prometheus endpoint when one is asked for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datastore.errors import MountFailed
from datastore.logs import fields

if TYPE_CHECKING:
    from .prometheus import Endpoint

log = logging.getLogger(__name__)
_PROC = Path("/proc/self")
_TRIES, _PAUSE_S = 60, 0.5
"""How long the address of an endpoint is waited for."""


def own_process() -> dict[str, int | float]:
    """rssBytes, openFiles, threads, cpuSeconds of this process; the first two only where there is a /proc."""
    own: dict[str, int | float] = {"threads": threading.active_count(), "cpuSeconds": round(time.process_time(), 2)}
    with suppress(OSError):
        own["rssBytes"] = int(_PROC.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        own["openFiles"] = len(os.listdir(_PROC / "fd")) - 1  # the descriptor that lists them
    return own


class Metrics:
    """The endpoint of a mount at HOST:PORT, or none for ''.

    A new mount whose address is taken is refused. A server that takes over a living mount tries for a while instead,
    until the one before it has let go, and then goes on without.
    """

    def __init__(self, address: str, *, resumed: bool = False) -> None:
        """Errors: MountFailed, unless resumed."""
        self._address = address
        self._endpoint: Endpoint | None = None
        self._stopping = threading.Event()
        if address and not resumed:
            self._endpoint = _listen(address)

    def start(self, source: Callable[[], Mapping[str, Any]]) -> None:
        """Serve what `source` gives at each scrape."""
        if self._endpoint is not None:
            self._endpoint.start(source)
        elif self._address:
            threading.Thread(target=self._take_over, args=(source,), name="metrics-bind", daemon=True).start()

    def status(self) -> dict[str, str]:
        """metrics: where to scrape."""
        return {} if self._endpoint is None else {"metrics": self._endpoint.url}

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        self._stopping.set()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()

    def _take_over(self, source: Callable[[], Mapping[str, Any]]) -> None:
        for tried in range(_TRIES):
            try:
                self._endpoint = _listen(self._address)
                self._endpoint.start(source)
                return
            except MountFailed as error:
                if tried == _TRIES - 1:
                    log.error("there are no metrics", extra=fields(error=error))
            if self._stopping.wait(_PAUSE_S):
                return


def _listen(address: str) -> Endpoint:
    from .prometheus import Endpoint  # here: 60 ms that a mount without an endpoint need not wait

    return Endpoint(address)
