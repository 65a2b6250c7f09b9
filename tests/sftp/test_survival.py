"""What ends while programs read and write: the mount's server, the connection, both."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from tests.promises import promise
from tests.sftp.mounts import mounted
from tests.sftp.sshd import SSHServer
from tests.survival.running import kill_pair, kill_server, load, without_faults

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("KILLS", "6"))


@promise("S-276", "S-277")
def test_programs_notice_no_death(sshd: SSHServer, clean_environment: Path, tmp_path: Path) -> None:
    """Of the mount's server, of its successor, of the connection; every byte is there at the end."""
    chance = random.Random(KILLS)
    directory = clean_environment / "survives"
    directory.mkdir()
    with mounted(sshd, directory, clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        for number in range(KILLS):
            if number % 3 == 2:
                kill_pair(mount, chance)
            elif number % 3 == 1:
                sshd.break_connections()
            else:
                kill_server(mount, chance)
            loads.progress()
        reports = without_faults(loads)
        assert mount.umount().returncode == 0
    for kind, report in reports.items():
        found = (path for path in (directory / kind).rglob("*") if path.is_file())
        top = directory / kind
        assert {str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found} == report[
            "content"
        ]
