"""The clock as an argument of the code that needs the time: the machine's clock here, a manual one in the tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two clocks that the code reads."""

    def monotonic(self) -> float:
        """Return seconds that never go backwards; for ages and deadlines."""
        ...

    def time_ns(self) -> int:
        """Return nanoseconds since the epoch; for times that are shown to people."""
        ...


class SystemClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)
    time_ns = staticmethod(time.time_ns)
