"""Requests side by side for a larger piece of work (Core.each)."""

from __future__ import annotations

import threading

import pytest

from datastore.fuse.vfs.upload import copies
from tests.driving import resolve
from tests.mounted import Client, World
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


def test_a_large_piece_of_work_leaves_lanes_to_others(one: Client) -> None:
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
    """Their parts are copied side by side too, and each is a request of its own."""
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 1000)
    monkeypatch.setattr(copies, "COPY_MAX", 5 << 20)
    content = bytes(11 << 20)
    world.put("d/large", content)
    world.put("d/small", b"small")
    threads: set[str] = set()
    copy_part = one.faulty.upload_part_copy

    def noted(*arguments: object, **options: object) -> object:
        threads.add(threading.current_thread().name)
        both.wait(60)
        return copy_part(*arguments, **options)  # type: ignore[arg-type]

    both = threading.Barrier(3)
    monkeypatch.setattr(one.faulty, "upload_part_copy", noted)
    one.local.rename("d", "e")
    assert world.body("e/large") == content
    assert world.body("e/small") == b"small"
    assert len(threads) == 3
