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


def test_help_of_the_package_for_notebooks_shows_its_functions() -> None:
    """They are imported at their first use, which help() and the completion of a notebook must not wait for."""
    code = "import pydoc, datastore.training; print(pydoc.plain(pydoc.render_doc(datastore.training)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "    submit(" in shown
    assert "class Job" in shown
