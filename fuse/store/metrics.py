"""Statistics of a store for `status`, the metrics and tests: calls, bytes, time and errors by class, per method, and
since when the store has not answered, or refuses access."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from datastore.errors import (
    AccessDenied,
    BucketNotFound,
    ClockSkew,
    CredentialsInvalid,
    EndpointNotAllowed,
    ObjectLocked,
    StoreError,
    WrongRegion,
)
from datastore.histogram import Histogram

SILENT_S = 10.0
"""How long a request may wait for its answer before that counts as silence; a failed attempt counts at once."""
LARGE_BYTES = 256 << 10
"""A larger body may be on its way for minutes: how long its request waits says nothing, if no attempt fails."""


_NO_ACCESS = (AccessDenied, BucketNotFound, ClockSkew, CredentialsInvalid, EndpointNotAllowed, WrongRegion)


class Silence:
    """Records since when a store has not answered or has refused access, for people who look at a mount in an outage.
    Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since: float | None = None
        """Start of the present period without an answer, monotonic seconds; None: the store has answered everything."""
        self._asked_at = 0.0
        self._error = ""
        self._refused_since: float | None = None
        """When the store refused access, monotonic seconds; None: it has granted it since."""
        self._refusal = ""

    def asked(self, sent_bytes: int = 0) -> None:
        """Note that a call begins that sends a body of so many bytes; ended() must follow."""
        with self._lock:
            self._waiting += sent_bytes <= LARGE_BYTES
            self._asked_at = time.monotonic()
            if self._since is None and sent_bytes <= LARGE_BYTES:
                self._since = self._asked_at

    def failed(self, error: BaseException) -> None:
        """Note that an attempt of a call failed; another one may follow."""
        with self._lock:
            self._asked_at = time.monotonic()
            self._error = str(error)
            if self._since is None:
                self._since = self._asked_at

    def ended(self, lost: str, sent_bytes: int = 0) -> None:
        """Note that a call has ended. lost: why the store gave no answer; "": it answered, perhaps with a refusal."""
        with self._lock:
            self._waiting -= sent_bytes <= LARGE_BYTES
            self._error = lost
            if not lost:
                self._since = time.monotonic() if self._waiting else None
            elif self._since is None:
                self._since = time.monotonic()

    def answered(self, error: StoreError | None = None) -> None:
        """Note an answer of the store. error: how it failed the request."""
        with self._lock:
            if not isinstance(error, _NO_ACCESS) or isinstance(error, ObjectLocked):
                self._refused_since = None
                return
            self._refusal = str(error)
            if self._refused_since is None:
                self._refused_since = time.monotonic()

    def told(self) -> dict[str, Any]:
        """Return since and lastAsked (Unix time), error of the last attempt, and silentSeconds; or in place of the last
        `refuses` if the store answers, but refuses access; {} if all is well."""
        with self._lock:
            now, since, error = time.monotonic(), self._since, self._error
            told: dict[str, Any]
            if since is not None and (error or now - since >= SILENT_S):
                told = {"silentSeconds": round(now - since, 1), "error": error}
            elif (since := self._refused_since) is not None:
                told = {"refuses": True, "error": self._refusal}
            else:
                return {}
            to_unix = time.time() - now
            return {"since": since + to_unix, "lastAsked": self._asked_at + to_unix, **told}


@dataclass
class _Tally:
    sent_bytes: int = 0
    received_bytes: int = 0
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
        """Count a call that has ended; error is the class name of the exception that it raised."""
        with self._lock:
            tally = self._tallies[method]
            tally.sent_bytes += sent
            tally.received_bytes += received
            tally.buckets.add(max(0, int(seconds * 1e9)))
            if error:
                tally.errors[error] += 1

    def record_retry(self, method: str, error: StoreError) -> None:
        """Count a failed attempt of a call that is tried again."""
        with self._lock:
            self._tallies[method].retries[type(error).__name__] += 1

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return by method calls, sent_bytes, received_bytes, seconds, errors and retries by class, buckets.
        The edges of the buckets are datastore.histogram.EDGES_S; a call and its retries count as one call."""
        with self._lock:
            return {
                method: {
                    **vars(tally),
                    "calls": sum(tally.buckets.buckets()),
                    "seconds": round(tally.buckets.total_ns / 1e9, 6),
                    "errors": dict(tally.errors),
                    "retries": dict(tally.retries),
                    "buckets": tally.buckets.buckets(),
                }
                for method, tally in sorted(self._tallies.items())
            }
