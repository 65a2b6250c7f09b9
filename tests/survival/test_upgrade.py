"""`datastore restart` under the same load (docs/SEMANTICS.md, S-59)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import mounted
from tests.servers import Server
from tests.survival.running import in_the_bucket, load, server_pid, without_faults

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(600)]
RESTARTS = 3


def test_applications_notice_no_upgrade(versitygw: Server, clean_environment: Path, tmp_path: Path) -> None:
    """S-59: a new server takes over, the keeper stays, and status names both."""
    with mounted(versitygw, new_bucket(versitygw), clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        keeper = mount.status()["keeperPid"]
        for _ in range(RESTARTS):
            old = server_pid(mount)
            done = mount.command("restart", mount.path)
            assert done.returncode == 0, done.stderr
            told = mount.status()
            assert told["serverPid"] != old
            assert (told["keeperPid"], told["restart"]) == (keeper, "possible")
            mount.pids = [keeper, told["serverPid"]]
            loads.progress()
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert in_the_bucket(mount, kind) == report["content"]
