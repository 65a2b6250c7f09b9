"""An export whose result is read and checked again, and that may be repeated after a kill at any moment.

What is already at the place counts as exported when every byte of it is as it was saved; anything else belongs to
somebody else and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastore.api.source import LocalLocation, S3Location, Source
from datastore.errors import AlreadyExists, InvalidRequest
from datastore.models.archives import check_blobs, open_layout, open_tar
from datastore.models.directory import DirectoryTree
from datastore.models.errors import ModelError, SaveLost, VersionDamaged
from datastore.models.exporting import Form, export_directory, export_tar_file, export_tree
from datastore.models.manifest import VersionManifest
from datastore.models.ocilayout import export_layout
from datastore.models.opening import opened_tree
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.storage import ReadableTree
from datastore.models.verifying import damages, first_of


def export_repeatably(
    models: Models, model: str, number: int, target: Source, path: str, form: Form, progress: Progress
) -> VersionManifest:
    """Export a version to a path of a Datastore, unless it is there.

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
        {"directory": export_directory, "tar": export_tar_file, "oci": export_layout}[form](
            models, model, number, place, progress
        )
        was_there = False
    except AlreadyExists:
        was_there = True
    manifest = models.manifest(model, number)
    try:
        with _readable(place, form) as tree:
            _check(tree, manifest, progress, AlreadyExists if was_there else VersionDamaged)
    except (NotADirectoryError, ModelError) as error:
        if was_there and not isinstance(error, SaveLost):
            raise AlreadyExists(f"{place}: is there already, and is something else: {error}") from error
        raise
    return manifest


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
