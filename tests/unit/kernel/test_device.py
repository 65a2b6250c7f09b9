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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where somebody who is not root may mount."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(device, "check_device", lambda: None)
    (tmp_path / "place").mkdir()
    return str(tmp_path / "place")


def test_a_missing_fusermount3_says_which_package(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", place)
    with pytest.raises(MountFailed, match="apt-get install fuse3"):
        device.mount(place, "data")


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
def test_what_fusermount_may_do(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    program(tmp_path, script, monkeypatch)
    if "sleep" in script:
        monkeypatch.setattr(device, "FUSERMOUNT_TIMEOUT_S", 0.2)
    with pytest.raises(MountFailed, match=words):
        device.mount(place, "data")


def test_allow_other_names_the_line_that_is_missing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setattr(device, "FUSE_CONF", tmp_path / "fuse.conf")
    (tmp_path / "fuse.conf").write_text("#user_allow_other\n")
    with pytest.raises(MountFailed, match="user_allow_other in"):
        device.mount(place, "data", allow_other=True)


def test_unmounting_what_is_not_mounted_is_success(tmp_path: Path) -> None:
    device.unmount(str(tmp_path))


def mounted(place: str) -> mountinfo.MountTable:
    return mountinfo.parse(f"36 35 0:9 / {place} rw - fuse.datastore data rw\n")


def test_who_has_left_while_he_was_looked_for_keeps_no_mount(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking through all processes took longer than is waited for him: the mount is tried once more."""
    script = f"cd {tmp_path}; echo >>tries; [ -s left ] || {{ echo >left; echo busy >&2; exit 1; }}"
    program(tmp_path, script, monkeypatch)
    now = [0.0]

    def nobody(_: str) -> list[str]:
        now[0] += 10.0
        return []

    with monkeypatch.context() as patch:
        patch.setattr(device, "users", nobody)
        patch.setattr(mountinfo, "read", lambda: mounted(place))
        patch.setattr(time, "monotonic", lambda: now[0])
        patch.setattr(time, "sleep", lambda _: None)
        device.unmount(place, retry_s=2.0)
    assert (tmp_path / "tries").read_text() == "\n\n"


def test_what_another_has_unmounted_meanwhile_is_unmounted(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fusermount3 finds nothing there then, and fails."""
    program(tmp_path, "exit 1", monkeypatch)
    looks = iter([mounted(place), mountinfo.parse("")])
    monkeypatch.setattr(mountinfo, "read", lambda: next(looks))
    device.unmount(place)


def test_names_are_quoted_for_the_option_list(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, f'printf "%s\\n" "$@" >{tmp_path}/said; exit 1', monkeypatch)
    with pytest.raises(MountFailed):
        device.mount(place, "a,b\\c")
    assert "fsname=a\\,b\\\\c" in (tmp_path / "said").read_text()


def test_a_mount_below_is_what_keeps_it_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "36 35 0:9 / /m/a rw - fuse.datastore data rw\n"
    monkeypatch.setattr(mountinfo, "read", lambda: mountinfo.parse(line))
    assert str(device.busy("/m")) == "/m is busy: /m/a is mounted below it; unmount that first"
    assert "below" not in str(device.busy("/m/a"))
