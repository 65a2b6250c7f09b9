"""The disturbances of a soak: the mount's server is killed, the store goes away or stops answering."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass

import psutil

from tests.mount.outages import Breakable
from tests.soak.samples import serving

OUTAGES = ("gone", "frozen")
KINDS = ("kill", "kill", "kill twice", *OUTAGES)


@dataclass(frozen=True)
class Pace:
    """Shortest and longest time in seconds between two disturbances (gap_s), and for which the store is away or
    does not answer: less than the 60 s for which a request is retried."""

    gap_s: tuple[float, float] = (8.0, 30.0)
    gone_s: tuple[float, float] = (2.0, 20.0)
    frozen_s: tuple[float, float] = (1.0, 8.0)


SHORT = Pace((3.0, 9.0), (1.0, 5.0), (1.0, 4.0))


@dataclass(frozen=True)
class Event:
    """at_s: seconds since the start; lasted_s: 0 for a kill."""

    kind: str
    at_s: float
    lasted_s: float = 0.0


class Disturber(threading.Thread):
    """Disturbs the mount from start() to stop()."""

    def __init__(
        self, storage: Breakable, supervisor_pid: int, began: float, pace: Pace, *, kills: bool = True
    ) -> None:
        super().__init__(name="disturb", daemon=True)
        self.events: list[Event] = []
        self._storage, self._supervisor = storage, psutil.Process(supervisor_pid)
        self._began = began
        self._pace = pace
        self._kinds = KINDS if kills else OUTAGES
        self._random = random.Random(1)
        self._stopping = threading.Event()
        self.failure = ""

    def stop(self) -> None:
        """End the disturbances; the store works again afterwards."""
        self._stopping.set()
        self.join(60)

    def run(self) -> None:
        try:
            while not self._stopping.wait(self._random.uniform(*self._pace.gap_s)):
                self._one(self._random.choice(self._kinds))
        except Exception as error:
            self.failure = f"the disturber broke: {error!r}"

    def _one(self, kind: str) -> None:
        at = time.monotonic()
        if kind.startswith("kill"):
            self._kill(serving(self._supervisor))
            if kind == "kill twice":
                self._stopping.wait(self._random.uniform(0.05, 1.0))
                self._kill(*self._supervisor.children())
            self.events.append(Event("kill", at - self._began))
            return
        if kind == "gone":
            self._storage.stop()
            self._stopping.wait(self._random.uniform(*self._pace.gone_s))
            self._storage.run()
        else:
            self._storage.freeze()
            self._stopping.wait(self._random.uniform(*self._pace.frozen_s))
            self._storage.thaw()
        self.events.append(Event(kind, at - self._began, time.monotonic() - at))

    def _kill(self, *servers: psutil.Process | None) -> None:
        """Kill these servers: the one that serves; at a second kill its successor and the standby process."""
        for server in filter(None, servers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
