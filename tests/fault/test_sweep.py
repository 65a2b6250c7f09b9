"""For each n: the n-th store call of every writer path fails, because of the line or with what the store says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.sweeping import ERRORS, LOOKING, calls_of, same_but_markers, small_parts, sweep
from tests.fault.worlds import fault_world
from tests.faulty import nth
from tests.promises import promise

__all__ = ["small_parts"]


@promise("S-18", "S-19", "S-27")
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nth_call_fails(scenario: Scenario, kind: str, tmp_path: Path) -> None:
    """Whatever call fails: nothing is lost, half made or reported wrongly."""
    sweep(scenario, kind, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_passing_fault_is_not_felt(scenario: Scenario, after: bool, tmp_path: Path) -> None:
    """With the retry layer one transient fault changes nothing."""
    for n, healthy in enumerate(calls_of(scenario, tmp_path / "healthy")):
        if after and healthy in LOOKING:
            continue
        with fault_world(tmp_path / str(n), scenario.before, retrying=True, mount=scenario.mount) as world:
            prepared = scenario.prepare(world.local)
            nth_call = len(world.faulty.calls) + n
            world.faulty.plan = nth(nth_call, ERRORS["unreachable"], after=after)
            scenario.act(world.local, prepared)
            scenario.finish(world.local, prepared)
            # Side by side calls come in any order: which one failed is known only now.
            method = world.faulty.calls[nth_call] if nth_call < len(world.faulty.calls) else "none"
            assert same_but_markers(world.keys(), scenario.after), f"call {n} ({method}): {sorted(world.keys())}"
            world.check()
            if method != "create_upload":
                assert not world.bucket.uploads, f"call {n} ({method})"
