"""Keys to work on: each at most once at a time, each at most once waiting, some later. One event loop, no locks.

INVARIANT: a key that is worked on is not handed out again before done(); what was added meanwhile comes afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Generic, TypeVar

K = TypeVar("K")


class WorkQueue(Generic[K]):
    """Bounded by the number of keys."""

    def __init__(self) -> None:
        self._ready: dict[K, None] = {}
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._busy: set[K] = set()
        self._dirty: set[K] = set()
        self._count = 0
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: K) -> None:
        """Work on it as soon as possible; an appointment for later is dropped."""
        self._due.pop(key, None)
        if key in self._busy:
            self._dirty.add(key)
        else:
            self._ready[key] = None
            self._wake.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Work on it in delay_s at the latest; an earlier appointment stands."""
        if key in self._ready or key in self._dirty:
            return
        due = asyncio.get_running_loop().time() + delay_s
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        self._wake.set()

    def forget(self, key: K) -> None:
        """Drop whatever is planned for it."""
        self._due.pop(key, None)
        self._ready.pop(key, None)
        self._dirty.discard(key)

    def awaits(self, key: K) -> bool:
        """Whether something is planned for it."""
        return key in self._ready or key in self._dirty or key in self._due

    async def get(self) -> K:
        """The next key; call done() with it afterwards."""
        while True:
            self._ripen()
            if self._ready:
                key = next(iter(self._ready))
                del self._ready[key]
                self._busy.add(key)
                return key
            self._wake.clear()
            await self._sleep()

    def done(self, key: K) -> None:
        """The key may be handed out again."""
        self._busy.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

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
