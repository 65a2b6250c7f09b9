"""Open a place of data (datastore/api/source.py) as a store of models, or as a tree to save from or export to.

`location` says where the data of a directory is that is mounted for the moment only; manifests name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastore.api.source import LocalLocation, S3Location, Source
from datastore.errors import DatastoreError, InvalidRequest
from datastore.fuse.store.s3 import open_s3, probe
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.objects import Objects, ObjectStorage, ObjectTree, Place
from datastore.models.storage import Storage, Tree

PROBE_DEADLINE_S = 10.0


@contextmanager
def opened_storage(source: Source, location: str = "") -> Iterator[Storage]:
    """Open the store of models in a bucket, or in the directory where other storage is mounted. Errors: StoreError."""
    if isinstance(source, S3Location):
        with _objects(source, writable=True) as objects:
            yield ObjectStorage(objects, source.prefix)
        return
    yield DirectoryStorage(_directory(source), location=location)


@contextmanager
def opened_tree(
    source: Source, path: str, location: str = "", *, writable: bool = False, follow_links: bool = False
) -> Iterator[Tree]:
    """Open a directory below a place ('' is the place); it need not exist. Errors: StoreError, InvalidRequest.

    follow_links: a link that leads out of a local place stands for its file, in place of an error.
    """
    names = [name for name in path.split("/") if name]
    if ".." in names or "." in names:
        raise InvalidRequest(f"{path}: '.' and '..' lead nowhere in a Datastore; write the path below it")
    if isinstance(source, S3Location):
        with _objects(source, writable=writable) as objects:
            prefix = source.prefix + "".join(f"{name}/" for name in names)
            yield ObjectTree(objects, prefix, within=source.prefix)
        return
    root = _directory(source)
    below = "/".join([location, *names]) if location else ""
    yield DirectoryTree(Path(root, *names), within="/" if follow_links else root, location=below)


@contextmanager
def located(path: str, location: str) -> Iterator[LocalLocation]:
    """Yield a directory that is mounted for the moment; errors that leave the block name the location in its place."""
    try:
        yield LocalLocation(path=path)
    except DatastoreError as error:
        named = rf"(?<![^\s'\"]){re.escape(path)}(?![\w.-])"
        error.args = (re.sub(named, lambda _: location or path, str(error)),)
        raise


@contextmanager
def _objects(location: S3Location, *, writable: bool) -> Iterator[Objects]:
    probe(location, writable=writable, deadline_s=PROBE_DEADLINE_S)
    store = open_s3(location)
    objects = Objects(store, Place(location.endpoint, location.bucket), store.metrics)
    try:
        yield objects
    finally:
        objects.close()


def _directory(source: Source) -> str:
    if not isinstance(source, LocalLocation):
        raise InvalidRequest(f"{source} has to be mounted first; the models are in the mounted directory")
    return source.path
