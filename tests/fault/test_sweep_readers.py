"""For each n: the n-th store call of every way to look and read fails; what is answered is right, or an error."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from datastore.fuse.data import readahead
from datastore.fuse.store.base import ListPage, ObjectInfo
from tests.fault.scenarios import BIG, LARGE, TREE
from tests.fault.sweeping import ERRORS, Tried, other_version, plan_of
from tests.fault.worlds import FaultWorld, fault_world
from tests.faulty import Fault
from tests.localfs import LocalFs
from tests.model.world import outcome
from tests.promises import promise

BLOCK = 4096
HUGE = bytes(range(256)) * 1024
"""Eight ranges of a cold sequential reader."""
DEEP = {"a/": b"", "a/b/c/file": b"deep", "a/b/c/link.rclonelink": b"file", "a/b/other": b"x"}


@dataclass(frozen=True)
class Look:
    """One way to look, over these objects; give: what is seen."""

    name: str
    objects: Mapping[str, bytes]
    give: Callable[[LocalFs], Any]


def _sequentially(local: LocalFs) -> bytes:
    with local.opened("huge") as file:
        return b"".join(file.read(start, BLOCK * 4) for start in range(0, len(HUGE), BLOCK * 4))


def _at_random(local: LocalFs) -> bytes:
    chosen = random.Random(7)
    with local.opened("huge") as file:
        return b"".join(file.read(chosen.randrange(len(HUGE)) // 97 * 97, 1000) for _ in range(6))


def _tree(local: LocalFs) -> list[Any]:
    """As `ls -lR`."""
    found: list[Any] = []
    waiting = [""]
    while waiting:
        path = waiting.pop()
        for name, kind in local.scandir(path, plus=True):
            inner = f"{path}/{os.fsdecode(name)}".strip("/")
            found.append((inner, kind, local.stat(inner).size))
            if kind == 0o040000:
                waiting.append(inner)
    return sorted(found)


LOOKS = (
    Look("read small", TREE, lambda local: local.read("d/f")),
    Look("read in one request", BIG, lambda local: local.read("big")),
    Look("read large", {"huge": HUGE}, _sequentially),
    Look("read at random", {"huge": HUGE}, _at_random),
    Look("stat", DEEP, lambda local: local.stat("a/b/c/file").size),
    Look("stat of nothing", DEEP, lambda local: local.exists("a/b/nothing")),
    Look("readlink", DEEP, lambda local: local.readlink("a/b/c/link")),
    Look("list", TREE, lambda local: local.listdir("d")),
    Look("walk", {**TREE, **DEEP}, _tree),
    Look("xattr", TREE, lambda local: local.listxattr("d/f")),
)


def _short(answer: Any) -> Any:
    if not isinstance(answer, tuple) or isinstance(answer, ListPage | ObjectInfo):
        return answer
    body, info = answer
    return body[: len(body) // 2], info


FAULTS: dict[str, Fault] = {
    **{kind: Fault(error) for kind, error in ERRORS.items()},
    "truncated, unseen": Fault(alter=_short),
    "wrong etag, unseen": Fault(alter=other_version),
}
BODIES = {"truncated, unseen", "precondition", "wrong etag, unseen"}
"""What only an answer with a body, asked for by its version, can have."""
ERRNOS = {errno.EIO, errno.ETIMEDOUT, errno.EACCES, errno.ESTALE}


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads ask for small ranges."""
    for name, size in {"WHOLE": len(LARGE), "RANGE": 4 * BLOCK, "FIRST": 2 * BLOCK, "MAX": 8 * BLOCK}.items():
        monkeypatch.setattr(readahead, f"{name}_BYTES", size)


def calls_of(look: Look, directory: Path) -> tuple[list[str], Any]:
    """The store calls of a healthy look, and what it gives."""
    with fault_world(directory, look.objects) as world:
        first = len(world.faulty.calls)
        seen = look.give(world.local)
        return world.faulty.calls[first:], seen


@promise("S-30", "S-66")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.name)
def test_what_is_seen_is_right_or_an_error(look: Look, kind: str, tmp_path: Path) -> None:
    """Whatever call fails, once or for good: never wrong bytes, never a wrong name; and it passes."""
    calls, right = calls_of(look, tmp_path / "healthy")
    for n, method in enumerate(calls):
        if kind in BODIES and method != "get":
            continue
        tried = Tried()
        for lasting in (False, True):
            if tried.same(lasting=lasting):
                continue
            where = f"call {n} ({method}) {kind}, {'for good' if lasting else 'once'}"
            with fault_world(tmp_path / f"{n}-{lasting}", look.objects) as world:
                first = len(world.faulty.calls) + n
                world.faulty.plan = plan_of(FAULTS[kind], first, lasting=lasting)
                _look_at(look, world, right, where)
                world.check()
                tried.seen = world.heal()[first:]
                assert look.give(world.local) == right, f"{where}: not right after it had passed"
                assert world.keys() == dict(look.objects), f"{where}: a look has changed the bucket"
                assert not world.fs.uploads.unsent(), where


def _look_at(look: Look, world: FaultWorld, right: Any, where: str) -> None:
    seen: list[Any] = []
    number = outcome(lambda: seen.append(look.give(world.local)))
    assert number in ERRNOS or seen == [right], f"{where}: errno {number}, or seen otherwise: {str(seen)[:200]}"


REFUSED: dict[str, tuple[Mapping[str, bytes], Callable[[LocalFs], None], int]] = {
    "rmdir of what is not empty": (TREE, lambda local: local.rmdir("d"), errno.ENOTEMPTY),
    "rmdir of what is implied": (DEEP, lambda local: local.rmdir("a/b"), errno.ENOTEMPTY),
    "rename over what is not empty": (
        {**TREE, "m/": b"", "m/x": b"x"},
        lambda local: local.rename("d/e", "m"),
        errno.ENOTEMPTY,
    ),
}


@promise("S-04", "S-66")
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_refused(name: str, kind: str, tmp_path: Path) -> None:
    """A fault never makes a directory that is not empty look empty."""
    objects, act, code = REFUSED[name]
    with fault_world(tmp_path / "healthy", objects) as world:
        first = len(world.faulty.calls)
        with pytest.raises(OSError, check=lambda error: error.errno == code):
            act(world.local)
        calls = world.faulty.calls[first:]
    for n in range(len(calls)):
        tried = Tried()
        for lasting in (False, True):
            if tried.same(lasting=lasting):
                continue
            with fault_world(tmp_path / f"{n}-{lasting}", objects) as world:
                first = len(world.faulty.calls) + n
                world.faulty.plan = plan_of(Fault(ERRORS[kind]), first, lasting=lasting)
                with pytest.raises(OSError, check=lambda error: error.errno in {code, *ERRNOS}):
                    act(world.local)
                world.check()
                tried.seen = world.heal()[first:]
                assert {key: body for key, body in world.keys().items() if key in objects} == dict(objects)
                with pytest.raises(OSError, check=lambda error: error.errno == code):
                    act(world.local)
