"""Prefetches small versions that will probably be read soon: a queue, and tasks that fetch one after the other.

A reader whose version is still queued fetches it itself. For the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from datastore.errors import StoreError, TransientStoreError

from ..loop import Future
from ..store.base import ObjectVersion
from .reader import Reader


class SmallFileFetcher:
    """INVARIANT: bytes is the sum of the sizes of all versions that are queued or being fetched."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waiting: dict[str, ObjectVersion] = {}
        self._running: dict[str, Future[None]] = {}
        self._tasks = 0
        self.bytes = 0

    def add(self, versions: Iterable[ObjectVersion], width: int) -> None:
        """Queue these versions, to be fetched in this order, at most `width` at a time."""
        for version in versions:
            self._put(version)
        for _ in range(min(width - self._tasks, len(self._waiting))):
            self._tasks += 1
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
        """Fetch what is queued. After an error nobody has it: a later reader fetches again, and gets the error."""
        try:
            while (version := self._take()) is not None:
                try:
                    await self._reader.bring(version, ahead=True)
                except TransientStoreError:
                    self.bytes -= sum(version.size for version in self._waiting.values())
                    self._waiting.clear()
                except StoreError:
                    pass
                finally:
                    self._settle(version)
        finally:
            self._tasks -= 1
            if not self._tasks:
                self._reader.keep_rest()

    def _settle(self, version: ObjectVersion) -> None:
        self.bytes -= version.size
        self._running.pop(version.key).set_result(None)
