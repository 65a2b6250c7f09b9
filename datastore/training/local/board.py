"""Shows a directory of a job's Datastores in TensorBoard, while the job runs or later."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastore.api.resolve import MountOptions
from datastore.errors import DatastoreError, InvalidManifest
from datastore.mounting import lifecycle, unmounting
from datastore.mounting.signals import SignalWatch
from datastore.training.local.records import directory_of


def program() -> str:
    """Return the path of tensorboard. Errors: DatastoreError when it is not on PATH."""
    found = shutil.which("tensorboard")
    if found is None:
        raise DatastoreError("tensorboard is not on PATH: pip install tensorboard")
    return found


@contextmanager
def log_directory(name: str, namespace: str, datastore: str, path: str, watch: SignalWatch) -> Iterator[Path]:
    """Yield the directory's path on this machine: in the job's own mount while the job runs, else in a read-only mount
    for the length of the block. datastore '': spec.tensorboard names Datastore and path. Errors: DatastoreError."""
    directory = directory_of(name, namespace)
    job, manifest = directory.load_job(), directory.load_manifest()
    if not datastore:
        if job.spec.tensorboard is None:
            raise InvalidManifest(f"TrainingJob {name} has no spec.tensorboard: say --datastore NAME [--path DIR]")
        datastore, path = job.spec.tensorboard.datastore, job.spec.tensorboard.path
    found = manifest.pick(datastore, namespace)
    if found.spec.local:
        yield Path(found.spec.local.path) / path
        return
    mountpoint = directory.mountpoint(datastore)
    if directory.alive and mountpoint.is_mount():
        yield mountpoint / path
        return
    own = directory.mountpoint(f"{datastore}-tensorboard")
    options = MountOptions(read_only=True)
    record = lifecycle.mount(manifest, found, str(own), options, watch, ends_with_us=True)
    try:
        yield own / path
    finally:
        unmounting.unmount(record, force=True)
