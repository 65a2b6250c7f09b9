"""The transport by which a mount reaches its storage, and the reason for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

from datastore import mountinfo, nfsclient
from datastore.cli import inspection
from datastore.mountinfo import Mount
from datastore.mounting import silence
from datastore.mounting.records import MountRecord
from tests.promises import promise


def record(location: str, in_kernel: Literal["", "bind", "nfs"] = "bind") -> MountRecord:
    return MountRecord(
        state_dir=Path("/none"), name="a", mountpoint="/mnt/none", location=location, in_kernel=in_kernel
    )


@promise("S-310")
@pytest.mark.parametrize(
    ("location", "transport", "why"),
    [
        ("s3://b/", "s3", "own S3 client"),
        ("sftp://h/a", "sftp", "SSH server"),
        ("glusterfs://g/v", "glusterfs", "GlusterFS's own client"),
        ("local:/a", "bind", "another place"),
    ],
)
def test_each_source_names_its_transport(location: str, transport: str, why: str) -> None:
    seen = inspection.inspect(record(location))["via"]
    assert seen["transport"] == transport
    assert why in seen["why"]


@promise("S-310")
@pytest.mark.parametrize(
    ("filesystems", "uid", "why"),
    [
        ("nodev\ttmpfs\n\text4\nnodev\tnfsd\n", 0, "no NFS client"),
        ("nodev\tnfs\nnodev\tnfs4\n", 1000, "only root"),
        ("nodev\tnfs\nnodev\tnfs4\n", 0, "of our own engine"),
        ("", 0, "no NFS client"),
    ],
)
def test_why_an_export_is_served_by_libnfs(
    filesystems: str, uid: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "filesystems"
    if filesystems:
        file.write_text(filesystems)
    monkeypatch.setattr(nfsclient, "FILESYSTEMS", file)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    seen = inspection.via(record("nfs://h/a"))
    assert seen["transport"] == "libnfs"
    assert why in seen["why"]


@promise("S-313")
def test_the_silence_of_a_kernel_mount_has_no_invented_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of ours watches such a mount; our own servers know the beginning of a silence."""
    there = Mount("0:77", "/mnt/none", False, "nfs4", "10.99.0.77:/srv")
    monkeypatch.setattr(mountinfo, "read", lambda: mountinfo.MountTable([there]))
    monkeypatch.setattr(nfsclient, "silent", lambda _mount: "the NFS server 10.99.0.77 does not answer")
    seen = inspection.inspect(record("nfs://10.99.0.77/srv", "nfs"))
    assert "since" not in seen["storage"]
    assert silence.state_words(seen) == f"{seen['state']}, storage does not answer"
    assert silence.storage_words(seen) == "storage does not answer: the NFS server 10.99.0.77 does not answer"
