"""Tells whether the containers of podman see what is mounted.

podman without root has a mount namespace of its own, made before the mounts. Where / is not a shared mount, no later
mount comes into it, and containers would be shown the empty directories beneath the mounts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from datastore.errors import DatastoreError

_TIMEOUT_S = 120.0
"""The longest wait for podman, which may have to set up its storage first."""


def check_sees(engine: str, sources: Mapping[str, str]) -> None:
    """Check that containers see what is mounted; another engine than podman is not checked. sources: the directory of
    this machine for each path in the containers. Errors: DatastoreError."""
    if Path(engine).name != "podman" or os.geteuid() == 0:
        return
    for path, source in sources.items():
        if _device(engine, source) != str(os.stat(source).st_dev):
            raise DatastoreError(
                f"podman does not see what is mounted for {path}: without root it needs / to be a shared mount; `sudo "
                "mount --make-rshared /`, then `podman system migrate`, and repeat the command"
            )


def _device(engine: str, source: str) -> str:
    """Return the number of the file system at a path, as podman sees it; '' if podman does not say it."""
    command = [engine, "unshare", "stat", "-c", "%d", source]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
