"""Renames on a real mount (docs/SEMANTICS.md, Renames)."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_SERVER
from tests.mount.mounts import Area, fails
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]
WAYS = ONE_SERVER

NOREPLACE, EXCHANGE = 1, 2
AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def renameat2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2). Errors: OSError."""
    if _libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@promise("S-25")
def test_an_existing_target_is_replaced(area: Area) -> None:
    """In one step: who reads the target all the while sees the old or the new, never nothing."""
    target = area.path / "target"
    target.write_bytes(b"0" * 100)
    seen: set[bytes] = set()
    failures: list[OSError] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                seen.add(target.read_bytes())
            except OSError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, 10):
            (area.path / "new").write_bytes(str(number).encode() * 100)
            (area.path / "new").rename(target)
    finally:
        done.set()
        reader.join(30)
    # libfuse itself first renames a target that is open to .fuse_hidden*, so there the name is away for a moment.
    assert not failures or not area.is_native
    assert seen <= {str(number).encode() * 100 for number in range(10)}
    assert area.get("target") == b"9" * 100


@promise("S-25")
def test_flags(area: Area) -> None:
    """RENAME_NOREPLACE is honoured, RENAME_EXCHANGE is EINVAL."""
    (area.path / "a").write_bytes(b"a")
    (area.path / "b").write_bytes(b"b")
    fails(errno.EEXIST, renameat2, area.path / "a", area.path / "b", NOREPLACE)
    fails(errno.EINVAL, renameat2, area.path / "a", area.path / "b", EXCHANGE)
    renameat2(area.path / "a", area.path / "c", NOREPLACE)
    assert sorted(area.keys()) == ["", "b", "c"]


@promise("S-25", "S-26")
def test_open_files_below_a_renamed_directory(area: Area) -> None:
    """A reader and a writer go on; the writer's close is at the new key."""
    (area.path / "old").mkdir()
    (area.path / "old/read").write_bytes(b"r" * 200_000)
    (area.path / "old/changed").write_bytes(b"c" * 200_000)
    with (
        (area.path / "old/read").open("rb", buffering=0) as read,
        (area.path / "old/changed").open("r+b", buffering=0) as changed,
        (area.path / "old/new").open("wb", buffering=0) as new,
    ):
        changed.write(b"before")
        new.write(b"before ")
        (area.path / "old").rename(area.path / "moved")
        assert read.read(200_000) == b"r" * 200_000
        os.pwrite(changed.fileno(), b"after", 100_000)
        new.write(b"after")
    assert area.get("moved/new") == b"before after"
    body = area.get("moved/changed")
    assert (body[:6], body[100_000:100_005], len(body)) == (b"before", b"after", 200_000)
    assert not [key for key in area.keys() if key.startswith("old")]  # noqa: SIM118  (keys of the bucket, no dict)
    assert sorted(os.listdir(area.path / "moved")) == ["changed", "new", "read"]
