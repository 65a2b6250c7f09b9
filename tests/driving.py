"""One event loop for all tests that call a Filesystem, or a part of one, without a mount: a thread turns it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from datastore.fuse.loop import Loop, running

T = TypeVar("T")


@functools.cache
def the_loop() -> Loop:
    """It, turned from now on."""
    loop = Loop()

    def turn() -> None:
        with loop.turning():
            while True:
                loop.turn()

    threading.Thread(target=turn, name="tests-loop", daemon=True).start()
    return loop


def resolve(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns or raises, when it has ended; any thread but the loop's."""
    return the_loop().run(coroutine)


async def beside(call: Callable[[], T]) -> T:
    """What a call returns that waits for something else of this loop: a lane makes it."""
    loop = running()
    return call() if loop is None else await loop.lane(call)
