"""Small versions that will soon be asked for: a queue, and a few threads that fetch one after the other.

Few, because each thread more is a switch more for a file (two cores: 37 a file with a thread for each); as many as it
takes to hide how long the store needs for an answer. Whoever asks for one that still waits fetches it himself.
Threads: any. Lock order: the lock is a leaf.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from datastore.errors import StoreError

from .reader import Reader
from .version import ObjectVersion

_WIDTH_MIN, _WIDTH_MAX = 2, 64
_SHARE_S = 0.0015
"""One more thread for each such time that the store takes for an answer."""
_WAIT_S = 120.0


class Prefetcher:
    """INVARIANT: bytes is the sum of the sizes of what waits or is on its way."""

    def __init__(self, reader: Reader, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._executor = executor
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, ObjectVersion] = {}
        self._running: dict[str, Future[None]] = {}
        self._workers = 0
        self._answer_s = _SHARE_S * 8
        """How long the store takes, smoothed."""
        self.bytes = 0

    def add(self, versions: Iterable[ObjectVersion]) -> None:
        """Fetch these, in this order."""
        with self._lock:
            for version in versions:
                if version.key not in self._waiting and version.key not in self._running:
                    self._waiting[version.key] = version
                    self.bytes += version.size
            more = max(0, min(self._width(), len(self._waiting)) - self._workers)
            self._workers += more
        for _ in range(more):
            try:
                self._executor.submit(self._work)
            except RuntimeError:  # shut down
                with self._lock:
                    self._workers -= 1

    def awaited(self, key: str) -> bool:
        """Wait for what is on its way for a key, or fetch what still waits; False when neither, or it failed."""
        with self._lock:
            version = self._take(key)
            running = self._running.get(key)
        try:
            if version is not None:
                self._fetch(version, asked=True)
            elif running is not None:
                running.result(timeout=_WAIT_S)
        except (StoreError, FutureTimeout):
            return False
        return running is not None

    def brought(self, version: ObjectVersion) -> bool:
        """Fetch this one now, or wait for what is on its way for its key; False when that failed."""
        with self._lock:
            if version.key not in self._waiting and version.key not in self._running:
                self._waiting[version.key] = version
                self.bytes += version.size
        return self.awaited(version.key)

    def _width(self) -> int:
        return max(_WIDTH_MIN, min(_WIDTH_MAX, int(self._answer_s / _SHARE_S)))

    def _take(self, key: str) -> ObjectVersion | None:
        """What waits under a key is the caller's now. The lock is held."""
        version = self._waiting.pop(key, None)
        if version is not None:
            self._running[key] = Future()
        return version

    def _next(self) -> ObjectVersion | None:
        with self._lock:
            if self._waiting and self._workers <= self._width():
                return self._take(next(iter(self._waiting)))
            self._workers -= 1
            return None

    def _work(self) -> None:
        while (version := self._next()) is not None:
            with suppress(Exception):  # nobody asked for it yet: who does starts anew, and is told
                self._fetch(version, asked=False)

    def _fetch(self, version: ObjectVersion, *, asked: bool) -> None:
        began = self._clock()
        running = self._running[version.key]
        fetched = False

        def arrived() -> None:
            nonlocal fetched
            if not fetched:
                fetched = True
                self._settle(version, running, self._clock() - began)

        try:
            self._reader.bring(version, arrived, asked=asked)
        finally:
            if not fetched:
                self._settle(version, running, None)

    def _settle(self, version: ObjectVersion, running: Future[None], seconds: float | None) -> None:
        with self._lock:
            del self._running[version.key]
            self.bytes -= version.size
            if seconds is not None:
                self._answer_s += (seconds - self._answer_s) / 8
        running.set_result(None)
