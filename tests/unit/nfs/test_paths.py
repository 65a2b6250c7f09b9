"""The paths of open files."""

from __future__ import annotations

from pathlib import Path

from datastore.fuse.nfs.paths import open_files


def test_open_files_are_named_by_their_inode_numbers(tmp_path: Path) -> None:
    """As far as they are below the mount, whoever has them open."""
    for pid, number, to, ino in ((8, 3, "/m/a/b", 41), (8, 4, "/mine", 42), (9, 5, "/m/c", 43)):
        for name in ("fd", "fdinfo"):
            (tmp_path / str(pid) / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / str(pid) / "fd" / str(number)).symlink_to(to)
        (tmp_path / str(pid) / "fdinfo" / str(number)).write_text(
            f"pos:\t0\nflags:\t0100002\nmnt_id:\t29\nino:\t{ino}\n"
        )
    assert open_files("/m", tmp_path) == {41: "a/b", 43: "c"}
    with (tmp_path / "real").open("w"):
        assert open_files(str(tmp_path))[(tmp_path / "real").stat().st_ino] == "real"
