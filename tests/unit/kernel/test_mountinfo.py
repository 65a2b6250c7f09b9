"""mountinfo.py: parsing, and who uses a mount."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.kernel import mountinfo
from datastore.fuse.kernel.mountinfo import Mount

TEXT = (
    "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    "98 25 0:51 / /home/me/my\\040data rw,nosuid,nodev - fuse.datastore digits rw,user_id=0\n"
    "99 25 0:52 / /home/me/my\\040data rw - tmpfs tmpfs rw\n"
    "not a line\n"
)


def test_lines_are_read_with_their_escapes() -> None:
    assert mountinfo.parse(TEXT)[1] == Mount("0:51", "/home/me/my data", "fuse.datastore", "digits")


def test_the_mount_on_top_is_found(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(TEXT)
    assert mountinfo.at("/home/me/my data", tmp_path) == Mount("0:52", "/home/me/my data", "tmpfs", "tmpfs")
    assert mountinfo.at("/elsewhere", tmp_path) is None


@given(st.text())
def test_any_text_parses(text: str) -> None:
    mountinfo.parse(text)


def process(proc: Path, pid: int, command: str, *, cwd: str = "/", files: tuple[str, ...] = (), maps: str = "") -> None:
    here = proc / str(pid)
    (here / "fd").mkdir(parents=True)
    (here / "comm").write_text(command + "\n")
    (here / "maps").write_text(maps)
    (here / "cwd").symlink_to(cwd)
    for number, target in enumerate(files):
        (here / "fd" / str(number)).symlink_to(target)


def test_users_are_found_by_directory_file_and_mapping(tmp_path: Path) -> None:
    process(tmp_path, 10, "shell", cwd="/m/d")
    process(tmp_path, 9, "reader", files=("/etc/passwd", "/m/file"))
    process(tmp_path, 11, "mapper", maps="7f00-7f01 r--s 00000000 00:33 5 /m/file\n")
    process(tmp_path, 12, "other", cwd="/mm", files=("/mm/x",))
    assert mountinfo.users("/m", tmp_path) == ["pid 9 (reader)", "pid 10 (shell)", "pid 11 (mapper)"]


def test_our_own_directory_is_seen_in_the_real_proc() -> None:
    assert any(f"pid {os.getpid()} " in user for user in mountinfo.users(os.getcwd()))
