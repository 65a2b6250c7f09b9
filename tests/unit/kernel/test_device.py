"""device.py: what is refused before the kernel is asked, in words that say what to do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from datastore import mountinfo
from datastore.errors import MountFailed
from datastore.fuse.kernel import device


def test_a_missing_place_a_file_a_mount_and_a_full_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (
        (tmp_path / "no", "does not exist"),
        (tmp_path / "file", "not a directory"),
        (tmp_path, "not empty"),
        (Path("/proc"), "already a mount of"),
    ):
        with pytest.raises(MountFailed, match=words):
            device.check_mountpoint(str(place))


def test_a_missing_device_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(MountFailed, match="modprobe fuse"):
        device.check_device()


def test_a_closed_device_says_how_to_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MountFailed, match="chmod 0666 /dev/fuse"):
        device.check_device()


def test_a_missing_fusermount3_says_which_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MountFailed, match="apt-get install fuse3"):
        device._mount_by_fusermount(str(tmp_path), "data", read_only=False, allow_other=False)


def program(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / "fusermount3"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'fusermount3: no write access to /x' >&2; exit 1", "refused to mount.*: no write access"),
        ("exec sleep 60", "no answer"),
        ("exit 0", "no device descriptor"),
    ],
)
def test_what_fusermount_may_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    program(tmp_path, script, monkeypatch)
    if "sleep" in script:
        monkeypatch.setattr(device, "FUSERMOUNT_TIMEOUT_S", 0.2)
    with pytest.raises(MountFailed, match=words):
        device._mount_by_fusermount(str(tmp_path), "data", read_only=False, allow_other=False)


def test_allow_other_names_the_line_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setattr(device, "FUSE_CONF", tmp_path / "fuse.conf")
    (tmp_path / "fuse.conf").write_text("#user_allow_other\n")
    with pytest.raises(MountFailed, match="user_allow_other in"):
        device._mount_by_fusermount(str(tmp_path), "data", read_only=False, allow_other=True)


def test_unmounting_what_is_not_mounted_is_success(tmp_path: Path) -> None:
    device.unmount(str(tmp_path))


def test_who_has_left_while_he_was_looked_for_keeps_no_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through all processes took longer than is waited for him: the mount is tried once more."""
    now, tries = [0.0], []

    def unmount(place: str, lazy: bool) -> None:
        tries.append(now[0])
        now[0] += 10.0
        if len(tries) == 1:
            raise device._UserNotFound("busy")

    with monkeypatch.context() as patch:
        patch.setattr(device, "_unmount", unmount)
        patch.setattr(time, "monotonic", lambda: now[0])
        patch.setattr(time, "sleep", lambda _: None)
        device.unmount("/m", retry_s=2.0)
    assert tries == [0.0, 10.0]


def test_what_another_has_unmounted_meanwhile_is_unmounted(tmp_path: Path) -> None:
    """fusermount3 finds nothing there then, and fails."""
    device._unmount_by(["false"], str(tmp_path))


def test_names_are_quoted_for_the_option_list() -> None:
    assert device._quoted("a,b\\c") == "a\\,b\\\\c"


def test_a_mount_below_is_what_keeps_it_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "36 35 0:9 / /m/a rw - fuse.datastore data rw\n"
    monkeypatch.setattr(mountinfo, "read", lambda: mountinfo.parse(line))
    assert str(device.busy("/m")) == "/m is busy: /m/a is mounted below it; unmount that first"
    assert "below" not in str(device.busy("/m/a"))
