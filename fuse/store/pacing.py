"""Limits how fast a mount sends to its store (spec.uploadLimit)."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable

from ..loop import pause

_LOOK_S = 0.5
"""How often a waiting caller looks for a changed limit, in seconds."""


class UploadPace:
    """Lets all callers together send a limited number of bytes a second, in the order in which they ask.

    Passing time pays for bytes at the limit's rate. A body is sent as soon as all bytes before it are paid for. So the
    rate holds over times in which many parts of uploads are sent (8 MiB each; more for files from 8 GiB). Threads: any.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = pause,
    ) -> None:
        """bytes_per_s 0: no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._taken = 0
        """How many bytes callers have asked to send so far."""
        self._paid = 0.0
        """How many of these bytes were paid for at _seen_at. Never more than _taken: idle time is not saved up."""
        self._seen_at = clock()

    def limit(self, bytes_per_s: int) -> None:
        """Set the limit; callers that already wait notice within half a second. 0: no limit."""
        with self._lock:
            self._pay()
            self._bytes_per_s = bytes_per_s

    async def take(self, size_bytes: int) -> bool:
        """Wait until this many bytes may be sent; return whether that took any time."""
        if not self._bytes_per_s:
            return False
        with self._lock:
            self._pay()
            before, self._taken = self._taken, self._taken + size_bytes
        waited = False
        while (wait_s := self._wait_s(before)) > 0:
            waited = True
            await self._sleep(min(wait_s, _LOOK_S))
        return waited

    def _wait_s(self, before: int) -> float:
        """Return the seconds until the first `before` bytes are paid for."""
        with self._lock:
            self._pay()
            return (before - self._paid) / self._bytes_per_s if self._bytes_per_s else 0.0

    def _pay(self) -> None:
        now = self._clock()
        if self._bytes_per_s:
            self._paid = min(self._taken, self._paid + (now - self._seen_at) * self._bytes_per_s)
        else:
            self._paid = self._taken
        self._seen_at = now
