"""What directories promise (docs/SEMANTICS.md), over a bucket in memory with two clients."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Literal

import pytest

from datastore.fuse.ops import ROOT_INO, Caller, Fh
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.vfs.tree.listing import Listing
from datastore.fuse.vfs.tree.nodes import Directory
from tests.driving import resolve
from tests.kernelkeeps import Room
from tests.mounted import Client, World, failing
from tests.promises import promise

BOTH_LISTINGS = True

CALLER = Caller(1000, 1000, 1)


@promise("S-01")
def test_mkdir_writes_the_marker(world: World, one: Client, other: Client) -> None:
    """An empty object with its name, a slash and its content type: it survives a remount and is seen by others.

    Of two clients that make the same directory at once one gets EEXIST.
    """
    other.local.listdir()
    one.local.mkdir("d", 0o710)
    failing(errno.EEXIST, other.local.mkdir, "d")
    assert world.all_keys() == ["d/"]
    info = world.tool.head("d/")
    assert (info.size, info.content_type) == (0, "application/x-directory")
    for client in (other, one.again()):
        assert client.local.listdir() == [b"d"]
        assert client.local.stat("d").mode == stat.S_IFDIR | 0o710


@promise("S-02")
def test_an_implied_directory_stays_when_its_last_entry_goes(world: World, one: Client, other: Client) -> None:
    """The marker is written before a removal, and before a rename of a file or of a directory."""
    world.put_all(["a/f", "b/c/f", "d/e/f"])
    one.local.rename("a/f", "g")
    one.local.rename("b/c", "h")
    before = len(one.faulty.calls)
    one.local.unlink("d/e/f")
    assert [name for name in one.faulty.calls[before:] if name in ("put", "delete")] == ["put", "delete"]
    world.later()
    assert one.local.listdir() == other.local.listdir() == [b"a", b"b", b"d", b"g", b"h"]
    assert other.local.listdir("d") == [b"e"]
    assert {"a/", "b/", "d/e/"} <= set(world.all_keys())


@promise("S-02")
@pytest.mark.parametrize("attributes", ["full", "listing"])
def test_a_marker_that_another_client_removed_is_made_again(
    world: World, attributes: Literal["full", "listing"]
) -> None:
    """A listing shows that it is gone; one that shows it spares writing it."""
    one = world.client(attributes=attributes)
    one.local.mkdir("d")
    one.local.write("d/f", b"x")
    world.put("e/", b"")
    world.put("e/f", b"x")
    world.tool.delete("d/")
    world.later()
    puts = one.calls("put")
    for folder in "de":
        assert one.local.listdir(folder) == [b"f"]
        one.local.unlink(f"{folder}/f")
    assert one.calls("put") - puts == 1
    assert world.all_keys() == ["d/", "e/"]


@promise("S-02")
def test_a_marker_that_another_client_made_meanwhile_stays(world: World, one: Client) -> None:
    """With its attributes; and it is written once, however much is removed."""
    for key in ("d/f", "d/g", "e/f", "e/g"):
        world.put(key)
    one.local.listdir("d")
    world.put("d/", mode=str(stat.S_IFDIR | 0o700))
    puts = one.calls("put")
    for path in ("d/f", "d/g", "e/f", "e/g"):
        one.local.unlink(path)
    assert world.metadata("d/")["mode"] == str(stat.S_IFDIR | 0o700)
    assert one.calls("put") - puts == len("de")


@promise("S-03")
def test_a_directory_without_a_marker_exists_as_long_as_it_has_keys(world: World, one: Client) -> None:
    """A directory without a marker has default attributes, one with it does not show it; without keys it is gone."""
    world.put("a/b/c", b"x")
    for path in ("a", "a/b"):
        attr = one.local.stat(path)
        assert attr.mode == stat.S_IFDIR | 0o755
        assert (attr.uid, attr.gid) == one.fs.core.settings.defaults[:2]
    assert one.local.listdir("a/b") == [b"c"]
    world.tool.delete("a/b/c")
    world.tool.put("d/", b"", WriteOptions(content_type="application/x-directory"))
    world.later()
    assert one.local.listdir() == [b"d"]
    assert not one.local.exists("a")
    assert one.local.listdir("d") == []


@promise("S-04")
def test_rmdir_refuses_what_is_no_empty_directory(world: World, one: Client) -> None:
    """The store is asked, whatever is remembered; a file that is still open for writing for the first time counts."""
    one.local.mkdir("d")
    assert one.local.listdir("d") == []
    world.put("d/by-another", b"x")
    failing(errno.ENOTEMPTY, one.local.rmdir, "d")
    assert "d/" in world.all_keys()
    assert one.local.listdir("d") == [b"by-another"]
    world.tool.delete("d/by-another")
    one.local.rmdir("d")
    one.local.mkdir("e")
    with one.local.opened("e/f", os.O_CREAT | os.O_WRONLY):
        failing(errno.ENOTEMPTY, one.local.rmdir, "e")
        failing(errno.ENOTDIR, one.local.rmdir, "e/f")
    failing(errno.ENOENT, one.local.rmdir, "absent")
    assert one.local.listdir() == [b"e"]


@promise("S-11")
def test_links_count_the_subdirectories_once_they_are_known(world: World, one: Client) -> None:
    """Find takes 2 for a directory without any; 1 says that they are not counted."""
    world.put_all(["d/sub/f", "d/f"])
    one.ask_one_by_one("d")
    one.local.mkdir("d/first")
    assert one.local.stat("d").nlink == 1
    one.local.listdir("d")
    changes: list[tuple[int, Callable[[], object]]] = [
        (5, lambda: one.local.mkdir("d/new")),
        (5, lambda: one.local.write("d/g", b"")),
        (5, lambda: one.local.unlink("d/g")),
        (4, lambda: one.local.rmdir("d/new")),
    ]
    for links, change in changes:
        change()
        assert one.local.stat("d").nlink == links


def read_pass(client: Client, fh: Fh, *, step: int, remove: bool = False) -> list[bytes]:
    """One pass over the root directory, `step` entries at a time; remove: each one as it is read."""
    names: list[bytes] = []
    offset = 0
    while lines := resolve(client.fs.readdir(ROOT_INO, fh, offset, Room(step), False)):
        offset = lines[-1].offset
        for line in lines:
            if line.name not in (b".", b".."):
                names.append(line.name)
                if remove:
                    client.local.unlink(line.name)
    return names


@promise("S-05")
def test_every_entry_appears_once_while_entries_are_removed(world: World, one: Client) -> None:
    """Removing while reading, as rm -r does, misses nothing and repeats nothing."""
    names = [f"{number:02}" for number in range(25)]
    world.put_all(names)
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    assert read_pass(one, fh, step=3, remove=True) == [name.encode() for name in names]
    assert world.all_keys() == []


@promise("S-05")
def test_an_entry_that_comes_during_a_pass_does_not_move_the_others(world: World, one: Client) -> None:
    """One snapshot per pass; rewinddir takes a new one."""
    world.put_all("bd")
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    first = resolve(one.fs.readdir(ROOT_INO, fh, 0, Room(3), False))
    assert [line.name for line in first] == [b".", b"..", b"b"]
    one.local.write("a", b"")
    one.local.write("c", b"")
    rest = resolve(one.fs.readdir(ROOT_INO, fh, first[-1].offset, Room(10), False))
    assert [line.name for line in rest] == [b"d"]
    assert read_pass(one, fh, step=10) == [b"a", b"b", b"c", b"d"]


@promise("S-58", "S-05")
def test_what_a_pass_shows_is_written_down_once(world: World, one: Client) -> None:
    """For the next server, at its first answer; not at each of the others."""
    world.put_all(f"f{number:02}" for number in range(30))
    saved = one.directory / "state" / "listings"
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    first = resolve(one.fs.readdir(ROOT_INO, fh, 0, Room(2), False))
    (kept,) = saved.iterdir()
    kept.unlink()
    assert len(resolve(one.fs.readdir(ROOT_INO, fh, first[-1].offset, Room(10), False))) == 10
    assert list(saved.iterdir()) == []


@promise("S-05")
def test_readdir_with_attributes_counts_lookups(world: World, one: Client) -> None:
    """Readdirplus gives each entry's attributes, once, and the same ids as a lookup."""
    world.put("f", b"abc", mode=str(stat.S_IFREG | 0o600))
    world.put("d/g", b"")
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    lines = resolve(one.fs.readdir(ROOT_INO, fh, 0, Room(10), True))
    found = {line.name: line for line in lines if line.entry is not None}
    assert sorted(found) == [b"d", b"f"]
    entry = found[b"f"].entry
    assert entry is not None
    assert entry.attr is not None
    assert (entry.attr.size, stat.S_IMODE(entry.attr.mode)) == (3, 0o600)
    assert one.fs.core.nodes.by_ino[entry.attr.ino].nlookup == 1
    assert one.local.stat("f").ino == entry.attr.ino == found[b"f"].ino


@promise("S-05", "S-12")
def test_each_answer_about_a_large_directory_tells_the_attributes_of_all_its_entries(world: World, one: Client) -> None:
    """They are asked for before it, from its own first entry on; those that are known are not asked for again."""
    world.put_all(f"f{number:04}" for number in range(1000))
    world.later()
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    offset, seen = 0, 0
    while lines := resolve(one.fs.readdir(ROOT_INO, fh, offset, Room(200), True)):
        assert all(line.entry is not None for line in lines if line.name not in (b".", b".."))
        offset, seen = lines[-1].offset, seen + len(lines)
    assert seen == 1002
    assert one.calls("head") <= 1001


@promise("S-05")
def test_a_pass_goes_on_if_its_directory_is_dropped(world: World, one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that drops what is known of a directory does not make a pass over it empty."""
    world.put("f", b"")
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    read_directory = one.fs.resolver.read_directory

    async def dropped(directory: Directory, *, whole: bool = True) -> Listing:
        listing = await read_directory(directory, whole=whole)
        directory.listing = None
        return listing

    monkeypatch.setattr(one.fs.resolver, "read_directory", dropped)
    assert read_pass(one, fh, step=10) == [b"f"]


@promise("S-04")
def test_bytes_in_a_directorys_object_are_not_removed_with_it(world: World, one: Client) -> None:
    world.put("d/", b"written by another tool")
    failing(errno.ENOTEMPTY, one.local.rmdir, "d")
    assert world.body("d/") == b"written by another tool"
    world.put("d/", b"")
    world.later()
    one.local.rmdir("d")
