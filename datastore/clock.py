"""Time, injected: the real clock here, a manual one in the tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two times that code needs."""

    def monotonic(self) -> float:
        """Seconds that only grow; for ages and deadlines."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since the epoch; for what people see."""
        ...


class SystemClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)
    time_ns = staticmethod(time.time_ns)
