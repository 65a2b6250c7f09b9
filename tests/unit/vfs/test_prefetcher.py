"""Prefetcher: which names of a listing come next."""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Iterable

import pytest

from datastore.errors import Unreachable
from datastore.fuse.store.base import ObjectInfo, ObjectVersion
from datastore.fuse.vfs.lookup import prefetcher
from datastore.fuse.vfs.lookup.prefetcher import PENDING_MAX, _Run
from datastore.fuse.vfs.tree.listing import Listed, Listing
from tests.datachecks import forget
from tests.mounted import Client, World
from tests.patience import eventually
from tests.promises import promise

NAMES = [b"f%04d" % number for number in range(1000)]


def listing(names: list[bytes]) -> Listing:
    made = Listing(0.0, marker=True)
    made.entries.update({name: Listed(stat.S_IFREG, name.decode()) for name in names})
    return made


def run() -> _Run:
    return _Run(listing(NAMES))


@pytest.mark.parametrize("jumps", [[777, 999, 111], [500], [999, 998, 997, 996]])
def test_a_reader_that_comes_from_another_directory_begins_a_run(jumps: list[int]) -> None:
    made = run()
    for at in jumps:
        made.step(NAMES[at])
    asked = [one for name in NAMES for one in made.step(name)]
    assert len(set(asked) & set(range(900))) > 800


def test_who_reads_on_after_the_directory_was_listed_anew_goes_on_at_the_same_name() -> None:
    made = run()
    for name in NAMES[:10]:
        made.step(name)
    made.follow(listing([b"a", *NAMES]))
    assert made.names[made.step(NAMES[10]).start] == NAMES[11]


def test_attributes_that_a_get_brought_along_are_not_asked_for_again(world: World, one: Client) -> None:
    names = [f"d/f{number:03}" for number in range(60)]
    world.put_all(names)
    world.later()
    one.local.listdir("d")
    for name in names:
        assert one.local.read(name) == b"x"
        one.quiet()
    assert one.calls("head") <= 4, "the first ones, before there was a run of reads"


def test_what_is_not_sent_yet_is_not_fetched_ahead(world: World, one: Client) -> None:
    names = [f"d/f{number:03}" for number in range(60)]
    world.put_all(names[:30])
    with contextlib.ExitStack() as files:
        for name in names[30:]:
            files.enter_context(one.local.opened(name, os.O_CREAT | os.O_WRONLY)).write(b"ours")
        world.later(100)
        one.local.listdir("d")
        for name in names[:30]:
            assert one.local.read(name) == b"x"
            one.quiet()
        assert one.calls("get") == 30


@promise("S-152")
@pytest.mark.parametrize("reads", [True, False])
def test_what_is_fetched_ahead_is_bounded(
    monkeypatch: pytest.MonkeyPatch, world: World, one: Client, reads: bool
) -> None:
    """In bytes, and in directories; what is asked for ahead is asked for once, and of files alone."""
    monkeypatch.setattr(prefetcher, "_BYTES_AHEAD", 12)
    monkeypatch.setattr(prefetcher, "_DIRECTORIES", 2)
    ahead, queued = one.fs.resolver._prefetcher, list[int]()
    added = ahead._files.add

    def add(versions: Iterable[ObjectVersion], width: int) -> None:
        added(versions, width)
        queued.append(ahead._files.bytes)

    monkeypatch.setattr(ahead._files, "add", add)
    for folder in "abc":
        names = [f"{folder}/f{number:03}" for number in range(40)]
        world.put_all(names)
        world.put_all(f"{folder}/f{number:03}d/x" for number in range(0, 40, 5))
        world.later(100)
        one.local.listdir(folder)
        one.local.stat(f"{folder}/f039")
        one.local.unlink(f"{folder}/f039")
        heads = one.calls("head")
        for name in names[:-1]:
            if reads:
                assert one.local.read(name) == b"x"
            else:
                one.local.stat(name)
        one.quiet()
        assert reads or one.calls("head") - heads <= 39
    runs = ahead._opens if reads else ahead._lookups
    assert len(runs) == 2
    assert max(queued, default=12) == 12


def test_a_run_asks_for_each_once_and_for_many_together() -> None:
    made = run()
    asked = [list(places) for name in NAMES if (places := made.step(name))]
    assert [place for places in asked for place in places] == list(range(asked[0][0], len(NAMES)))
    assert min(len(places) for places in asked[3:-1]) >= 15


def test_attributes_that_did_not_come_are_asked_for_again(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who needs one of them does not wait for an answer that will not come."""
    names = [f"d/f{number:03}" for number in range(60)]
    world.put_all(names)
    world.later()
    one.local.listdir("d")
    asked = list[str]()

    real, looked_up = one.faulty.head, 0

    async def fails_ahead(key: str) -> ObjectInfo:
        if key != f"d/f{looked_up:03}":
            asked.append(key)
            raise Unreachable("nobody answers")
        return await real(key)

    monkeypatch.setattr(one.faulty, "head", fails_ahead)
    for looked_up, name in enumerate(names):  # noqa: B007
        assert one.local.exists(name)
    assert asked


def test_what_the_kernel_has_kept_is_not_fetched_ahead(world: World, one: Client) -> None:
    """Only a read shows that it let go of the pages, and then the next ones are fetched."""
    names = [f"d/f{number:04}" for number in range(1100)]
    for name in names:
        world.put(name, name.encode())
    world.later(100)
    one.local.listdir("d")
    ahead, core = one.fs.resolver._prefetcher, one.fs.core
    for name in names:
        one.local.open(name).close()
    eventually(lambda: ahead._files.bytes == 0)
    assert core.cache is not None
    forget(core.reader)
    core.cache.make_room(1 << 40)
    before = one.calls("get")
    for name in names:
        one.local.open(name).close()
    assert (one.calls("get") - before, ahead._files.bytes) == (0, 0)
    for name in names[:10]:
        assert one.local.read(name) == name.encode()
    eventually(lambda: one.calls("get") - before >= 20)


def shuffled(world: World, folder: str, count: int = 200) -> list[str]:
    """Names of files that another tool put long ago, in an order that nobody can guess."""
    names = [f"{folder}/f{number:03}" for number in range(count)]
    for name in names:
        world.put(name, name.encode())
    world.later(100)
    random.Random(3).shuffle(names)
    return names


@promise("S-152")
def test_a_shuffled_loader_costs_one_request_a_file(world: World, one: Client) -> None:
    """The attributes come with the content, once a few files in a row were opened after they were looked up.

    Who only looks at files fetches few, also right after a loader; what is gone meanwhile is gone.
    """
    others = shuffled(world, "others")
    for name in shuffled(world, "d"):
        assert one.local.read(name) == name.encode()
    assert one.calls("get") <= 210
    assert one.calls("head") <= 40, "the first ones, and what falls into an order by chance"
    world.tool.delete("others/f007")
    before = one.calls("get")
    sizes = {name: one.local.stat(name).size for name in others if one.local.exists(name)}
    assert sizes == {name: len(name) for name in others if name != "others/f007"}
    assert one.calls("get") - before <= PENDING_MAX + 8


@promise("S-152")
def test_where_files_are_read_names_are_looked_up_side_by_side_without_heads(world: World, one: Client) -> None:
    """Several threads look up a name each before they open any. Who goes on and opens none is told by HEADs."""
    for name in shuffled(world, "read", 40):
        one.local.read(name)
    for number in range(96):
        world.put(f"d/f{number:03}", b"x")
    world.later(100)
    one.local.listdir("d")
    before = one.calls("head")
    for number in range(16):
        one.local.stat(f"d/f{number:03}")
    one.quiet()
    assert one.calls("head") == before, "a GET brought each"
    for number in range(16, 48):
        one.local.stat(f"d/f{number:03}")
    one.quiet()
    assert one.calls("head") - before >= 32


@promise("S-152")
def test_a_lookup_succeeds_though_its_file_is_replaced_meanwhile(world: World, one: Client, other: Client) -> None:
    """The version that is listed may be gone when its content is asked for: no lookup fails for that."""
    names = shuffled(world, "d")
    for name in names[:100]:
        one.local.read(name)
    for name in names[100:]:
        other.local.write(name, b"of another client")
    assert all(one.local.stat(name).size in (6, 17) for name in names[100:])
    world.later()
    assert all(one.local.read(name) == b"of another client" for name in names[100:])
