"""What a dead process left is finished by the next mount, whatever store call of that mount fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from datastore.errors import (
    AccessDenied,
    CorruptBody,
    DeadlineExceeded,
    ServerFault,
    StoreError,
    Throttled,
    Unreachable,
)
from datastore.fuse.data import multipart
from tests.fault.scenarios import BIG, LARGE, MOVED, NEW, PART, PATCHED, TREE, without
from tests.fault.worlds import MIN_PART, FaultWorld, fault_world
from tests.faulty import from_nth, nth


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipart uploads of a few KiB."""
    monkeypatch.setattr(multipart, "MIB", MIN_PART)
    monkeypatch.setattr(multipart, "SINGLE_MAX", PART)
    monkeypatch.setattr(multipart, "PART_SIZE", PART)


def unsent_small(world: FaultWorld) -> None:
    world.local.open("d/f", os.O_RDWR | os.O_TRUNC).write(NEW)


def unsent_new(world: FaultWorld) -> None:
    world.local.open("d/new", os.O_RDWR | os.O_CREAT).write(NEW)


def unsent_large(world: FaultWorld) -> None:
    world.local.open("big", os.O_RDWR).write(b"XYZ", PART * 2 + 100)


def renamed_file(world: FaultWorld) -> None:
    world.fs.core.db.begin("rename-file", "d/f", "new")


def renamed_directory(world: FaultWorld) -> None:
    world.fs.core.store.copy("d/f", "m/f")
    world.fs.core.db.begin("rename-directory", "d/", "m/")


def hidden_copy(world: FaultWorld) -> None:
    world.fs.core.store.copy("other", ".datastore.unlinked/x")
    world.fs.core.db.begin("discard", ".datastore.unlinked/x", "")


LEFT: dict[str, tuple[Mapping[str, bytes], Callable[[FaultWorld], None], Mapping[str, bytes]]] = {
    "unsent": (TREE, unsent_small, {**TREE, "d/f": NEW}),
    "unsent and new": (TREE, unsent_new, {**TREE, "d/new": NEW}),
    "unsent, large": (BIG, unsent_large, {**BIG, "big": PATCHED}),
    "rename": (TREE, renamed_file, {**without("d/f"), "new": b"old"}),
    "rename of a directory": (TREE, renamed_directory, MOVED),
    "hidden copy": (TREE, hidden_copy, TREE),
}


KINDS: dict[str, tuple[StoreError, tuple[bool, ...]]] = {
    "reset": (Unreachable("no route to the store"), (False, True)),
    "denied": (AccessDenied("not allowed"), (False, True)),
    "timeout": (DeadlineExceeded("no answer in time"), (True,)),
    "server fault": (ServerFault("the server broke"), (False,)),
    "throttled": (Throttled("slow down"), (False,)),
    "truncated": (CorruptBody("shorter than promised"), (False,)),
}
"""What a call fails with, and whether it took effect before."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", LEFT)
def test_recovery_survives_faults(left: str, kind: str, tmp_path: Path) -> None:
    """S-20 S-27 A mount whose recovery fails at its n-th call works, and the next one finishes the rest."""
    before, leave, after = LEFT[left]
    error, effects = KINDS[kind]
    for n in range(_calls(left, tmp_path / "healthy")):
        for make in (nth, from_nth):
            for lost_answer in effects:
                directory = tmp_path / f"{n}-{make.__name__}-{lost_answer}"
                with fault_world(directory, before) as world:
                    leave(world)
                    world.release()
                    world.build(make(n, error, after=lost_answer))
                    assert not world.bucket.uploads or lost_answer or make is from_nth
                    world.heal()
                    world.release()
                    world.build()
                    assert world.keys() == after, f"call {n}: {sorted(world.keys())}"
                    assert not world.hidden()
                    assert not world.fs.uploads.unsent()
                    assert not world.fs.core.db.intents()
                    world.check()


def _calls(left: str, directory: Path) -> int:
    before, leave, after = LEFT[left]
    with fault_world(directory, before) as world:
        leave(world)
        world.release()
        world.build()
        assert world.keys() == after
        return len(world.faulty.calls)


def test_unsent_bytes_are_read_before_they_are_sent(tmp_path: Path) -> None:
    """S-20 What recovery could not send yet is sent by flush_all."""
    with fault_world(tmp_path, BIG) as world:
        unsent_large(world)
        world.release()
        world.build(from_nth(0, Unreachable("no route to the store")))
        assert [row["path"] for row in world.fs.uploads.unsent()] == ["big"]
        world.heal()
        assert world.fs.flush_all() == []
        assert world.keys() == {**BIG, "big": PATCHED}
        assert world.local.read("big") == PATCHED != LARGE
