"""Which mounts the kernel's NFS client makes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore import nfsclient
from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation, S3Location
from datastore.errors import MountFailed
from datastore.mounting import kernelnfs, mounttable
from datastore.mounting.signals import watching
from tests.promises import promise

SPEC = MountSpec(name="n", mountpoint="/m", source=NFSLocation(server="h", path="/p"), state_dir="/s", cache_dir="/c")


@promise("S-313")
def test_root_mounts_exports_by_the_kernel_if_it_has_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless something is asked for that only our own engine has."""
    (tmp_path / "filesystems").write_text("nodev\tnfs\nnodev\tnfs4\n")
    monkeypatch.setattr(nfsclient, "FILESYSTEMS", tmp_path / "filesystems")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert kernelnfs.mounts(SPEC)
    for other in (
        replace(SPEC, transport="libfuse"),
        replace(SPEC, metrics="127.0.0.1:1"),
        replace(SPEC, source=S3Location(bucket="b")),
    ):
        assert not kernelnfs.mounts(other)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not kernelnfs.mounts(SPEC)


@promise("S-313")
def test_the_mounting_child_has_ended_before_the_mount_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it may still mount."""
    started: list[subprocess.Popen[str]] = []

    def start(_command: list[str], **more: Any) -> subprocess.Popen[str]:
        started.append(popen(["sleep", "600"], **more))
        return started[-1]

    def look(_mountpoint: str) -> None:
        assert started[0].returncode is not None

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(kernelnfs, "MOUNT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(mounttable, "mounted_at", look)
    with watching() as watch, pytest.raises(MountFailed, match="did not end within"):
        kernelnfs.mount(SPEC, watch)
    assert started
