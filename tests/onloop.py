"""A store whose calls run as tasks of the tests' loop, for tests that call it from threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.driving import resolve, the_loop
from tests.memorystore import HookedStore

T = TypeVar("T")


class OnLoop(HookedStore):
    """Each call runs as a task of the tests' loop, while the calling thread, which must be another one, waits."""

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return resolve(call())

    def close(self) -> None:
        the_loop().call(self.inner.close)
