"""For each n: the n-th store call of every writer path fails because the store cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.sweeping import small_parts, sweep
from tests.promises import promise

__all__ = ["small_parts"]
KINDS = ("unreachable",)


@promise("S-18", "S-19", "S-27")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nth_call_fails(scenario: Scenario, kind: str, tmp_path: Path) -> None:
    """Whatever call fails, because of the line."""
    sweep(scenario, kind, tmp_path)
