"""Directories on a real mount (docs/SEMANTICS.md, Directories)."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from tests.mount.mounts import Area, Mount, fails, settle

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]


def test_mkdir_writes_a_marker_that_any_client_sees(area: Area) -> None:
    """S-01: the directory is an empty object `dir/` of the usual type."""
    (area.path / "empty").mkdir(mode=0o750)
    head = area.mount.objects.head(area.key("empty/"))
    assert head["ContentLength"] == 0
    assert head["ContentType"] == "application/x-directory"
    assert area.keys() == ["", "empty/"]


def test_directories_survive_the_mount(area: Area) -> None:
    """S-01: empty, emptied and nested directories are there at the next mount, with their modes."""
    (area.path / "a/b/c").mkdir(parents=True)
    (area.path / "emptied").mkdir(mode=0o701)
    (area.path / "emptied/file").write_bytes(b"x")
    (area.path / "emptied/file").unlink()
    area.mount.remount()
    found = sorted(os.path.relpath(top, area.path) for top, _, _ in os.walk(area.path))
    assert found == [".", "a", "a/b", "a/b/c", "emptied"]
    assert stat.S_IMODE((area.path / "emptied").stat().st_mode) == 0o701


def test_rmdir_removes_the_marker(area: Area) -> None:
    """S-01: until rmdir, and no longer."""
    (area.path / "gone").mkdir()
    (area.path / "gone").rmdir()
    assert area.keys() == [""]
    assert list(area.path.iterdir()) == []


def test_an_implied_directory_stays_without_its_last_entry(area: Area) -> None:
    """S-02 S-03: a directory that only other tools' keys implied stays when its entries are removed or moved away."""
    area.put("implied/one", b"1")
    area.put("left/one", b"1")
    settle()
    (area.path / "implied/one").unlink()
    (area.path / "left/one").rename(area.path / "moved")
    assert sorted(os.listdir(area.path)) == ["implied", "left", "moved"]
    assert sorted(area.keys()) == ["", "implied/", "left/", "moved"]
    area.mount.remount()
    assert sorted(os.listdir(area.path)) == ["implied", "left", "moved"]


def test_an_implied_directory_has_default_attributes(area: Area) -> None:
    """S-03: 0755 and the owner of the mount."""
    area.put("implied/deep/one", b"1")
    settle()
    seen = (area.path / "implied").stat()
    assert stat.S_ISDIR(seen.st_mode)
    assert stat.S_IMODE(seen.st_mode) == 0o755
    assert (seen.st_uid, seen.st_gid) == (os.getuid(), os.getgid())
    assert os.listdir(area.path / "implied/deep") == ["one"]


def test_rmdir_asks_the_store(area: Area) -> None:
    """S-04: what another client wrote a moment ago makes it ENOTEMPTY, also when a listing showed nothing."""
    (area.path / "d").mkdir()
    assert os.listdir(area.path / "d") == []
    area.put("d/new", b"x")
    fails(errno.ENOTEMPTY, os.rmdir, area.path / "d")
    assert area.get("d/new") == b"x"


def test_rmdir_of_what_is_no_empty_directory(area: Area) -> None:
    """S-04: ENOTEMPTY with entries of our own, ENOTDIR for a file, ENOENT for nothing."""
    (area.path / "d/e").mkdir(parents=True)
    (area.path / "file").write_bytes(b"x")
    fails(errno.ENOTEMPTY, os.rmdir, area.path / "d")
    fails(errno.ENOTDIR, os.rmdir, area.path / "file")
    fails(errno.ENOENT, os.rmdir, area.path / "nothing")
    fails(errno.EEXIST, os.mkdir, area.path / "d")
    fails(errno.EEXIST, os.mkdir, area.path / "file")
    fails(errno.EISDIR, os.unlink, area.path / "d")


def test_a_pass_shows_every_entry_once_while_entries_go(area: Area) -> None:
    """S-05: one snapshot a pass, however many answers it takes; rm -r's way of reading."""
    names = [f"file-with-a-rather-long-name-{number:04d}" for number in range(400)]
    area.put_empty(names)
    settle()
    seen = []
    with os.scandir(area.path) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 2:
                os.unlink(entry.path)
    assert sorted(seen) == names
    assert sorted(os.listdir(area.path)) == sorted(set(names) - set(seen[1::2]))


def test_rewinddir_takes_a_new_snapshot(area: Area) -> None:
    """S-05: the same descriptor read again from the start shows what is there then."""
    (area.path / "one").mkdir()
    fd = os.open(area.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(fd) == ["one"]
        (area.path / "two").mkdir()
        (area.path / "one").rmdir()
        assert os.listdir(fd) == ["two"]  # listdir(fd) rewinds
    finally:
        os.close(fd)


def test_a_directory_of_more_than_a_page(area: Area) -> None:
    """S-05: 1,010 entries take two pages of a listing; names are found one by one as well."""
    names = [f"{number:04d}" for number in range(1010)]
    area.put_empty(names)
    settle()
    assert sorted(os.listdir(area.path)) == names
    assert (area.path / "1009").stat().st_size == 0
    assert not (area.path / "1010").exists()


def test_nobody_vanishes_from_other_mounts(area: Area, other: Mount) -> None:
    """S-01: another mount sees an empty directory, and its end."""
    there = other.path / area.name
    (area.path / "empty").mkdir()
    settle()
    assert os.listdir(there) == ["empty"]
    (area.path / "empty").rmdir()
    settle()
    assert os.listdir(there) == []
