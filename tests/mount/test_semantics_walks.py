"""Walking a readOnly mount again: the kernel keeps what directories list (docs/SEMANTICS.md, S-151)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter, new_bucket
from tests.mount.mounts import Mount, Objects, opened, runs, settle
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]

TTL_S = 10.0
"""metadataTTL: longer than a listing is given up before its time, so that there is something to keep."""
FILES = 600
"""More than one answer holds."""
READS = ("READDIR", "READDIRPLUS", "LOOKUP", "GETATTR")


@pytest.fixture
def mount(mount_with: Mounter, versitygw: Server) -> Iterator[Mount]:
    """A readOnly mount of folders and one large folder."""
    there = Objects(versitygw, new_bucket(versitygw))
    there.put_empty(f"d{folder}/f{number}" for folder in range(4) for number in range(5))
    there.put_empty(f"flat/f{number:04}" for number in range(FILES))
    with mount_with(there.bucket, metadataTTL=f"{TTL_S:g}s", readOnly=True) as made:
        yield made


def walk(top: Path) -> dict[str, int]:
    """Every path below and its inode, each asked for, as `ls -lR` does."""
    found = {}
    with os.scandir(top) as entries:
        for entry in entries:
            found[entry.path] = entry.stat(follow_symlinks=False).st_ino
            assert entry.inode() == found[entry.path]
            if entry.is_dir(follow_symlinks=False):
                found |= walk(Path(entry.path))
    return found


def requests(mount: Mount) -> Counter[str]:
    """What came from the kernel so far."""
    return Counter(mount.told()["requests"])


def walk_kept(mount: Mount, top: Path) -> tuple[dict[str, int], Counter[str]]:
    """The same when the kernel has all of it, and what came from the kernel meanwhile.

    Not always the next walk: the machine may be busy, and a name that the kernel is told of makes it read again.
    """

    walks: list[tuple[dict[str, int], Counter[str]]] = []

    def is_kept() -> bool:
        before = requests(mount)
        walks.append((walk(top), requests(mount) - before))
        return not any(walks[-1][1][name] for name in READS)

    eventually(is_kept, "walked without a word of its names")
    return walks[-1]


@promise("S-151")
def test_a_second_walk_asks_only_for_each_directory(mount: Mount) -> None:
    """An OPENDIR and a RELEASEDIR, and nothing for its entries."""
    first = walk(mount.path)
    assert len(first) == 5 + 4 * 5 + FILES
    second, came = walk_kept(mount, mount.path)
    assert second == first
    assert came["OPENDIR"] == 6
    assert set(came) <= {"OPENDIR", "RELEASEDIR", "STATFS"}


@promise("S-151", "S-28", "S-05")
def test_what_another_client_changes_is_seen_after_the_time_to_live(mount: Mount) -> None:
    """New, removed and replaced files, in a directory that is all in the kernel.

    Also by who rewinds an open directory: the kernel would go by what it keeps for as long as that is open.
    """
    with opened(mount.path / "d0", os.O_DIRECTORY) as fd:
        before = sorted(os.listdir(fd))
        assert before == [f"f{number}" for number in range(5)]
        first = walk(mount.path / "flat")
        assert walk_kept(mount, mount.path / "flat")[0] == first
        mount.objects.put("d0/new")
        mount.objects.put("flat/f0000-new", b"new")
        mount.objects.put("flat/f0001", b"another version")
        mount.objects.delete("flat/f0003")
        settle(TTL_S)
        assert sorted(os.listdir(fd)) == sorted([*before, "new"])
    second = walk(mount.path / "flat")
    names = {os.path.basename(path) for path in second}
    assert names == {os.path.basename(path) for path in first} - {"f0003"} | {"f0000-new"}
    assert (mount.path / "flat/f0001").read_bytes() == b"another version"
    assert walk_kept(mount, mount.path / "flat")[0] == second


@promise("S-151")
def test_a_walk_that_was_given_up_leaves_nothing_half(mount: Mount) -> None:
    """The next one sees everything, and is kept."""
    with os.scandir(mount.path / "flat") as entries:
        for _ in range(3):
            next(entries).stat()
    first = walk(mount.path / "flat")
    assert len(first) == FILES
    assert walk_kept(mount, mount.path / "flat")[0] == first


@promise("S-151", "S-05")
def test_a_directory_goes_on_when_the_kernel_drops_what_it_keeps(mount: Mount) -> None:
    """In the middle of a pass that began with what was kept, each name is seen once."""
    first = walk(mount.path / "flat")
    entries = os.scandir(mount.path / "flat")
    seen = [next(entries).name for _ in range(10)]
    mount.objects.put("flat/a-new-one-before-all")
    settle(TTL_S)
    walk(mount.path / "flat")
    seen += [entry.name for entry in entries]
    assert sorted(seen) == sorted(os.path.basename(path) for path in first)


@promise("S-151", "S-58")
def test_a_new_server_begins_anew(mount: Mount) -> None:
    """Also for who has a directory open since before the old one died."""
    with opened(mount.path / "d0", os.O_DIRECTORY) as fd:
        before = sorted(os.listdir(fd))
        first = walk(mount.path)
        mount.kill_server()
        eventually(lambda: not runs(mount.pids[1]), "the server is gone")
        mount.objects.put("d0/new")
        settle(TTL_S)
        assert set(walk(mount.path)) == {*first, str(mount.path / "d0/new")}
        assert sorted(os.listdir(fd)) == sorted([*before, "new"])


CROWD_TTL_S = 4.0
FOLDERS = 300
READERS = 6
FEW = 3
TURNS = 2
"""Of those that went by what was kept each saw some hundred stale ones."""


def look(top: Path, start: float) -> list[int]:
    """How many names each directory shows."""
    time.sleep(max(0.0, start - time.monotonic()))
    return [len(os.listdir(top / f"d{folder:03}")) for folder in range(FOLDERS)]


@promise("S-151", "S-28")
def test_all_processes_that_look_at_once_see_what_another_client_made(mount_with: Mounter, versitygw: Server) -> None:
    """One of them makes the kernel drop what it keeps, and none goes by that meanwhile."""
    there = Objects(versitygw, new_bucket(versitygw))
    there.put_empty(f"d{folder:03}/f{number}" for folder in range(FOLDERS) for number in range(FEW))
    stale: list[int] = []
    with (
        mount_with(there.bucket, metadataTTL=f"{CROWD_TTL_S:g}s", readOnly=True) as mount,
        ProcessPoolExecutor(READERS, mp_context=get_context("fork")) as pool,
    ):
        for turn in range(TURNS):
            for _ in range(2):  # so that the kernel keeps all of it
                walk(mount.path)
            there.put_empty(f"d{folder:03}/new{turn}" for folder in range(FOLDERS))
            settle(CROWD_TTL_S)
            start = time.monotonic() + 0.2
            seen = list(pool.map(look, [mount.path] * READERS, [start] * READERS))
            stale += [names for one in seen for names in one if names != FEW + 1 + turn]
    assert not stale
