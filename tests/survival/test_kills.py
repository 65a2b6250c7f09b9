"""kill -9 of the server, again and again, under a load that checks every byte (docs/SEMANTICS.md, S-41, S-58).

KILLS=100 runs the whole; by default it is bounded for CI.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from tests.mount.mounts import Mount, mounted
from tests.mount.conftest import new_bucket
from tests.servers import Server
from tests.survival.running import kill_server, load

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(1500)]

KILLS = int(os.environ.get("KILLS", "25"))


def test_applications_notice_no_death_of_the_server(
    versitygw: Server, clean_environment: Path, tmp_path: Path
) -> None:
    """S-41 S-58: no error, no wrong byte, no lost byte, whenever the server dies."""
    chance = random.Random(KILLS)
    with mounted(versitygw, new_bucket(versitygw), clean_environment) as mount, load(mount, tmp_path / "c") as loads:
        for _ in range(KILLS):
            kill_server(mount, chance)
            loads.progress()
        reports = loads.finish()
        print({kind: report["operations"] for kind, report in reports.items()})
        assert {kind: report["errors"] for kind, report in reports.items() if report["errors"]} == {}
        assert {kind: report["wrong"] for kind, report in reports.items() if report["wrong"]} == {}
        assert mount.umount().returncode == 0
        for kind, report in reports.items():
            assert in_the_bucket(mount, kind) == report["content"]


def in_the_bucket(mount: Mount, top: str) -> dict[str, str]:
    """What another tool finds below a directory: path -> sha256."""
    keys = [key for key in mount.objects.keys(f"{top}/") if not key.endswith("/")]
    return {key[len(top) + 1 :]: hashlib.sha256(mount.objects.get(key)).hexdigest() for key in keys}
