"""A sweep: the n-th store call of a scenario fails, for every n; nothing may be lost, half done or reported wrongly."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from datastore.errors import (
    AccessDenied,
    CorruptBody,
    DeadlineExceeded,
    PreconditionFailed,
    StoreError,
    Unreachable,
)
from datastore.fuse.data import multipart
from datastore.fuse.store.base import ETag, ListPage, ObjectInfo, WriteResult
from datastore.fuse.vfs.upload import copies
from tests.driving import resolve
from tests.fault.scenarios import BEHIND, PART, REFUSING, Scenario
from tests.fault.worlds import MIN_PART, SILLY_COPY, FaultWorld, fault_world
from tests.faulty import AtOnce, Fault, Plan, from_nth, nth
from tests.model.reference import LINK
from tests.model.world import outcome

ERRORS = {
    "unreachable": Unreachable("no route to the store"),
    "denied": AccessDenied("not allowed"),
    "timeout": DeadlineExceeded("no answer in time"),
    "precondition": PreconditionFailed("another version"),
    "truncated": CorruptBody("shorter than promised"),
}
"""The errors that calls end with. Without retries ServerFault and Throttled are as Unreachable (fuse/errnos.py)."""
METHODS = {
    "precondition": {"get", "put", "copy", "upload_part_copy", "complete_upload"},
    "truncated": {"get", "list_page"},
}
"""The calls that can end with these kinds of error; other kinds are possible with all."""
EFFECTS = {"precondition": (False,), "truncated": (False,), "timeout": (True,)}
"""Whether the call took effect before it failed (others: both are tried): a refusal has no effect, and a timeout
without an effect is the same as `unreachable`."""

LOOKING = {"head", "get", "list_page", "pending_uploads"}
"""Calls that change nothing, so that a failure before and after their effect is the same."""
CHANGING = {
    *("put", "copy", "delete", "delete_many", "set_legal_hold"),
    *("create_upload", "upload_part", "upload_part_copy", "complete_upload", "abort_upload"),
}
"""Calls that change something."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let multipart uploads and copies begin at a few KiB."""
    monkeypatch.setattr(multipart, "MIB", MIN_PART)
    monkeypatch.setattr(multipart, "SINGLE_MAX", PART)
    monkeypatch.setattr(multipart, "PART_SIZE", PART)
    monkeypatch.setattr(multipart, "COPY_MAX", 2 * PART)
    monkeypatch.setattr(copies, "COPY_MAX", PART)
    monkeypatch.setattr(copies, "COPY_OBJECT_MAX", 2 * PART)


def calls_of(scenario: Scenario, directory: Path) -> list[str]:
    """Run a scenario without faults, check its result, and return its store calls."""
    with fault_world(directory, scenario.before, mount=scenario.mount) as world:
        prepared = scenario.prepare(world.local)
        first = len(world.faulty.calls)
        scenario.act(world.local, prepared)
        calls = world.faulty.calls[first:]
        scenario.finish(world.local, prepared)
        assert same_but_markers(world.keys(), scenario.after)
        assert not world.hidden()
        world.check()
    return calls


def same_but_markers(found: Mapping[str, bytes], expected: Mapping[str, bytes]) -> bool:
    """Whether both are equal but for markers of directories that exist by their entries anyway (S-02)."""

    def plain(keys: Mapping[str, bytes]) -> dict[str, bytes]:
        return {
            key: body
            for key, body in keys.items()
            if not (key.endswith("/") and any(other != key and other.startswith(key) for other in keys))
        }

    return plain(found) == plain(expected)


def sweep(scenario: Scenario, kind: str, tmp_path: Path) -> None:
    """Let each call fail once and for good, before and after its effect; then let the store work again."""
    calls = calls_of(scenario, tmp_path / "healthy")
    for n, method in enumerate(calls):
        if method not in METHODS.get(kind, {method}):
            continue
        if kind == "precondition" and scenario.mount is REFUSING:
            continue  # test_promises_conflict.py tests what another version means to such a mount
        for new_process in (False, True) if kind == "unreachable" else ((n + list(ERRORS).index(kind)) % 2 == 1,):
            tried = Tried()
            for after, lasting in itertools.product(EFFECTS.get(kind, (False, True)), (False, True)):
                if tried.same(after=after, lasting=lasting):
                    continue
                where = f"call {n} ({method}) fails {'for good' if lasting else 'once'}"
                where += f"{', after its effect' if after else ''}{', then a new process' if new_process else ''}"
                directory = tmp_path / f"{n}-{lasting}-{after}-{new_process}"
                make = from_nth if lasting else nth
                with fault_world(directory, scenario.before, mount=scenario.mount) as world:
                    fault = (make, n, ERRORS[kind], after)
                    tried.seen = _fail_and_mend(world, scenario, fault, where, new_process=new_process)


def other_version(answer: Any) -> Any:
    """Return an answer of the store with the ETag, if it has one, replaced by that of no version."""
    if isinstance(answer, ObjectInfo):
        return answer._replace(etag=ETag("other"))
    if isinstance(answer, WriteResult):
        return replace(answer, etag=ETag("other"))
    if isinstance(answer, tuple) and not isinstance(answer, ListPage):
        body, info = answer
        return body, other_version(info)
    return ETag("other") if isinstance(answer, str) else answer


def plan_of(fault: Fault, n: int, *, lasting: bool) -> Plan:
    """Plan a fault at the n-th call, or from it on. An altered answer spares create_upload, which has no version."""

    def plan(index: int, method: str) -> Fault | None:
        if fault.alter is not None and method == "create_upload":
            return None
        return fault if index == n or (lasting and index > n) else None

    return AtOnce(plan)


class Tried:
    """Tells which case would repeat another. seen: the store calls of the last case, from the failed one on."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def same(self, *, after: bool = False, lasting: bool = False) -> bool:
        """Whether a case repeats another: reads have no effect; a lasting fault with no later call is a single one."""
        return bool(self.seen) and ((after and self.seen[0] in LOOKING) or (lasting and len(self.seen) == 1))


def _fail_and_mend(
    world: FaultWorld, scenario: Scenario, fault: tuple[object, int, StoreError, bool], where: str, *, new_process: bool
) -> list[str]:
    """Run one case; return the store calls from the failed one on, until the store worked again."""
    make, n, error, after = fault
    prepared = scenario.prepare(world.local)
    base, accepted = len(world.faulty.calls), world.writes_accepted
    world.faulty.plan = make(base + n, error, after=after)  # type: ignore[operator]
    failed = outcome(lambda: scenario.act(world.local, prepared))
    world.check()
    nothing_foreign(world, scenario, where)
    if not failed:
        # The failed call may have been a prefetch; what prepare opened may be sent only at its close.
        states = (scenario.after, *(scenario.halfway if prepared is not None else ()))
        succeeded = any(same_but_markers(world.keys(), state) for state in states)
        assert succeeded, f"{where}: success, but {sorted(world.keys())}"
    _no_orphans(world, where, base)
    seen = world.heal()[base + n :]
    unsent = world.fs.uploads.unsent()
    if failed and world.writes_accepted > accepted and not same_but_markers(world.keys(), scenario.after):
        listed = [row for row in unsent if row["error"] or scenario.mount is BEHIND]
        assert listed, f"{where}: close failed, but nothing is listed as unsent"
    mend(world, scenario, prepared, where, failed=bool(failed), new_process=new_process)
    return seen


def mend(
    world: FaultWorld,
    scenario: Scenario,
    prepared: object,
    where: str,
    *,
    failed: bool,
    new_process: bool,
    killed: bool = False,
) -> None:
    """Check, as the store works again, that unsent data is read and sent, and that the next mount changes nothing."""
    unsent = world.fs.uploads.unsent()
    for row in unsent:
        _readable(world, scenario, str(row["path"]), where)
    _still_read(world, scenario, prepared, where)
    if new_process:
        world.release()
        world.build()
    else:
        scenario.finish(world.local, prepared)
        assert resolve(world.fs.flush_all()) == [], where
    world.check()
    assert world.fs.uploads.unsent() == [], where
    left = world.keys()
    results = (scenario.after, *scenario.when_killed) if killed else (scenario.after,)
    done = any(same_but_markers(left, state) for state in results)
    undone = any(same_but_markers(left, state) for state in (scenario.before, *scenario.halfway))
    nothing_foreign(world, scenario, where)
    assert done or (failed and (undone or scenario.moves)), f"{where}: neither done nor undone: {sorted(left)}"
    assert done or not (unsent and prepared is None), f"{where}: what was listed as unsent was not sent"
    if not new_process:
        _same_through_mount(world, where)
        world.release()
        world.build()
        assert same_but_markers(world.keys(), left), f"{where}: the next mount changed what was reported"
    world.all_done(where)
    assert not world.fs.core.db.uploads(), f"{where}: an upload that ended is still in the journal"
    _same_through_mount(world, where)


def nothing_foreign(world: FaultWorld, scenario: Scenario, where: str) -> None:
    """Check that each object is a whole one of an allowed state, and that no content is lost."""
    for key, body in world.keys().items():
        states = (scenario.before, scenario.after, *scenario.halfway)
        allowed = [state[key] for state in states if key in state]
        marker = key.endswith("/") and body == b""
        assert body in allowed or marker, f"{where}: {key} holds {body[:20]!r} ({len(body)})"
    kept = set(world.keys().values())
    for key, body in scenario.before.items():
        if key in scenario.after and scenario.after[key] == body:
            assert world.keys().get(key) == body, f"{where}: {key} was touched"
        elif body in scenario.after.values():
            assert body in kept, f"{where}: the content of {key} is nowhere"


def _no_orphans(world: FaultWorld, where: str, base: int) -> None:
    """Check that no multipart upload stays, unless abort failed or the answer to create_upload was lost."""
    written = world.streams()  # waits for uploads that are just being created, whose failure is not known yet
    failed = {world.faulty.calls[i] for i in range(base, len(world.faulty.calls)) if world.faulty.plan(i, "")}
    if not failed & {"abort_upload", "create_upload"}:
        orphans = set(world.bucket.uploads) - written
        assert not orphans, f"{where}: an unfinished upload stays behind"


def _readable(world: FaultWorld, scenario: Scenario, path: str, where: str) -> None:
    """S-19 Check that what could not be sent can be read through the mount."""
    expected = [state[path] for state in (scenario.after, *scenario.halfway) if path in state]
    assert world.local.read(path) in expected, f"{where}: {path} is listed as unsent but reads otherwise"


def _still_read(world: FaultWorld, scenario: Scenario, prepared: object, where: str) -> None:
    if scenario.still_read is None:
        return
    read: list[bytes] = []
    number = outcome(lambda: read.append(prepared.read()))  # type: ignore[attr-defined]
    # The removal seemed to fail but took effect, and the file is too large to be kept: as another client's removal.
    lost = number == errno.ESTALE and "after its effect" in where and len(scenario.still_read) > SILLY_COPY
    assert lost or (number == 0 and read[0] == scenario.still_read), f"{where}: the open file changed"


def _same_through_mount(world: FaultWorld, where: str) -> None:
    """Check that the mount shows what the bucket holds, and nothing else."""
    assert world.local.tree() == shown(world.keys()), where


def shown(keys: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tree that a mount shows of these objects; directories end with a slash."""
    tree = {}
    for key, body in keys.items():
        name = key.removesuffix(LINK)
        tree[key if name in keys else name] = body
        tree |= {f"{parent}/": b"" for parent in PurePosixPath(key).parents if parent.name}
    return tree
