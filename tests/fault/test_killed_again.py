"""For each n and m: a process dies before its n-th lasting step, and whoever takes over dies, or fails, at its m-th."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from tests.driving import resolve
from tests.fault.dying import Mortal
from tests.fault.scenarios import Scenario
from tests.fault.sweeping import ERRORS, same_but_markers, small_parts
from tests.fault.test_killed_between import ALL, MORE, whole
from tests.fault.worlds import FaultWorld, fault_world
from tests.faulty import from_nth, no_faults, nth
from tests.mounted import Died
from tests.promises import promise

__all__ = ["small_parts"]
pytestmark = pytest.mark.timeout(900)
CHOSEN = [scenario for scenario in ALL if scenario.moves or scenario in MORE]
"""Those that leave more than one thing to do; the others are as they are with one death."""


def _steps(scenario: Scenario, mortal: Mortal, directory: Path) -> int:
    with fault_world(directory, scenario.before, mount=scenario.mount) as world:
        prepared = scenario.prepare(world.local)
        mortal.dies_at(world, None)
        scenario.act(world.local, prepared)
        return len(mortal.steps)


def _killed(world: FaultWorld, scenario: Scenario, mortal: Mortal, n: int) -> None:
    prepared = scenario.prepare(world.local)
    mortal.dies_at(world, n)
    with contextlib.suppress(Died):
        scenario.act(world.local, prepared)
    mortal.bury(world)


def _settled(world: FaultWorld, scenario: Scenario, where: str, *, failed: bool = False) -> None:
    """failed: what it moves may be under either name, or both, but never older bytes of it under the new one."""
    states = (scenario.before, scenario.after, *scenario.halfway, *scenario.when_killed)
    world.check()
    left = whole(world.keys(), scenario)
    shown = {key: body[:20] for key, body in left.items()}
    settled = any(same_but_markers(left, state) for state in states)
    if failed and scenario.moves:
        known = all(body == b"" or any(state.get(key) == body for state in states) for key, body in left.items())
        settled = known and any(set(state.values()) <= {b"", *left.values()} for state in states)
    assert settled, f"{where}: {shown}"
    assert not world.fs.uploads.unsent(), where
    assert not world.fs.core.db.intents(), where
    assert not world.bucket.uploads, where


@promise("S-20", "S-27", "S-62")
@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_a_start_that_is_killed_is_made_good(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies, and the next one before the m-th lasting step of its start."""
    mortal = Mortal(monkeypatch)
    for n in range(_steps(scenario, mortal, tmp_path / "healthy")):
        for m in itertools.count():
            where = f"killed before step {n}, then before step {m} of the start"
            with fault_world(tmp_path / f"{n}-{m}", scenario.before, mount=scenario.mount) as world:
                _killed(world, scenario, mortal, n)
                mortal.steps, mortal._last = [], m
                lived = False
                with contextlib.suppress(Died):
                    world.build(mortal._plan)
                    lived = True
                if not lived:
                    mortal.bury_unborn()
                    world.build()
                mortal.dies_at(world, None)
                _settled(world, scenario, where)
            if lived:
                break


@promise("S-159", "S-20", "S-27", "S-66")
@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_a_start_that_fails_is_made_good(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies, and the m-th store call of the next start fails, once or for good."""
    mortal = Mortal(monkeypatch)
    for n, make in itertools.product(range(_steps(scenario, mortal, tmp_path / "healthy")), (nth, from_nth)):
        for m in itertools.count():
            where = f"killed before step {n}, then {make.__name__} call {m} of the start fails"
            with fault_world(tmp_path / f"{n}-{m}-{make.__name__}", scenario.before, mount=scenario.mount) as world:
                _killed(world, scenario, mortal, n)
                mortal.dies_at(world, None)
                world.build(make(m, ERRORS["unreachable"]))
                reached = len(world.faulty.calls) > m
                world.faulty.plan = no_faults
                resolve(world.fs.flush_all())
                mortal.bury(world)
                world.build()
                mortal.dies_at(world, None)
                _settled(world, scenario, where, failed=True)
            if not reached:
                break
