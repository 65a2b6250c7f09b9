"""For each n: the process dies before its n-th lasting step: a store call, or a change of what is on the local disk."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from datastore.fuse.ops import Filesystem
from tests.driving import resolve
from tests.fault.dying import Mortal
from tests.fault.scenarios import BEHIND, LARGE, NEW, SCENARIOS, TREE, Scenario, without
from tests.fault.surviving import Surviving
from tests.fault.sweeping import mend, same_but_markers, small_parts
from tests.fault.worlds import FaultWorld, fault_world
from tests.localfs import LocalFs
from tests.mounted import Died, no_writes
from tests.promises import promise

__all__ = ["small_parts"]
pytestmark = pytest.mark.timeout(600)
OLDER = b"older, unsent"


def _unsent_target(local: LocalFs) -> str:
    """A file that was closed and not sent yet."""
    local.write("other", OLDER)
    return "closed"


def _open_unsent_target(local: LocalFs) -> Any:
    file = local.open("other", os.O_RDWR | os.O_TRUNC)
    file.write(OLDER)
    return file


def _sent_at_once(local: LocalFs, _: Any) -> None:
    with local.opened("d/f", os.O_RDWR | os.O_TRUNC) as file:
        file.write(NEW)
        file.fsync()


OVER_UNSENT = {**without("d/f"), "other": b"old"}
MORE = (
    Scenario(
        "rename over what is unsent",
        TREE,
        lambda local, _: local.rename("d/f", "other"),
        OVER_UNSENT,
        _unsent_target,
        mount=BEHIND,
        halfway=({**TREE, "other": OLDER},),
    ),
    Scenario(
        "rename over what is open and unsent",
        TREE,
        lambda local, _: local.rename("d/f", "other"),
        OVER_UNSENT,
        _open_unsent_target,
        lambda local, file: file.close(),
        halfway=({**TREE, "other": OLDER},),
    ),
    Scenario(
        "unlink what is unsent",
        TREE,
        lambda local, _: local.unlink("other"),
        without("other"),
        _unsent_target,
        mount=BEHIND,
        halfway=({**TREE, "other": OLDER},),
    ),
    Scenario("write and sync", TREE, _sent_at_once, {**TREE, "d/f": NEW}),
)
ALL = (*SCENARIOS, *MORE)


def whole(left: Mapping[str, bytes], scenario: Scenario) -> dict[str, bytes]:
    """A file of which a part was written counts as written."""

    def begun(key: str, body: bytes) -> bool:
        written = scenario.after.get(key, b"")
        header_last = written[4:] == LARGE[4:] and LARGE.startswith(body)
        return scenario.before.get(key) != body and (written.startswith(body) or header_last)

    return {key: scenario.after[key] if begun(key, body) else body for key, body in left.items()}


class _Kernel(Surviving):
    def __init__(self, world: FaultWorld, mortal: Mortal) -> None:
        super().__init__(world)
        self._mortal = mortal
        self.found: Mapping[str, bytes] = {}
        """What was in the bucket when the server died."""

    def restart(self) -> None:
        """A new server over the same state directory."""
        self.found = self._world.keys()
        self._mortal.bury(self._world)
        self._world.build(resumed=True)


def _steps(scenario: Scenario, mortal: Mortal, directory: Path) -> list[str]:
    with fault_world(directory, scenario.before, mount=scenario.mount) as world:
        prepared = scenario.prepare(world.local)
        mortal.dies_at(world, None)
        scenario.act(world.local, prepared)
        return list(mortal.steps)


@promise("S-41", "S-58")
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_a_new_server_goes_on(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees an error, and what was replaced or removed never comes back."""
    mortal = Mortal(monkeypatch)
    for n, step in enumerate(_steps(scenario, mortal, tmp_path / "healthy")):
        where = f"killed before step {n} ({step})"
        with fault_world(tmp_path / str(n), scenario.before, mount=scenario.mount) as world:
            kernel = _Kernel(world, mortal)
            local = LocalFs(cast(Filesystem, kernel))
            prepared = scenario.prepare(local)
            mortal.dies_at(world, n)
            with contextlib.suppress(Died):  # on a thread of the server's own: no request was under way
                scenario.act(local, prepared)
            if mortal.dead:
                kernel.restart()
            mortal.dies_at(world, None)
            world.heal()
            world.check()
            mend(world, scenario, prepared, where, failed=False, new_process=False, killed=True)


@promise("S-20", "S-27", "S-62")
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_the_next_mount_goes_on(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the death of every process all is as before, as after, or as what was written."""
    mortal = Mortal(monkeypatch)
    states = (scenario.before, scenario.after, *scenario.halfway, *scenario.when_killed)
    for n, step in enumerate(_steps(scenario, mortal, tmp_path / "healthy")):
        where = f"killed before step {n} ({step})"
        with fault_world(tmp_path / str(n), scenario.before, mount=scenario.mount) as world:
            prepared = scenario.prepare(world.local)
            mortal.dies_at(world, n)
            with contextlib.suppress(Died):
                scenario.act(world.local, prepared)
            mortal.bury(world)
            world.build()
            world.check()
            left = world.keys()
            shown = {key: body[:20] for key, body in left.items()}
            assert any(same_but_markers(whole(left, scenario), state) for state in states), f"{where}: {shown}"
            assert not world.fs.uploads.unsent(), where
            assert not world.fs.core.db.intents(), where
            world.release()
            world.build()
            assert world.keys() == left, f"{where}: the next mount changed it again"


def _written(local: LocalFs) -> None:
    local.write("other", NEW)


def _written_and_synced(local: LocalFs) -> None:
    with local.opened("other", os.O_RDWR | os.O_TRUNC) as file:
        file.write(NEW)
        file.fsync()


def _renamed_over(local: LocalFs) -> None:
    local.rename("d/f", "other")


def _unsent_renamed_over(local: LocalFs) -> None:
    file = local.open("d/f", os.O_RDWR | os.O_TRUNC)
    file.write(NEW)
    local.rename("d/f", "other")
    file.close()


def _removed(local: LocalFs) -> None:
    local.unlink("other")


def _made_anew(local: LocalFs) -> None:
    """Exclusively, and empty."""
    local.open("made", os.O_RDWR | os.O_CREAT | os.O_EXCL).close()


BESIDE: dict[Callable[[LocalFs], None], tuple[str, tuple[Mapping[str, bytes], ...]]] = {
    _written: ("other", ({**TREE, "other": NEW}, {**TREE, "other": b""})),
    _written_and_synced: ("other", ({**TREE, "other": NEW}, {**TREE, "other": b""})),
    _renamed_over: ("other", (OVER_UNSENT,)),
    _unsent_renamed_over: (
        "other",
        ({**without("d/f"), "other": NEW}, {**TREE, "d/f": NEW, "other": OLDER}, {**TREE, "d/f": b"", "other": OLDER}),
    ),
    _removed: ("other", (without("other"),)),
    _made_anew: ("made", ({**TREE, "made": b""},)),
}
"""What is done to a name for which an earlier process left unsent bytes, and what that may come to."""
STAYS = (_removed, _made_anew)
"""Nothing has their place in the end: killed at the wrong moment, what was left comes back rather than is lost."""


@promise("S-128")
@pytest.mark.parametrize("resumed", [False, True], ids=["all", "server"])
@pytest.mark.parametrize("act", BESIDE, ids=lambda act: act.__name__.strip("_"))
def test_what_was_left_before_never_replaces_what_is_newer(
    act: Callable[[LocalFs], None], resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes between the newer content and the end of the older one, or anywhere else."""
    mortal = Mortal(monkeypatch)
    name, results = BESIDE[act]
    for n in itertools.count():
        with fault_world(tmp_path / str(n), TREE) as world:
            world.local.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC).write(OLDER)
            world.release()
            world.build(no_writes)
            kernel = _Kernel(world, mortal)
            mortal.dies_at(world, n)
            answered = False
            with contextlib.suppress(Died):
                act(LocalFs(cast(Filesystem, kernel)) if resumed else world.local)
                answered = True
            outlived = answered and not mortal.dead and not kernel.found
            undone = not answered or (act in STAYS and not outlived)
            allowed = (*results, {**TREE, name: OLDER}) if undone and not world.writes_accepted else results
            found = kernel.found or world.keys()
            if not resumed:
                mortal.bury(world)
                world.build()
            mortal.dies_at(world, None)
            world.check()
            assert resolve(world.fs.flush_all()) == []
            for start in range(2):
                where = f"{'not killed' if outlived else f'killed before step {n}'}, start {start}"
                left = world.keys()
                shown = {key: body[:20] for key, body in left.items()}
                assert any(same_but_markers(left, state) for state in allowed), f"{where}: {shown}"
                assert left.get(name) != OLDER or found.get(name) != NEW, where
                world.release()
                world.build()
        if outlived:
            assert n > 3
            return
