"""Simulates the death of a mount server's process, for tests that run the file system in their own process."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from datastore.fuse.loop import Future, Loop
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from tests.driving import resolve, the_loop
from tests.patience import PATIENCE_S

HELD_S = 5.0
"""How long kill() waits for background work. What runs longer is held back by a test, for another file system."""
_POLL_S = 0.001


def kill(fs: DatastoreFilesystem) -> None:
    """Let the process die: nothing is sent, recorded or removed; its tasks end and its files are closed."""
    with suppress(BaseException):  # the exception by which a test lets the process die
        resolve(fs.upkeep.stop())
    quiet(HELD_S)
    core = fs.core
    core.cache.close()
    core.nodelog.close()
    core.db.close()
    unsent = [node.staged for node in core.nodes.by_ino.values() if node.staged is not None]
    for staged in (*unsent, *(left.staged for left in fs.uploads.orphans.files.values())):
        staged.close(remove=False)


def quiet(patience_s: float = PATIENCE_S) -> bool:
    """Wait until no file system has background work; return whether that happened in time."""
    return resolve(_quiet(patience_s))


async def _quiet(patience_s: float) -> bool:
    loop, idle = the_loop(), 0
    end = loop.clock() + patience_s
    while idle < 2:  # looked at twice: the loop may not know yet of a call that has just ended in a lane
        if loop.clock() > end:
            return False
        await loop.sleep(_POLL_S)
        idle = 0 if _at_work(loop) else idle + 1
    return True


def _at_work(loop: Loop) -> bool:
    """Whether a task waits for anything but another task: a call in a lane (thread pool), a server or a timer."""
    if loop.runnable or loop.lanes._unended or loop.disk._unended or loop.waits:
        return True
    timers = (call.func for _, _, call in loop._timers if isinstance(call, partial))
    return any(isinstance(getattr(function, "__self__", None), Future) for function in timers)
