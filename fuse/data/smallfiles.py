"""Small versions that will soon be asked for: a queue, and one task that fetches them, several at once.

Whoever asks for one that still waits fetches it himself. On the loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from datastore.errors import StoreError

from ..loop import Future
from ..store.base import ObjectVersion
from .reader import Reader


class SmallFileFetcher:
    """INVARIANT: bytes is the sum of the sizes of what waits or is on its way."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waiting: dict[str, ObjectVersion] = {}
        self._running: dict[str, Future[None]] = {}
        self._working = False
        self.bytes = 0

    def add(self, versions: Iterable[ObjectVersion]) -> None:
        """Fetch these, in this order."""
        for version in versions:
            self._put(version)
        if self._waiting and not self._working:
            self._working = True
            self._reader.loop.background(self._work())

    async def awaited(self, key: str) -> bool:
        """Wait for what is on its way for a key, or fetch what still waits; False when neither, or it failed."""
        running = self._running.get(key)
        if running is not None:
            await running
            return True
        version = self._take(key)
        if version is None:
            return False
        try:
            await self._reader.bring(version)
        except StoreError:
            return False
        finally:
            self._settle(version)
        return True

    async def brought(self, version: ObjectVersion) -> bool:
        """Fetch this one now, or wait for what is on its way for its key; False when that failed."""
        self._put(version)
        return await self.awaited(version.key)

    def _put(self, version: ObjectVersion) -> None:
        """Among what waits, unless it is on its way."""
        if version.key not in self._waiting and version.key not in self._running:
            self._waiting[version.key] = version
            self.bytes += version.size

    def _take(self, key: str | None = None) -> ObjectVersion | None:
        """What waits under a key, or has waited longest, is the caller's now; of no key is ""."""
        version = self._waiting.pop(next(iter(self._waiting), "") if key is None else key, None)
        if version is not None:
            self._running[version.key] = Future()
        return version

    async def _work(self) -> None:
        while self._waiting:
            try:
                await self._reader.bring_many(self._take, self._settle)
            except Exception:  # nobody asked for these yet: who does starts anew, and is told
                self.bytes -= sum(version.size for version in self._waiting.values())
                self._waiting.clear()
        self._working = False

    def _settle(self, version: ObjectVersion) -> None:
        self.bytes -= version.size
        self._running.pop(version.key).set_result(None)
