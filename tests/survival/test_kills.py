"""kill -9 of the server, again and again, under a load that checks every byte (docs/SEMANTICS.md, S-41, S-58).

KILLS=100 and PAIRS=100 run the whole; by default it is bounded for CI.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import mounted
from tests.promises import promise
from tests.servers import Server
from tests.survival.running import in_the_bucket, kill_pair, kill_server, load, without_faults

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1500)]

KILLS = int(os.environ.get("KILLS", "25"))
PAIRS = int(os.environ.get("PAIRS", "8"))
SEED = int(os.environ.get("SEED", str(PAIRS)))
ROUND = 5
"""So many pairs go by before every process of the load must have done something."""


@promise("S-41", "S-58")
def test_applications_notice_no_death_of_the_server(versitygw: Server, clean_environment: Path, tmp_path: Path) -> None:
    """No error, no wrong byte, no lost byte, whenever the server dies."""
    chance = random.Random(KILLS)
    with mounted(versitygw, new_bucket(versitygw), clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        for _ in range(KILLS):
            kill_server(mount, chance)
            loads.progress()
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert in_the_bucket(mount, kind) == report["content"]


@promise("S-41", "S-58")
def test_nor_when_successors_die_young(versitygw: Server, clean_environment: Path, tmp_path: Path) -> None:
    """The same when they die in pairs without a pause, the second while it imports, recovers or serves."""
    chance = random.Random(SEED)
    with mounted(versitygw, new_bucket(versitygw), clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        for number in range(PAIRS):
            kill_pair(mount, chance)
            if number % ROUND == ROUND - 1:
                loads.progress()
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert in_the_bucket(mount, kind) == report["content"]
