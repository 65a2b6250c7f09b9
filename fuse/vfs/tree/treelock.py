"""A lock that uploads share and the rename of a directory takes alone: keys must not change while bytes go to them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...loop import Future


class TreeLock:
    """Shared and exclusive, in the order of asking: who waits for exclusive keeps newcomers out.

    Waits have no deadline of their own: whoever holds it waits for the store, which is bounded.
    """

    def __init__(self) -> None:
        self._sharing = 0
        self._alone = False
        self._waiting: deque[tuple[bool, Future[None]]] = deque()
        """Whether for exclusive, and what to tell."""

    def shared(self) -> TreeLock:
        """For `async with`: keys stay as they are meanwhile. Not to be nested."""
        return self

    async def __aenter__(self) -> None:
        if self._alone or self._waiting:
            await self._enter(alone=False)
        else:
            self._sharing += 1

    async def __aexit__(self, *_: object) -> None:
        self._sharing -= 1
        if self._waiting:
            self._let_in()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Nobody else relies on keys meanwhile."""
        await self._enter(alone=True)
        try:
            yield
        finally:
            self._alone = False
            self._let_in()

    async def _enter(self, *, alone: bool) -> None:
        turn: Future[None] = Future()
        self._waiting.append((alone, turn))
        self._let_in()
        await turn

    def _let_in(self) -> None:
        while self._waiting and not self._alone:
            alone, turn = self._waiting[0]
            if alone and self._sharing:
                return
            self._waiting.popleft()
            self._alone = alone
            self._sharing += not alone
            turn.set_result(None)
