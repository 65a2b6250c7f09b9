"""A lock that uploads share and the rename of a directory takes alone: keys must not change while bytes go to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...loop import Future, Lock


class TreeLock:
    """Shared and exclusive, in the order of asking: who waits for exclusive keeps newcomers out. Waits have no deadline
    of their own: whoever holds it waits for the store, which is bounded.
    """

    def __init__(self) -> None:
        self._gate = Lock()
        """Held by who is exclusive, also while he waits for those that share."""
        self._sharing = 0
        self._unshared: Future[None] | None = None

    def shared(self) -> TreeLock:
        """For `async with`: keys stay as they are meanwhile. Not to be nested."""
        return self

    async def __aenter__(self) -> None:
        if self._gate.locked:
            async with self._gate:
                self._sharing += 1
        else:
            self._sharing += 1

    async def __aexit__(self, *_: object) -> None:
        self._sharing -= 1
        if self._unshared is not None and not self._sharing:
            self._unshared.set_result(None)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Nobody else relies on keys meanwhile."""
        async with self._gate:
            if self._sharing:
                self._unshared = Future()
                try:
                    await self._unshared
                finally:
                    self._unshared = None
            yield
