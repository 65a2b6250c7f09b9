"""What a process loads before it works: a mount waits for it, and a restart too."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"pydantic", "typer", "rich", "yaml", "botocore", "boto3", "prometheus_client", "grpc", "asyncio"}


@pytest.mark.parametrize(
    "modules", ["datastore.fuse.server, datastore.fuse.vfs.build", "datastore.fuse.supervisor.process"]
)
def test_the_mount_processes_load_no_heavy_library(modules: str) -> None:
    """Manifests are read by the command; boto only finds credentials, when the chain has to be asked."""
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY.isdisjoint(loaded), sorted(HEAVY.intersection(loaded))
