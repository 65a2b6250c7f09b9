"""Mounts the Datastores of one job on this machine, and unmounts them at its end."""

from __future__ import annotations

import os
import time
from pathlib import Path

from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest
from datastore.api.resolve import MountOptions
from datastore.api.trainingjob import TrainingJob
from datastore.errors import DatastoreError, InvalidManifest
from datastore.mounting import lifecycle, unmounting, waiting
from datastore.mounting.errors import Unsynced
from datastore.mounting.records import MountRecord
from datastore.mounting.signals import SignalWatch
from datastore.training.local.records import JobDirectory
from datastore.training.local.sandbox import Shown


class Mounts:
    """The mounts of one job. They end with this process, also if it is killed."""

    def __init__(self, directory: JobDirectory, watch: SignalWatch) -> None:
        self._directory = directory
        self._watch = watch
        self._records: list[MountRecord] = []
        self._roots: dict[str, Path] = {}
        """Where each Datastore is on this machine."""

    @property
    def trouble(self) -> str:
        """Why the storage of a mount does not answer, or ''."""
        return waiting.trouble_of(self._records)

    def mount(self, job: TrainingJob, manifest: Manifest, *, for_others: bool) -> dict[str, Shown]:
        """Mount all Datastores; return what the replicas see at which path. for_others: another user reads the mounts.
        Errors: DatastoreError, Interrupted; what is mounted by then is in the hands of unmount()."""
        shown: dict[str, Shown] = {}
        wanted = job.spec.datastores
        writers = {each.name for each in wanted if not each.read_only}
        for name in dict.fromkeys(each.name for each in wanted):
            options = MountOptions(read_only=name not in writers, allow_other=for_others)
            self._roots[name] = self._mounted(manifest, manifest.pick(name, job.namespace), options)
        for each in wanted:
            root = self._roots[each.name]
            source = root / each.sub_path
            if each.sub_path and not each.read_only:
                source.mkdir(parents=True, exist_ok=True)
            if not source.is_dir() or not source.resolve().is_relative_to(root.resolve()):
                where = f"TrainingJob {job.name}: spec.datastores"
                raise InvalidManifest(f"{where}: Datastore {each.name} has no directory {each.sub_path}")
            shown["/" + each.path.strip("/")] = Shown(source=str(source), read_only=each.read_only)
        return shown

    def _mounted(self, manifest: Manifest, datastore: Datastore, options: MountOptions) -> Path:
        if datastore.spec.local:
            source = Path(datastore.spec.local.path)
            if not source.is_dir():
                raise InvalidManifest(f"Datastore {datastore.name}: spec.local.path {source} is not a directory")
            return source
        place = self._directory.mountpoint(datastore.name)
        record = lifecycle.mount(manifest, datastore, os.fspath(place), options, self._watch, ends_with_us=True)
        self._records.append(record)
        return place

    def place(self, datastore: str, path: str) -> Path:
        """Return the path on this machine of a directory in one of the job's Datastores."""
        return self._roots[datastore] / path

    def unmount(self, *, force: bool) -> None:
        """Unmount all, the last mount first, and wait for all uploads for as long as for those of one mount, at most.
        Errors, after all were tried: Unsynced, else the first."""
        failed: DatastoreError | None = None
        deadline = time.monotonic() + unmounting.STOP_TIMEOUT_S
        for record in reversed(list(self._records)):
            left_s = None if force else max(1.0, deadline - time.monotonic())
            try:
                unmounting.unmount(record, None if force else self._watch, force=force, timeout_s=left_s)
            except DatastoreError as error:
                failed = error if isinstance(error, Unsynced) or failed is None else failed
                if not force:
                    continue
            self._records.remove(record)
        if failed:
            raise failed
