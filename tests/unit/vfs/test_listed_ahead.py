"""Directories that are listed before anybody asks for that (S-154): what it takes of the mount's threads and memory."""

from __future__ import annotations

from datastore.fuse.vfs.tree.nodes import Directory
from datastore.fuse.vfs.tree.walk import Walk
from tests.driving import resolve
from tests.mounted import TTL_S, Client, World
from tests.promises import promise

TWO_PAGES = 1500


def directory(client: Client, path: str) -> Directory:
    """The node of a directory."""
    found = client.fs.core.nodes.by_ino[client.local.stat(path).ino]
    assert isinstance(found, Directory)
    return found


@promise("S-105", "S-28")
def test_a_directory_that_goes_while_a_walk_comes_to_it(world: World, one: Client) -> None:
    """Another thread found it gone, and the walk counts without it."""
    for folder in "abcdef":
        world.put(f"{folder}/f")
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


def test_first_pages_that_are_too_old_are_let_go_of(world: World, one: Client) -> None:
    """What was begun and not used is no more than what can still be used."""
    for folder in ("a", "b"):
        for number in range(TWO_PAGES):
            world.put(f"{folder}/{number:04}")
    for folder in ("a", "b"):
        resolve(one.fs.remote.begin(directory(one, folder)))
        world.later()
    assert list(one.fs.remote._begun) == [directory(one, "b").ino]


@promise("S-154")
def test_a_directory_that_many_look_up_is_listed_once(world: World, one: Client) -> None:
    """Each of them has it listed ahead, and the first that comes to it does it for all."""
    world.put("d/f")
    node = directory(one, "d")
    before = one.calls("list_page")
    for _ in range(3):
        resolve(one.fs.resolver._descent._list(node))
    assert one.calls("list_page") == before + 1


@promise("S-28")
def test_a_first_page_that_is_too_old_is_not_shown(world: World) -> None:
    """What was listed ahead counts from the moment at which it was asked for."""
    for number in range(TWO_PAGES):
        world.put(f"d/{number:04}")
    world.clock.advance(50)
    for passed_s, is_believed in ((TTL_S / 2, True), (TTL_S, False)):
        client = world.client()
        resolve(client.fs.remote.begin(directory(client, "d")))
        world.put(f"d/0000-{passed_s}")
        world.clock.advance(passed_s)
        assert (f"0000-{passed_s}".encode() not in client.local.listdir("d")) is is_believed
