"""Prefetches small versions that will probably be read soon: a queue, and a task that fetches several at once.

A reader whose version is still queued fetches it itself. For the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from datastore.errors import StoreError

from ..loop import Future
from ..store.base import ObjectVersion
from .reader import Reader


class SmallFileFetcher:
    """INVARIANT: bytes is the sum of the sizes of all versions that are queued or being fetched."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waiting: dict[str, ObjectVersion] = {}
        self._running: dict[str, Future[None]] = {}
        self._working = False
        self.bytes = 0

    def add(self, versions: Iterable[ObjectVersion]) -> None:
        """Queue these versions, to be fetched in this order."""
        for version in versions:
            self._put(version)
        if self._waiting and not self._working:
            self._working = True
            self._reader.loop.background(self._work())

    def __contains__(self, key: str) -> bool:
        """Whether a version of this key is queued or being fetched."""
        return key in self._waiting or key in self._running

    async def awaited(self, key: str) -> bool:
        """Wait until a fetch under way for the key ends, well or not, or fetch the version that is queued for it.
        False when there is neither, or when the fetch of the queued version failed."""
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
        """Fetch the version now, or wait for a fetch under way for its key; False if the fetch by this call failed."""
        self._put(version)
        return await self.awaited(version.key)

    def _put(self, version: ObjectVersion) -> None:
        """Queue a version, unless one of its key is queued or being fetched."""
        if version.key not in self:
            self._waiting[version.key] = version
            self.bytes += version.size

    def _take(self, key: str | None = None) -> ObjectVersion | None:
        """Move the queued version of a key (None: the first version queued) to those being fetched, and return it for
        the caller to fetch; None if there is none. ("" stands for an empty queue, because no key is empty.)"""
        version = self._waiting.pop(next(iter(self._waiting), "") if key is None else key, None)
        if version is not None:
            self._running[version.key] = Future()
        return version

    async def _work(self) -> None:
        while self._waiting:
            try:
                await self._reader.bring_many(self._take, self._settle)
            except Exception:  # no reader waits for these yet; a later reader fetches again, and gets the error
                self.bytes -= sum(version.size for version in self._waiting.values())
                self._waiting.clear()
        self._working = False

    def _settle(self, version: ObjectVersion) -> None:
        self.bytes -= version.size
        self._running.pop(version.key).set_result(None)
