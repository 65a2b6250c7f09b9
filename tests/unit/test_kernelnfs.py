"""Which mounts the kernel's NFS client makes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from datastore import nfsclient
from datastore.api.mountspec import MountSpec
from datastore.api.source import NFSLocation, S3Location
from datastore.mounting import kernelnfs
from tests.promises import promise

SPEC = MountSpec(name="n", mountpoint="/m", source=NFSLocation(server="h", path="/p"), state_dir="/s", cache_dir="/c")


@promise("S-313")
def test_roots_exports_are_mounted_by_a_kernel_that_has_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
