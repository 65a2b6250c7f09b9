"""When and how long to try again: exponential back-off with jitter inside a total budget.

Errors say themselves whether another try makes sense (`DatastoreError.transient`). One layer retries, so delays never
multiply: retrying.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..loop import pause


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """budget_s: from the first try to the start of the last one; 0: a single try.

    Delays double from first_delay_s up to max_delay_s; the upper half of each is jitter, so that clients that failed
    together don't come back together.
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 8.0
    budget_s: float = 60.0

    def delay_s(self, attempt: int, fraction: float) -> float:
        """The wait after the attempt-th try (from 1); fraction in [0, 1) is the jitter's share."""
        whole = min(self.first_delay_s * 2.0 ** min(attempt - 1, 32), self.max_delay_s)
        return whole / 2 + whole / 2 * fraction


@dataclass(frozen=True, slots=True)
class Retrier:
    """A policy, and how its time passes. clock: monotonic seconds; jitter: a fraction in [0, 1)."""

    policy: RetryPolicy = RetryPolicy()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = pause
    jitter: Callable[[], float] = random.random
