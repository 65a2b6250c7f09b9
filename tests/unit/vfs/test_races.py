"""What a request of one thread must not undo when another thread changes a name meanwhile; each race made to happen.

The store is asked, and while its answer travels this mount changes the name itself: the answer is too old then. Who
opens or reads a file while a rename replaces it, or a removal takes it, gets the old or the new (S-23, S-25).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from datastore.fuse.loop import now
from datastore.fuse.ops import Ino, OpenRequest
from datastore.fuse.vfs.lookup import remote
from datastore.fuse.vfs.opened import files
from datastore.fuse.vfs.tree.listing import listing_of
from datastore.fuse.vfs.tree.nodes import Directory
from tests.datachecks import forget
from tests.driving import beside, resolve
from tests.localfs import ME
from tests.mounted import Client, World, around, failing
from tests.patience import PATIENCE_S
from tests.promises import promise

BOTH_LISTINGS = True
Moves = tuple[Callable[[], None], Callable[[], None]]


def nothing() -> None:
    """To happen between two others."""


def list_beside(world: World, client: Client, path: str) -> None:
    """A walk of the tree above tells of the directory, now."""
    folder = client.folder(path)
    page = world.tool.list_page(folder.key, delimiter="/")
    world.clock.advance(0.001)
    client.fs.remote.install(folder, listing_of(folder.key, [page], world.clock.monotonic()))


@pytest.fixture
def away(one: Client) -> Moves:
    """A directory `a` with a file is renamed to `b`, and back."""
    one.local.mkdir("a")
    one.local.write("a/f", b"x")
    return lambda: one.local.rename("a", "b"), lambda: one.local.rename("b", "a")


@promise("S-29")
def test_a_listing_made_during_a_rename_is_not_used(monkeypatch: pytest.MonkeyPatch, one: Client, away: Moves) -> None:
    """Renamed and renamed back: what was listed in between is not the directory."""
    node = one.folder("a")
    one.world.clock.advance(0.01)
    node.listing = None
    around(monkeypatch, one, "list_page", *away)
    resolve(one.fs.resolver.read_directory(node))
    assert one.local.listdir("a") == [b"f"]
    assert one.local.read("a/f") == b"x"


@promise("S-29")
def test_listing_a_directory_that_is_renamed_during_each_try_is_ebusy(
    monkeypatch: pytest.MonkeyPatch, one: Client, away: Moves
) -> None:
    """Who lists it is told so in the end."""
    monkeypatch.setattr(remote, "AGAIN_MAX", 1)
    node = one.folder("a")
    node.listing = None
    around(monkeypatch, one, "list_page", *away)
    failing(errno.EBUSY, one.local.listdir, "a")


@promise("S-29")
@pytest.mark.parametrize("removed", [False, True])
def test_a_file_written_during_its_head_keeps_its_unsent_bytes(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client, removed: bool
) -> None:
    """removed: another client did that. What was written here is not sent yet, and stays."""
    one.local.write("f", b"first")
    with one.local.opened("f", os.O_RDWR) as file:

        def write() -> None:
            file.write(b"longer than that")

        around(monkeypatch, one, "head", (lambda: world.tool.delete("f")) if removed else nothing, write)
        assert resolve(one.fs.remote.head(one.node("f")))
        assert file.stat().size == len(b"longer than that")
        assert not one.node("f").gone


@promise("S-29")
def test_a_directory_renamed_during_its_head_stays(monkeypatch: pytest.MonkeyPatch, one: Client, away: Moves) -> None:
    """The same with its HEAD and the look below it."""
    node = one.folder("a")
    around(monkeypatch, one, "head", *away)
    assert resolve(one.fs.remote.head(node))
    assert not node.gone
    one.fs.core.nodes.root.forget_listing()
    around(monkeypatch, one, "list_page", away[0], nothing)
    around(monkeypatch, one, "head", lambda: now(one.store.delete("a/")), nothing)
    assert resolve(one.fs.remote.head(node))
    assert not node.gone
    assert one.local.listdir("b") == [b"f"]


@promise("S-29")
def test_a_name_made_during_its_lookup_is_not_taken_for_absent(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
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
    assert not one.folder("d").gone
    assert one.local.listdir("d") == [b"f"]


@promise("S-29")
def test_a_listing_during_a_rename_brings_no_old_name_back(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """A listing that began during a rename does not bring the old name back."""
    one.local.write("f", b"x")
    one.world.clock.advance(0.01)
    root = one.fs.core.nodes.root
    ended: list[bool] = []

    def list_it() -> None:
        # Between the new name and the removal of the old one.
        root.listing = None
        around(monkeypatch, one, "list_page", nothing, release)
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
def test_a_lookup_during_a_rename_makes_no_second_node(
    monkeypatch: pytest.MonkeyPatch, one: Client, away: Moves
) -> None:
    """A node that a look-up made of the half of the copies is not one of two with one name."""
    root = one.fs.core.nodes.root
    found: list[Any] = []

    def look() -> None:
        root.listing = None
        found.append(resolve(one.fs.resolver.find(root, b"b")))

    around(monkeypatch, one, "copy", nothing, look)
    away[0]()
    live = [node for node in one.fs.core.nodes.by_ino.values() if node.name == b"b" and not node.gone]
    assert found
    assert len(live) == 1
    assert one.local.listdir("b") == [b"f"]


@promise("S-29")
def test_a_file_made_and_forgotten_during_a_listing_is_listed(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
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

    around(monkeypatch, one, "list_page", nothing, make)
    resolve(one.fs.remote.read_directory(root, whole=True))
    assert one.local.listdir() == [b"d", b"f"]
    assert one.local.read("f") == b"x"


@promise("S-23")
def test_a_file_removed_during_its_head_does_not_come_back(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """It does not come back when it is written to and closed: we removed it, no other client did."""
    one.local.write("f", b"x")
    file = one.local.open("f", os.O_RDWR)
    node = one.node("f")
    around(monkeypatch, one, "head", lambda: one.local.unlink("f"), nothing)
    assert not resolve(one.fs.remote.head(node))
    file.write(b"y")
    file.close()
    assert one.local.listdir() == []
    assert one.world.all_keys() == []


@promise("S-23")
def test_a_head_of_an_older_version_detaches_no_file(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client
) -> None:
    """Who has the file open keeps its name, and its removal removes it."""
    one.local.write("f", b"first")
    file, node = one.local.open("f", os.O_RDWR), one.node("f")

    def send_another() -> None:
        file.write(b"second")
        file.fsync()

    around(monkeypatch, one, "head", nothing, send_another)
    assert resolve(one.fs.remote.head(node))
    assert not node.gone
    one.local.unlink("f")
    file.write(b"third")
    file.close()
    assert world.all_keys() == []


@promise("S-23")
@pytest.mark.parametrize("listing", [False, True])
def test_a_removal_that_is_seen_early_is_final(monkeypatch: pytest.MonkeyPatch, one: Client, listing: bool) -> None:
    """The file that is still open does not come back with its next close."""
    one.local.write("f", b"first")
    file, node = one.local.open("f", os.O_RDWR), one.node("f")

    def look() -> None:
        if listing:
            resolve(one.fs.remote.read_directory(one.fs.core.nodes.root, whole=True))
        else:
            assert not resolve(one.fs.remote.head(node))

    around(monkeypatch, one, "delete", nothing, look)
    one.local.unlink("f")
    assert file.read() == b"first"
    file.write(b"second")
    file.close()
    assert one.world.all_keys() == []
    assert not one.local.exists("f")


@promise("S-28")
@pytest.mark.parametrize("method", ["list_page", "head"])
def test_a_name_made_while_it_is_asked_for_is_shown(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client, method: str
) -> None:
    """Also when a listing of the directory has come since, which began later."""
    root = one.fs.core.nodes.root
    one.local.write("there", b"")
    world.later()
    if method == "head":
        one.ask_one_by_one()

    def make() -> None:
        world.clock.advance(0.001)
        one.local.write("f", b"ours")
        list_beside(world, one, "")

    around(monkeypatch, one, method, nothing, make)
    if method == "head":
        assert one.local.lookup("f").size == 4
    else:
        resolve(one.fs.remote.read_directory(root, whole=True))
    assert b"f" in root.children
    assert not one.node("f").lost
    assert one.local.listdir() == [b"f", b"there"]


@promise("S-25")
def test_an_open_during_a_rename_waits_for_the_new_bytes(monkeypatch: pytest.MonkeyPatch, one: Client) -> None:
    """Nobody keeps the old bytes for one who comes then: he waits, and has the new ones."""
    one.world.put("target", b"old")
    one.local.write("new", b"new!")
    assert one.local.read("target") == b"old"
    forget(one.fs.core.reader)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(one.local.read("target")))

    def come() -> None:
        reader.start()
        reader.join(0.2)

    around(monkeypatch, one, "copy", come, lambda: None)
    one.local.rename("new", "target")
    reader.join(PATIENCE_S)
    assert found == [b"new!"]


@promise("S-23", "S-25")
@pytest.mark.parametrize("how", ["replaced", "removed", "removed, large"])
def test_a_read_of_a_removed_file_has_the_kept_bytes(monkeypatch: pytest.MonkeyPatch, one: Client, how: str) -> None:
    """Its request comes too late, but the bytes are kept."""
    one.world.put("target", b"old")
    one.local.write("new", b"new!")
    if how == "removed, large":
        one.keep_small_copies_only(1)
    with one.local.opened("target") as file:
        if how == "replaced":
            one.local.rename("new", "target")
        else:
            one.local.unlink("target")
        monkeypatch.setattr(one.fs.core.reader, "held", lambda *_: None)
        assert bytes(resolve(one.fs.read(Ino(file.ino), file._fh, 0, 3))) == b"old"


def opening_fails(one: Client, ino: Ino) -> None:
    """An open that comes after a rename has taken the name: the kernel would walk the path again."""
    failing(errno.ESTALE, lambda: resolve(one.fs.open(ME, ino, OpenRequest(flags=os.O_RDONLY))))


def lose(one: Client) -> None:
    """Have an open come too late."""
    for name in ("target", "new", "newer"):
        one.local.write(name, name.encode())
    ino = one.local.stat("target").ino
    one.local.rename("new", "target")
    opening_fails(one, ino)


@promise("S-25")
def test_a_rename_lets_an_open_pass_that_lost_once(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that its file was replaced, and the kernel walks the path once more: the next rename lets it pass."""
    monkeypatch.setattr(files, "PATIENCE_S", 2 * PATIENCE_S)
    lose(one)

    second = threading.Thread(target=one.local.rename, args=("newer", "target"))
    second.start()
    second.join(0.2)
    waited = second.is_alive()
    content = one.local.read("target")
    second.join(PATIENCE_S)

    assert waited
    assert content == b"new"
    assert one.local.read("target") == b"newer"


@promise("S-25")
def test_a_rename_waits_briefly_for_a_lost_open(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor who came for a name that is gone."""
    monkeypatch.setattr(files, "PATIENCE_S", 0.05)
    lose(one)
    one.local.rename("newer", "target")

    monkeypatch.setattr(files, "PATIENCE_S", 2 * PATIENCE_S)
    ino = one.local.stat("target").ino
    one.local.unlink("target")
    opening_fails(one, ino)
    one.local.write("other", b"other")
    began = time.monotonic()
    one.local.rename("other", "target")
    assert time.monotonic() - began < PATIENCE_S
