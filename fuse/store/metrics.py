"""Counts what a store is asked: calls, bytes, time and errors by class, per method, and since when it has not answered.

For `status`, the metrics and tests.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from datastore.errors import StoreError
from datastore.histogram import Histogram

SILENT_S = 10.0
"""So long a single answer may take before it is called silence; a refused connection is one at once."""


class Silence:
    """Since when one store has not answered: for who looks at a mount during an outage. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since: float | None = None
        """Monotonic seconds of the first question since the last answer."""
        self._asked_at = 0.0
        self._error = ""

    def asked(self) -> None:
        """A call begins; ended() follows."""
        with self._lock:
            self._waiting += 1
            self._asked_at = time.monotonic()
            if self._since is None:
                self._since = self._asked_at

    def failed(self, error: BaseException) -> None:
        """An attempt was in vain; there may be another one."""
        with self._lock:
            self._asked_at = time.monotonic()
            self._error = str(error)

    def ended(self, lost: str) -> None:
        """A call has ended. lost: why there was no answer; "": there was one, be it a refusal."""
        with self._lock:
            self._waiting -= 1
            self._error = lost
            if not lost:
                self._since = time.monotonic() if self._waiting else None

    def told(self) -> dict[str, Any]:
        """since and lastAsked (Unix time), silentSeconds, error of the last attempt; {} of a store that answers."""
        with self._lock:
            now, since, error = time.monotonic(), self._since, self._error
            if since is None or not (error or now - since >= SILENT_S):
                return {}
            to_unix = time.time() - now
            times = {"since": since + to_unix, "lastAsked": self._asked_at + to_unix}
            return {**times, "silentSeconds": round(now - since, 1), "error": error}


@dataclass
class _Tally:
    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    buckets: Histogram = field(default_factory=Histogram)


class StoreMetrics:
    """The tallies of one store. Thread-safe; numbers only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self.silence = Silence()

    def record(self, method: str, seconds: float, *, sent: int = 0, received: int = 0, error: str = "") -> None:
        """One call that ended; error is the class name of what it raised."""
        with self._lock:
            tally = self._tallies[method]
            tally.calls += 1
            tally.sent_bytes += sent
            tally.received_bytes += received
            tally.seconds += seconds
            tally.slowest_s = max(tally.slowest_s, seconds)
            tally.buckets.add(max(0, int(seconds * 1e9)))
            if error:
                tally.errors[error] += 1

    def record_retry(self, method: str, error: StoreError) -> None:
        """One failure inside a call that was tried again."""
        with self._lock:
            self._tallies[method].retries[type(error).__name__] += 1

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """By method: calls, sent_bytes, received_bytes, seconds, slowest_s, errors and retries by class name, buckets.

        The edges of the buckets are datastore.histogram.EDGES_S; a call counts with all its retries.
        """
        with self._lock:
            return {
                method: {
                    **vars(tally),
                    "seconds": round(tally.seconds, 6),
                    "slowest_s": round(tally.slowest_s, 6),
                    "errors": dict(tally.errors),
                    "retries": dict(tally.retries),
                    "buckets": tally.buckets.buckets(),
                }
                for method, tally in sorted(self._tallies.items())
            }
