"""What a process will come to is asked for while it waits for what is before that, and believed no longer (S-154)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from datastore.fuse.loop import pause
from datastore.fuse.store.base import ListPage
from datastore.fuse.vfs.tree.distance import FAR_S, Distance
from tests.mounted import Client, World
from tests.promises import promise

LEVELS = 12
DEEP = "/".join(f"l{level:02}" for level in range(LEVELS))
FOLDERS, FILES = 40, 10


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the store answers."""
    monkeypatch.setattr(Distance, "is_far", True)


def slowest(client: Client, monkeypatch: pytest.MonkeyPatch, method: str) -> Callable[[], int]:
    """How many calls of a method were under way at once."""
    original = getattr(client.store, method)
    now, most = 0, 0

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await pause(0.1)
        try:
            return await original(*arguments, **options)
        finally:
            now -= 1

    monkeypatch.setattr(client.store, method, counted)
    return lambda: most


@promise("S-154")
def test_one_slow_listing_is_no_distance() -> None:
    """It may have been tried again; and one fast one says that the store is near."""
    distance = Distance()
    told = []
    for took_s in (10 * FAR_S, FAR_S, 0.1 * FAR_S, FAR_S, FAR_S, FAR_S, FAR_S):
        distance.listed(took_s)
        told.append(distance.is_far)
    assert told == [False, True, False, False, False, False, True]


@promise("S-154")
def test_a_way_that_was_gone_before_is_asked_about_at_once(
    world: World, one: Client, far: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request after the other would be one round trip for each name of a path."""
    world.put(f"{DEEP}/f", b"x")
    world.later(100)
    assert one.local.stat(f"{DEEP}/f").size == 1
    one.quiet()
    world.later()
    most = slowest(one, monkeypatch, "head")
    assert one.local.stat(f"{DEEP}/f").size == 1
    assert most() > LEVELS // 2


@promise("S-154", "S-28")
@pytest.mark.parametrize("marker", [False, True])
def test_what_others_did_on_such_a_way_is_seen(world: World, one: Client, far: None, marker: bool) -> None:
    if marker:
        world.put(f"{DEEP}/", b"")
    world.put(f"{DEEP}/f", b"x")
    world.put("l00/l01/other/f", b"x")
    world.later(100)
    assert one.local.exists(f"{DEEP}/f")
    one.quiet()
    world.put(f"{DEEP}/f", b"another")
    world.later()
    assert one.local.stat(f"{DEEP}/f").size == len(b"another")
    one.quiet()
    for key in [key for key in world.all_keys() if key.startswith("l00/l01/l02/")]:
        world.tool.delete(key)
    world.later()
    assert not one.local.exists(f"{DEEP}/f")
    assert not one.local.exists("l00/l01/l02")
    assert one.local.exists("l00/l01/other/f")


@promise("S-154")
def test_the_first_page_of_a_large_directory_is_asked_for_once(
    world: World, one: Client, far: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what its listing begins with."""
    for number in range(2500):
        world.put(f"top/flat/f{number:05}", b"")
    world.later(100)
    asked: list[str] = []
    original = one.store.list_page

    async def told(prefix: str, **options: Any) -> ListPage:
        asked.append(prefix)
        return await original(prefix, **options)

    monkeypatch.setattr(one.store, "list_page", told)
    assert one.local.exists("top/flat")
    one.quiet()
    assert asked.count("top/flat/") == 1
    assert len(one.local.listdir("top/flat")) == 2500
    assert asked.count("top/flat/") == 3


def walk(client: Client) -> int:
    return sum(len(client.local.scandir(f"top/d{folder:03}", plus=True)) for folder in range(FOLDERS * 5))


@promise("S-154", "S-105")
def test_a_walk_has_attributes_and_pages_asked_for_ahead(world: World, one: Client) -> None:
    """Each of them is asked for once."""
    for folder in range(FOLDERS * 5):
        for file in range(FILES):
            world.put(f"top/d{folder:03}/f{file}", b"x")
    world.later(100)
    one.local.scandir("top", plus=True)
    before = one.calls("head"), one.calls("list_page")
    assert walk(one) == FOLDERS * 5 * FILES
    one.quiet()
    heads, pages = one.calls("head") - before[0], one.calls("list_page") - before[1]
    assert FOLDERS * 5 * FILES <= heads <= FOLDERS * 5 * (FILES + 1) + 8
    assert pages <= 8
    world.put("top/d150/f0", b"another")
    world.later()
    assert walk(one) == FOLDERS * 5 * FILES
    assert one.local.stat("top/d150/f0").size == len(b"another")
