"""Small versions that will soon be asked for: a queue, and one thread that fetches them, several at once.

Whoever asks for one that still waits fetches it himself. Threads: any. Lock order: the lock is a leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout

from datastore.errors import StoreError

from ..store.base import ObjectVersion
from .reader import Reader

_WAIT_S = 120.0


class SmallFileFetcher:
    """INVARIANT: bytes is the sum of the sizes of what waits or is on its way."""

    def __init__(self, reader: Reader, executor: Executor) -> None:
        self._reader = reader
        self._executor = executor
        self._lock = threading.Lock()
        self._waiting: dict[str, ObjectVersion] = {}
        self._running: dict[str, Future[None]] = {}
        self._working = False
        self.bytes = 0

    def add(self, versions: Iterable[ObjectVersion]) -> None:
        """Fetch these, in this order."""
        with self._lock:
            for version in versions:
                if version.key not in self._waiting and version.key not in self._running:
                    self._waiting[version.key] = version
                    self.bytes += version.size
            begin = bool(self._waiting) and not self._working
            self._working = self._working or begin
        if begin:
            try:
                self._executor.submit(self._work)
            except RuntimeError:  # shut down
                self._working = False

    def awaited(self, key: str) -> bool:
        """Wait for what is on its way for a key, or fetch what still waits; False when neither, or it failed."""
        with self._lock:
            version = self._take(key)
            running = self._running.get(key)
        try:
            if version is not None:
                self._fetch(version)
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

    def _take(self, key: str) -> ObjectVersion | None:
        """What waits under a key is the caller's now. The lock is held."""
        version = self._waiting.pop(key, None)
        if version is not None:
            self._running[key] = Future()
        return version

    def _next(self) -> ObjectVersion | None:
        with self._lock:
            return self._take(next(iter(self._waiting))) if self._waiting else None

    def _work(self) -> None:
        while True:
            try:
                self._reader.bring_many(self._next, self._settle)
            except Exception:  # nobody asked for these yet: who does starts anew, and is told
                self._forget()
            with self._lock:
                if not self._waiting:
                    self._working = False
                    return

    def _forget(self) -> None:
        """Fetch nothing of what waits."""
        with self._lock:
            self.bytes -= sum(version.size for version in self._waiting.values())
            self._waiting.clear()

    def _fetch(self, version: ObjectVersion) -> None:
        """For one who waits."""
        fetched = False

        def arrived() -> None:
            nonlocal fetched
            if not fetched:
                fetched = True
                self._settle(version)

        try:
            self._reader.bring(version, arrived)
        finally:
            if not fetched:
                self._settle(version)

    def _settle(self, version: ObjectVersion) -> None:
        with self._lock:
            running = self._running.pop(version.key)
            self.bytes -= version.size
        running.set_result(None)
