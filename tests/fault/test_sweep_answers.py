"""For each n: the n-th store call of every writer path fails with what the store, or its answer, says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.sweeping import ERRORS, small_parts, sweep
from tests.promises import promise

__all__ = ["small_parts"]
KINDS = [kind for kind in ERRORS if kind != "unreachable"]


@promise("S-18", "S-19", "S-27")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nth_call_fails(scenario: Scenario, kind: str, tmp_path: Path) -> None:
    """Whatever call fails, because of the answer."""
    sweep(scenario, kind, tmp_path)
