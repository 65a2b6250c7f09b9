"""`datastore restart` under the same load (docs/SEMANTICS.md, S-59)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import mounted
from tests.promises import promise
from tests.servers import Server
from tests.survival.running import in_the_bucket, load, server_pid, without_faults

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1500)]
RESTARTS = 3


@promise("S-59")
def test_applications_notice_no_upgrade(versitygw: Server, clean_environment: Path, tmp_path: Path) -> None:
    """A new server takes over, the supervisor stays, and status names both."""
    with mounted(versitygw, new_bucket(versitygw), clean_environment) as mount, load(mount, tmp_path / "c") as loads:
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
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert in_the_bucket(mount, kind) == report["content"]
