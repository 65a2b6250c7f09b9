"""For each n: the server dies at the n-th store call of every writer path, and another one resumes its mount."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from datastore.fuse.ops import Filesystem
from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.surviving import Surviving
from tests.fault.sweeping import ERRORS, LOOKING, Tried, calls_of, mend, nothing_foreign, small_parts
from tests.fault.worlds import FaultWorld, fault_world
from tests.faulty import Plan, from_nth, no_faults, nth
from tests.localfs import LocalFs
from tests.model.world import outcome
from tests.mounted import Died
from tests.promises import promise

__all__ = ["small_parts"]
pytestmark = pytest.mark.timeout(600)
BEFORE_AFTER = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


class Survivor:
    """One scenario whose server dies at its n-th call, before or after that took effect."""

    def __init__(self, world: FaultWorld, scenario: Scenario, n: int, *, after: bool, plan: Plan = no_faults) -> None:
        self.kernel = Surviving(world)
        self.kernel.plan_next = plan
        self._world, self._scenario = world, scenario
        self.followed: list[str] = []
        """The store calls of the server that lived until the store worked again."""
        self._local = LocalFs(cast(Filesystem, self.kernel))
        self.prepared: Any = scenario.prepare(self._local)
        self.kernel.dies_at(n, after=after)

    def act(self) -> None:
        """Raises what the application sees; the store works again."""
        try:
            with contextlib.suppress(Died):  # on a thread of the server's own: no request was under way
                self._scenario.act(self._local, self.prepared)
            if self.kernel.dying:
                self.kernel.restart()
        finally:
            self.followed = self._world.heal()


@promise("S-41", "S-58")
@BEFORE_AFTER
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_kill_is_not_felt(scenario: Scenario, after: bool, tmp_path: Path) -> None:
    """What was in flight is done once, nobody sees an error, and nothing is left behind."""
    for n, method in enumerate(calls_of(scenario, tmp_path / "healthy")):
        if after and method in LOOKING:
            continue
        where = f"killed {'after' if after else 'before'} call {n} ({method})"
        with fault_world(tmp_path / str(n), scenario.before, mount=scenario.mount) as world:
            survivor = Survivor(world, scenario, n, after=after)
            survivor.act()
            world.check()
            mend(world, scenario, survivor.prepared, where, failed=False, new_process=False, killed=True)


@promise("S-27", "S-58", "S-66")
@BEFORE_AFTER
@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.moves], ids=lambda scenario: scenario.name)
def test_resuming_survives_faults(scenario: Scenario, after: bool, tmp_path: Path) -> None:
    """The server that resumes fails at its m-th call, once or for good: an error at the most.

    In each way at each call after the kill that leaves the most to do;
    after the others at one, because of the line.
    """
    kills = calls_of(scenario, tmp_path / "healthy")
    chosen = [n for n, method in enumerate(kills) if not (after and method in LOOKING)]
    left = {n: _recovery_calls(scenario, n, tmp_path / f"{n}", after=after) for n in chosen}
    for n in chosen:
        method = kills[n]
        most = n == max(chosen, key=lambda each: left[each])
        kinds = list(ERRORS) if most else ["unreachable"]
        at = range(left[n]) if most or not left[n] else [n % left[n]]
        tried: dict[tuple[int, str], Tried] = defaultdict(Tried)
        for make, m, kind in itertools.product((nth, from_nth), at, kinds):
            if tried[m, kind].same(lasting=make is from_nth):
                continue
            where = f"killed {'after' if after else 'before'} call {n} ({method}), then {make.__name__} {m}: {kind}"
            with fault_world(tmp_path / f"{n}-{m}", scenario.before, mount=scenario.mount) as world:
                survivor = Survivor(world, scenario, n, after=after, plan=make(m, ERRORS[kind]))
                failed = outcome(survivor.act)
                tried[m, kind].seen = survivor.followed[m:]
                world.check()
                nothing_foreign(world, scenario, where)
                mend(world, scenario, survivor.prepared, where, failed=bool(failed), new_process=False, killed=True)


def _recovery_calls(scenario: Scenario, n: int, directory: Path, *, after: bool) -> int:
    with fault_world(directory, scenario.before, mount=scenario.mount) as world:
        survivor = Survivor(world, scenario, n, after=after)
        survivor.act()
        return survivor.kernel.recovery_calls
