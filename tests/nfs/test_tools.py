"""pjdfstest and fsx on a mounted export: what a file system has to do, and that it keeps every byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nfs.host.server import NFSServer
from tests.nfs.mounts import mounted
from tests.promises import promise
from tests.tools import fsx_tier, pjdfstest_tier

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(7200)]

OPERATIONS = int(os.environ.get("FSX_OPERATIONS", "3000"))
SEEDS = int(os.environ.get("FSX_SEEDS", "1"))


@promise("S-263")
def test_pjdfstest(nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path) -> None:
    """Every test passes, device nodes and hard links included, but for those that docs/PJDFSTEST.md explains."""
    with mounted(nfs_host, export(), clean_environment, options=("--allow-other",)) as mount:
        for directory in (clean_environment, mount.folder):  # the tests become other users
            directory.chmod(0o755)
        outcome = pjdfstest_tier.run_in("nfs", mount.path)
    explained = pjdfstest_tier.explained(pjdfstest_tier.DOCUMENT.read_text(), "nfs")
    assert pjdfstest_tier.judge(outcome, explained, bar=len(explained))


@promise("S-263", "S-262")
def test_fsx(nfs_host: NFSServer, export: Callable[..., str], clean_environment: Path) -> None:
    """With and without memory maps. Version 3 makes no holes."""
    with mounted(nfs_host, export(), clean_environment) as mount:
        assert fsx_tier.run_all(mount.path, OPERATIONS, SEEDS, absent=("punch_hole",)) == 0
