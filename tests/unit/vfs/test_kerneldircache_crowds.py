"""Several open the same directory of a readOnly mount at the same moment (S-151), against a model of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from datastore.fuse.ops import OpenDirReply
from datastore.fuse.vfs.tree.nodes import Directory
from tests.driving import resolve
from tests.kernelkeeps import CALLER, Kept, OpenDirectory, Room, names
from tests.mounted import Client, World
from tests.promises import promise

TTL_S = 60.0
ALL = 1000


@pytest.fixture
def reader(world: World) -> Client:
    """A client of which the kernel keeps what it lists."""
    for name in "abc":
        world.put(f"d/{name}")
    made = world.client(attributes="listing", ttl_s=TTL_S)
    made.fs.core.settings = replace(made.fs.core.settings, keep_directories=True)
    return made


def directory(reader: Client) -> Directory:
    """The one that is read."""
    found = reader.fs.core.nodes.by_ino[reader.local.stat("d").ino]
    assert isinstance(found, Directory)
    return found


def read(opened: OpenDirectory) -> list[bytes]:
    """From the start to the end, and close it."""
    found = []
    while lines := opened.read(2):
        found += names(lines)
    opened.close()
    return found


def opened(reader: Client) -> OpenDirReply:
    """OPENDIR, of which the kernel has not heard yet."""
    return resolve(reader.fs.opendir(CALLER, directory(reader).ino))


def kept_and_changed(world: World, reader: Client) -> Kept:
    """What the kernel has of a directory that is another by now."""
    kept = Kept()
    for _ in range(2):
        assert read(OpenDirectory(reader.fs, directory(reader).ino, kept)) == [b"a", b"b", b"c"]
    assert kept.complete
    world.put("d/new")
    world.later(TTL_S)
    return kept


@promise("S-151", "S-28")
def test_who_opens_before_it_is_dropped_does_not_go_by_it(world: World, reader: Client) -> None:
    """The process that drops it may run later than who opens after it."""
    kept = kept_and_changed(world, reader)
    slow = opened(reader)
    assert (slow.cache, slow.keep) == (True, False)
    quick = OpenDirectory(reader.fs, directory(reader).ino, kept)
    assert read(quick) == [b"a", b"b", b"c", b"new"]
    kept.drop()
    reader.fs.releasedir(directory(reader).ino, slow.fh)


@promise("S-151")
@pytest.mark.parametrize("reads", [True, False])
def test_it_is_kept_again_once_it_was_dropped(world: World, reader: Client, reads: bool) -> None:
    """Which is so when who drops it reads it, or closes it; who read past it changes nothing."""
    kept = kept_and_changed(world, reader)
    ino = directory(reader).ino
    first = OpenDirectory(reader.fs, ino, kept)
    beside = OpenDirectory(reader.fs, ino, kept)
    assert (beside.cache, beside.keeps) == (False, True)
    if reads:
        assert len(read(first)) == 4
    else:
        first.close()
    assert len(read(beside)) == 4
    if not reads:
        assert len(read(OpenDirectory(reader.fs, ino, kept))) == 4
    last = OpenDirectory(reader.fs, ino, kept)
    assert last.keeps
    assert len(names(last.read(ALL))) == 4
    assert last.asked == 0


@promise("S-151")
def test_what_was_told_while_it_was_dropped_is_dropped_once_more(world: World, reader: Client) -> None:
    """The answer may come to the kernel after the word to drop all."""
    ino = directory(reader).ino
    held = opened(reader)
    resolve(reader.fs.readdir(ino, held.fh, 0, Room(ALL), True))
    world.later(TTL_S - 1.0)
    resolve(reader.fs.readdir(ino, held.fh, 0, Room(ALL), True))
    for seconds, times in ((1.5, 1), (1.0, 2), (1.0, 2)):
        reader.fs.kernel_dir_cache.expire()
        assert [told for told, _ in reader.kernel.inodes].count(ino) == times
        world.clock.advance(seconds)


@promise("S-151")
def test_who_reads_it_all_the_time_does_so_from_what_is_kept(world: World, reader: Client) -> None:
    """What was told just before it was dropped is dropped once more, what is told after that is not."""
    ino, kept = directory(reader).ino, Kept()
    held = OpenDirectory(reader.fs, ino, kept)
    dropped = 0
    for half_seconds in range(int(3 * TTL_S) * 2):
        held.rewind()
        assert len(names(held.read(ALL))) == 3
        assert held.read(ALL) == []
        if half_seconds % 2:
            reader.fs.kernel_dir_cache.expire()
            if len(reader.kernel.inodes) > dropped:
                dropped = len(reader.kernel.inodes)
                kept.drop()
        world.clock.advance(0.5)
    assert dropped < 15


@promise("S-151")
def test_a_directory_that_lost_its_name_and_has_it_again(world: World, reader: Client) -> None:
    """It was told to be empty, which is no listing of it."""
    kept = kept_and_changed(world, reader)
    node = directory(reader)
    assert len(read(OpenDirectory(reader.fs, node.ino, kept))) == 4
    reading = OpenDirectory(reader.fs, node.ino, Kept())
    reader.fs.remote.lost(node)
    assert read(reading) == []
    assert reader.fs.core.nodes.reattach(node)
    assert not resolve(reader.fs.opendir(CALLER, node.ino)).keep
