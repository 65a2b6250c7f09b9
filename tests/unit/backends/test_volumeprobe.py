"""datastore.backends.volumeprobe: what a mounted volume can do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from datastore.backends import volumeprobe
from datastore.backends.volumeprobe import capabilities, main, usage
from tests.promises import promise


@pytest.fixture(autouse=True)
def message(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("termination") / "log"
    monkeypatch.setattr(volumeprobe, "MESSAGE", path)
    return path


@promise("S-115")
def test_a_local_disk_can_do_everything_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    found = capabilities(tmp_path)
    assert set(found) == {"emptyDirs", "symlinks", "append", "chmod", "hardlinks", "rename", "atomicRename"}
    assert all(found.values())
    assert list(tmp_path.iterdir()) == []


@promise("S-115")
def test_a_refused_operation_is_a_missing_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    found = capabilities(tmp_path)
    assert [name for name, able in found.items() if not able] == ["symlinks", "hardlinks"]
    assert list(tmp_path.iterdir()) == []


def test_files_are_counted_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"4567")
    (tmp_path / "l").symlink_to("y")
    assert usage(tmp_path) == (3, 7)
    late = iter((0.0, 21.0))
    assert usage(tmp_path, lambda: next(late)) is None
    monkeypatch.setattr(volumeprobe, "COUNT_MAX", 0)
    assert usage(tmp_path) is None


def test_the_answer_is_one_json_object(tmp_path: Path, message: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    main([str(tmp_path)])
    answer = json.loads(message.read_text())
    assert (answer["capabilities"]["rename"], answer["objects"], answer["bytes"]) == (True, 1, 3)
    main([str(tmp_path / "absent")])
    assert json.loads(message.read_text())["error"].startswith("No such file or directory (as uid ")
