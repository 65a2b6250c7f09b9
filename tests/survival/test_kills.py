"""kill -9 of the server again and again, and `restart`, under a load that checks every byte (S-41, S-58, S-59).

KILLS=100 and PAIRS=100 run the whole; by default it is bounded for CI.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.mounts import Mount
from tests.promises import promise
from tests.survival.running import ends_well, kill_pair, kill_server, load, server_pid

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1500)]

KILLS = int(os.environ.get("KILLS", "25"))
PAIRS = int(os.environ.get("PAIRS", "8"))
RESTARTS = 3
SEED = int(os.environ.get("SEED", str(PAIRS)))


@promise("S-41", "S-58")
@pytest.mark.parametrize(
    ("kill", "times", "seed", "each"), [(kill_server, KILLS, KILLS, 1), (kill_pair, PAIRS, SEED, 5)]
)
def test_applications_notice_no_death_of_the_server(
    mount: Mount, tmp_path: Path, kill: Callable[[Mount, random.Random], None], times: int, seed: int, each: int
) -> None:
    """No error, no wrong byte, no lost byte, whenever the server dies.

    Nor when they die in pairs without a pause, the second while it imports, recovers or serves. each: so many times go
    by before every process of the load must have done something.
    """
    chance = random.Random(seed)
    with load(mount, tmp_path / "c") as loads:
        for number in range(times):
            kill(mount, chance)
            if number % each == each - 1:
                loads.progress()
        ends_well(mount, loads)


@promise("S-59")
def test_applications_notice_no_upgrade(mount: Mount, tmp_path: Path) -> None:
    """A new server takes over, the supervisor stays, and status names both."""
    with load(mount, tmp_path / "c") as loads:
        supervisor = mount.status()["supervisorPid"]
        for _ in range(RESTARTS):
            old = server_pid(mount)
            done = mount.command("restart", mount.path)
            assert done.returncode == 0, done.stderr
            told = mount.status()
            assert told["serverPid"] != old
            assert (told["supervisorPid"], told["restart"]) == (supervisor, "possible")
            mount.pids = [supervisor, told["serverPid"]]
            loads.progress()
        ends_well(mount, loads)
