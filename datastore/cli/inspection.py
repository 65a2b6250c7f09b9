"""The state of each mount as `list` and `status` show it: from its server, or from what a dead server left on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from datastore import controlclient, nfsclient
from datastore.errors import DatastoreError
from datastore.mounting import kernelnfs, mounttable
from datastore.mounting.directory import real_path
from datastore.mounting.records import MountRecord, all_records, is_server
from datastore.mounting.unsent import unsent_files

NONE_MOUNTED = "no Datastore is mounted; mount one with `datastore mount FILE`"
MOUNTED, CRASHED, HANGING, UNMOUNTED = "mounted", "crashed", "not answering", "not mounted"
DETACHED = "detached"

SUPERVISOR_DIED = (
    "its supervisor process has died: it serves on, but if its server dies too, programs get errors; "
    "`datastore umount` it when it suits, and mount it again"
)
SERVER_DIED = "the mount has crashed; `datastore umount` removes it, `datastore mount` mounts it again"
_WITHOUT_SUPERVISOR = {"supervisorPid": 0, "restart": "not possible: no supervisor", "trouble": SUPERVISOR_DIED}


def inspect(record: MountRecord) -> dict[str, Any]:
    """Return everything known of a mount; `state` is MOUNTED, CRASHED, HANGING, UNMOUNTED or DETACHED."""
    told: Mapping[str, Any] = {}
    if record.in_kernel:
        state = MOUNTED if mounttable.mounted_at(record.mountpoint) else UNMOUNTED
        told = {"storage": kernelnfs.storage(record.mountpoint)} if record.in_kernel == "nfs" else {}
    else:
        try:
            told = controlclient.status(record.state_dir)
            state = DETACHED if told.get("detached") else MOUNTED
        except controlclient.NotAnswering:
            told, state = {"dirty": unsent_files(record.state_dir)}, _dead_state(record)
    own = {
        "name": record.name,
        "mountpoint": record.mountpoint,
        "location": record.location,
        "readOnly": record.read_only,
        "state": state,
        "stateDir": str(record.state_dir),
        "via": via(record),
    }
    extra = {key: value for key, value in told.items() if key not in own and key not in ("ok", "detached")}
    alone = (
        _WITHOUT_SUPERVISOR
        if state == MOUNTED and not record.in_kernel and not is_server(record.supervisor_pid)
        else {}
    )
    return {**own, **_processes(record), **extra, **alone, "dirty": dirty_files(told)}


_WHY = {
    "s3": "this program's own S3 client",
    "sftp": "spec.sftp is a directory of an SSH server",
    "glusterfs": "a GlusterFS volume is mounted by GlusterFS's own client",
    "local": "a directory of this machine is shown at another place",
}
_TRANSPORTS = {"nfs": "libnfs", "local": "bind"}
"""The transports whose name is not the scheme of the location, by that scheme."""


def via(record: MountRecord) -> dict[str, str]:
    """Return by which transport the storage is reached, and why by that one."""
    scheme = record.location.partition(":")[0]
    if record.in_kernel == "nfs":
        which = kernelnfs.version(record.mountpoint)
        why = f"root mounts by the kernel's NFS client, here version {which}" if which else "root mounts by the kernel"
        return {"transport": "kernel", "why": why}
    why = _why_libnfs() if scheme == "nfs" else _WHY.get(scheme, "")
    return {"transport": _TRANSPORTS.get(scheme, scheme), "why": why}


def _why_libnfs() -> str:
    if not nfsclient.in_this_kernel():
        return "this machine's kernel has no NFS client"
    if os.geteuid():
        return "only root could mount by the kernel's NFS client"
    return "--metrics and --transport libfuse are of our own engine"


def _processes(record: MountRecord) -> dict[str, Any]:
    if record.in_kernel:
        return {}
    restart = "possible"
    if record.transport == "libfuse":
        restart = "not possible: mounted with --transport libfuse"
    elif record.location.startswith("glusterfs:"):
        restart = "not possible: GlusterFS's own client serves it, and can't hand requests over"
    told = {"supervisorPid": record.supervisor_pid, "serverPid": record.server_pid, "restart": restart}
    return {**told, "trouble": record.trouble} if record.trouble else told


def dirty_files(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the files that are not uploaded, from a server's status; malformed entries are left out."""
    dirty = told.get("dirty")
    return [dict(each) for each in dirty if isinstance(each, Mapping)] if isinstance(dirty, list) else []


def find(target: str) -> MountRecord:
    """Return the mount that the user names by directory or by Datastore. Errors: DatastoreError listing the mounts."""
    records = all_records()
    path = real_path(target)
    at_path = [each for each in records if each.mountpoint == path]
    by_path = [each for each in at_path if each.pids or each.in_kernel] or at_path
    named = by_path or [each for each in records if each.name == target]
    # A mount goes before one that has ended and left changes that are not uploaded.
    named = [each for each in named if not each.ended] or named
    if len(named) == 1:
        return named[0]
    if named:
        places = ", ".join(each.mountpoint for each in named)
        raise DatastoreError(f"{target} is mounted more than once, name the directory: {places}")
    known = ", ".join(f"{each.name} at {each.mountpoint}" for each in records)
    others = f"`datastore list` shows {known}" if known else "nothing is mounted"
    raise DatastoreError(f"{target}: no Datastore is mounted there or has this name; {others}")


def containing(path: str) -> tuple[MountRecord, str] | None:
    """Return the mount that a path is in, and the path below its mount point; None if there is none."""
    whole = real_path(path)
    for record in all_records():
        if whole == record.mountpoint or whole.startswith(record.mountpoint + os.sep):
            return record, whole[len(record.mountpoint) :].strip(os.sep)
    return None


def complete_mounted(incomplete: str) -> list[str]:
    """Return names and directories of mounts, for shell completion."""
    known = {text for record in all_records() for text in (record.name, record.mountpoint)}
    return sorted(each for each in known if each.startswith(incomplete))


def _dead_state(record: MountRecord) -> str:
    if record.pids:
        return HANGING
    return CRASHED if mounttable.mounted_at(record.mountpoint) else UNMOUNTED
