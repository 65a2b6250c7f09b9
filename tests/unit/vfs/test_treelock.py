"""The lock between uploads and renames of directories."""

from __future__ import annotations

import itertools

from datastore.fuse.loop import Future
from datastore.fuse.vfs.tree.treelock import TreeLock
from tests.driving import resolve, the_loop
from tests.promises import promise


class Holder:
    """A task that holds the lock until it is told to let go."""

    def __init__(self, lock: TreeLock, *, alone: bool) -> None:
        self.has_it = False
        self._let_go: Future[None] = Future()
        self._task = the_loop().spawn(self._hold(lock, alone=alone))

    async def _hold(self, lock: TreeLock, *, alone: bool) -> None:
        async with lock.exclusive() if alone else lock.shared():
            self.has_it = True
            await self._let_go

    async def end(self) -> None:
        self._let_go.set_result(None)
        await self._task
        await the_loop().pause()


async def holders(lock: TreeLock, *alone: bool) -> list[Holder]:
    """Those that ask for it in this order, and have gone as far as they may."""
    made = [Holder(lock, alone=one) for one in alone]
    await the_loop().pause()
    return made


@promise("S-26")
def test_one_alone() -> None:
    """While a directory is renamed nobody uploads, and the other way round; uploads go side by side."""

    async def take_turns() -> None:
        for alone in itertools.product((True, False), repeat=2):
            first, second = await holders(TreeLock(), *alone)
            assert (first.has_it, second.has_it) == (True, not any(alone))
            await first.end()
            assert second.has_it
            await second.end()

    resolve(take_turns())


@promise("S-26")
def test_a_rename_is_not_starved() -> None:
    """Who waits to be alone comes before newcomers."""

    async def come_and_go() -> None:
        lock = TreeLock()
        first, rename, newcomer = await holders(lock, False, True, False)
        assert (first.has_it, rename.has_it, newcomer.has_it) == (True, False, False)
        await first.end()
        assert (rename.has_it, newcomer.has_it) == (True, False)
        await rename.end()
        assert newcomer.has_it
        await newcomer.end()

    resolve(come_and_go())
