"""Keys to work on: each at most once at a time, each at most once waiting, some later. One event loop, no locks.

Namespaces have their turns one after another, however many keys one of them has waiting: a tenant with thousands of
objects delays nobody else's. INVARIANT: a key that is worked on is not handed out again before done(); what was added
meanwhile comes afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict

Key = tuple[str, str]
"""Namespace and name."""


class WorkQueue:
    """Bounded by the number of keys."""

    def __init__(self) -> None:
        self._ready: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """Of each namespace the names that wait; the namespace whose turn is next stands first."""
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._busy: set[Key] = set()
        self._dirty: set[Key] = set()
        self._count = 0
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(names) for names in self._ready.values())

    def add(self, key: Key) -> None:
        """Work on it as soon as possible; an appointment for later is dropped."""
        self._due.pop(key, None)
        if key in self._busy:
            self._dirty.add(key)
        else:
            self._ready.setdefault(key[0], OrderedDict())[key[1]] = None
            self._wake.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Work on it in delay_s at the latest; an earlier appointment stands."""
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
        """Whether something is planned for it."""
        return self._waits(key) or key in self._dirty or key in self._due

    async def get(self) -> Key:
        """The next key; call done() with it afterwards."""
        while True:
            self._ripen()
            if self._ready:
                namespace, names = self._ready.popitem(last=False)
                name, _ = names.popitem(last=False)
                if names:
                    self._ready[namespace] = names  # at the end: the others' turn
                self._busy.add((namespace, name))
                return namespace, name
            self._wake.clear()
            await self._sleep()

    def done(self, key: Key) -> None:
        """The key may be handed out again."""
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
            # One that was moved or dropped meanwhile has another entry or none.
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
