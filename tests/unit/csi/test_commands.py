"""Commands that end by their deadline, or are left behind."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from datastore import errors, mountinfo
from datastore.csi import errors as own
from datastore.csi.commands import Commands, remove_directory
from tests.patience import eventually
from tests.promises import promise


@promise("S-87")
def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    note.touch()
    for timeout_s in (0.5, 5.0, 20.0):  # a busy machine takes its time to start it
        began = time.monotonic()
        with pytest.raises(own.CommandTimeout):
            Commands().run(["sh", "-c", f"sleep 60 & echo $! > {note}; wait"], place="x", timeout_s=timeout_s)
        assert time.monotonic() - began < timeout_s + 30
        if note.read_text():
            break
    pid = int(note.read_text())
    eventually(lambda: not _runs(pid), "a busy machine takes its time to end what is killed")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(errors.MountFailed, match="no such place"):
        Commands().run(["sh", "-c", "echo no such place >&2; exit 3"], place="x")


@pytest.mark.parametrize("verb", ["unmount", "unmount_all"])
def test_a_mount_that_another_process_unmounts_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A mount server that ends at that moment unmounts, too."""
    there = [mountinfo.Mount("0:1", "/place", False, "fuse.datastore", "s")]

    def umount(self: Commands, command: list[str], *, place: str, **_: Any) -> bytes:
        there.clear()
        raise errors.MountFailed(f"umount: {place}: not mounted.")

    monkeypatch.setattr(mountinfo, "read", lambda: mountinfo.MountTable(list(there)))
    monkeypatch.setattr(Commands, "run", umount)
    getattr(Commands(), verb)("/place")
    assert not there


def test_a_file_in_a_directorys_place_that_can_not_be_removed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet and the pod's events get this line; any other error would be reported as a bug in the driver."""
    file = tmp_path / "file"
    file.touch()

    def refused(path: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        with pytest.raises(errors.MountFailed, match=f"can't remove {file}: Operation not permitted"):
            remove_directory(str(file))
    for _ in range(2):
        remove_directory(str(file))
    assert not file.exists()
