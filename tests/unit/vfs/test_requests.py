"""How many requests a call costs: what is known is not asked for."""

from __future__ import annotations

import os
import stat

import pytest

from datastore.fuse.ops import ROOT_INO, OpenRequest
from datastore.fuse.state.statedb import KnownAttributes
from tests.driving import resolve
from tests.localfs import ME
from tests.mounted import Client, World
from tests.promises import promise

FILES = 40
NAMES = [f"f{number:02}" for number in range(FILES)]


def written(client: Client) -> None:
    """Empty files of these names."""
    for name in NAMES:
        client.local.write(name, b"")


@promise("S-25")
def test_a_rename_does_not_list_the_directory_again(world: World, one: Client) -> None:
    """Each is a copy and a delete."""
    written(one)
    one.local.listdir()
    listings = one.calls("list_page")
    for name in NAMES:
        one.local.rename(name, f"g{name}")
    assert one.calls("list_page") == listings
    assert one.calls("copy") == one.calls("delete") == FILES
    assert one.local.listdir() == [b"g" + name.encode() for name in NAMES]


@promise("S-12")
def test_attributes_that_were_asked_for_ahead_are_asked_for_once(world: World, one: Client) -> None:
    """Also where the node was there before, from the second of its creation on."""
    written(one)
    for heads in (FILES, 0):
        world.later(10)
        before = one.calls("head")
        for name in NAMES:
            one.local.stat(name)
        assert one.calls("head") - before == heads


@promise("S-03")
def test_a_directory_without_a_marker_is_not_looked_into_twice(world: World, one: Client) -> None:
    """The listing of the directory above, or its own, says that it is there."""
    world.put_all(["a/f", "b/f", "c/f", "d/f"])
    before = one.calls("list_page")
    one.local.scandir("", plus=True)
    assert one.calls("list_page") - before == 1
    world.later()
    one.local.listdir("")
    for folder in "abcd":
        one.local.listdir(folder)
    one.quiet()
    heads = one.calls("head")
    for folder in "abcd":
        one.local.stat(folder)
    assert one.calls("head") == heads


@promise("S-03", "S-28")
def test_a_known_directory_without_a_marker_costs_one_request(world: World, one: Client) -> None:
    """That shows that something is below, and no marker; a marker that another client makes is seen."""
    world.put("d/f")
    world.later(10)
    one.local.stat("d")
    world.later()
    heads, pages = one.calls("head"), one.calls("list_page")
    one.local.stat("d")
    assert (one.calls("head") - heads, one.calls("list_page") - pages) == (0, 1)
    world.put("d/", mode=str(stat.S_IFDIR | 0o750))
    world.later()
    assert one.local.stat("d").mode & 0o777 == 0o750
    world.tool.delete_many(["d/", "d/f"])
    world.later()
    assert not one.local.exists("d")


@promise("S-12")
def test_a_marker_that_is_known_is_not_asked_for_again(world: World, one: Client) -> None:
    """Its version comes with the directory's own listing; another client's change is seen all the same."""
    one.local.mkdir("d")
    one.local.chmod("d", 0o700)
    for _ in range(2):
        world.later(10)
        directory = one.folder("d")
    world.later(10)
    before = one.calls("head")
    resolve(one.fs.resolver.read_directory(directory))
    assert one.local.stat("d").mode & 0o777 == 0o700
    assert one.calls("head") == before
    world.client().local.chmod("d", 0o755)
    world.later(10)
    resolve(one.fs.resolver.read_directory(directory))
    assert one.local.stat("d").mode & 0o777 == 0o755


@promise("S-06")
def test_where_a_link_leads_is_known_to_who_made_it(world: World, one: Client) -> None:
    """Without a GET."""
    one.local.symlink(b"target", "x")
    assert one.local.readlink("x") == b"target"
    assert one.calls("get") == 0
    one.local.unlink("x")
    one.local.symlink(b"other", "x")
    assert one.local.readlink("x") == b"other"


@promise("S-28", "S-04")
@pytest.mark.parametrize("call", ["unlink", "rename", "rmdir"])
def test_what_was_made_here_is_removed_without_asking_for_its_attributes(world: World, one: Client, call: str) -> None:
    """A fresh listing says that it is there; only who wants to see the attributes waits for them."""
    names = [b"n%02d" % number for number in range(FILES)]
    for name in names:
        one.local.mkdir(name) if call == "rmdir" else one.local.write(name, b"")
    world.later(10)
    one.fs.core.nodes.root.probe_s = 1.0  # seconds that asking for single names has taken
    heads, listings = one.calls("head"), one.calls("list_page")
    for name in names:
        entry = resolve(one.fs.lookup(ME, ROOT_INO, name))
        assert entry.attr is not None
        assert entry.entry_ttl_s > 0
        assert entry.attr_ttl_s == 0
        one.local.rename(name, b"x" + name) if call == "rename" else getattr(one.local, call)(name)
    assert one.calls("head") == heads
    assert one.calls("list_page") - listings == 1 + (FILES if call == "rmdir" else 0)
    assert world.client().local.listdir() == [b"x" + name for name in names] * (call == "rename")


@promise("S-28", "S-25")
def test_a_name_that_another_client_took_is_removed_as_it_is_now(world: World, one: Client, other: Client) -> None:
    """It is what the listing shows now that is renamed and removed."""
    for name in ("a", "b"):
        one.local.write(name, b"old")
    other.local.unlink("a")
    other.local.mkdir("a")
    other.local.write("b", b"newer")
    world.later(10)
    with pytest.raises(IsADirectoryError):
        one.local.unlink("a")
    one.local.rename("b", "c")
    assert world.body("c") == b"newer"


@promise("S-18", "S-20")
def test_a_small_file_leaves_nothing_behind_when_its_close_returns(world: World, one: Client) -> None:
    """Not even a row that says it is unsent, whenever the process dies."""
    for number in range(FILES):
        entry, reply = resolve(one.fs.create(ME, ROOT_INO, b"f%d" % number, 0o100644, OpenRequest(flags=os.O_WRONLY)))
        assert entry.attr is not None
        resolve(one.fs.write(entry.attr.ino, reply.fh, 0, memoryview(b"x"), False))
        resolve(one.fs.flush(entry.attr.ino, reply.fh))
    one.nothing_left()
    assert one.fs.core.db.unsent() == []
    one.fs.core.db._forgotten.clear()  # what a process that is killed has not written down
    world.put("f0", b"newer, by another client")
    again = one.again()
    assert again.fs.core.db.unsent() == []
    again.nothing_left()
    assert len(world.all_keys()) == FILES
    assert world.body("f0") == b"newer, by another client"


@promise("S-18")
def test_a_file_that_is_written_after_a_close_of_its_handle_is_sent_again(world: World, one: Client) -> None:
    """A shell closes a copy of the descriptor before the program writes."""
    entry, reply = resolve(one.fs.create(ME, ROOT_INO, b"f", 0o100644, OpenRequest(flags=os.O_WRONLY)))
    assert entry.attr is not None
    for piece, whole in ((b"", b""), (b"ab", b"ab"), (b"cd", b"abcd")):
        if piece:
            resolve(one.fs.write(entry.attr.ino, reply.fh, len(whole) - len(piece), memoryview(piece), False))
        resolve(one.fs.flush(entry.attr.ino, reply.fh))
        assert world.body("f") == whole
    resolve(one.fs.release(entry.attr.ino, reply.fh))
    assert one.local.read("f") == b"abcd"


@promise("S-12")
def test_names_that_the_database_lacks_are_looked_for_once(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the database for every name at each listing."""
    written(one)
    looked_for: list[str] = []
    db = one.fs.core.db
    real = db.attributes

    def attributes(key: str) -> KnownAttributes | None:
        looked_for.append(key)
        return real(key)

    monkeypatch.setattr(db, "attributes", attributes)
    for _ in range(3):
        world.later(10)
        one.local.listdir()
    assert len(looked_for) <= FILES
