"""Whom a request is made for."""

from __future__ import annotations

import os
from pathlib import Path

from datastore.fuse.nfs.client import Credentials
from datastore.fuse.nfs.identity import TEXT_LIMIT, Identities, as_text, from_text
from datastore.fuse.ops import Caller
from tests.promises import promise


def status(proc: Path, pid: int, groups: str) -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nGroups:\t{groups} \nVmSize:\t1\n")


@promise("S-264")
def test_the_callers_groups_are_looked_up(tmp_path: Path) -> None:
    """16 at most, and none of a process that can't be seen."""
    identities = Identities(tmp_path)
    status(tmp_path, 7, "10 20 4294967294")
    assert identities.of(Caller(1, 2, 7)) == Credentials(1, 2, (10, 20, 4294967294))
    status(tmp_path, 8, " ".join(map(str, range(30))))
    assert identities.of(Caller(1, 2, 8)).groups == tuple(range(16))
    assert identities.of(Caller(1, 2, 9)) == Credentials(1, 2)
    assert identities.of(Caller(1, 2, 0)) == Credentials(1, 2)
    assert identities.of(Caller(3, 2, 7)).uid == 3  # another user of the same process


def test_few_are_remembered(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    for pid in range(1, 2000):
        identities.of(Caller(1, 2, pid))
    status(tmp_path, 5000, "1")
    assert identities.of(Caller(1, 2, 5000)).groups == (1,)


@promise("S-260")
def test_credentials_are_written_down_as_far_as_there_is_room() -> None:
    for groups in ((), (1,), (1, 2, 3)):
        given = Credentials(4294967294, 0, groups)
        assert from_text(as_text(given)) == given
    many = Credentials(4294967294, 4294967294, tuple(range(4294960000, 4294960016)))
    text = as_text(many)
    assert len(text) <= TEXT_LIMIT
    kept = from_text(text)
    assert (kept.uid, kept.gid) == (many.uid, many.gid)
    assert kept.groups == many.groups[: len(kept.groups)]
    assert len(kept.groups) >= 6
    assert from_text("") == Credentials(os.getuid(), os.getgid())
