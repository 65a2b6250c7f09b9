"""How fast a mount may send to its store (spec.uploadLimit)."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable

from ..loop import pause

_LOOK_S = 0.5
"""How soon who waits learns of another limit."""


class UploadPace:
    """Hands out the right to send, so many bytes a second in all, in the order in which it is asked for.

    A body goes at once when all that was sent before it is paid for, and is then paid for itself. So the rate holds
    over any time that is long beside one part of an upload (8 MiB, of files from 8 GiB on more). Threads: any.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = pause,
    ) -> None:
        """bytes_per_s 0: without limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._taken = 0
        """Bytes that were asked for so far."""
        self._paid = 0.0
        """How many of them the time has paid for, at _seen_at. Never more than _taken: nothing is saved up."""
        self._seen_at = clock()

    def limit(self, bytes_per_s: int) -> None:
        """From now on, and half a second later also for who waits."""
        with self._lock:
            self._pay()
            self._bytes_per_s = bytes_per_s

    async def take(self, size_bytes: int) -> bool:
        """Wait until so much may be sent; whether that took any time."""
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
        """How long until the first `before` bytes are paid for."""
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
