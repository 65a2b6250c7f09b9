"""What directories promise (docs/SEMANTICS.md), over a bucket in memory with two clients."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from datastore.fuse.ops import ROOT_INO, Caller, Fh, resolve
from datastore.fuse.store.base import WriteOptions
from datastore.fuse.vfs.tree.listing import Listing
from datastore.fuse.vfs.tree.nodes import Directory
from tests.kernelkeeps import Room
from tests.mounted import Client, World, failing

BOTH_LISTINGS = True

CALLER = Caller(1000, 1000, 1)


def test_mkdir_writes_the_marker(world: World, one: Client) -> None:
    """S-01 mkdir leaves an empty object with the directory's name, a slash and its content type."""
    one.local.mkdir("d")
    assert world.all_keys() == ["d/"]
    info = world.tool.head("d/")
    assert (info.size, info.content_type) == (0, "application/x-directory")


def test_an_empty_directory_survives_a_remount_and_is_seen_by_others(world: World, one: Client, other: Client) -> None:
    """S-01 an empty directory lives until rmdir."""
    one.local.mkdir("d", 0o710)
    assert stat.S_IMODE(other.local.stat("d").mode) == 0o710
    again = one.again()
    assert again.local.listdir() == [b"d"]
    assert stat.S_ISDIR(again.local.stat("d").mode)


def test_a_directory_outlives_its_entries(world: World, one: Client) -> None:
    """S-01 a directory that was made stays when what was in it is gone."""
    one.local.mkdir("d")
    one.local.write("d/f", b"x")
    one.local.unlink("d/f")
    world.later()
    assert one.local.listdir() == [b"d"]
    one.local.rmdir("d")
    assert world.all_keys() == []
    assert not one.local.exists("d")


def test_mkdir_of_a_name_that_another_client_took(world: World, one: Client, other: Client) -> None:
    """S-01 two clients that make the same directory at once: one of them gets EEXIST."""
    one.local.listdir()
    other.local.mkdir("d")
    failing(errno.EEXIST, one.local.mkdir, "d")


def test_an_implied_directory_stays_when_its_last_entry_is_removed(world: World, one: Client, other: Client) -> None:
    """S-02 the marker is written before the last entry goes."""
    world.put("a/b/f", b"x")
    one.local.unlink("a/b/f")
    assert "a/b/" in world.all_keys()
    world.later()
    assert other.local.listdir("a") == [b"b"]


def test_an_implied_directory_stays_when_its_last_entry_is_renamed_away(world: World, one: Client) -> None:
    """S-02 the same for a rename, of a file and of a directory."""
    world.put("a/f", b"x")
    world.put("b/c/f", b"y")
    one.local.rename("a/f", "g")
    one.local.rename("b/c", "h")
    world.later()
    assert one.local.listdir() == [b"a", b"b", b"g", b"h"]
    assert {"a/", "b/"} <= set(world.all_keys())


def test_an_implied_directory_stays_when_its_last_directory_is_removed(world: World, one: Client) -> None:
    """S-02 the same for rmdir."""
    world.put("a/b/")
    one.local.rmdir("a/b")
    assert world.all_keys() == ["a/"]


def test_the_marker_goes_first(world: World, one: Client) -> None:
    """S-02 at no time during an unlink is the directory without both marker and entry."""
    world.put("a/f", b"x")
    one.local.stat("a/f")
    before = len(one.faulty.calls)
    one.local.unlink("a/f")
    writes = [name for name in one.faulty.calls[before:] if name in ("put", "delete")]
    assert writes == ["put", "delete"]


def test_keys_below_make_a_directory(world: World, one: Client) -> None:
    """S-03 a directory without a marker has default attributes."""
    world.put("a/b/c", b"x")
    for path in ("a", "a/b"):
        attr = one.local.stat(path)
        assert attr.mode == stat.S_IFDIR | 0o755
        assert (attr.uid, attr.gid) == one.fs.core.settings.defaults[:2]
    assert one.local.listdir("a/b") == [b"c"]


def test_an_implied_directory_goes_with_the_keys_of_other_tools(world: World, one: Client) -> None:
    """S-03 when another tool removes all keys below, the directory is gone for us too."""
    world.put("a/b", b"x")
    assert one.local.exists("a")
    world.tool.delete("a/b")
    world.later()
    assert not one.local.exists("a")


def test_rmdir_sees_what_others_wrote_meanwhile(world: World, one: Client) -> None:
    """S-04 rmdir asks the store, whatever is remembered."""
    one.local.mkdir("d")
    assert one.local.listdir("d") == []
    world.put("d/by-another", b"x")
    failing(errno.ENOTEMPTY, one.local.rmdir, "d")
    assert "d/" in world.all_keys()
    assert one.local.listdir() == [b"d"]


def test_rmdir_of_a_directory_with_a_file_that_is_not_sent(world: World, one: Client) -> None:
    """S-04 a file that is still open for writing for the first time counts."""
    one.local.mkdir("d")
    with one.local.opened("d/f", os.O_CREAT | os.O_WRONLY):
        failing(errno.ENOTEMPTY, one.local.rmdir, "d")


def test_rmdir_of_a_directory_with_a_directory(world: World, one: Client) -> None:
    """S-04 an empty directory inside is something as well."""
    one.local.mkdir("d")
    one.local.mkdir("d/e")
    failing(errno.ENOTEMPTY, one.local.rmdir, "d")
    one.local.rmdir("d/e")
    one.local.rmdir("d")
    assert world.all_keys() == []


def test_rmdir_of_a_file(one: Client) -> None:
    """S-04 only directories."""
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


def test_every_entry_appears_once_while_entries_are_removed(world: World, one: Client) -> None:
    """S-05 removing while reading, as rm -r does, misses nothing and repeats nothing."""
    names = [b"%02d" % number for number in range(25)]
    for name in names:
        world.put(name.decode())
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    assert read_pass(one, fh, step=3, remove=True) == names
    one.fs.releasedir(ROOT_INO, fh)
    assert world.all_keys() == []


def test_an_entry_that_comes_during_a_pass_does_not_move_the_others(world: World, one: Client) -> None:
    """S-05 one snapshot per pass; rewinddir takes a new one."""
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


def test_readdir_with_attributes_counts_lookups(world: World, one: Client) -> None:
    """S-05 readdirplus gives each entry's attributes, once, and the same ids as a lookup."""
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


def test_a_pass_goes_on_while_its_directory_is_dropped_from_memory(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-05 a change that drops what is known of a directory does not make a pass over it empty."""
    world.put("f", b"")
    fh = resolve(one.fs.opendir(CALLER, ROOT_INO)).fh
    read_directory = one.fs.resolver.read_directory

    def dropped(directory: Directory, *, whole: bool = True) -> Listing:
        listing = read_directory(directory, whole=whole)
        directory.listing = None
        return listing

    monkeypatch.setattr(one.fs.resolver, "read_directory", dropped)
    assert read_pass(one, fh, step=10) == [b"f"]
    one.fs.releasedir(ROOT_INO, fh)


def test_a_marker_is_no_entry_of_its_directory(world: World, one: Client) -> None:
    """S-03 the marker itself is not shown."""
    world.tool.put("d/", b"", WriteOptions(content_type="application/x-directory"))
    assert one.local.listdir("d") == []
