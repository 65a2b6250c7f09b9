"""Prepares the directory of a mount: creates a missing one, and refuses one whose files would be hidden."""

from __future__ import annotations

import os
from pathlib import Path

from datastore import beneath
from datastore.errors import MountFailed
from datastore.mounting import mounttable
from datastore.mounting.records import MountRecord, all_records, remove_made


def real_path(directory: str) -> str:
    """Return the path, absolute and without symbolic links. A mount there is not touched, because it may hang.
    Errors: MountFailed for a relative path when the current directory was removed."""
    try:
        path = os.path.abspath(os.path.expanduser(directory))
    except OSError as error:
        why = f"the current directory can't be used ({error.strerror})"
        raise MountFailed(f"{directory}: {why}: cd to another one, or write the whole path") from error
    parent, name = os.path.split(path)
    beside = os.path.join(os.path.realpath(parent), name) if name else path
    return beside if mounttable.mounted_at(beside) else os.path.realpath(beside)


def record_at(mountpoint: str) -> MountRecord | None:
    """Return the record of the mount at an absolute path, a live mount before a crashed one; None without any."""
    found = [each for each in all_records() if each.mountpoint == mountpoint]
    return next((each for each in found if each.pids or each.in_kernel), found[0] if found else None)


def is_of_another(record: MountRecord) -> bool:
    """Return whether a live mount of another record has taken the mount point of this record, whose mount crashed."""
    there = record_at(record.mountpoint)
    return there is not None and there.state_dir != record.state_dir and bool(there.pids or there.in_kernel)


def prepare(mountpoint: str) -> tuple[str, ...]:
    """Make an absolute path ready for a mount; return the directories made, deepest first. Errors: MountFailed."""
    _refuse_mounted(mountpoint)
    for record in all_records():
        if record.mountpoint == mountpoint:  # of a mount that crashed there, of any Datastore
            beneath.restore(mountpoint, record.state_dir / beneath.NOTE_FILE)
    try:
        return _make(Path(mountpoint))
    except OSError as error:
        raise MountFailed(f"{mountpoint}: can't be a mount point: {error.strerror}") from error


def _refuse_mounted(mountpoint: str) -> None:
    at = mounttable.mounted_at(mountpoint)
    if at is None:
        return
    record = record_at(mountpoint)
    if record and (record.pids or record.in_kernel):
        what = (
            f"Datastore {record.name} is mounted there already; choose another directory, or, if no `datastore run` "
            f"or job uses it, end it with `datastore umount {mountpoint}`; `mount --replace` mounts another one in its "
            "place"
        )
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
