"""Requests side by side for a larger piece of work (Core.each)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from datastore.fuse.loop import running
from datastore.fuse.vfs.upload import copies
from datastore.fuse.vfs.upload.delivery import SMALL
from tests.driving import resolve
from tests.mounted import Client, World, pattern
from tests.patience import passed
from tests.promises import promise


def test_the_first_error_is_raised_when_all_have_ended(one: Client) -> None:
    """Nothing of it goes on when who asked for it is told."""
    core, ended = one.fs.core, list[int]()

    async def work(number: int) -> int:
        await core.loop.sleep(0.01 if number == 3 else 0.0)
        ended.append(number)
        if number in fail:
            raise OSError(number, "failed")
        return number

    fail: tuple[int, ...] = ()
    assert resolve(core.each(work, range(7))) == list(range(7))
    ended.clear()
    fail = (3, 5)
    with pytest.raises(OSError, match="failed") as caught:
        resolve(core.each(work, range(7)))
    assert caught.value.errno == 3
    assert sorted(ended) == list(range(7))


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

    assert resolve(core.each(work, range(200))) == list(range(200))
    assert most == 32


@promise("S-26")
def test_large_objects_below_a_renamed_directory(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parts are copied side by side too."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    monkeypatch.setattr(copies, "COPY_MAX", 5 << 20)
    content = bytes(11 << 20)
    world.put("d/large", content)
    world.put("d/small", b"small")
    asked, at_once = 0, threading.Event()
    copy_part = one.faulty.upload_part_copy

    async def noted(*arguments: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            at_once.set()
        await passed(at_once)
        return await copy_part(*arguments, **options)

    monkeypatch.setattr(one.faulty, "upload_part_copy", noted)
    one.local.rename("d", "e")
    assert world.body("e/large") == content
    assert world.body("e/small") == b"small"
    assert asked == 3
