"""The work of the cells, on a plain directory: it does what it says and sees wrong contents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import filework
from bench.payload import BLOCK, WrongContent, block, blocks
from bench.worker import WorkFailed, run_work

CAP_S = 20.0
SIZE = 4 * BLOCK


@pytest.fixture
def big(tmp_path: Path) -> Path:
    file = tmp_path / "big"
    with file.open("wb") as out:
        out.writelines(blocks(SIZE))
    return file


def damage(file: Path, offset: int) -> None:
    with file.open("r+b") as out:
        out.seek(offset)
        out.write(b"\xff" * 8)


@pytest.mark.parametrize("offset", [2 * BLOCK, 3 * BLOCK - 8])
def test_a_wrong_block_is_seen(big: Path, offset: int) -> None:
    damage(big, offset)
    with pytest.raises(WrongContent):
        filework.read_sequential(str(big), SIZE, CAP_S)


def test_a_file_that_ends_too_soon_is_seen(big: Path) -> None:
    os.truncate(big, SIZE - 1)
    with pytest.raises(WrongContent):
        filework.read_sequential(str(big), SIZE, CAP_S)


def test_a_cap_ends_a_loop_and_says_so(big: Path) -> None:
    answer = filework.read_random(str(big), SIZE, 4096, 50, 0.0)
    assert answer["partial"]
    assert answer["count"] == 0


@pytest.mark.parametrize("content", [block(8, 5000), block(7, 4999), block(7, 4990) + bytes(10)])
def test_a_wrong_small_file_is_seen_in_any_thread(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "small"
    filework.create_files(str(folder), 20, 5000, 4, CAP_S)
    (folder / "f00007").write_bytes(content)
    with pytest.raises(WrongContent, match="f00007"):
        filework.read_files(str(folder), 20, 5000, 4, CAP_S)


def test_a_walk_counts_and_a_missing_entry_is_seen(tmp_path: Path) -> None:
    for number in range(3):
        filework.create_files(str(tmp_path / f"d{number}"), 5, 100, 1, CAP_S)
    assert filework.walk(str(tmp_path), 18, CAP_S)["count"] == 18
    with pytest.raises(WrongContent):
        filework.walk(str(tmp_path), 19, CAP_S)


def test_each_kind_of_metadata_call(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for operation in ("mkdir", "create", "stat", "symlink", "readlink", "rename", "litter", "unlink", "rmdir"):
        assert filework.metadata(operation, folder, 5)["count"] == 5
    assert sorted(os.listdir(folder)) == [f"{letter}{number}" for letter in "gs" for number in range(5)]


def test_files_are_held_open_across_folders(tmp_path: Path) -> None:
    for name in "ab":
        filework.create_files(str(tmp_path / name), 5, 100, 1, CAP_S)
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert filework.hold_open(folders, 8, CAP_S)["count"] == 8
    assert filework.hold_open(folders, 11, CAP_S)["partial"]


def test_a_worker_answers_with_figures_or_with_what_went_wrong(big: Path, tmp_path: Path) -> None:
    answer = run_work("filework.read_sequential", CAP_S, path=str(big), size=SIZE, cap_s=CAP_S)
    assert answer["bytes"] == SIZE
    with pytest.raises(WorkFailed, match="No such file"):
        run_work("filework.first_byte", CAP_S, path=str(tmp_path / "none"))
    damage(big, 0)
    with pytest.raises(WorkFailed, match="wrong content"):
        run_work("filework.read_sequential", CAP_S, path=str(big), size=SIZE, cap_s=CAP_S)


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WorkFailed, match="no end within"):
        run_work("filework.first_byte", 1.0, path=str(tmp_path / "fifo"))
