"""A store whose calls are tasks of a loop, for tests that call it from threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from datastore.fuse.store.base import GetFeed, GetSink, HeadSink
from tests.driving import resolve, the_loop
from tests.memorystore import HookedStore

T = TypeVar("T")


class OnLoop(HookedStore):
    """Each call is a task of the tests' loop, and waited for; so it works in the thread that calls, but not on it."""

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return resolve(call())

    async def head_many(self, keys: Sequence[str], sink: HeadSink) -> None:
        resolve(self.inner.head_many(keys, sink))

    async def get_many(self, feed: GetFeed, sink: GetSink) -> None:
        resolve(self.inner.get_many(feed, sink))

    def close(self) -> None:
        the_loop().call(self.inner.close)
