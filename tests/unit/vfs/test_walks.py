"""Walks of a tree cost requests by the page, and see what others do all the same (S-28, S-105).

What a process will come to is asked for while it waits for what is before that, and believed no longer (S-154).
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.loop import pause
from datastore.fuse.store.base import ETag, ListedObject, ListPage
from datastore.fuse.vfs.lookup.remote import FAR_S, Remote
from datastore.fuse.vfs.lookup.walks import split
from datastore.fuse.vfs.tree.walk import Walk
from tests.driving import beside, resolve
from tests.mounted import TTL_S, Client, World
from tests.promises import promise
from tests.unit.vfs.test_large_directories import PAGE, Pages

FOLDERS, FILES = 40, 10
ORDERS = pytest.mark.parametrize("order", [1, -1], ids=["onwards", "backwards"])
Tree = dict[bytes, list[bytes]]


def filled(world: World, *, markers: bool = False) -> Tree:
    """By another tool, long ago."""
    tree = {b"d%02d" % folder: [b"f%d" % file for file in range(FILES)] for folder in range(FOLDERS)}
    for folder, files in tree.items():
        if markers:
            world.put(f"top/{folder.decode()}/", b"")
        world.put_all(f"top/{folder.decode()}/{file.decode()}" for file in files)
    world.later(100)
    return tree


def walked(client: Client, order: int = 1) -> Tree:
    found = client.local.scandir("top", plus=True)
    folders = [name for name, kind in found if stat.S_ISDIR(kind)][::order]
    return {name: [each for each, _ in client.local.scandir(b"top/" + name, plus=True)] for name in folders}


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
    world.put_all(f"flat/f{number:04}" for number in range(500))
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
    world.put_all(f"flat/f{number:04}" for number in range(900))
    world.later(100)
    assert len(one.local.scandir("flat", plus=True)) == 900
    assert one.calls("head") <= 260


@promise("S-28")
@ORDERS
def test_a_walk_sees_what_another_client_did(world: World, one: Client, other: Client, order: int) -> None:
    """New, changed and removed names, whole directories among them."""
    tree = filled(world)
    walked(one, order)
    before = one.calls("list_page")
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
    assert one.calls("list_page") - before < 12
    assert one.local.stat("top/d20/f0").size == len(b"another size")
    assert stat.S_IMODE(one.local.stat("top/d30").mode) == 0o700
    assert not one.local.exists("top/d25/f1")


@promise("S-105", "S-28")
def test_directories_that_fill_pages_are_listed_by_themselves(world: World, one: Client) -> None:
    """A page that lists no two of them is not asked for again soon, and what is known of them is no newer for it."""
    Pages(one)
    tree = {b"d%d" % folder: [b"f%02d" % file for file in range(PAGE + 2)] for folder in range(8)}
    world.put_all(f"top/{folder.decode()}/{file.decode()}" for folder, files in tree.items() for file in files)
    world.later(100)
    for _ in range(2):
        before = one.calls("list_page")
        assert walked(one) == tree
        assert one.calls("list_page") - before < 2 * len(tree) + 6
        world.put("top/d2/f", b"")
        tree[b"d2"] = sorted({b"f", *tree[b"d2"]})
        world.later(100)


@promise("S-29")
def test_a_page_that_is_older_than_what_a_writer_was_told(
    monkeypatch: pytest.MonkeyPatch, world: World, other: Client
) -> None:
    """An open for writing asks for the file itself while the page of its directory is under way (S-161)."""
    filled(world)
    one = world.client(attributes="listing")
    one.local.stat("top/d05/f0")
    one.local.listdir("top")
    world.later()

    def write() -> None:
        other.local.write("top/d05/f0", b"another size")
        with one.local.opened("top/d05/f0", os.O_WRONLY):
            pass

    original = one.store.list_page

    async def page(*arguments: Any, **options: Any) -> ListPage:
        answer = await original(*arguments, **options)
        if "unless" in options and "delimiter" not in options and written == [False]:
            written[0] = True
            await beside(write)
        return answer

    written = [False]
    monkeypatch.setattr(one.store, "list_page", page)
    for folder in ("d00", "d01", "d02", "d03"):
        one.local.listdir(f"top/{folder}")
    assert written == [True]
    assert one.local.stat("top/d05/f0").size == len(b"another size")


@promise("S-28")
def test_a_page_without_a_digest_confirms_nothing(monkeypatch: pytest.MonkeyPatch, world: World, one: Client) -> None:
    tree = filled(world)
    original = one.store.list_page

    async def plain(*arguments: Any, **options: Any) -> ListPage:
        return (await original(*arguments, **options | {"unless": b""}))._replace(digest=b"")

    monkeypatch.setattr(one.store, "list_page", plain)
    for _ in range(2):
        assert walked(one) == tree
        world.put("top/d07/new", b"new")
        tree[b"d07"] = [*(b"f%d" % file for file in range(FILES)), b"new"]
        world.later(10)


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
        for wait_s in (0, 10):
            world.later(wait_s)
            assert {name: sorted(files) for name, files in walked(one, order).items()} == tree


def believed_s(client: Client, path: str) -> float:
    return client.fs.remote.ttl(client.folder(path))


@promise("S-28")
@pytest.mark.parametrize("large", [True, False])
def test_a_slow_listing_is_believed_longer(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client, large: bool
) -> None:
    """Who walks a large directory would else list it again and again; of another others' changes are seen as before."""
    world.put_all((f"d/f{number:05}" for number in range(1500 if large else 1)), b"")
    original = one.store.list_page

    async def slow(*arguments: Any, **options: Any) -> ListPage:
        world.clock.advance(seconds)  # also where the page is the same
        return await original(*arguments, **options)

    monkeypatch.setattr(one.store, "list_page", slow)
    seconds = 3.0 if large else 5.0
    one.local.listdir("d")
    first = believed_s(one, "d")
    assert first >= (12 if large else 10)
    if not large:
        seconds = 0.0
    world.later(100)
    one.local.listdir("d")
    assert believed_s(one, "d") >= first if large else believed_s(one, "d") == TTL_S


@promise("S-105")
def test_a_slow_walk_asks_for_no_more_than_it_can_use(world: World, one: Client) -> None:
    """What would be too old when it is read is not asked for."""
    tree = filled(world)
    one.local.listdir("top")
    for name in tree:
        world.later(0.4)
        one.local.listdir(b"top/" + name)
    node = one.folder("top")
    assert node.walk is not None
    assert not node.walk.pages


KEYS = st.builds(str.__add__, st.sampled_from(["a", "b", "a-", "b."]), st.sampled_from(["", "/", "/a", "/b/", "/b/a"]))


@given(st.sets(KEYS, max_size=20), st.integers(1, 20), st.sampled_from(["", "a", "b"]))
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
    node = one.folder("top")
    world.later()
    before = one.calls("head", "list_page")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: resolve(one.fs.resolver.find(one.fs.core.nodes.root, b"top")), range(16)))
    assert found == [node] * 16
    assert one.calls("head", "list_page") - before == 1


@promise("S-105", "S-28")
def test_a_directory_that_goes_while_a_walk_comes_to_it(world: World, one: Client) -> None:
    """Another thread found it gone, and the walk counts without it."""
    world.put_all(f"{folder}/f" for folder in "abcdef")
    root, walk = one.fs.core.nodes.root, Walk()
    one.local.listdir()
    for at, folder in enumerate("abc"):
        walk.follow(root, f"{folder}/", at / 100, TTL_S)
    world.tool.delete("d/f")
    world.later()
    one.local.listdir()
    walk.follow(root, "e/", 0.04, TTL_S)
    assert walk.starts("d/") == []
    assert walk.starts("e/")


LEVELS = 12
DEEP = "/".join(f"l{level:02}" for level in range(LEVELS))
MANY = 200
TWO_PAGES = 1500


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the store answers."""
    monkeypatch.setattr(Remote, "is_far", True)


@promise("S-154")
def test_one_slow_listing_does_not_make_the_store_far(one: Client) -> None:
    """It may have been tried again; and one fast one says that the store is near."""
    remote, told = Remote(one.fs.core), []
    for took_s in (10 * FAR_S, FAR_S, 0.1 * FAR_S, FAR_S, FAR_S, FAR_S, FAR_S):
        remote.took_s.append(took_s)
        told.append(remote.is_far)
    assert told == [False, True, False, False, False, False, True]


@promise("S-154")
def test_all_names_of_a_known_path_are_asked_about_at_once(
    world: World, one: Client, far: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request after the other would be one round trip for each name of a path."""
    world.put(f"{DEEP}/f", b"x")
    world.later(100)
    assert one.local.stat(f"{DEEP}/f").size == 1
    one.quiet()
    original, now, most = one.store.list_page, 0, 0

    async def counted(prefix: str, **options: Any) -> ListPage:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await pause(0.1)
        now -= 1
        return await original(prefix, **options)

    monkeypatch.setattr(one.store, "list_page", counted)
    for _ in range(2):
        world.later()
        most, before = 0, one.calls("head", "list_page")
        assert one.local.stat(f"{DEEP}/f").size == 1
        assert most > LEVELS // 2
        assert one.calls("head", "list_page") - before <= LEVELS + 2, "each is asked about once, and the last is listed"


@promise("S-154", "S-28")
@pytest.mark.parametrize("marker", [False, True])
def test_what_others_changed_on_a_known_path_is_seen(world: World, one: Client, far: None, marker: bool) -> None:
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
def test_a_directory_that_is_looked_up_is_listed_ahead_once(
    world: World, one: Client, far: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.put_all(f"top/flat/f{number:05}" for number in range(2500))
    world.later(100)
    asked: list[str] = []
    original = one.store.list_page

    async def told(prefix: str, **options: Any) -> ListPage:
        asked.extend([prefix] if "delimiter" in options else [])
        return await original(prefix, **options)

    monkeypatch.setattr(one.store, "list_page", told)
    assert one.local.exists("top/flat")
    one.quiet()
    assert asked.count("top/flat/") == 3
    assert len(one.local.listdir("top/flat")) == 2500
    assert asked.count("top/flat/") == 3
    world.later()
    assert one.local.exists("top/flat")
    one.quiet()
    assert asked.count("top/flat/") == 3, "its pages are known, and compared when it is read"


def walk(client: Client) -> int:
    return sum(len(client.local.scandir(f"top/d{folder:03}", plus=True)) for folder in range(MANY))


@promise("S-154", "S-105")
def test_a_walk_has_attributes_and_pages_asked_for_ahead(world: World, one: Client) -> None:
    """Each of them is asked for once."""
    world.put_all(f"top/d{folder:03}/f{file}" for folder in range(MANY) for file in range(FILES))
    world.later(100)
    one.local.scandir("top", plus=True)
    before = one.calls("head"), one.calls("list_page")
    assert walk(one) == MANY * FILES
    one.quiet()
    heads, pages = one.calls("head") - before[0], one.calls("list_page") - before[1]
    assert MANY * FILES <= heads <= MANY * (FILES + 1) + 8
    assert pages <= 8
    world.put("top/d150/f0", b"another")
    world.later()
    assert walk(one) == MANY * FILES
    assert one.local.stat("top/d150/f0").size == len(b"another")


@promise("S-154")
def test_a_directory_that_many_look_up_is_listed_once(world: World, one: Client) -> None:
    """Each of them has it listed ahead, and the first that comes to it does it for all."""
    world.put("d/f")
    node = one.folder("d")
    before = one.calls("list_page")
    for _ in range(3):
        resolve(one.fs.resolver._descent._list(node))
    assert one.calls("list_page") == before + 1
