"""Everything dies at once, or the server in the middle of an upload (docs/SEMANTICS.md, S-20, S-58, S-62)."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mount.mounts import Mount
from tests.patience import eventually
from tests.promises import promise
from tests.servers import boto_client
from tests.survival.load import KINDS, pattern
from tests.survival.running import CHECKOUT, kill_server, load, server_pid

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1500)]
ROUNDS = int(os.environ.get("ROUNDS", "2"))
BIG = 96 << 20
UNMAPPED = tuple(kind for kind in KINDS if kind != "mapped")
"""A page of a map that cannot be read ends a process with SIGBUS, as it should."""


@promise("S-62")
@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_what_was_accepted_is_there_after_the_death_of_everything(
    mount: Mount, tmp_path: Path, round_number: int
) -> None:
    """Applications get errors, and the next mount has each byte that write() took; none is wrong."""
    with load(mount, tmp_path / "c", UNMAPPED, halt=True) as loads:
        time.sleep(0.7 + 0.37 * round_number)  # some work of each kind; when, is of no matter
        mount.pids[1] = server_pid(mount)
        for pid in mount.pids:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: mount.umount("--force").returncode != 1, "what is left is unmounted")
        reports = loads.finish()
    assert {kind: report["wrong"] for kind, report in reports.items() if report["wrong"]} == {}
    assert any(report["errors"] for report in reports.values())
    mount.mount()
    lost = {kind: gone for kind, report in reports.items() if (gone := missing(mount.path / kind, report))}
    assert lost == {}
    eventually(lambda: not uploads(mount), "orphaned uploads are aborted", 120.0)
    assert mount.umount().returncode == 0


def missing(directory: Path, report: dict[str, Any]) -> list[str]:
    """Files that do not hold what was accepted. What a cut-off step worked on may have its old or its new name."""
    lost = []
    for name, digest in report["content"].items():
        length = report["lengths"][name]
        doubtful = name in report["doubt"]
        places = [directory / each for each in ({name, *report["doubt"]} if doubtful else {name})]
        bodies = [place.read_bytes() for place in places if place.exists()]
        wanted = [hashlib.sha256(body[:length] if doubtful else body).hexdigest() for body in bodies]
        if digest not in wanted:
            lost.append(f"{name}: {length} bytes expected, found {[len(body) for body in bodies]}")
    return lost


def uploads(mount: Mount) -> list[dict[str, Any]]:
    """Multipart uploads that are neither completed nor aborted."""
    answer = boto_client(mount.server).list_multipart_uploads(Bucket=mount.bucket)
    return list(answer.get("Uploads", ()))


WRITE = """
import os, sys
from tests.survival.load import pattern
body = pattern(5, int(sys.argv[2]))
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for at in range(0, len(body), 1 << 20):
    os.write(fd, body[at:at + (1 << 20)])
os.fsync(fd)
os.close(fd)
"""


@promise("S-58", "S-62")
def test_a_server_dies_in_the_middle_of_an_upload(mount: Mount) -> None:
    """The writer's close returns 0, the object is whole, and no half upload stays."""
    chance = random.Random(3)
    for number in range(ROUNDS):
        command = [sys.executable, "-c", WRITE, str(mount.path / f"big{number}"), str(BIG)]
        writer = subprocess.Popen(command, cwd=CHECKOUT)
        try:
            eventually(lambda: uploads(mount) or writer.poll() is not None, "an upload", 120.0)  # noqa: B023
            kill_server(mount, chance)
            assert writer.wait(300) == 0
        finally:
            writer.kill()
        assert mount.objects.get(f"big{number}") == pattern(5, BIG)
    eventually(lambda: not uploads(mount), "orphaned uploads are aborted", 120.0)
    assert mount.umount().returncode == 0
