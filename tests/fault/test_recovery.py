"""What a dead process left is finished by the next mount, whatever store call of that mount fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from tests.driving import resolve
from tests.fault.scenarios import BIG, LARGE, MOVED, NEW, PART, PATCHED, TREE, without
from tests.fault.sweeping import EFFECTS, ERRORS, Tried, other_version, plan_of, shown, small_parts
from tests.fault.worlds import FaultWorld, fault_world
from tests.faulty import Fault, from_nth
from tests.promises import promise

__all__ = ["small_parts"]


def unsent(path: str, flags: int = 0, body: bytes = NEW, at: int = 0) -> Callable[[FaultWorld], None]:
    """Written to, and never closed."""
    return lambda world: cast(None, world.local.open(path, os.O_RDWR | flags).write(body, at))


def renamed_file(world: FaultWorld) -> None:
    world.fs.core.db.begin("rename-file", "d/f", "new")


def renamed_directory(world: FaultWorld) -> None:
    resolve(world.fs.core.store.copy("d/f", "m/f"))
    world.fs.core.db.begin("rename-directory", "d/", "m/")


def hidden_copy(world: FaultWorld) -> None:
    resolve(world.fs.core.store.copy("other", ".datastore.unlinked/x"))
    world.fs.core.db.begin("discard", ".datastore.unlinked/x", "")


UNSENT_LARGE = unsent("big", body=b"XYZ", at=PART * 2 + 100)
LEFT: dict[str, tuple[Mapping[str, bytes], Callable[[FaultWorld], None], Mapping[str, bytes]]] = {
    "unsent": (TREE, unsent("d/f", os.O_TRUNC), {**TREE, "d/f": NEW}),
    "unsent and new": (TREE, unsent("d/new", os.O_CREAT), {**TREE, "d/new": NEW}),
    "unsent, large": (BIG, UNSENT_LARGE, {**BIG, "big": PATCHED}),
    "rename": (TREE, renamed_file, {**without("d/f"), "new": b"old"}),
    "rename of a directory": (TREE, renamed_directory, MOVED),
    "hidden copy": (TREE, hidden_copy, TREE),
}


KINDS = {
    **{kind: [Fault(error, after) for after in EFFECTS.get(kind, (False, True))] for kind, error in ERRORS.items()},
    "wrong etag, unseen": [Fault(alter=other_version)],
}
"""What a call ends with."""


@promise("S-20", "S-27")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", LEFT)
def test_recovery_survives_faults(left: str, kind: str, tmp_path: Path) -> None:
    """A mount whose recovery fails at its n-th call works, and the next one finishes the rest."""
    before, leave, after = LEFT[left]
    for n, method in enumerate(_calls(left, tmp_path / "healthy")):
        tried = Tried()
        for fault, lasting in itertools.product(KINDS[kind], (False, True)):
            if tried.same(after=fault.after, lasting=lasting):
                continue
            where = f"call {n} ({method}) {kind}, {'for good' if lasting else 'once'}"
            with fault_world(tmp_path / f"{n}-{lasting}-{fault.after}", before) as world:
                leave(world)
                world.release()
                world.build(plan_of(fault, n, lasting=lasting))
                nothing_lost(world, before, after, where)
                assert not world.bucket.uploads or fault.after or lasting, f"{where}: an upload is left"
                tried.seen = world.heal()[n:]
                world.release()
                world.build()
                assert world.keys() == after, f"{where}: {sorted(world.keys())}"
                assert world.local.tree() == shown(after), where
                world.all_done(where)
                world.check()


def nothing_lost(world: FaultWorld, before: Mapping[str, bytes], after: Mapping[str, bytes], where: str) -> None:
    """While the rest is not done yet: each object is whole, of before or of after, and no content is nowhere."""
    found = world.keys()
    for key, body in found.items():
        assert body in (before.get(key), after.get(key)), f"{where}: {key} holds {body[:20]!r}"
    for key, body in before.items():
        assert body in found.values() or body not in after.values(), f"{where}: the content of {key} is nowhere"
    world.check()


def _calls(left: str, directory: Path) -> list[str]:
    before, leave, after = LEFT[left]
    with fault_world(directory, before) as world:
        leave(world)
        world.release()
        world.build()
        assert world.keys() == after
        return list(world.faulty.calls)


@promise("S-20")
def test_unsent_bytes_are_read_before_they_are_sent(tmp_path: Path) -> None:
    """What recovery could not send yet is sent by flush_all."""
    with fault_world(tmp_path, BIG) as world:
        UNSENT_LARGE(world)
        world.release()
        world.build(from_nth(0, ERRORS["unreachable"]))
        assert [row["path"] for row in world.fs.uploads.unsent()] == ["big"]
        world.heal()
        assert resolve(world.fs.flush_all()) == []
        assert world.keys() == {**BIG, "big": PATCHED}
        assert world.local.read("big") == PATCHED != LARGE
