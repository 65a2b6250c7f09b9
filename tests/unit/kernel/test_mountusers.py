"""Who uses a mount."""

from __future__ import annotations

import os
from pathlib import Path

from datastore.fuse.kernel.device import users


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
