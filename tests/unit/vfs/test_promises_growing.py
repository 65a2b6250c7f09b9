"""S-44: a file that stays open and only grows is published while it is written."""

from __future__ import annotations

import os

import pytest

from datastore.fuse.vfs.upload import upkeep as upkeep_module
from datastore.fuse.vfs.upload.upkeep import BUSY_S, QUIET_S, Upkeep
from tests.driving import resolve
from tests.mounted import Client, World
from tests.promises import promise

BOTH_LISTINGS = True

APPEND = os.O_CREAT | os.O_WRONLY | os.O_APPEND


def upkeep(client: Client) -> Upkeep:
    return client.fs.upkeep


@promise("S-44")
def test_a_quiet_log_is_seen_before_it_is_closed(world: World, one: Client, other: Client) -> None:
    """Three seconds after the last write another client reads what was written."""
    with one.local.opened("log", APPEND) as log:
        log.write(b"first\n")
        resolve(upkeep(one).publish())
        assert not other.local.exists("log")
        world.clock.advance(QUIET_S)
        resolve(upkeep(one).publish())
        world.clock.advance(QUIET_S)
        assert other.local.read("log") == b"first\n"
        log.write(b"second\n", 6)
        world.clock.advance(QUIET_S)
        resolve(upkeep(one).publish())
    world.clock.advance(QUIET_S)
    assert other.local.read("log") == b"first\nsecond\n"


@promise("S-44")
def test_a_busy_log_is_published_every_so_often(world: World, one: Client, other: Client) -> None:
    """A log that is written each second is published after 15 s."""
    with one.local.opened("log", APPEND) as log:
        for second in range(int(BUSY_S) + 1):
            log.write(b".", second)
            resolve(upkeep(one).publish())
            world.clock.advance(1.0)
        assert one.calls("put") == 1
        assert other.local.stat("log").size >= BUSY_S


@promise("S-44")
@pytest.mark.parametrize(("limit", "pause_s"), [("QUIET_BYTES", QUIET_S), ("BUSY_BYTES", 1.0)])
def test_a_log_that_grew_by_too_much_waits_for_its_close(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch, limit: str, pause_s: float
) -> None:
    """A writer waits while its file is sent."""
    monkeypatch.setattr(upkeep_module, limit, 5)
    with one.local.opened("most", APPEND) as most, one.local.opened("more", APPEND) as more:
        most.write(b"1")
        more.write(b"1")
        world.clock.advance(BUSY_S - 1.0)
        most.write(b"2345", 1)
        more.write(b"23456", 1)
        world.clock.advance(pause_s)
        resolve(upkeep(one).publish())
        assert world.all_keys() == ["most"]


@promise("S-44")
def test_a_file_that_is_rewritten_waits_for_its_close(world: World, one: Client, other: Client) -> None:
    """A change in the middle is not shown half-made."""
    one.local.write("file", b"0123456789")
    with one.local.opened("file", os.O_RDWR) as file:
        file.write(b"x", 3)
        world.clock.advance(10 * BUSY_S)
        resolve(upkeep(one).publish())
        assert other.local.read("file") == b"0123456789"
    world.clock.advance(QUIET_S)
    assert other.local.read("file") == b"012x456789"


@promise("S-32", "S-44", "S-162")
@pytest.mark.parametrize("flags", [APPEND, os.O_CREAT | os.O_WRONLY | os.O_TRUNC])
def test_who_closes_last_wins_over_what_was_published(world: World, one: Client, other: Client, flags: int) -> None:
    """A publication is no close of what was written anew; who appends loses what another truncated."""
    log = one.local.open("log", flags)
    log.write(b"from one")
    world.clock.advance(QUIET_S)
    resolve(upkeep(one).publish())
    other.local.write("log", b"from two")
    world.clock.advance(QUIET_S)
    log.close()
    world.clock.advance(QUIET_S)
    assert other.local.read("log") == (b"from two" if flags == APPEND else b"from one")
