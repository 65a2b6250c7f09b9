"""What directories promise (docs/SEMANTICS.md), over a bucket in memory with two clients."""

from __future__ import annotations

import errno
import os
import stat

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
def test_mkdir_writes_the_marker(world: World, one: Client) -> None:
    """Mkdir leaves an empty object with the directory's name, a slash and its content type."""
    one.local.mkdir("d")
    assert world.all_keys() == ["d/"]
    info = world.tool.head("d/")
    assert (info.size, info.content_type) == (0, "application/x-directory")


@promise("S-01")
def test_an_empty_directory_survives_a_remount_and_is_seen_by_others(world: World, one: Client, other: Client) -> None:
    """An empty directory lives until rmdir."""
    one.local.mkdir("d", 0o710)
    assert stat.S_IMODE(other.local.stat("d").mode) == 0o710
    again = one.again()
    assert again.local.listdir() == [b"d"]
    assert stat.S_ISDIR(again.local.stat("d").mode)


@promise("S-01")
def test_mkdir_of_a_name_that_another_client_took(world: World, one: Client, other: Client) -> None:
    """Two clients that make the same directory at once: one of them gets EEXIST."""
    one.local.listdir()
    other.local.mkdir("d")
    failing(errno.EEXIST, one.local.mkdir, "d")


@promise("S-02")
def test_an_implied_directory_stays_when_its_last_entry_is_removed(world: World, one: Client, other: Client) -> None:
    """The marker is written before the last entry goes."""
    world.put("a/b/f", b"x")
    one.local.unlink("a/b/f")
    assert "a/b/" in world.all_keys()
    world.later()
    assert other.local.listdir("a") == [b"b"]


@promise("S-02")
def test_an_implied_directory_stays_when_its_last_entry_is_renamed_away(world: World, one: Client) -> None:
    """The same for a rename, of a file and of a directory."""
    world.put("a/f", b"x")
    world.put("b/c/f", b"y")
    one.local.rename("a/f", "g")
    one.local.rename("b/c", "h")
    world.later()
    assert one.local.listdir() == [b"a", b"b", b"g", b"h"]
    assert {"a/", "b/"} <= set(world.all_keys())


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


@promise("S-02")
def test_the_marker_goes_first(world: World, one: Client) -> None:
    """At no time during an unlink is the directory without both marker and entry."""
    world.put("a/f", b"x")
    one.local.stat("a/f")
    before = len(one.faulty.calls)
    one.local.unlink("a/f")
    writes = [name for name in one.faulty.calls[before:] if name in ("put", "delete")]
    assert writes == ["put", "delete"]


@promise("S-03")
def test_keys_below_make_a_directory(world: World, one: Client) -> None:
    """A directory without a marker has default attributes."""
    world.put("a/b/c", b"x")
    for path in ("a", "a/b"):
        attr = one.local.stat(path)
        assert attr.mode == stat.S_IFDIR | 0o755
        assert (attr.uid, attr.gid) == one.fs.core.settings.defaults[:2]
    assert one.local.listdir("a/b") == [b"c"]


@promise("S-03")
def test_an_implied_directory_goes_with_the_keys_of_other_tools(world: World, one: Client) -> None:
    """When another tool removes all keys below, the directory is gone for us too."""
    world.put("a/b", b"x")
    assert one.local.exists("a")
    world.tool.delete("a/b")
    world.later()
    assert not one.local.exists("a")


@promise("S-04")
def test_rmdir_sees_what_others_wrote_meanwhile(world: World, one: Client) -> None:
    """Rmdir asks the store, whatever is remembered."""
    one.local.mkdir("d")
    assert one.local.listdir("d") == []
    world.put("d/by-another", b"x")
    failing(errno.ENOTEMPTY, one.local.rmdir, "d")
    assert "d/" in world.all_keys()
    assert one.local.listdir() == [b"d"]


@promise("S-04")
def test_rmdir_of_a_directory_with_a_file_that_is_not_sent(world: World, one: Client) -> None:
    """A file that is still open for writing for the first time counts."""
    one.local.mkdir("d")
    with one.local.opened("d/f", os.O_CREAT | os.O_WRONLY):
        failing(errno.ENOTEMPTY, one.local.rmdir, "d")


@promise("S-04")
def test_rmdir_of_a_file(one: Client) -> None:
    """Only directories."""
    one.local.write("f", b"")
    failing(errno.ENOTDIR, one.local.rmdir, "f")
    failing(errno.ENOENT, one.local.rmdir, "absent")


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
    names = [b"%02d" % number for number in range(25)]
    for name in names:
        world.put(name.decode())
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    assert read_pass(one, fh, step=3, remove=True) == names
    one.fs.releasedir(ROOT_INO, fh)
    assert world.all_keys() == []


@promise("S-05")
def test_an_entry_that_comes_during_a_pass_does_not_move_the_others(world: World, one: Client) -> None:
    """One snapshot per pass; rewinddir takes a new one."""
    for name in ("b", "d"):
        world.put(name)
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    first = resolve(one.fs.readdir(ROOT_INO, fh, 0, Room(3), False))
    assert [line.name for line in first] == [b".", b"..", b"b"]
    one.local.write("a", b"")
    one.local.write("c", b"")
    rest = resolve(one.fs.readdir(ROOT_INO, fh, first[-1].offset, Room(10), False))
    assert [line.name for line in rest] == [b"d"]
    assert read_pass(one, fh, step=10) == [b"a", b"b", b"c", b"d"]
    one.fs.releasedir(ROOT_INO, fh)


@promise("S-58", "S-05")
def test_what_a_pass_shows_is_written_down_once(world: World, one: Client) -> None:
    """For the next server, at its first answer; not at each of the others."""
    for number in range(30):
        world.put(f"f{number:02}")
    saved = one.directory / "state" / "listings"
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    first = resolve(one.fs.readdir(ROOT_INO, fh, 0, Room(2), False))
    (kept,) = saved.iterdir()
    kept.unlink()
    assert len(resolve(one.fs.readdir(ROOT_INO, fh, first[-1].offset, Room(10), False))) == 10
    assert list(saved.iterdir()) == []
    one.fs.releasedir(ROOT_INO, fh)


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
    one.fs.releasedir(ROOT_INO, fh)


@promise("S-05")
def test_a_pass_goes_on_while_its_directory_is_dropped_from_memory(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    one.fs.releasedir(ROOT_INO, fh)


@promise("S-03")
def test_a_marker_is_no_entry_of_its_directory(world: World, one: Client) -> None:
    """The marker itself is not shown."""
    world.tool.put("d/", b"", WriteOptions(content_type="application/x-directory"))
    assert one.local.listdir("d") == []


@promise("S-04")
def test_bytes_in_a_directorys_object_are_not_removed_with_it(world: World, one: Client) -> None:
    world.put("d/", b"written by another tool")
    failing(errno.ENOTEMPTY, one.local.rmdir, "d")
    assert world.body("d/") == b"written by another tool"
    world.put("d/", b"")
    world.later()
    one.local.rmdir("d")


MARKER = WriteOptions(content_type="application/x-directory; charset=UTF-8", metadata={"mode": "16832", "uid": "7"})


class TestObjectsThatStandForDirectories:
    """S-165 An object `dir` of the type application/x-directory, as older tools write it, is the directory `dir`."""

    def test_it_is_shown_as_one(self, world: World, one: Client, other: Client) -> None:
        world.tool.put("dir", b"", MARKER)
        world.put("file", b"x")
        for client in (one, other):
            seen = client.local.stat("dir")
            assert (seen.mode, seen.uid) == (stat.S_IFDIR | 0o700, 7)
            assert client.local.listdir("dir") == []
            assert client.local.listdir("") == [b"dir", b"file"]
            world.later()
            assert client.local.stat("dir").mode == stat.S_IFDIR | 0o700
        assert world.all_keys() == ["dir", "file"]

    @pytest.mark.parametrize("change", ["mkdir", "create", "chmod", "rename"])
    def test_it_becomes_a_marker_when_it_changes(self, world: World, one: Client, other: Client, change: str) -> None:
        world.tool.put("dir", b"", MARKER)
        name = "dir"
        if change == "mkdir":
            one.local.mkdir("dir/sub")
        elif change == "create":
            one.local.write("dir/file", b"x")
        elif change == "chmod":
            one.local.chmod("dir", 0o750)
        else:
            one.local.rename("dir", "moved")
            name = "moved"
        mode = 0o750 if change == "chmod" else 0o700
        assert world.metadata(f"{name}/")["mode"] == str(stat.S_IFDIR | mode)
        assert name not in world.all_keys()
        for client in (one, other):
            assert client.local.stat(name).mode == stat.S_IFDIR | mode
            assert client.local.listdir("") == [name.encode()]

    def test_it_is_one_where_names_are_asked_for_one_by_one(self, world: World, one: Client) -> None:
        world.tool.put("dir", b"", MARKER)
        one.ask_one_by_one()
        assert one.local.stat("dir").mode == stat.S_IFDIR | 0o700
        heads = one.calls("head")
        assert one.local.scandir() == [(b"dir", stat.S_IFDIR)]
        assert one.calls("head") == heads

    def test_it_is_removed(self, world: World, one: Client) -> None:
        world.tool.put("dir", b"", MARKER)
        one.local.rmdir("dir")
        assert world.all_keys() == []
        assert one.local.listdir("") == []

    def test_it_is_not_shown_beside_its_entries(self, world: World, one: Client) -> None:
        world.tool.put("dir", b"", MARKER)
        world.put("dir/inside", b"x")
        list(one.local.scandir("", plus=True))
        assert one.local.listdir("") == [b"dir"]
        assert one.local.listdir("dir") == [b"inside"]
        failing(errno.ENOTEMPTY, one.local.rmdir, "dir")
        one.local.unlink("dir/inside")
        one.local.rmdir("dir")
        assert world.all_keys() == []

    def test_a_file_that_comes_in_its_place_is_a_file(self, world: World, one: Client) -> None:
        world.tool.put("dir", b"", MARKER)
        assert one.local.stat("dir").mode == stat.S_IFDIR | 0o700
        world.put("dir", b"bytes")
        world.later()
        assert one.local.read("dir") == b"bytes"
        assert world.body("dir") == b"bytes"


def test_a_directory_whose_entries_are_known_counts_its_subdirectories(world: World, one: Client) -> None:
    """Links as find(1) counts them; 1 says that nobody knows."""
    world.put("d/a/f", b"x")
    world.put("d/b/f", b"x")
    for number in range(3):
        world.put(f"d/f{number}", b"x")
    assert one.local.stat("d").nlink == 1
    one.local.listdir("d")
    assert one.local.stat("d").nlink == 4
    one.local.mkdir("d/c")
    assert one.local.stat("d").nlink == 5
    one.local.rmdir("d/c")
    assert one.local.stat("d").nlink == 4
