"""The store is asked, and while its answer travels this mount changes the name itself: the answer is too old then."""

from __future__ import annotations

import os

import pytest

from datastore.fuse.vfs.tree.listing import listing_of
from datastore.fuse.vfs.tree.nodes import Directory, Node
from tests.driving import resolve
from tests.mounted import Client, World, around
from tests.promises import promise

BOTH_LISTINGS = True


def node_of(client: Client, path: str) -> Node:
    return client.fs.core.nodes.by_ino[client.local.stat(path).ino]


def list_beside(world: World, client: Client, path: str) -> None:
    """A walk of the tree above tells of the directory, now."""
    directory = node_of(client, path)
    assert isinstance(directory, Directory)
    page = world.tool.list_page(directory.key, delimiter="/")
    world.clock.advance(0.001)
    client.fs.remote.install(directory, listing_of(directory.key, [page], world.clock.monotonic()))


@promise("S-23")
def test_attributes_of_the_version_before_ours(monkeypatch: pytest.MonkeyPatch, world: World, one: Client) -> None:
    """Who has the file open keeps its name, and its removal removes it."""
    one.local.write("f", b"first")
    file = one.local.open("f", os.O_RDWR)
    node = node_of(one, "f")

    def send_another() -> None:
        file.write(b"second")
        file.fsync()

    around(monkeypatch, one, "head", lambda: None, send_another)
    assert resolve(one.fs.remote.head(node))
    assert not node.gone
    one.local.unlink("f")
    file.write(b"third")
    file.close()
    assert world.all_keys() == []


@promise("S-23")
@pytest.mark.parametrize("listing", [False, True])
def test_a_removal_that_is_seen_before_it_is_done(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client, listing: bool
) -> None:
    """The file that is still open does not come back with its next close."""
    one.local.write("f", b"first")
    file = one.local.open("f", os.O_RDWR)
    node = node_of(one, "f")

    def look() -> None:
        if listing:
            resolve(one.fs.remote.read_directory(one.fs.core.nodes.root, whole=True))
        else:
            assert not resolve(one.fs.remote.head(node))

    around(monkeypatch, one, "delete", lambda: None, look)
    one.local.unlink("f")
    assert file.read() == b"first"
    file.write(b"second")
    file.close()
    assert world.all_keys() == []
    assert not one.local.exists("f")


@promise("S-28")
def test_a_listing_that_began_before_one_that_is_here(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client
) -> None:
    """What was made in between is there."""
    one.local.mkdir("d")
    one.local.write("d/there", b"")
    world.later()

    def make() -> None:
        world.clock.advance(0.001)
        one.local.write("d/f", b"ours")
        list_beside(world, one, "d")

    around(monkeypatch, one, "list_page", lambda: None, make)
    directory = node_of(one, "d")
    assert isinstance(directory, Directory)
    resolve(one.fs.remote.read_directory(directory, whole=True))
    assert not one.fs.core.nodes.by_ino[one.local.stat("d/f").ino].lost
    assert b"f" in directory.children
    assert one.local.listdir("d") == [b"f", b"there"]


@promise("S-28")
def test_a_name_that_was_made_while_it_was_looked_up(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client
) -> None:
    """Also when a listing of the directory has come since."""
    one.ask_one_by_one()

    def make() -> None:
        world.clock.advance(0.001)
        one.local.write("f", b"ours")
        list_beside(world, one, "")

    around(monkeypatch, one, "head", lambda: None, make)
    assert one.local.lookup("f").size == 4
