"""Several processes that read the same directories of a readOnly mount at the same moment (SEMANTICS.md, S-151)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter, new_bucket
from tests.mount.mounts import Mount, Objects, settle
from tests.promises import promise
from tests.servers import Server

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]

TTL_S = 4.0
FOLDERS = 300
READERS = 6
FILES = 3
TURNS = 2
"""Of those that went by what was kept each saw some hundred stale ones."""


@pytest.fixture
def mount(mount_with: Mounter, versitygw: Server) -> Iterator[Mount]:
    """A readOnly mount of many small folders."""
    there = Objects(versitygw, new_bucket(versitygw))
    there.put_empty(f"d{folder:03}/f{number}" for folder in range(FOLDERS) for number in range(FILES))
    with mount_with(there.bucket, metadataTTL=f"{TTL_S:g}s", readOnly=True) as made:
        yield made


def look(top: Path, start: float) -> list[int]:
    """How many names each directory shows."""
    time.sleep(max(0.0, start - time.monotonic()))
    return [len(os.listdir(top / f"d{folder:03}")) for folder in range(FOLDERS)]


def walk(top: Path) -> None:
    """So that the kernel keeps all of it."""
    for folder in range(FOLDERS):
        with os.scandir(top / f"d{folder:03}") as entries:
            for entry in entries:
                entry.stat()


@promise("S-151", "S-28")
def test_all_of_them_see_what_another_client_made(mount: Mount) -> None:
    """One of them makes the kernel drop what it keeps, and none goes by that meanwhile."""
    stale: list[int] = []
    with ProcessPoolExecutor(READERS, mp_context=get_context("fork")) as pool:
        for turn in range(TURNS):
            walk(mount.path)
            walk(mount.path)
            mount.objects.put_empty(f"d{folder:03}/new{turn}" for folder in range(FOLDERS))
            settle(TTL_S)
            start = time.monotonic() + 0.2
            seen = list(pool.map(look, [mount.path] * READERS, [start] * READERS))
            stale += [names for one in seen for names in one if names != FILES + 1 + turn]
    assert not stale
