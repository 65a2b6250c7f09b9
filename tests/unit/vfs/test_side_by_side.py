"""Requests side by side for a larger piece of work (Core.each), and the lock of uploads and renames of directories."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from datastore.fuse.data.multipart import PARTS_MAX
from datastore.fuse.loop import Future, each, running
from datastore.fuse.vfs.tree.core import TreeLock
from datastore.fuse.vfs.upload import copies
from datastore.fuse.vfs.upload.delivery import SMALL
from tests.driving import resolve, the_loop
from tests.mounted import Client, World, pattern
from tests.patience import passed
from tests.promises import promise


@pytest.mark.parametrize(
    ("size", "method", "on_loop"), [(SMALL, "put", True), (SMALL + 1, "put", False), (9 << 20, "upload_part", False)]
)
def test_only_small_bodies_are_sent_on_the_loop(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, size: int, method: str, on_loop: bool
) -> None:
    send, seen = getattr(one.faulty, method), set[bool]()

    async def noted(*arguments: Any, **options: Any) -> Any:
        seen.add(running() is not None)
        return await send(*arguments, **options)

    monkeypatch.setattr(one.faulty, method, noted)
    one.local.write("f", pattern(size))
    assert world.body("f") == pattern(size)
    assert seen == {on_loop}


def test_a_large_piece_of_work_leaves_connections_to_others(one: Client) -> None:
    """A rename of a directory with many objects, say."""
    core, at_once, most = one.fs.core, 0, 0

    async def work(number: int) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await core.loop.sleep(0.001)
        at_once -= 1
        return number

    assert resolve(each(work, range(200))) == list(range(200))
    assert most == 32


@promise("S-26")
@pytest.mark.parametrize(("parts_max", "parts"), [(PARTS_MAX, 3), (2, 2)])
def test_large_objects_below_a_renamed_directory_are_copied_by_parts(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, parts_max: int, parts: int
) -> None:
    """What CopyObject does not take is copied part by part, side by side, with its metadata; in no more than it may."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    monkeypatch.setattr(copies, "COPY_MAX", 5 << 20)
    monkeypatch.setattr(copies, "PARTS_MAX", parts_max)
    content = pattern(11 << 20)
    world.put("d/large", content, mode=str(0o100600), origin="camera")
    world.put("d/small", b"small")
    asked, at_once = 0, threading.Event()
    copy_part = one.faulty.upload_part_copy

    async def noted(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == parts:
            at_once.set()
        await passed(at_once)
        return await copy_part(*arguments, **options)

    monkeypatch.setattr(one.faulty, "upload_part_copy", noted)
    one.local.rename("d", "e")
    assert world.contents() == {"e/large": content, "e/small": b"small"}
    assert world.metadata("e/large")["origin"] == "camera"
    assert (asked, one.sent_bytes()) == (parts, 0)


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
def test_a_directory_rename_excludes_uploads_which_run_side_by_side() -> None:
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
