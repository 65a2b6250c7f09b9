"""Staging files that are used again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datastore.fuse.data.spares import StagingFiles
from datastore.fuse.data.staging import StagedFile


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    directory = tmp_path / "staging"
    directory.mkdir()
    return directory


def written(files: StagingFiles, content: bytes) -> StagedFile:
    staged = files.new(None, 1)
    staged.write(0, content)
    return staged


def inode(staged: StagedFile) -> int:
    return os.fstat(staged.fd).st_ino


def test_the_next_file_is_the_last_one_emptied_under_a_name_of_its_own(staging: Path) -> None:
    """S-20 the journal may still have a row for the old name, which must have no file then."""
    files = StagingFiles(staging)
    first = written(files, b"content")
    number = inode(first)
    files.drop(first)
    assert list(staging.iterdir()) == []
    assert first.read_present(0, 7) is None
    second = files.new(None, 2)
    assert (inode(second), second.size, os.fstat(second.fd).st_size) == (number, 0, 0)
    assert second.path != first.path
    assert list(staging.iterdir()) == [second.path]
    assert second.path.stat().st_mode & 0o777 == 0o600
    second.close(remove=True)


def test_what_somebody_else_has_is_left_alone(staging: Path, tmp_path: Path) -> None:
    """S-23 S-41 the bytes of a file that was removed while open; a file that the cache took over."""
    files = StagingFiles(staging)
    removed, adopted = written(files, b"removed"), written(files, b"adopted")
    os.link(removed.path, tmp_path / "removed")
    adopted.path.rename(tmp_path / "adopted")
    for staged in (removed, adopted):
        files.drop(staged)
        assert staged.fd == -1
        assert (tmp_path / staged.path.name).exists() is False
    assert (tmp_path / "removed").read_bytes() == b"removed"
    assert (tmp_path / "adopted").read_bytes() == b"adopted"
    assert list(staging.iterdir()) == []


def test_few_are_kept_and_none_that_is_large(staging: Path) -> None:
    """Local space is for what is unsent."""
    files = StagingFiles(staging)
    many = [written(files, b"x") for _ in range(100)]
    large = files.new(None, 1)
    large.truncate(1 << 30)
    for staged in (large, *many):
        files.drop(staged)
    kept = list(staging.with_name("spare").iterdir())
    assert len(kept) == 32
    assert not any(path.stat().st_size for path in kept)


def test_the_next_process_begins_without_those_of_the_last(staging: Path) -> None:
    """S-20 what one that was killed had not emptied yet is in no journal."""
    files = StagingFiles(staging)
    files.drop(written(files, b"x"))
    (staging.with_name("spare") / "left").write_bytes(b"content that was sent")
    StagingFiles(staging)
    assert list(staging.with_name("spare").iterdir()) == []
    staged = files.new(None, 1)
    assert staged.path.parent == staging, "whatever became of what it had kept"
    staged.close(remove=True)


def test_one_that_cannot_be_emptied_is_not_used_again(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file would begin with its bytes."""
    files = StagingFiles(staging)
    staged = written(files, b"content")

    def refused(_fd: int, _size: int) -> None:
        raise OSError("the disk does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refused)
        files.drop(staged)
    again = files.new(None, 1)
    assert os.fstat(again.fd).st_size == 0
    again.close(remove=True)


def test_where_there_is_no_room_for_them_none_are_kept(tmp_path: Path) -> None:
    """S-153: on a full disk a server starts without."""
    staging = tmp_path / "staging"
    staging.mkdir()
    (tmp_path / "spare").write_bytes(b"no directory can be made here")
    files = StagingFiles(staging)
    first = files.new(None, 0)
    first.write(0, b"x")
    files.drop(first)
    assert list(staging.iterdir()) == []
    assert (tmp_path / "spare").read_bytes().startswith(b"no")
