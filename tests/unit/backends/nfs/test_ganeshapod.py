"""datastore.backends.nfs.ganeshapod: what an NFS server's pod does before it serves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from datastore.backends.nfs import ganeshapod
from datastore.backends.nfs.ganeshapod import Refused, has_handles, mounts, ready
from tests.promises import promise

ME = f"{os.getuid()} {os.getgid()} 2770"


def test_a_new_claim_gets_its_directories_once(tmp_path: Path) -> None:
    ready(tmp_path, ME)
    data = tmp_path / "data"
    assert stat.S_IMODE(data.stat().st_mode) == 0o2770
    data.chmod(0o755)
    (data / "file").touch()
    ready(tmp_path, ME)
    assert stat.S_IMODE(data.stat().st_mode) == 0o755, "the user's own change stays"
    assert (data / "file").exists()


@promise("S-300")
def test_a_directory_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    ready(tmp_path, ME)
    (tmp_path / "data").rmdir()
    with pytest.raises(Refused, match="data is gone"):
        ready(tmp_path, ME)
    assert not (tmp_path / "data").exists()


@promise("S-300")
def test_a_claim_without_file_handles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_handles(tmp_path)
    assert not has_handles(Path("/proc"))
    monkeypatch.setattr(ganeshapod, "has_handles", lambda _: False)
    for _ in range(2):
        with pytest.raises(Refused, match="no file handles"):
            ready(tmp_path, ME)


def test_ganesha_sees_no_mount_but_its_volume() -> None:
    first = "overlay / overlay rw 0 0\n/dev/sda /etc/hosts ext4 rw 0 0\n"
    table = f"{first}/dev/sda /volume ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n"
    assert mounts(table, Path("/volume")) == "/dev/sda /volume ext4 rw 0 0\n"


@promise("S-292")
def test_a_probe_needs_an_export_and_not_a_port() -> None:
    with pytest.raises(OSError, match="refused"):
        ganeshapod.probe(ports=(1, 1))
