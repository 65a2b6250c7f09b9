"""For each n: the process dies before its n-th lasting step (a store call, or a change of what is on the local disk),
or after it, where that is a store call.

And for each m: whoever takes over dies, or fails, at its m-th.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from datastore.fuse.ops import Filesystem
from tests.driving import resolve
from tests.fault.dying import Mortal
from tests.fault.scenarios import BEHIND, LARGE, NEW, SCENARIOS, TREE, Scenario, opened, rename, unlink, without, write
from tests.fault.surviving import Surviving
from tests.fault.sweeping import (
    CHANGING,
    ERRORS,
    LOOKING,
    Tried,
    mend,
    nothing_foreign,
    same_but_markers,
    small_parts,
)
from tests.fault.worlds import FaultWorld, fault_world
from tests.faulty import Plan, from_nth, no_faults, nth
from tests.localfs import LocalFs
from tests.model.world import outcome
from tests.mounted import Died, no_writes
from tests.promises import promise

__all__ = ["small_parts"]
pytestmark = pytest.mark.timeout(900)
OLDER = b"older, unsent"


def _unsent_target(local: LocalFs) -> str:
    """A file that was closed and not sent yet."""
    local.write("other", OLDER)
    return "closed"


def _open_unsent_target(local: LocalFs) -> Any:
    file = local.open("other", os.O_RDWR | os.O_TRUNC)
    file.write(OLDER)
    return file


OVER_UNSENT = {**without("d/f"), "other": b"old"}
KEPT = ({**TREE, "other": OLDER},)
OVER = rename("d/f", "other")
MORE = (
    Scenario(
        *("rename over what is unsent", TREE, OVER, OVER_UNSENT, _unsent_target),
        mount=BEHIND,
        halfway=KEPT,
    ),
    Scenario(
        *("rename over what is open and unsent", TREE, OVER, OVER_UNSENT, _open_unsent_target),
        lambda local, file: file.close(),
        halfway=KEPT,
    ),
    Scenario(
        *("unlink what is unsent", TREE, unlink("other"), without("other"), _unsent_target),
        mount=BEHIND,
        halfway=KEPT,
    ),
    Scenario("write and sync", TREE, opened("d/f", os.O_TRUNC, sync=True), {**TREE, "d/f": NEW}),
)
ALL = (*SCENARIOS, *MORE)


def whole(left: Mapping[str, bytes], scenario: Scenario) -> dict[str, bytes]:
    """A file of which a part was written counts as written."""

    def begun(key: str, body: bytes) -> bool:
        written = scenario.after.get(key, b"")
        header_last = written[4:] == LARGE[4:] and LARGE.startswith(body)
        return scenario.before.get(key) != body and (written.startswith(body) or header_last)

    return {key: scenario.after[key] if begun(key, body) else body for key, body in left.items()}


class _Survived(NamedTuple):
    """What became of a scenario whose server died. followed: the store calls of the next one until all worked again."""

    prepared: Any
    failed: int
    recovery_calls: int
    followed: list[str]


def survived(
    world: FaultWorld, scenario: Scenario, mortal: Mortal, n: int, *, after: bool, plan: Plan = no_faults
) -> _Survived:
    """It dies at its n-th step, and another one, with these faults, resumes its mount."""
    kernel = Surviving(world, mortal, plan)
    local = LocalFs(cast(Filesystem, kernel))
    prepared = scenario.prepare(local)
    mortal.dies_at(world, n, after=after)

    def act() -> None:
        with contextlib.suppress(Died):  # on a thread of the server's own: no request was under way
            scenario.act(local, prepared)
        if mortal.dead:
            kernel.restart()

    failed = outcome(act)
    mortal.dies_at(world, None)
    followed = world.heal()
    world.check()
    return _Survived(prepared, failed, kernel.recovery_calls, followed)


BEFORE_AFTER = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


@promise("S-41", "S-58")
@BEFORE_AFTER
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_a_new_server_goes_on(scenario: Scenario, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in flight is done once, nobody sees an error, and what was replaced or removed never comes back."""
    mortal = Mortal(monkeypatch)
    for n, step in enumerate(mortal.steps_of(scenario, tmp_path / "healthy")):
        if after and step not in CHANGING:
            continue
        where = f"killed {'after' if after else 'before'} step {n} ({step})"
        with fault_world(tmp_path / str(n), scenario.before, mount=scenario.mount) as world:
            seen = survived(world, scenario, mortal, n, after=after)
            assert not seen.failed, where
            mend(world, scenario, seen.prepared, where, failed=False, new_process=False, killed=True)


@promise("S-27", "S-58", "S-66")
@BEFORE_AFTER
@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.moves], ids=lambda scenario: scenario.name)
def test_resuming_survives_faults(
    scenario: Scenario, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that resumes fails at its m-th call, once or for good: an error at the most.

    In each way at each call after the kill that leaves the most to do;
    after the others at one, because of the line.
    """
    mortal = Mortal(monkeypatch)
    kills = mortal.steps_of(scenario, tmp_path / "healthy")
    left: dict[int, int] = {}
    for n, step in enumerate(kills):
        if step in CHANGING or (step in LOOKING and not after):
            with fault_world(tmp_path / f"{n}", scenario.before, mount=scenario.mount) as world:
                left[n] = survived(world, scenario, mortal, n, after=after).recovery_calls
    for n, calls in left.items():
        most = n == max(left, key=lambda each: left[each])
        kinds = list(ERRORS) if most else ["unreachable"]
        at = range(calls) if most or not calls else [n % calls]
        tried: dict[tuple[int, str], Tried] = defaultdict(Tried)
        for make, m, kind in itertools.product((nth, from_nth), at, kinds):
            if tried[m, kind].same(lasting=make is from_nth):
                continue
            where = f"killed {'after' if after else 'before'} step {n} ({kills[n]}), then {make.__name__} {m}: {kind}"
            with fault_world(tmp_path / f"{n}-{m}", scenario.before, mount=scenario.mount) as world:
                seen = survived(world, scenario, mortal, n, after=after, plan=make(m, ERRORS[kind]))
                tried[m, kind].seen = seen.followed[m:]
                nothing_foreign(world, scenario, where)
                mend(world, scenario, seen.prepared, where, failed=bool(seen.failed), new_process=False, killed=True)


@promise("S-20", "S-27", "S-62")
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_the_next_mount_goes_on(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the death of every process all is as before, as after, or as what was written."""
    mortal = Mortal(monkeypatch)
    for n, step in enumerate(mortal.steps_of(scenario, tmp_path / "healthy")):
        where = f"killed before step {n} ({step})"
        with fault_world(tmp_path / str(n), scenario.before, mount=scenario.mount) as world:
            mortal.kills(world, scenario, n)
            world.build()
            _settled(world, scenario, where)
            left = world.keys()
            world.release()
            world.build()
            assert world.keys() == left, f"{where}: the next mount changed it again"


def _unsent_renamed_over(local: LocalFs, _: Any) -> None:
    file = local.open("d/f", os.O_RDWR | os.O_TRUNC)
    file.write(NEW)
    local.rename("d/f", "other")
    file.close()


def _made_anew(local: LocalFs, _: Any) -> None:
    """Exclusively, and empty."""
    local.open("made", os.O_RDWR | os.O_CREAT | os.O_EXCL).close()


WRITTEN = ({**TREE, "other": NEW}, {**TREE, "other": b""})
BESIDE: dict[str, tuple[Callable[[LocalFs, Any], None], str, tuple[Mapping[str, bytes], ...]]] = {
    "written": (write("other", NEW), "other", WRITTEN),
    "written_and_synced": (opened("other", os.O_TRUNC, sync=True), "other", WRITTEN),
    "renamed_over": (OVER, "other", (OVER_UNSENT,)),
    "unsent_renamed_over": (
        _unsent_renamed_over,
        "other",
        ({**without("d/f"), "other": NEW}, {**TREE, "d/f": NEW, "other": OLDER}, {**TREE, "d/f": b"", "other": OLDER}),
    ),
    "removed": (unlink("other"), "other", (without("other"),)),
    "made_anew": (_made_anew, "made", ({**TREE, "made": b""},)),
}
"""What is done to a name for which an earlier process left unsent bytes, and what that may come to."""
STAYS = ("removed", "made_anew")
"""Nothing has their place in the end: killed at the wrong moment, what was left comes back rather than is lost."""


@promise("S-128")
@pytest.mark.parametrize("resumed", [False, True], ids=["all", "server"])
@pytest.mark.parametrize("done", BESIDE)
def test_what_was_left_before_never_replaces_what_is_newer(
    done: str, resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes between the newer content and the end of the older one, or anywhere else."""
    mortal = Mortal(monkeypatch)
    act, name, results = BESIDE[done]
    for n in itertools.count():
        with fault_world(tmp_path / str(n), TREE) as world:
            world.local.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC).write(OLDER)
            world.release()
            world.build(no_writes)
            kernel = Surviving(world, mortal)
            mortal.dies_at(world, n)
            answered = False
            with contextlib.suppress(Died):
                act(LocalFs(cast(Filesystem, kernel)) if resumed else world.local, None)
                answered = True
            outlived = answered and not mortal.dead and not kernel.found
            undone = not answered or (done in STAYS and not outlived)
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


CHOSEN = [scenario for scenario in ALL if scenario.moves or scenario in MORE]
"""Those that leave more than one thing to do; the others are as they are with one death."""


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
    world.all_done(where)


@promise("S-20", "S-27", "S-62")
@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_a_start_that_is_killed_is_made_good(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies, and the next one before the m-th lasting step of its start."""
    mortal = Mortal(monkeypatch)
    for n in range(len(mortal.steps_of(scenario, tmp_path / "healthy"))):
        for m in itertools.count():
            where = f"killed before step {n}, then before step {m} of the start"
            with fault_world(tmp_path / f"{n}-{m}", scenario.before, mount=scenario.mount) as world:
                mortal.kills(world, scenario, n)
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
    for n, make in itertools.product(range(len(mortal.steps_of(scenario, tmp_path / "healthy"))), (nth, from_nth)):
        for m in itertools.count():
            where = f"killed before step {n}, then {make.__name__} call {m} of the start fails"
            with fault_world(tmp_path / f"{n}-{m}-{make.__name__}", scenario.before, mount=scenario.mount) as world:
                mortal.kills(world, scenario, n)
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
