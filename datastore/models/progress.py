"""Reports the progress of long work, for a terminal's progress bar or an object's status, and stops the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from datastore.errors import DatastoreError, StoreError
from datastore.models.errors import SaveLost

Phase = Literal["looking", "reading", "copying", "checking", "removing"]

EVERY_S = 0.25
"""Seconds between two events within a phase, except for its last event; neither a terminal nor a status needs more."""
_FILE_COSTS_BYTES = 256 << 10
"""For the estimate of the time left: opening a file takes about as long as processing this many bytes."""


@dataclass(frozen=True, slots=True)
class Event:
    """The progress at one moment. eta_s: the estimated seconds left; None while there is no estimate."""

    phase: Phase
    files: int
    files_total: int
    bytes: int
    bytes_total: int
    elapsed_s: float
    eta_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object, for a line of a log or a status."""
        return asdict(self)


Listener = Callable[[Event], None]


class Stopped(SaveLost):
    """The work was asked to stop. resume: whether another attempt may continue with what is done already."""

    def __init__(self, text: str, *, resume: bool) -> None:
        super().__init__(text)
        self.resume = resume


def can_resume(error: BaseException) -> bool:
    """Return whether another attempt may continue with what is done already, after the work has ended with an error."""
    return error.resume if isinstance(error, Stopped) else isinstance(error, StoreError) and error.transient


class Progress:
    """Counts finished work, calls the listener (one call at a time), and stops the work. Any thread may use it."""

    def __init__(self, listener: Listener | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener = listener
        self._clock = clock
        self._lock = threading.Lock()
        self._stop: DatastoreError | None = None
        self._phase: Phase = "looking"
        self._files = self._bytes = self._files_total = self._bytes_total = 0
        self._began = self._told = clock()

    def begin(self, phase: Phase, files: int = 0, size_bytes: int = 0) -> None:
        """Begin the next phase of the work, in which this many files and bytes are to be processed."""
        with self._lock:
            self._phase, self._files_total, self._bytes_total = phase, files, size_bytes
            self._files = self._bytes = 0
            self._began = self._clock()
            self._tell()

    def count(self, files: int, size_bytes: int) -> None:
        """Add this many files and bytes to what is done. Errors: those of check()."""
        self.check()
        with self._lock:
            self._files += files
            self._bytes += size_bytes
            done = self._files == self._files_total and self._bytes == self._bytes_total
            if done or self._clock() - self._told >= EVERY_S:
                self._tell()

    def stop(self, *, resume: bool) -> None:
        """Ask the work to end: its next count() or check() raises Stopped. resume: see Stopped."""
        self._stop = Stopped("interrupted", resume=resume)

    def fail(self, error: DatastoreError) -> None:
        """Ask the work to end with this error in place of Stopped."""
        self._stop = error

    def check(self) -> None:
        """Errors: Stopped after stop(), or the error that fail() was given."""
        if self._stop is not None:
            raise self._stop

    def _tell(self) -> None:
        self._told = self._clock()
        if self._listener is None:
            return
        elapsed_s = self._told - self._began
        done = self._bytes + self._files * _FILE_COSTS_BYTES
        left = self._bytes_total + self._files_total * _FILE_COSTS_BYTES - done
        eta_s = elapsed_s * left / done if done and elapsed_s > 1 else None
        self._listener(
            Event(
                self._phase, self._files, self._files_total, self._bytes, self._bytes_total, round(elapsed_s, 3),
                None if eta_s is None else round(eta_s, 1),
            )
        )  # fmt: skip
