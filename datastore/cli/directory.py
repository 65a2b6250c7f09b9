"""The directory that becomes a mount point: made when missing, refused when it would hide something."""

from __future__ import annotations

import os
from pathlib import Path

from datastore.cli import mounttable
from datastore.cli.records import MountRecord, all_records, remove_made
from datastore.errors import MountFailed


def real_path(directory: str) -> str:
    """Absolute and free of symbolic links, as the mount table has it. Never touches a mount point: it may hang."""
    path = os.path.abspath(os.path.expanduser(directory))
    parent, name = os.path.split(path)
    beside = os.path.join(os.path.realpath(parent), name) if name else path
    return beside if mounttable.mounted_at(beside) else os.path.realpath(beside)


def record_at(mountpoint: str) -> MountRecord | None:
    """The record of the mount at an absolute path."""
    return next((each for each in all_records() if each.mountpoint == mountpoint), None)


def prepare(mountpoint: str) -> tuple[str, ...]:
    """Make an absolute path ready for a mount; returns the directories made, deepest first. Errors: MountFailed."""
    _refuse_mounted(mountpoint)
    try:
        return _make(Path(mountpoint))
    except OSError as error:
        raise MountFailed(f"{mountpoint}: can't be a mount point: {error.strerror}") from error


def _refuse_mounted(mountpoint: str) -> None:
    at = mounttable.mounted_at(mountpoint)
    if at is None:
        return
    record = record_at(mountpoint)
    if record and (record.pids or record.bind):
        what = f"Datastore {record.name} is mounted there already; `datastore umount {mountpoint}` ends it"
    elif record:
        what = (
            f"a mount of Datastore {record.name} that has crashed is there; `datastore umount {mountpoint}` removes it"
        )
    else:
        what = f"something else is mounted there ({at.fstype}); choose another directory"
    raise MountFailed(f"{mountpoint}: {what}")


def _make(path: Path) -> tuple[str, ...]:
    if path.exists():
        if not path.is_dir():
            raise MountFailed(f"{path}: can't be a mount point: it is not a directory")
        if any(path.iterdir()):
            raise MountFailed(f"{path}: is not empty, and a mount would hide its files; choose another directory")
        return ()
    missing = [each for each in (path, *path.parents) if not each.exists()]
    made: list[str] = []
    try:
        for each in reversed(missing):
            each.mkdir()
            made.insert(0, str(each))
    except OSError:
        remove_made(tuple(made))
        raise
    return tuple(made)
