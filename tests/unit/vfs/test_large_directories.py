"""Directories of many pages: what was listed once is compared by the page, and read where it differs (S-155, S-156)."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastore.fuse.store.base import ListPage
from datastore.fuse.vfs.lookup.remote import FIRST_PAGES
from datastore.fuse.vfs.tree.listing import listing_of
from datastore.fuse.vfs.tree.names import BESIDE_DIRECTORY
from tests.mounted import TTL_S, Client, World
from tests.mounted import world as opened
from tests.promises import promise

PAGE = 10
PAGES = 20
NAMES = [b"f%03d" % number for number in range(PAGE * PAGES)]


class Pages:
    """Makes a store's pages small, each takes a moment; counts those of `d/`, and of these the ones that were new."""

    def __init__(self, client: Client, keys: int = PAGE) -> None:
        self._world = client.world
        self.asked = self.read = 0
        self._original = client.store.list_page
        self._keys = keys
        client.store.list_page = self._page  # type: ignore[method-assign]

    async def _page(self, prefix: str, *, max_keys: int = 1000, **options: Any) -> ListPage:
        page = await self._original(prefix, max_keys=min(max_keys, self._keys), **options)
        self._world.clock.advance(0.001)
        if prefix == "d/" and max_keys > 1:
            self.asked += 1
            self.read += bool(page.objects or page.common_prefixes)
        return page

    def since(self) -> tuple[int, int]:
        """Pages asked for, and those that were read, since this was called last."""
        found = self.asked, self.read
        self.asked = self.read = 0
        return found


@pytest.fixture
def pages(world: World, one: Client) -> Pages:
    """A large directory `d`, old and listed."""
    world.put_all(f"d/{os.fsdecode(name)}" for name in NAMES)
    world.later(100)
    pages = Pages(one)
    assert one.local.listdir("d") == NAMES
    pages.since()
    return pages


@promise("S-156")
def test_who_looks_all_names_up_lists_no_page_twice_in_its_time(world: World, one: Client, pages: Pages) -> None:
    """Names first, then each one's attributes: `ls -l`, rsync, `du`; a HEAD each, and the next time none of them."""
    before = 0
    for heads in (len(NAMES) + 5 * PAGES, 5 * PAGES):
        for name in NAMES:
            one.local.stat(b"d/" + name)
            world.later(TTL_S / 20)
        # Two times to live go by while a page is looked through.
        asked, read = pages.since()
        assert asked <= PAGES * 3
        assert read <= PAGES
        assert one.calls("head") - before <= heads
        before = one.calls("head")


@promise("S-156")
def test_a_page_proves_that_nothing_else_is_there(world: World, one: Client, pages: Pages) -> None:
    """Also of names that do not exist; another client's are seen when its time is over."""
    for number in range(100):
        assert not one.local.exists(f"d/f1000{number}")
        world.later(TTL_S / 20)
    asked, _ = pages.since()
    assert asked <= 12
    world.put("d/f100050", b"x")
    world.later(TTL_S)
    assert one.local.exists("d/f100050")


@promise("S-152", "S-156", "S-28")
@pytest.mark.parametrize("folders", [1, 20])
def test_a_shuffled_loader_reads_by_one_request_a_file(world: World, one: Client, folders: int) -> None:
    """The request that brings a file also says that it is still there, be it in a large directory or in one of many.

    What is held already costs a HEAD.
    """
    names = [f"{number % folders}/f{number:04}" for number in range(6000)]
    world.put_all([*(f"{number}/" for number in range(folders)), *names])
    world.later(100)
    Pages(one, 300)
    for number in range(folders):
        one.local.listdir(str(number))
    loaded = random.Random(3).sample(names, 300)
    own = 75 if folders == 1 else 300  # for the attributes of the directories, once in each time to live
    ahead = 0 if folders == 1 else 600  # of small directories, as some files fall into their order by chance
    for gets, heads in ((300 + ahead, own + 12), (ahead, own + 300)):
        before = [one.calls("get"), one.calls("head"), one.calls("list_page")]
        for name in loaded:
            assert one.local.read(name) == b"x"
            world.later(TTL_S / 4)
        after = [one.calls("get"), one.calls("head"), one.calls("list_page")]
        got, asked, listed = (now - then for then, now in zip(before, after, strict=True))
        assert got <= gets
        assert asked <= heads
        assert listed <= 60
    new, gone, hidden = loaded[:3]
    world.put(new, b"other")
    world.tool.delete(gone)
    world.put(f"{hidden}/x", b"below")
    world.later()
    assert one.local.read(new) == b"other"
    assert not one.local.exists(gone)
    one.local.listdir(os.path.dirname(hidden))
    assert stat.S_ISDIR(one.local.stat(hidden).mode)


@promise("S-156")
def test_a_single_name_costs_no_page(world: World, one: Client, pages: Pages) -> None:
    """Who looks at one name of a page now and then asks for that alone; the first time also for the first pages."""
    for name in NAMES[::PAGE]:
        world.later(10)
        one.local.stat(b"d/" + name)
    assert pages.since() == (0, 0)
    assert one.calls("head") <= 3 * PAGES + 1
    new = world.client()
    first = Pages(new)
    new.local.stat("d/f105")
    assert first.since() == (FIRST_PAGES, FIRST_PAGES)


@promise("S-155", "S-28")
@pytest.mark.parametrize(
    ("change", "names", "asked", "read"),
    [
        (lambda w: w.put("d/f105", b"other"), [], PAGES, 1),
        (lambda w: w.put("d/g", b""), [b"g"], PAGES + 1, 2),
        (lambda w: w.put("d/f1055", b""), [b"f1055"], PAGES + 7, 11),
        (lambda w: w.tool.delete("d/f105"), [b"f105"], PAGES + 7, 10),
    ],
    ids=["replaced", "appended", "inserted", "removed"],
)
def test_what_another_client_changed_is_read(
    world: World, one: Client, pages: Pages, change: Callable[[World], None], names: list[bytes], asked: int, read: int
) -> None:
    """A new version and the end are one page; elsewhere those behind it begin at other keys by then."""
    change(world)
    world.later()
    there = sorted({*NAMES} ^ {*names})
    assert one.local.listdir("d") == there
    if names != [b"f105"]:
        assert one.local.stat("d/f105").size == len(world.body("d/f105"))
    counted = pages.since()
    assert counted[0] <= asked
    assert counted[1] <= read
    world.later()
    assert one.local.listdir("d") == there
    assert pages.since() == (PAGES + (len(there) > len(NAMES)), 0)


@promise("S-155", "S-28")
def test_what_was_made_here_and_removed_elsewhere_is_not_shown(world: World, one: Client, pages: Pages) -> None:
    """The store shows the page that it showed before the file was made, whoever asks for it."""
    one.local.write("d/f1055", b"x")
    world.tool.delete("d/f1055")
    for _ in range(5):
        world.later(0.4)
        one.local.stat("d/f104")
        one.local.stat("d/f106")
    assert not one.local.exists("d/f1055")
    assert one.local.listdir("d") == NAMES


@promise("S-156", "S-28", "S-37")
def test_a_name_with_keys_in_several_pages(world: World, one: Client, pages: Pages) -> None:
    """A listing shows whether a file is one, though another page tells that something is below its name."""
    world.put_all(f"d/f100-{number:02}" for number in range(2 * PAGE))
    world.later(100)
    one.local.listdir("d")
    for there in (True, False):
        one.local.stat("d/f100")
        if there:
            world.put("d/f100/x", b"x")
        else:
            world.tool.delete("d/f100/x")
        for _ in range(3):
            world.later(TTL_S * 0.6)
            one.local.stat("d/f099")
            one.local.stat("d/f100-01")
        one.local.listdir("d")
        assert stat.S_ISDIR(one.local.stat("d/f100").mode) == there


@promise("S-155")
def test_keys_in_another_order_are_read_each_time(world: World, one: Client, pages: Pages) -> None:
    """Where pages do not follow each other by their keys none of them proves anything."""
    node = one.folder("d")
    original = one.store.list_page

    async def shuffled(prefix: str, **options: Any) -> ListPage:
        page = await original(prefix, **options)
        return page._replace(objects=[f._replace(key=f"d/{f.key[::-1]}".replace("/d", "")) for f in page.objects])

    one.store.list_page = shuffled  # type: ignore[method-assign]
    node.forget_listing()
    one.local.listdir("d")
    assert node.listing is not None
    assert node.listing.spans == []


@promise("S-155", "S-11")
def test_a_directorys_own_attributes_come_with_an_unchanged_page(world: World, one: Client) -> None:
    """Its marker is on the first page, and another page differs."""
    world.put("d/", b"", mode=str(stat.S_IFDIR | 0o750))
    world.put_all(f"d/{os.fsdecode(name)}" for name in NAMES)
    world.later(100)
    Pages(one)
    one.local.listdir("d")
    world.put("d/g")
    world.later()
    assert b"g" in one.local.listdir("d")
    assert stat.S_IMODE(one.local.stat("d").mode) == 0o750


TAILS = [base + end for base in ("a", "b", "c", "d", "e") for end in ("", "!", "-x", ".rclonelink", "/", "/x", "0")]

OWN = ("write", "unlink", "mkdir", "symlink")


@promise("S-155", "S-156", "S-28", "S-29", "S-37")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_shows_what_the_bucket_has(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A directory of pages of two keys, so that a name's keys are in several."""
    root: Path = tmp_path_factory.mktemp("large")
    with opened(root) as world:
        one = world.client()
        Pages(one, 2)
        for tail in data.draw(st.sets(st.sampled_from(TAILS), min_size=8)):
            world.put(f"p/{tail}", b"" if tail.endswith("/") else b"1")
        world.put("p/zz", b"")
        world.later(100)
        for step in range(data.draw(st.integers(1, 12))):
            act = data.draw(st.sampled_from(["put", "delete", "look", "list", "wait", *OWN]))
            tail = data.draw(st.sampled_from(TAILS))
            if act == "put":
                world.put(f"p/{tail}", b"" if tail.endswith("/") else b"x" * (step + 2))
            elif act == "delete":
                world.tool.delete(f"p/{tail}")
            elif act in OWN:
                act_here(one, tail, act)
            elif act == "look":
                for each in TAILS[:: data.draw(st.integers(1, 9))]:
                    one.local.exists("p/" + each.partition("/")[0])
            elif act == "list":
                one.local.listdir("p")
            world.later(data.draw(st.sampled_from([0.0, 0.3, 1.1])))
        world.later(TTL_S + 0.01)
        check(world, one, data.draw(st.booleans()))


def act_here(one: Client, tail: str, how: str) -> None:
    """Make, replace or remove what has a name; what stands in the way is none of this test's business."""
    path = "p/" + tail.partition("/")[0].removesuffix(".rclonelink")
    with suppress(FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
        if how == "write":
            one.local.write(path, b"own")
        elif how == "symlink":
            one.local.symlink(b"t", path)
        else:
            getattr(one.local, how)(path)


def check(world: World, one: Client, names_first: bool) -> None:
    """Names, kinds and sizes are those that a listing of the whole bucket shows."""
    page = world.tool.list_page("p/", delimiter="/")
    expected = listing_of("p/", [page], 0.0).entries
    # Only a listing shows that another client has put something below the name of a known file.
    if names_first or any(name.endswith(BESIDE_DIRECTORY) for name in expected):
        assert one.local.listdir("p") == sorted(expected)
    for base in "abcde":
        for end in ("", "!", "-x", ".rclonelink", "0"):
            name = (base + end).encode()
            assert one.local.exists(b"p/" + name) == (name in expected), name
    for name, listed in expected.items():
        attr = one.local.stat(b"p/" + name)
        assert stat.S_ISDIR(attr.mode) == (listed.kind == stat.S_IFDIR), name
        # What a link's object is shown as depends on its metadata as well (S-08).
        assert stat.S_ISDIR(attr.mode) or stat.S_ISLNK(attr.mode) or attr.size == listed.size, name
    assert one.local.listdir("p") == sorted(expected)
