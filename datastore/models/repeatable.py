"""An export whose result is read and checked again, and that may be repeated after a kill at any moment.

What is already at the place counts as exported when every byte of it is as it was saved; anything else belongs to
somebody else and is left alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from datastore.api.source import LocalLocation, S3Location, Source
from datastore.errors import AccessDenied, AlreadyExists, InvalidRequest
from datastore.models.archives import check_blobs, open_layout, open_tar
from datastore.models.directory import DirectoryTree
from datastore.models.errors import ModelError, SaveLost, VersionDamaged
from datastore.models.exporting import export_directory, export_tar, export_tree
from datastore.models.manifest import VersionManifest
from datastore.models.ocilayout import export_layout
from datastore.models.opening import opened_tree
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.storage import ReadableTree
from datastore.models.verifying import damages, first_of

Form = Literal["directory", "tar", "oci"]


def export_repeatably(
    models: Models, model: str, number: int, target: Source, path: str, form: Form, token: str, progress: Progress
) -> VersionManifest:
    """Export a version to a path of a Datastore. token: equal for all attempts of one export, different for others.

    A directory's files are written to a bucket directly, so that its server copies them where it can; everything else
    is written to a mounted directory. Errors: AlreadyExists when something else is there; VersionDamaged; StoreError.
    """
    if isinstance(target, S3Location):
        if form != "directory":
            raise InvalidRequest(f"{form}: a file is written through a mount of the bucket")
        with opened_tree(target, path, writable=True) as tree:
            manifest = export_tree(models, model, number, tree, progress)
            _check(tree, manifest, progress, AlreadyExists)
        return manifest
    if not isinstance(target, LocalLocation):
        raise InvalidRequest(f"{target} has to be mounted first")
    place = Path(target.path, path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        was_there = place.is_file() or (place.is_dir() and any(place.iterdir()))
        if not was_there:
            _written(models, model, number, place, form, token, progress)
    except PermissionError as error:
        why = f"user {os.getuid()} may not write there; let it write in the directory above, or choose another one"
        raise AccessDenied(f"{error.filename or place}: {why}") from error
    manifest = models.manifest(model, number)
    try:
        with _readable(place, form) as tree:
            _check(tree, manifest, progress, AlreadyExists if was_there else VersionDamaged)
    except (NotADirectoryError, ModelError) as error:
        if was_there and not isinstance(error, SaveLost):
            raise AlreadyExists(f"{place}: is there already, and is something else: {error}") from error
        raise
    return manifest


def export_tar_file(
    models: Models, model: str, number: int, place: Path, token: str, progress: Progress
) -> VersionManifest:
    """Write a tar file that appears when it is whole. token: see export_repeatably(). Errors: AlreadyExists."""
    if place.exists():
        raise AlreadyExists(f"{place}: is there already; give another name, or remove it")
    partial = place.with_name(f".{place.name[:200]}.{token}.partial")
    try:
        with partial.open("wb", buffering=1 << 20) as out:
            manifest = export_tar(models, model, number, out, progress)
            out.flush()
            os.fsync(out.fileno())
        os.rename(partial, place)
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def _written(models: Models, model: str, number: int, place: Path, form: Form, token: str, progress: Progress) -> None:
    if form == "directory":
        export_directory(models, model, number, place, progress)
    elif form == "tar":
        export_tar_file(models, model, number, place, token, progress)
    else:
        shutil.rmtree(place.with_name(f".{place.name[:200]}.{token}.partial"), ignore_errors=True)
        export_layout(models, model, number, place, progress, token=token)


@contextmanager
def _readable(place: Path, form: Form) -> Iterator[ReadableTree]:
    if form == "directory":
        yield DirectoryTree(place)
        return
    if form == "oci":
        check_blobs(place)
    with (open_tar if form == "tar" else open_layout)(place) as tree:
        yield tree


def _check(tree: ReadableTree, manifest: VersionManifest, progress: Progress, error: type[Exception]) -> None:
    found = damages(tree, manifest, progress)
    if found:
        raise error(f"{first_of(found)}; choose a place where nothing is")
