"""What a request of one thread must not undo when another thread changes a name meanwhile; each race made to happen."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from datastore.fuse.loop import now
from datastore.fuse.vfs.tree.nodes import Directory
from tests.driving import beside, resolve
from tests.mounted import Client, around
from tests.patience import PATIENCE_S
from tests.promises import promise

BOTH_LISTINGS = True


def directory(client: Client, path: str) -> Directory:
    """The node of a directory."""
    node = client.fs.core.nodes.by_ino[client.local.stat(path).ino]
    assert isinstance(node, Directory)
    return node


@promise("S-29")
def test_a_listing_while_the_directory_is_away(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """Renamed and renamed back: what was listed in between is not the directory."""
    one.local.mkdir("a")
    one.local.write("a/f", b"x")
    node = directory(one, "a")
    one.world.clock.advance(0.01)
    node.listing = None
    around(
        monkeypatch,
        one,
        "list_page",
        lambda: one.local.rename("a", "b"),
        lambda: one.local.rename("b", "a"),
    )
    resolve(one.fs.resolver.read_directory(node))
    assert one.local.listdir("a") == [b"f"]
    assert one.local.read("a/f") == b"x"


@promise("S-29")
def test_an_answer_for_a_directory_that_was_away(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """The same with its HEAD and the look below it."""
    one.local.mkdir("a")
    one.local.write("a/f", b"x")
    node = directory(one, "a")
    around(monkeypatch, one, "head", lambda: one.local.rename("a", "b"), lambda: one.local.rename("b", "a"))
    assert resolve(one.fs.remote.head(node))
    assert not node.gone
    one.fs.core.nodes.root.forget_listing()
    around(monkeypatch, one, "list_page", lambda: one.local.rename("a", "b"), lambda: None)
    around(monkeypatch, one, "head", lambda: now(one.store.delete("a/")), lambda: None)
    assert resolve(one.fs.remote.head(node))
    assert not node.gone
    assert one.local.listdir("b") == [b"f"]


@promise("S-29")
def test_a_name_is_made_while_it_is_looked_up(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """'there is nothing' is no news about what was made after it was said."""
    root = one.fs.core.nodes.root
    original = one.fs.resolver.read_directory
    calls = iter((True,))

    def make() -> None:
        one.local.mkdir("d")
        one.local.write("d/f", b"x")

    async def read(node: Directory, **options: Any) -> Any:
        listing = await original(node, **options)
        entries = dict(listing.entries)
        if next(calls, False):
            await beside(make)
            # What the thread saw is what was there when it looked.
            monkeypatch.setattr(listing, "entries", entries, raising=True)
            root.listing = None
        return listing

    monkeypatch.setattr(one.fs.resolver, "read_directory", read)
    resolve(one.fs.resolver.find(root, b"d"))
    monkeypatch.undo()
    assert not directory(one, "d").gone
    assert one.local.listdir("d") == [b"f"]


@promise("S-29")
def test_an_old_name_is_made_anew_at_once(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """A listing that began during a rename does not bring the old name back."""
    one.local.write("f", b"x")
    one.world.clock.advance(0.01)
    root = one.fs.core.nodes.root
    ended: list[bool] = []

    def list_it() -> None:
        # Between the new name and the removal of the old one.
        root.listing = None
        around(monkeypatch, one, "list_page", lambda: None, release)
        resolve(one.fs.resolver.read_directory(root))

    def release() -> None:
        ended.append(True)
        go.set()
        done.wait(PATIENCE_S)

    go, done = threading.Event(), threading.Event()
    lister = threading.Thread(target=list_it)

    def begin() -> None:
        one.world.clock.advance(0.01)
        lister.start()
        go.wait(PATIENCE_S)

    around(monkeypatch, one, "delete", begin, done.set)
    one.local.rename("f", "g")
    lister.join(PATIENCE_S)
    assert ended
    assert one.local.listdir() == [b"g"]
    assert not one.local.exists("f")


@promise("S-29")
def test_what_stood_under_the_new_name_of_a_directory(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """A node that a look-up made of the half of the copies is not one of two with one name."""
    one.local.mkdir("a")
    one.local.write("a/f", b"x")
    root = one.fs.core.nodes.root
    found: list[Any] = []

    def look() -> None:
        root.listing = None
        found.append(resolve(one.fs.resolver.find(root, b"b")))

    around(monkeypatch, one, "copy", lambda: None, look)
    one.local.rename("a", "b")
    live = [node for node in one.fs.core.nodes.by_ino.values() if node.name == b"b" and not node.gone]
    assert found
    assert len(live) == 1
    assert one.local.listdir("b") == [b"f"]


@promise("S-29")
def test_what_the_kernel_forgot_during_a_listing(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """A name of ours that the listing under way does not know stays, also when its node is gone by then."""
    root = one.fs.core.nodes.root

    def make() -> None:
        one.world.clock.advance(0.01)
        one.local.write("f", b"x")
        one.local.mkdir("d")
        for path in ("f", "d"):
            ino = one.local.stat(path).ino
            one.fs.forget(ino, 100)
            assert ino not in one.fs.core.nodes.by_ino

    around(monkeypatch, one, "list_page", lambda: None, make)
    resolve(one.fs.remote.read_directory(root, whole=True))
    assert one.local.listdir() == [b"d", b"f"]
    assert one.local.read("f") == b"x"


@promise("S-23")
def test_a_file_that_is_removed_while_it_is_asked_about(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """It does not come back when it is written to and closed: we removed it, no other client did."""
    one.local.write("f", b"x")
    file = one.local.open("f", os.O_RDWR)
    node = one.fs.core.nodes.by_ino[file.ino]
    around(monkeypatch, one, "head", lambda: one.local.unlink("f"), lambda: None)
    assert not resolve(one.fs.remote.head(node))
    file.write(b"y")
    file.close()
    assert one.local.listdir() == []
    assert one.world.all_keys() == []
