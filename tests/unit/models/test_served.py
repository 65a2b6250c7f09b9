"""datastore.models.served: what each pod of a Serving does before it serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datastore.models import served
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.saving import Wish, save
from tests.modelstores import flip
from tests.promises import promise


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    """A store with version 1 of digits."""
    (tmp_path / "store").mkdir()
    models = Models(DirectoryStorage(tmp_path / "store"), who="tester")
    save(models, DirectoryTree(source), Wish(model="digits"), Progress())
    return tmp_path / "store"


def run(store: Path, reference: str = "digits:1") -> tuple[int, str]:
    report = store.parent / "report"
    code = served.main([f"--store={store}", f"--report={report}", reference])
    return code, report.read_text()


@promise("S-413")
def test_a_whole_version_is_reported_with_its_digest(store: Path) -> None:
    code, text = run(store)
    manifest = Models(DirectoryStorage(store)).manifest("digits", 1)
    assert (code, json.loads(text)) == (0, {"version": 1, "digest": manifest.digest})


@promise("S-411")
def test_one_flipped_bit_is_refused_with_its_path_and_both_digests(store: Path) -> None:
    entry = next(each for each in Models(DirectoryStorage(store)).manifest("digits", 1).entries if each.size > 10)
    flip(store / "digits" / "1" / entry.path, 7)
    code, text = run(store)
    assert code == served.DAMAGED
    assert text.startswith(f"digits/1/{entry.path}: was saved with sha256 {entry.sha256}, and has ")


@promise("S-411")
def test_a_version_that_is_shown_to_pods_with_an_fs_group_is_whole(store: Path) -> None:
    """S-83: the group may do what the owner may. A mode that another change made is damage as before."""
    entries = [each for each in Models(DirectoryStorage(store)).manifest("digits", 1).entries if each.kind != "symlink"]
    for entry in entries:
        mode = entry.mode | (entry.mode & 0o700) >> 3
        (store / "digits" / "1" / entry.path).chmod(mode | (0o2000 if entry.kind == "directory" else 0))
    assert run(store)[0] == 0

    for entry in (next(each for each in entries if each.kind == kind) for kind in ("file", "directory")):
        at = store / "digits" / "1" / entry.path
        shown = at.stat().st_mode & 0o7777
        at.chmod(shown ^ 0o001)
        code, text = run(store)
        assert (code, text.split(":")[0]) == (served.DAMAGED, f"digits/1/{entry.path}")
        at.chmod(shown)


def test_a_missing_version_is_reported(store: Path) -> None:
    code, text = run(store, "digits:2")
    assert code == served.UNREADABLE
    assert "digits" in text
    assert "2" in text
