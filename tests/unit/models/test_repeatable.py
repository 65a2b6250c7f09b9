"""An export that is checked where it was written, and may be repeated after a kill at any moment."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datastore.api.source import LocalLocation
from datastore.errors import AlreadyExists
from datastore.models.archives import open_layout, open_tar
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.errors import VersionDamaged
from datastore.models.exporting import Form
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.repeatable import export_repeatably
from datastore.models.saving import save
from datastore.models.verifying import damages
from tests.modelstores import flip, wish
from tests.promises import promise

FORMS: list[Form] = ["directory", "tar", "oci"]

KILLED = """
import os, signal, sys
from datastore.api.source import LocalLocation
from datastore.models.directory import DirectoryStorage
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.repeatable import export_repeatably as export
store, target, form, last = *sys.argv[1:4], int(sys.argv[4])
calls = 0
def count(event, arguments):
    global calls
    if event in ("open", "os.rename", "os.mkdir", "os.symlink", "os.remove") and target in str(arguments[0]):
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
export(Models(DirectoryStorage(store)), "digits", 1, LocalLocation(path=target), "a/out", form, Progress())
"""
"""An export that is killed at its n-th step at the target."""


@pytest.fixture
def models(source: Path, tmp_path: Path) -> Models:
    """With the source as digits:1, in a directory."""
    (tmp_path / "store").mkdir()
    made = Models(DirectoryStorage(tmp_path / "store"))
    save(made, DirectoryTree(source), wish(), Progress())
    return made


def exported(models: Models, target: Path, form: Form) -> Path:
    export_repeatably(models, "digits", 1, LocalLocation(path=str(target)), "a/out", form, Progress())
    return target / "a" / "out"


def is_whole(models: Models, place: Path, form: Form) -> bool:
    manifest = models.manifest("digits", 1)
    if form == "directory":
        return not damages(DirectoryTree(place), manifest, Progress())
    with (open_tar if form == "tar" else open_layout)(place) as tree:
        return not damages(tree, manifest, Progress())


@promise("S-405")
@pytest.mark.parametrize(
    ("form", "empty_before"), [("directory", False), ("directory", True), ("tar", False), ("oci", False), ("oci", True)]
)
def test_a_killed_export_is_completed_by_the_next_one(
    models: Models, tmp_path: Path, form: Form, empty_before: bool
) -> None:
    """Kill -9 at its steps; what is at the place then is whole, or nothing is, and in the end it is there alone."""
    steps = 0
    for last in (*range(1, 9), 13, 21, 34, 55):
        target = tmp_path / f"target-{last}"
        target.mkdir()
        place = target / "a" / "out"
        if empty_before:
            place.mkdir(parents=True)
        arguments = [str(tmp_path / "store"), str(target), form, str(last)]
        done = subprocess.run([sys.executable, "-c", KILLED, *arguments], timeout=60, check=False)
        if place.is_file() or list(target.rglob("out/*")):
            assert is_whole(models, place, form)
        assert is_whole(models, exported(models, target, form), form)
        assert os.listdir(target / "a") == ["out"]
        if done.returncode == 0:
            break
        steps += 1
    assert steps > 2, "the export was never killed"


@promise("S-405")
@pytest.mark.parametrize("form", FORMS)
def test_an_existing_target_is_completed_only_if_it_is_our_own(
    models: Models, source: Path, tmp_path: Path, form: Form
) -> None:
    """Every byte of it is read to know."""
    place = exported(models, tmp_path, form)
    before = place.stat().st_mtime_ns
    assert exported(models, tmp_path, form).stat().st_mtime_ns == before
    content = (source / "saved_model.pb").read_bytes()
    files = [place, *place.rglob("*")]
    changed = next(each for each in files if each.is_file() and content in each.read_bytes())
    flip(changed, changed.read_bytes().index(content))
    body = changed.read_bytes()
    with pytest.raises(AlreadyExists, match=r"saved_model\.pb|has the digest"):
        exported(models, tmp_path, form)
    assert changed.read_bytes() == body


@promise("S-404")
def test_a_damaged_version_is_not_exported(models: Models, tmp_path: Path) -> None:
    """With the path and both digests, and nothing at the place."""
    weights = tmp_path / "store" / "digits" / "1" / "saved_model.pb"
    good = hashlib.sha256(weights.read_bytes()).hexdigest()
    flip(weights, 0)
    for form in FORMS:
        with pytest.raises(VersionDamaged, match=f"saved_model.pb: was saved with sha256 {good}, and has "):
            exported(models, tmp_path / form, form)
        assert not (tmp_path / form / "a" / "out").exists()
