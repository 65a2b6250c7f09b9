"""Walks of a tree cost requests by the page, and see what others do all the same (S-28, S-105)."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.store.base import ETag, ListedObject, ListPage
from datastore.fuse.vfs.lookup.walks import split
from datastore.fuse.vfs.tree.nodes import Directory
from tests.driving import resolve
from tests.mounted import TTL_S, Client, World
from tests.promises import promise

FOLDERS, FILES = 40, 10
ORDERS = pytest.mark.parametrize("order", [1, -1], ids=["onwards", "backwards"])
Tree = dict[bytes, list[bytes]]


def filled(world: World, *, markers: bool = False) -> Tree:
    """By another tool, long ago."""
    for folder in range(FOLDERS):
        if markers:
            world.put(f"top/d{folder:02}/", b"")
        for file in range(FILES):
            world.put(f"top/d{folder:02}/f{file}", b"x")
    world.later(100)
    return {b"d%02d" % folder: [b"f%d" % file for file in range(FILES)] for folder in range(FOLDERS)}


def walked(client: Client, order: int = 1) -> Tree:
    found = client.local.scandir("top", plus=True)
    folders = [name for name, kind in found if stat.S_ISDIR(kind) and name not in (b".", b"..")][::order]
    tree = {}
    for name in folders:
        inside = client.local.scandir(b"top/" + name, plus=True)
        tree[name] = [each for each, _ in inside if each not in (b".", b"..")]
    return tree


@promise("S-105")
@ORDERS
@pytest.mark.parametrize("markers", [False, True])
def test_a_walk_asks_by_the_page(world: World, one: Client, order: int, markers: bool) -> None:
    """A second walk asks for the same pages again, and for no attributes that are known."""
    tree = filled(world, markers=markers)
    before = one.calls("list_page")
    assert walked(one, order) == tree
    assert one.calls("list_page") - before < 8
    world.later()
    heads, lists = one.calls("head"), one.calls("list_page")
    assert walked(one, order) == tree
    assert one.calls("list_page") - lists < 8
    assert one.calls("head") - heads < 8


@promise("S-105")
@pytest.mark.parametrize("top", ["top/d07", "flat"])
def test_a_walk_tells_the_attributes_again(world: World, one: Client, top: str) -> None:
    """A later walk looks no name up: what confirms a listing confirms what was learned of its files by HEAD."""
    filled(world)
    for number in range(500):
        world.put(f"flat/f{number:04}", b"x")
    world.later(100)
    walked(one)
    count = one.local.told(top)
    assert count >= FILES
    for _ in range(2):
        world.later()
        heads = one.calls("head")
        walked(one)
        assert one.local.told(top) == count
        assert one.calls("head") - heads < 8


@promise("S-105")
def test_the_names_of_a_large_directory_cost_few_heads(world: World, one: Client) -> None:
    """The kernel wants attributes with the first answer, whoever asks; with the next ones if they are used."""
    for number in range(900):
        world.put(f"flat/f{number:04}", b"x")
    world.later(100)
    assert len(one.local.scandir("flat", plus=True)) == 900
    assert one.calls("head") <= 260


@promise("S-28")
@ORDERS
def test_a_walk_sees_what_another_client_did(world: World, one: Client, other: Client, order: int) -> None:
    """New, changed and removed names, whole directories among them."""
    tree = filled(world)
    walked(one, order)
    other.local.write("top/d07/new", b"new")
    other.local.unlink("top/d11/f3")
    other.local.write("top/d20/f0", b"another size")
    other.local.chmod("top/d30", 0o700)
    world.put("top/d99/f", b"")
    for file in range(FILES):
        world.tool.delete(f"top/d25/f{file}")
    world.later(10)
    tree[b"d07"].append(b"new")
    tree[b"d11"].remove(b"f3")
    tree[b"d99"] = [b"f"]
    del tree[b"d25"]
    assert walked(one, order) == tree
    assert one.local.stat("top/d20/f0").size == len(b"another size")
    assert stat.S_IMODE(one.local.stat("top/d30").mode) == 0o700
    assert not one.local.exists("top/d25/f1")


@promise("S-29")
@ORDERS
def test_a_walk_shows_what_was_done_here(world: World, one: Client, order: int) -> None:
    """Also where a page that was asked for before told of the directory."""
    tree = filled(world)
    walked(one, order)
    for later in (0.0, 10.0):
        world.later(later)
        one.local.write(f"top/d05/own{later}", b"own")
        one.local.unlink(f"top/d06/f{int(later) // 10}")
        one.local.rename(f"top/d3{int(later) // 10}", f"top/e{int(later)}")
        tree[b"d05"].append(b"own%.1f" % later)
        tree[b"d06"].remove(b"f%d" % (later // 10))
        tree[b"e%d" % later] = tree.pop(b"d3%d" % (later // 10))
        assert {name: sorted(files) for name, files in walked(one, order).items()} == tree
        world.later(10)
        assert {name: sorted(files) for name, files in walked(one, order).items()} == tree


def slow(monkeypatch: pytest.MonkeyPatch, world: World, client: Client, seconds: float) -> None:
    """A page takes so long, also one that is the same."""
    original = client.store.list_page

    async def taking_time(*arguments: Any, **options: Any) -> ListPage:
        world.clock.advance(seconds)
        return await original(*arguments, **options)

    monkeypatch.setattr(client.store, "list_page", taking_time)


def believed_s(client: Client, path: str) -> float:
    directory = client.fs.core.nodes.by_ino[client.local.stat(path).ino]
    assert isinstance(directory, Directory)
    return client.fs.remote.ttl(directory)


@promise("S-28")
def test_a_large_directory_is_believed_for_as_long_the_second_time(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client
) -> None:
    """Who walks it would otherwise list it again and again."""
    for number in range(1500):
        world.put(f"flat/f{number:05}", b"")
    slow(monkeypatch, world, one, 3.0)
    one.local.listdir("flat")
    first = believed_s(one, "flat")
    assert first >= 12
    world.later(100)
    one.local.listdir("flat")
    assert believed_s(one, "flat") >= first


@promise("S-28")
def test_a_directory_that_was_slow_once_is_not_believed_for_longer_ever_after(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client
) -> None:
    """What others change is seen after `metadataTTL` again."""
    world.put("d/f", b"")
    with monkeypatch.context() as hiccup:
        slow(hiccup, world, one, 5.0)
        one.local.listdir("d")
        assert believed_s(one, "d") >= 10
    world.later(100)
    one.local.listdir("d")
    assert believed_s(one, "d") == TTL_S


@promise("S-105")
def test_a_slow_walk_asks_for_no_more_than_it_can_use(world: World, one: Client) -> None:
    """What would be too old when it is read is not asked for."""
    tree = filled(world)
    one.local.listdir("top")
    for name in tree:
        world.later(0.4)
        one.local.listdir(b"top/" + name)
    node = one.fs.resolver.directory(one.local.stat("top").ino)
    assert node.walk is not None
    assert not node.walk.pages


@given(
    st.sets(st.text("ab/-.", min_size=1, max_size=6), max_size=30), st.integers(1, 30), st.sampled_from(["", "a", "b"])
)
def test_a_page_tells_of_directories_what_their_own_listings_would(keys: set[str], size: int, start: str) -> None:
    """Of those that it tells of at all."""
    there = sorted("p/" + key for key in keys)
    after = [key for key in there if key > "p/" + start]
    objects = [ListedObject(key, 1, ETag("e"), 1) for key in after[:size]]
    page = ListPage(objects, (), "more" if len(after) > size else None)
    for tail, level in split("p/", page).items():
        below = [key for key in there if key.startswith("p/" + tail)]
        if "p/" + tail <= "p/" + start + "/" and tail != start + "/":
            continue  # it begins before the page does
        rest = [key[len("p/" + tail) :] for key in below]
        assert [found.key for found in level.objects] == [k for k, r in zip(below, rest, strict=True) if "/" not in r]
        folders = dict.fromkeys("p/" + tail + r.partition("/")[0] + "/" for r in rest if "/" in r)
        assert list(level.common_prefixes) == list(folders)


@promise("S-28")
def test_who_looks_a_directory_up_at_the_same_time_asks_once(world: World, one: Client) -> None:
    """Sixteen readers of files in it, when its time is over."""
    filled(world)
    node = one.fs.resolver.directory(one.local.stat("top").ino)
    world.later()
    before = one.calls("head")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: resolve(one.fs.resolver.find(one.fs.core.nodes.root, b"top")), range(16)))
    assert found == [node] * 16
    assert one.calls("head") - before == 1
