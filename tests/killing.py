"""The end of a file system's process, for tests that have it in their own."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from datastore.fuse.loop import Future, Loop
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from tests.driving import resolve, the_loop
from tests.patience import PATIENCE_S

HELD_S = 5.0
"""What is still asked for after that is held back by a test, for another file system."""
_POLL_S = 0.001


def kill(fs: DatastoreFilesystem) -> None:
    """The process dies: nothing is sent, written down or removed; its tasks end and its files are closed."""
    with suppress(BaseException):  # what a test lets it die of
        resolve(fs.upkeep.stop())
    quiet(HELD_S)
    core = fs.core
    if core.cache is not None:
        core.cache.close()
    core.nodelog.close()
    core.db.close()
    unsent = [node.staged for node in core.nodes.by_ino.values() if node.staged is not None]
    for staged in (*unsent, *(left.staged for left in fs.uploads.orphans.files.values())):
        staged.close(remove=False)


def quiet(patience_s: float = PATIENCE_S) -> bool:
    """Until nothing is asked for in the background, of any file system; whether it came to that."""
    return resolve(_quiet(patience_s))


async def _quiet(patience_s: float) -> bool:
    loop, idle = the_loop(), 0
    end = loop.clock() + patience_s
    while idle < 2:  # what a lane has just ended may not have been told yet
        if loop.clock() > end:
            return False
        await loop.sleep(_POLL_S)
        idle = 0 if _at_work(loop) else idle + 1
    return True


def _at_work(loop: Loop) -> bool:
    """Whether a task waits for anything but another task: a lane, a server, the time."""
    if loop.runnable or loop.lanes._unended or loop.disk._unended or loop.waits:
        return True
    timers = (call.func for _, _, call in loop._timers if isinstance(call, partial))
    return any(isinstance(getattr(function, "__self__", None), Future) for function in timers)
