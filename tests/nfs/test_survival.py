"""What ends while programs read and write: the mount's server, the NFS host, both (docs/SEMANTICS.md)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nfs.host.server import NFSServer
from tests.nfs.mounts import mounted, on_the_host
from tests.promises import promise
from tests.survival.running import kill_pair, kill_server, load, without_faults

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("KILLS", "8"))


@promise("S-260")
def test_programs_notice_no_death_of_the_mounts_server(
    nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path, tmp_path: Path
) -> None:
    chance = random.Random(KILLS)
    path = export()
    with mounted(nfs_host, path, clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        for number in range(KILLS):
            (kill_pair if number % 3 == 2 else kill_server)(mount, chance)
            loads.progress()
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert on_the_host(nfs_host, f"{path}/{kind}") == report["content"]


@promise("S-261")
@pytest.mark.parametrize("orderly", [True, False], ids=["reboot", "power-cut"])
def test_programs_wait_for_a_host_that_restarts(
    nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path, tmp_path: Path, orderly: bool
) -> None:
    path = export()
    with mounted(nfs_host, path, clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        loads.progress()
        nfs_host.reboot(orderly=orderly)
        loads.progress()
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert on_the_host(nfs_host, f"{path}/{kind}") == report["content"]
