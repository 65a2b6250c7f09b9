"""Foresight: which names of a listing come next."""

from __future__ import annotations

import random
import stat

from datastore.fuse.vfs.foresight import _AHEAD, _Run
from datastore.fuse.vfs.listing import Listed, Listing
from datastore.fuse.vfs.openings import PENDING_MAX
from tests.mounted import Client, World

NAMES = [b"f%04d" % number for number in range(1000)]


def run() -> _Run:
    listing = Listing(0.0, marker=True)
    listing.entries.update({name: Listed(stat.S_IFREG, name.decode()) for name in NAMES})
    return _Run(listing)


def test_one_loader_gets_what_comes_next_and_each_name_once() -> None:
    made = run()
    asked: list[int] = []
    for at, name in enumerate(NAMES):
        ahead = made.step(name)
        assert all(at < one <= at + _AHEAD for one in ahead)
        asked += ahead
    assert len(asked) == len(set(asked)) >= len(NAMES) - 10


def test_threads_that_drift_apart_are_one_run() -> None:
    made, places = run(), random.Random(2)
    at = list(range(16))
    asked: list[int] = []
    while any(one < len(NAMES) for one in at):
        # a thread may be many of its own steps behind the first one
        first = min(range(16), key=lambda thread: at[thread] + places.randrange(400))
        if at[first] < len(NAMES):
            asked += made.step(NAMES[at[first]])
        at[first] += 16
    assert len(asked) == len(set(asked)) > len(NAMES) * 0.9


def test_random_names_are_no_run() -> None:
    made, places = run(), random.Random(2)
    assert sum(len(made.step(places.choice(NAMES))) for _ in range(200)) < 200


def test_attributes_that_a_get_brought_along_are_not_asked_for_again(world: World, one: Client) -> None:
    for number in range(60):
        world.put(f"d/f{number:03}", b"x" * 100)
    world.later()
    one.local.listdir("d")
    for number in range(60):
        assert one.local.read(f"d/f{number:03}") == b"x" * 100
        one.fs.core.io.submit(int).result(10)
    assert one.calls("head") <= 24, "the first ones, before there was a run of reads"


def shuffled(world: World, folder: str, count: int = 200) -> list[str]:
    """Names of files that another tool put long ago, in an order that nobody can guess."""
    names = [f"{folder}/f{number:03}" for number in range(count)]
    for name in names:
        world.put(name, name.encode())
    world.later(100)
    random.Random(3).shuffle(names)
    return names


def test_a_shuffled_loader_costs_one_request_a_file(world: World, one: Client) -> None:
    """S-152 the attributes come with the content, once a few files in a row were opened after they were looked up."""
    for name in shuffled(world, "d"):
        assert one.local.read(name) == name.encode()
    assert one.calls("get") <= 210
    assert one.calls("head") <= 40, "the first ones, and what falls into an order by chance"


def test_who_only_looks_at_files_fetches_few(world: World, one: Client) -> None:
    """S-152 also right after a loader; what is gone meanwhile is gone."""
    others = shuffled(world, "others")
    for name in shuffled(world, "d"):
        one.local.read(name)
    world.tool.delete("others/f007")
    before = one.calls("get")
    sizes = {name: one.local.stat(name).size for name in others if one.local.exists(name)}
    assert sizes == {name: len(name) for name in others if name != "others/f007"}
    assert one.calls("get") - before <= PENDING_MAX + 8


def test_a_file_that_changes_while_it_is_looked_up(world: World, one: Client, other: Client) -> None:
    """S-152 the version that is listed may be gone when its content is asked for: no lookup fails for that."""
    names = shuffled(world, "d")
    for name in names[:100]:
        one.local.read(name)
    for name in names[100:]:
        other.local.write(name, b"of another client")
    assert all(one.local.stat(name).size in (6, 17) for name in names[100:])
    world.later()
    assert all(one.local.read(name) == b"of another client" for name in names[100:])
