"""A queue of keys: each waits at most once, and one worker at a time has it. For one event loop, without locks.

Namespaces take turns, however many keys one of them has waiting: a tenant with thousands of objects delays no others.
INVARIANT: a key that is worked on is not handed out again before done(); if it was added in the meantime, it follows
then.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict

Key = tuple[str, str]
"""Namespace and name."""


class WorkQueue:
    """Holds each key once; only the heap may also hold times that were replaced or dropped, until they are due."""

    def __init__(self) -> None:
        self._ready: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """The waiting names of each namespace; the namespace whose turn is next stands first."""
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._busy: set[Key] = set()
        self._dirty: set[Key] = set()
        self._count = 0
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(names) for names in self._ready.values())

    def add(self, key: Key) -> None:
        """Queue the key now; a time that add_after() set for it is dropped."""
        self._due.pop(key, None)
        if key in self._busy:
            self._dirty.add(key)
        else:
            self._ready.setdefault(key[0], OrderedDict())[key[1]] = None
            self._wake.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Queue the key in delay_s at the latest, unless it waits already or is due earlier."""
        if self._waits(key) or key in self._dirty:
            return
        due = asyncio.get_running_loop().time() + delay_s
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        self._wake.set()

    def awaits(self, key: Key) -> bool:
        """Whether the key waits, is due later, or was added again while a worker has it."""
        return self._waits(key) or key in self._dirty or key in self._due

    async def get(self) -> Key:
        """Wait for the next key and return it. Its worker has to call done() afterwards."""
        while True:
            self._ripen()
            if self._ready:
                namespace, names = self._ready.popitem(last=False)
                name, _ = names.popitem(last=False)
                if names:
                    self._ready[namespace] = names  # at the end: the other namespaces come first
                self._busy.add((namespace, name))
                return namespace, name
            self._wake.clear()
            await self._sleep()

    def done(self, key: Key) -> None:
        """End the work on a key, so that it may be handed out again."""
        self._busy.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    def _waits(self, key: Key) -> bool:
        return key[1] in self._ready.get(key[0], ())

    def _ripen(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            # A key whose time was changed or dropped in the meantime has another time or none.
            if self._due.get(key) == due:
                self.add(key)

    async def _sleep(self) -> None:
        wait_s = self._heap[0][0] - asyncio.get_running_loop().time() if self._heap else None
        if wait_s is not None and wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
