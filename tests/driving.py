"""One event loop, run by a thread, for all tests that call a Filesystem, or a part of it, without a mount."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from datastore.fuse.loop import Loop, running

T = TypeVar("T")


@functools.cache
def the_loop() -> Loop:
    """Return the tests' loop; the first call starts the thread that runs it."""
    loop = Loop()

    def turn() -> None:
        with loop.turning():
            while True:
                loop.turn()

    threading.Thread(target=turn, name="tests-loop", daemon=True).start()
    return loop


def resolve(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the tests' loop and return its result. Any thread but the loop's may call this."""
    return the_loop().run(coroutine)


async def beside(call: Callable[[], T]) -> T:
    """Make a call that may wait for tasks of the tests' loop; on that loop's thread a lane (pool thread) makes it."""
    loop = running()
    return call() if loop is None else await loop.lane(call)
