"""What the kernel may keep of directories on readOnly mounts (S-151), against a model of how it does that.

Of one reader, and of several who open a directory at the same moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from datastore.fuse.ops import ROOT_INO, DirEntry, Fh, Ino, OpenDirReply
from tests.driving import resolve
from tests.kernelkeeps import CALLER, Kept, OpenDirectory, Room, names
from tests.mounted import Client, World
from tests.promises import promise

TTL_S = 60.0
ALL = 1000
OLD = [b"a", b"b", b"c", b"d", b"e", b"f"]


def reader_of(world: World, **changes: Any) -> Client:
    """A readOnly client, as a Datastore has it unless told otherwise."""
    return world.client(attributes="listing", ttl_s=TTL_S, **{"read_only": True, **changes})


@pytest.fixture
def reader(world: World) -> Client:
    world.put_all("abcdef")
    return reader_of(world)


def opened(client: Client) -> OpenDirReply:
    """OPENDIR of the root."""
    return resolve(client.fs.opendir(CALLER, ROOT_INO))


def walk(client: Client, ino: Ino = ROOT_INO, *, plus: bool = True) -> OpenDirReply:
    """Open, read to the end, close; what OPENDIR said."""
    reply = resolve(client.fs.opendir(CALLER, ino))
    cursor = 0
    while lines := resolve(client.fs.readdir(ino, reply.fh, cursor, Room(4), plus)):
        cursor = lines[-1].offset
    client.fs.releasedir(ino, reply.fh)
    return reply


def read(opened: OpenDirectory) -> list[bytes]:
    """From the start to the end, and close it."""
    found = []
    while lines := opened.read(2):
        found += names(lines)
    opened.close()
    return found


def cursors(client: Client, fh: Fh) -> list[int]:
    """Of a whole pass."""
    return [line.offset for line in resolve(client.fs.readdir(ROOT_INO, fh, 0, Room(ALL), True))]


@promise("S-151")
def test_what_was_told_with_attributes_is_kept_until_it_is_nearly_too_old(world: World, reader: Client) -> None:
    first = walk(reader)
    assert (first.cache, first.keep) == (True, False)
    world.later(57.0)
    assert walk(reader).keep
    world.later(2.0)
    assert not walk(reader).keep
    world.later(1.0)
    assert not walk(reader).keep
    assert walk(reader).keep, "the store showed the same"


@promise("S-151")
def test_a_listing_without_attributes_is_not_kept_by_the_kernel(reader: Client) -> None:
    """Who goes by them would ask for each name."""
    walk(reader)
    reply = opened(reader)
    resolve(reader.fs.readdir(ROOT_INO, reply.fh, 0, Room(4), True))
    resolve(reader.fs.readdir(ROOT_INO, reply.fh, cursors(reader, reply.fh)[3], Room(4), False))
    assert [walk(reader, plus=plus).keep for plus in (False, True, True)] == [False, False, True]


@promise("S-151")
def test_nodes_that_the_kernel_gave_up_are_told_again(reader: Client) -> None:
    """All at once, not one by one; what has lost its name does not count."""
    walk(reader)
    nodes = reader.fs.core.nodes
    child, gone = nodes.root.children[b"a"], nodes.root.children[b"b"]
    reader.fs.forget(child.ino, child.nlookup)
    assert [walk(reader).keep for _ in range(2)] == [False, True]
    nodes.detach(gone)
    reader.fs.forget(gone.ino, gone.nlookup)
    assert walk(reader).keep


@promise("S-151")
@pytest.mark.parametrize("before", [False, True])
def test_what_was_read_in_part_is_kept_for_who_reads_the_rest(world: World, reader: Client, before: bool) -> None:
    """The kernel does not go by it, and would not begin anew. before: it had all of it, and dropped that."""
    kept = Kept()
    if before:
        assert read(OpenDirectory(reader.fs, ROOT_INO, kept)) == OLD
        world.later(TTL_S)
    first = OpenDirectory(reader.fs, ROOT_INO, kept)
    first.read(4)
    first.close()
    world.later(TTL_S)
    second = OpenDirectory(reader.fs, ROOT_INO, kept)
    assert (read(second), second.asked) == (OLD, 5)
    third = OpenDirectory(reader.fs, ROOT_INO, kept)
    assert (read(third), third.asked) == (OLD, 0)


@promise("S-151", "S-28")
def test_a_listing_that_changed_or_was_dropped_is_not_kept(world: World, reader: Client) -> None:
    walk(reader)
    world.put("new")
    world.later(TTL_S)
    reader.local.stat("new")
    assert [walk(reader).keep for _ in range(2)] == [False, True]
    reader.fs.core.nodes.root.listing = None
    assert not walk(reader).keep


@promise("S-151")
def test_nothing_is_kept_while_two_have_read_different_listings(world: World, reader: Client) -> None:
    """What the older one was told may still be on its way."""
    one = opened(reader)
    cursors(reader, one.fh)
    world.put("new")
    world.later(TTL_S)
    walk(reader)
    assert not walk(reader).keep
    reader.fs.releasedir(ROOT_INO, one.fh)
    assert [walk(reader).keep for _ in range(2)] == [False, True]


@promise("S-151")
def test_who_reads_a_changed_directory_anew_has_it_kept_for_others(world: World, reader: Client) -> None:
    """He has one handle, which is answered from one listing after the other."""
    one = opened(reader)
    for name in ("new", "newer"):
        cursors(reader, one.fh)
        world.put(name)
        world.later(TTL_S)
    cursors(reader, one.fh)
    assert opened(reader).keep


@promise("S-151", "S-05")
def test_an_open_directory_is_dropped_when_its_time_is_over(world: World, reader: Client) -> None:
    """Once, and only one that is open."""
    walk(reader)
    reply = opened(reader)
    world.later(57.0)
    reader.fs.kernel_dir_cache.expire()
    assert not reader.kernel.inodes
    for _ in range(3):
        world.later(1.0)
        reader.fs.kernel_dir_cache.expire()
        assert reader.kernel.inodes == [(ROOT_INO, 0)]
    reader.fs.releasedir(ROOT_INO, reply.fh)
    walk(reader)
    world.later(TTL_S)
    reader.fs.kernel_dir_cache.expire()
    assert reader.kernel.inodes == [(ROOT_INO, 0)]


@promise("S-151", "S-58")
def test_a_new_server_drops_what_the_earlier_one_told(world: World, reader: Client) -> None:
    """It also expires the directories that were opened before its start, until they are closed."""
    world.put("d/x")
    world.later(TTL_S)
    ino = reader.local.stat("d").ino
    fh = resolve(reader.fs.opendir(CALLER, ino)).fh
    dots = resolve(reader.fs.readdir(ino, fh, 0, Room(2), True))
    assert [line.ino for line in dots] == [ino, ROOT_INO]
    again = reader.again(resumed=True)
    again.fs.loop.call(again.fs.kernel_dir_cache.start)
    assert sorted(again.kernel.inodes) == sorted([(ROOT_INO, 0), (ino, 0)])
    again.kernel.inodes.clear()

    def rest() -> list[bytes]:
        return names(list(resolve(again.fs.readdir(ino, fh, dots[-1].offset, Room(ALL), True))))

    assert rest() == [b"x"]
    assert walk(again, ino).cache, "who goes on drops nothing"
    world.later(TTL_S)
    again.fs.kernel_dir_cache.expire()
    assert rest() == [b"x"]
    again.fs.releasedir(ino, fh)
    world.later(TTL_S)
    again.fs.kernel_dir_cache.expire()
    assert again.kernel.inodes == [(ino, 0)]
    assert again.fs.core.nodes.by_ino[ino].handles == 0


@promise("S-151")
@pytest.mark.parametrize("changes", [{"read_only": False}, {"transport": "libfuse"}])
def test_writable_and_libfuse_mounts_keep_no_directory_in_the_kernel(world: World, changes: dict[str, object]) -> None:
    """Where names are changed here, or libfuse speaks to the kernel, cursors are plain numbers, too."""
    world.put("a")
    client = reader_of(world, **changes)
    for _ in range(2):
        reply = walk(client)
        assert (reply.cache, reply.keep) == (False, False)
    assert cursors(client, opened(client).fh) == [1, 2, 3]
    client.fs.loop.call(client.fs.kernel_dir_cache.start)
    client.fs.kernel_dir_cache.expire()
    assert not client.kernel.inodes


def kept_and_changed(world: World, reader: Client) -> Kept:
    """What the kernel has of a directory that is another by now."""
    kept = Kept()
    for _ in range(2):
        assert read(OpenDirectory(reader.fs, ROOT_INO, kept)) == OLD
    assert kept.complete
    world.put("new")
    world.later(TTL_S)
    return kept


@promise("S-151")
@pytest.mark.parametrize("reads", [True, False])
def test_a_dropped_directory_is_kept_again_after_its_next_pass(world: World, reader: Client, reads: bool) -> None:
    """Which is so when who drops it reads it, or closes it; who read past it changes nothing."""
    kept = kept_and_changed(world, reader)
    first = OpenDirectory(reader.fs, ROOT_INO, kept)
    beside = OpenDirectory(reader.fs, ROOT_INO, kept)
    assert (beside.cache, beside.keeps) == (False, True)
    if reads:
        assert len(read(first)) == 7
    else:
        first.close()
    assert len(read(beside)) == 7
    if not reads:
        assert len(read(OpenDirectory(reader.fs, ROOT_INO, kept))) == 7
    last = OpenDirectory(reader.fs, ROOT_INO, kept)
    assert (last.keeps, len(read(last)), last.asked) == (True, 7, 0)


@promise("S-151")
@pytest.mark.parametrize("before_s", [0.0, 0.9])
def test_what_was_told_while_it_was_dropped_is_dropped_once_more(world: World, reader: Client, before_s: float) -> None:
    """The answer may come to the kernel after the word to drop all: just then, or up to a second later."""
    held = opened(reader)
    cursors(reader, held.fh)
    world.later(TTL_S - 1.0)
    cursors(reader, held.fh)
    world.clock.advance(before_s)
    for seconds, times in ((1.5, 1), (1.0, 2), (1.0, 2)):
        reader.fs.kernel_dir_cache.expire()
        assert len(reader.kernel.inodes) == times
        world.clock.advance(seconds)


@promise("S-151")
def test_who_reads_it_all_the_time_does_so_from_what_is_kept(world: World, reader: Client) -> None:
    """What was told just before it was dropped is dropped once more, what is told after that is not."""
    kept, dropped = Kept(), 0
    held = OpenDirectory(reader.fs, ROOT_INO, kept)
    for half_seconds in range(int(3 * TTL_S) * 2):
        held.rewind()
        assert names(held.read(ALL)) == OLD
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
    world.put("d/x")
    world.later(TTL_S)
    node = reader.folder("d")
    assert read(OpenDirectory(reader.fs, node.ino, Kept())) == [b"x"]
    reading = OpenDirectory(reader.fs, node.ino, Kept())
    reader.fs.remote.lost(node)
    assert names(reading.read(ALL)) == []
    assert reader.fs.core.nodes.reattach(node)
    assert [walk(reader, node.ino).keep for _ in range(3)] == [False] * 3
    reading.close()
    assert [walk(reader, node.ino).keep for _ in range(2)] == [False, True]


@promise("S-05")
def test_a_pass_of_a_directory_that_goes_meanwhile_ends_with_the_names_it_had(world: World, reader: Client) -> None:
    """It answers from one snapshot, whatever another client removes."""
    world.put_all(["dir/a", "dir/b", "dir/c"])
    world.later(TTL_S)
    reading = OpenDirectory(reader.fs, reader.folder("dir").ino, Kept())
    assert names(reading.read(3)) == [b"a"]
    world.tool.delete_many(["dir/a", "dir/b", "dir/c"])
    world.later(TTL_S)
    assert not reader.local.exists("dir")
    assert names(reading.read(ALL)) == [b"b", b"c"]


@dataclass
class Pass:
    """What one who reads the directory has seen since it began from the start."""

    handle: OpenDirectory
    began: float
    seen: list[bytes] = field(default_factory=list)
    on_its_way: tuple[list[DirEntry], int] | None = None
    checked: bool = True


class Readers:
    """Several who read one directory that another client changes, through one kernel."""

    def __init__(self, world: World, client: Client, seed: int) -> None:
        self.world, self.client = world, client
        self.random = random.Random(seed)
        self.kept = Kept()
        self.passes: list[Pass] = []
        self.there: dict[bytes, list[tuple[float, float]]] = {}
        self.served = 0
        for number in range(0, 20, 2):
            self.put(b"%02d" % number)
        self.wait(2 * TTL_S)

    def now(self) -> float:
        return self.world.clock.monotonic()

    def put(self, name: bytes) -> None:
        spans = self.there.setdefault(name, [])
        if not spans or spans[-1][1] < float("inf"):
            self.world.put(name.decode())
            spans.append((self.now(), float("inf")))

    def delete(self, name: bytes) -> None:
        spans = self.there.get(name)
        if spans and spans[-1][1] == float("inf"):
            self.world.tool.delete(name.decode())
            spans[-1] = (spans[-1][0], self.now())

    def wait(self, seconds: float) -> None:
        """As upkeep does it, each second."""
        for _ in range(int(seconds)):
            self.world.later(1.0)
            self.client.fs.kernel_dir_cache.expire()
            self.notified()

    def notified(self) -> None:
        if self.client.kernel.inodes:
            self.client.kernel.inodes.clear()
            self.kept.drop()

    def step(self) -> None:
        chosen = self.random.choices(
            (self.open, self.read, self.ask, self.arrive, self.rewind, self.close, self.change, self.pause, self.forget,
             self.evict, self.evict_all, self.restart),
            (6, 60, 4, 8, 2, 6, 2, 3, 0.5, 0.5, 4, 0.3),
        )[0]  # fmt: skip
        chosen()

    def open(self) -> None:
        if len(self.passes) < 4:
            self.passes.append(Pass(OpenDirectory(self.client.fs, ROOT_INO, self.kept), self.now()))

    def one(self) -> Pass | None:
        return self.random.choice(self.passes) if self.passes else None

    def free(self) -> Pass | None:
        """One that waits for no answer."""
        one = self.one()
        return one if one is not None and one.on_its_way is None else None

    def read(self) -> None:
        if one := self.free():
            self.begins(one)
            before = one.handle.asked
            lines = one.handle.read(self.random.choice((1, 3, 5, 50)))
            self.served += bool(lines) and one.handle.asked == before
            self.took(one, lines)

    def begins(self, one: Pass) -> None:
        if one.handle.cursor == 0:
            one.began, one.seen, one.checked = self.now(), [], True

    def ask(self) -> None:
        """The answer comes later."""
        one = self.free()
        if one is not None and not (one.handle.cache and self.kept.complete):
            self.begins(one)
            one.on_its_way = one.handle.ask(self.random.choice((3, 50)), plus=self.random.random() < 0.9)

    def arrive(self) -> None:
        one = self.one()
        if one is not None and one.on_its_way is not None:
            answer, one.on_its_way = one.on_its_way, None
            self.took(one, one.handle.arrive(*answer))

    def took(self, one: Pass, lines: list[DirEntry]) -> None:
        one.seen += names(lines)
        if not lines and one.checked:
            self.check(one)

    def check(self, one: Pass) -> None:
        """S-28 and S-05 of a whole pass."""
        assert len(set(one.seen)) == len(one.seen), one.seen
        since, now = one.began - TTL_S, self.now()
        throughout = {name for name, spans in self.there.items() if any(a <= since and now < b for a, b in spans)}
        ever = {name for name, spans in self.there.items() if any(a <= now and since <= b for a, b in spans)}
        assert throughout <= set(one.seen) <= ever, (throughout - set(one.seen), set(one.seen) - ever)

    def rewind(self) -> None:
        if one := self.free():
            one.handle.rewind()

    def close(self) -> None:
        if one := self.free():
            self.passes.remove(one)
            one.handle.close()

    def change(self) -> None:
        name = b"%02d" % self.random.randrange(20)
        (self.put if self.random.random() < 0.5 else self.delete)(name)

    def pause(self) -> None:
        self.wait(self.random.choice((1, 10, 20, 40, 61)))

    def forget(self) -> None:
        for node in list(self.client.fs.core.nodes.root.children.values())[:3]:
            self.client.fs.forget(node.ino, node.nlookup)

    def evict(self) -> None:
        """The kernel needs the memory of some pages."""
        self.kept.pages = [page if self.random.random() < 0.5 else None for page in self.kept.pages]

    def evict_all(self) -> None:
        """Or of the directory itself."""
        if not self.passes:
            self.kept.pages, self.kept.count, self.kept.end, self.kept.complete = [], 0, 0, False

    def restart(self) -> None:
        """Passes that are under way go on, by the names that were saved or are there now."""
        if any(one.on_its_way for one in self.passes):
            return
        self.client = self.client.again(resumed=True)
        self.client.fs.loop.call(self.client.fs.kernel_dir_cache.start)
        self.notified()
        for one in self.passes:
            one.handle.fs, one.checked = self.client.fs, False


@promise("S-151", "S-28", "S-05")
@pytest.mark.parametrize("seed", range(24))
def test_no_reader_sees_what_is_too_old_or_two_listings_mixed(world: World, seed: int) -> None:
    """Whatever is open, dropped, given up or on its way."""
    readers = Readers(world, reader_of(world), seed)
    for _ in range(2):
        readers.open()
        for _ in range(30):
            readers.read()
        readers.close()
    assert readers.served
    for _ in range(600):
        readers.step()
