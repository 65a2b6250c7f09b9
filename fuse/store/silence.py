"""Since when a store has not answered: for who looks at a mount during an outage."""

from __future__ import annotations

import threading
import time
from typing import Any

SILENT_S = 10.0
"""So long a single answer may take before it is called silence; a refused connection is one at once."""


class Silence:
    """Of one store. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since: float | None = None
        """Monotonic seconds of the first question since the last answer."""
        self._asked_at = 0.0
        self._error = ""

    def asked(self) -> None:
        """A call begins; answered() or gave_up() follows."""
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

    def answered(self) -> None:
        """A call has ended with an answer, be it a refusal."""
        with self._lock:
            self._waiting -= 1
            self._since = time.monotonic() if self._waiting else None
            self._error = ""

    def gave_up(self, error: BaseException) -> None:
        """A call has ended without one."""
        with self._lock:
            self._waiting -= 1
            self._error = str(error)

    def told(self) -> dict[str, Any]:
        """since and lastAsked (Unix time), silentSeconds, error of the last attempt; {} of a store that answers."""
        with self._lock:
            now, since, error = time.monotonic(), self._since, self._error
            if since is None or not (error or now - since >= SILENT_S):
                return {}
            to_unix = time.time() - now
            silent_s = round(now - since, 1)
            times = {"since": since + to_unix, "silentSeconds": silent_s, "lastAsked": self._asked_at + to_unix}
            return {**times, "error": error}
