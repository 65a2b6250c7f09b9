"""Who uses a mount."""

from __future__ import annotations

import os
from pathlib import Path

from datastore.fuse.kernel.device import seen_elsewhere, users


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
    assert users("/m", tmp_path) == ["pid 9 (reader)", "pid 10 (shell)", "pid 11 (mapper)"]


def test_our_own_directory_is_seen_in_the_real_proc() -> None:
    assert any(f"pid {os.getpid()} " in user for user in users(os.getcwd()))


def test_each_mount_namespace_that_still_has_a_file_system_is_named_once(tmp_path: Path) -> None:
    for pid, namespace, number in ((20, "a", "0:41"), (8, "a", "0:41"), (30, "b", "0:41"), (40, "c", "0:40")):
        process(tmp_path, pid, f"of {namespace}")
        (tmp_path / str(pid) / "mountinfo").write_text(f"36 35 {number} / /m rw - fuse.datastore digits rw\n")
        (tmp_path / str(pid) / "ns").mkdir()
        (tmp_path / str(pid) / "ns/mnt").symlink_to(f"mnt:[{namespace}]")
    assert seen_elsewhere("0:41", tmp_path) == ["pid 8 (of a)", "pid 30 (of b)"]
