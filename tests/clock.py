"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading

EPOCH_NS = 1_800_000_000 * 1_000_000_000
"""The time at which a clock begins, in nanoseconds since the epoch."""


class ManualClock:
    """Implements Clock; its two times move together, and only by `advance`."""

    def __init__(self) -> None:
        self._passed_ns = 0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return 1000.0 + self._passed_ns / 1e9

    def time_ns(self) -> int:
        return EPOCH_NS + self._passed_ns

    def advance(self, seconds: float) -> None:
        with self._lock:  # two threads that advance at once must not set the clock back
            self._passed_ns += int(seconds * 1_000_000_000)
