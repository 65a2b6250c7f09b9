"""Which tiers run side by side (tests/run_tiers.py)."""

from __future__ import annotations

import threading

import pytest

from tests import run_tiers
from tests.patience import PATIENCE_S
from tests.run_tiers import TIERS, Tally, Tier, run_all


def tiers(*lanes: str) -> list[Tier]:
    return [Tier(name=f"{number}{lane}", steps=(), lane=lane) for number, lane in enumerate(lanes)]


def test_neighbours_with_lanes_run_side_by_side_and_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    ran: list[str] = []

    def run(tier: Tier, *_: object) -> Tally:
        if tier.lane:
            together.wait(PATIENCE_S)
        ran.append(tier.name)
        return Tally(tier.name)

    monkeypatch.setattr(run_tiers, "run_tier", run)
    chosen = tiers("", "a", "b", "b", "a", "", "c", "d")
    tallies = run_all(chosen, pytest.fail)
    names = [tier.name for tier in chosen]
    assert [tally.name for tally in tallies] == names
    assert ran[0] == "0"
    assert set(ran[1:5]) == set(names[1:5])
    assert ran.index("1a") < ran.index("4a")
    assert ran.index("2b") < ran.index("3b")
    assert ran[5] == "5"
    assert set(ran[6:]) == set(names[6:])


@pytest.mark.parametrize("measured", ["soak", "bench-short", "e2e-cluster-crowd"])
def test_measuring_tiers_run_alone(measured: str) -> None:
    (tier,) = (tier for tier in TIERS if tier.name == measured)
    assert not tier.lane


def test_every_test_of_a_mount_is_in_a_tier() -> None:
    """The two tiers of root's share them by a mark."""
    steps = [step.argv for tier in TIERS if not tier.plain for step in tier.steps if "tests/mount" in step.argv]
    assert sorted(argv[argv.index("tests/mount") :] for argv in steps) == [
        ("tests/mount", "-m", "not slow"),
        ("tests/mount", "-m", "slow"),
    ]
