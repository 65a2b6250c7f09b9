"""The state of each mount as `list` and `status` show it: from its server, or from what a dead one left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from datastore import controlclient
from datastore.cli import mounttable
from datastore.cli.directory import real_path
from datastore.cli.records import MountRecord, all_records, is_server
from datastore.cli.unsent import unsent_files
from datastore.errors import DatastoreError

MOUNTED, CRASHED, HANGING, UNMOUNTED = "mounted", "crashed", "not answering", "not mounted"


KEEPER_DIED = (
    "its keeper process has died: it serves on, but if its server dies too, programs get errors; "
    "`datastore umount` it when it suits, and mount it again"
)
_WITHOUT_KEEPER = {"keeperPid": 0, "restart": "not possible: no keeper", "trouble": KEEPER_DIED}


def inspect(record: MountRecord) -> dict[str, Any]:
    """Everything known of one mount; `state` is one of the four words above."""
    told: Mapping[str, Any] = {}
    if record.bind:
        state = MOUNTED if mounttable.mounted_at(record.mountpoint) else UNMOUNTED
    else:
        try:
            told, state = controlclient.status(record.state_dir), MOUNTED
        except controlclient.NotAnswering:
            told, state = {"dirty": unsent_files(record.state_dir)}, _dead_state(record)
    own = {
        "name": record.name,
        "mountpoint": record.mountpoint,
        "location": record.location,
        "readOnly": record.read_only,
        "state": state,
    }
    extra = {key: value for key, value in told.items() if key not in own and key != "ok"}
    alone = _WITHOUT_KEEPER if state == MOUNTED and not record.bind and not is_server(record.keeper_pid) else {}
    return {**own, **_processes(record), **extra, **alone, "dirty": dirty_files(told)}


def _processes(record: MountRecord) -> dict[str, Any]:
    if record.bind:
        return {}
    restart = "possible" if record.upgradable else "not possible: Linux before 6.9, or libfuse"
    told = {"keeperPid": record.keeper_pid, "serverPid": record.server_pid, "restart": restart}
    return {**told, "trouble": record.trouble} if record.trouble else told


def dirty_files(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files that are not uploaded, whatever else a status holds."""
    dirty = told.get("dirty")
    return [dict(each) for each in dirty if isinstance(each, Mapping)] if isinstance(dirty, list) else []


def find(target: str) -> MountRecord:
    """The mount that a person names by directory or by Datastore. Errors: DatastoreError with what there is."""
    records = all_records()
    path = real_path(target)
    at_path = [each for each in records if each.mountpoint == path]
    by_path = [each for each in at_path if each.pids or each.bind] or at_path
    named = by_path or [each for each in records if each.name == target]
    # What is mounted goes before what was, and left changes behind.
    named = [each for each in named if not each.ended] or named
    if len(named) == 1:
        return named[0]
    if named:
        places = ", ".join(each.mountpoint for each in named)
        raise DatastoreError(f"{target} is mounted more than once, name the directory: {places}")
    known = ", ".join(f"{each.name} at {each.mountpoint}" for each in records)
    raise DatastoreError(f"{target}: no Datastore is mounted there or has this name; {known or 'none is mounted'}")


def containing(path: str) -> tuple[MountRecord, str] | None:
    """The mount that holds a path, and the path within it."""
    whole = real_path(path)
    for record in all_records():
        if whole == record.mountpoint or whole.startswith(record.mountpoint + os.sep):
            return record, whole[len(record.mountpoint) :].strip(os.sep)
    return None


def complete_mounted(incomplete: str) -> list[str]:
    """For shell completion: names and directories of mounts."""
    known = {text for record in all_records() for text in (record.name, record.mountpoint)}
    return sorted(each for each in known if each.startswith(incomplete))


def _dead_state(record: MountRecord) -> str:
    if record.pids:
        return HANGING
    return CRASHED if mounttable.mounted_at(record.mountpoint) else UNMOUNTED
