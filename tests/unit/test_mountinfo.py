"""mountinfo.py: the mount table as the kernel writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore import mountinfo
from datastore.mountinfo import Mount

TEXT = (
    "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    "98 25 0:51 / /home/me/my\\040data rw,nosuid,nodev - fuse.datastore digits rw,user_id=0\n"
    "99 25 0:52 / /home/me/my\\040data ro - tmpfs none rw\n"
    "not a line\n"
    "38 22 0:34 / /x\\134y rw - fuse.datastore o\\011k rw\n"
)


def test_lines_are_read_with_their_escapes() -> None:
    assert mountinfo.parse(TEXT).mounts == [
        Mount("8:1", "/", False, "ext4", "/dev/sda1", ("rw",)),
        Mount("0:51", "/home/me/my data", False, "fuse.datastore", "digits", ("rw", "user_id=0")),
        Mount("0:52", "/home/me/my data", True, "tmpfs", "none", ("rw",)),
        Mount("0:34", "/x\\y", False, "fuse.datastore", "o\tk", ("rw",)),
    ]


def test_the_mount_on_top_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(TEXT)
    monkeypatch.setattr(mountinfo, "MOUNTINFO", tmp_path / "mountinfo")
    table = mountinfo.read()
    there = table.at("/home/me/my data")
    assert there is not None
    assert there.device == "0:52"
    assert table.count("/home/me/my data") == 2
    assert table.at("/home/me") is None


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028"])
def test_only_a_line_feed_ends_a_line(end: str) -> None:
    place = f"/a{end}b"
    found = mountinfo.parse(f"98 25 0:51 / {place} rw - fuse.datastore digits rw\n").at(place)
    assert found is not None, "the kernel escapes only blanks, tabs, line feeds and backslashes"


def test_without_a_table_nothing_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountinfo, "MOUNTINFO", tmp_path / "none")
    assert mountinfo.read().mounts == []


@given(st.text())
def test_any_text_parses(text: str) -> None:
    mountinfo.parse(text)
