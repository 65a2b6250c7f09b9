"""Foresight: which names of a listing come next."""

from __future__ import annotations

import random
import stat

from datastore.fuse.vfs.foresight import _AHEAD, _Run
from datastore.fuse.vfs.listing import Listed, Listing
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
