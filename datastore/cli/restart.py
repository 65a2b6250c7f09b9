"""`datastore restart DIR|NAME`: replace the server of a live mount, e.g. after an upgrade; open files keep working."""

from __future__ import annotations

import os
import signal
import time

from datastore import controlclient
from datastore.cli.arguments import Target
from datastore.cli.console import note
from datastore.cli.inspection import SERVER_DIED, SUPERVISOR_DIED, find
from datastore.errors import DatastoreError, MountFailed
from datastore.mounting.records import MountRecord, is_server, read_record

RESTART_TIMEOUT_S = 360.0
"""More than the 300 s that the supervisor gives a new server, which first ends the renames that the old one began."""
STATUS_TIMEOUT_S = 2.0
_POLL_S = 0.05
LIBFUSE = "it is mounted with --transport libfuse, which can't hand requests from one mount server to the next"
GLUSTERFS = "GlusterFS's own client serves it, and can't hand requests from one mount server to the next"


def restart_command(target: Target) -> None:
    """Replace the mount's server with one of the installed version. Programs that use the mount see a short pause."""
    record = find(target)
    _check(record)
    started, old = time.monotonic(), _serving(record) or record.server_pid
    os.kill(record.supervisor_pid, signal.SIGUSR2)
    new = _replaced(record, old)
    took_s = time.monotonic() - started
    note(f"{record.name} at {record.mountpoint}: server {new} serves in the place of {old} ({took_s:.1f} s)")


def _check(record: MountRecord) -> None:
    if record.in_kernel:
        raise DatastoreError(f"{record.mountpoint} is served by the kernel alone, no server of ours does")
    if not is_server(record.supervisor_pid) and is_server(record.server_pid):
        raise MountFailed(f"{record.mountpoint}: {SUPERVISOR_DIED}")
    if not is_server(record.supervisor_pid):
        raise controlclient.NotAnswering(f"{record.mountpoint}: {SERVER_DIED}")
    if record.transport == "libfuse":
        raise MountFailed(f"{record.mountpoint}: {LIBFUSE}. Unmount and mount again instead")
    if record.location.startswith("glusterfs:"):
        raise MountFailed(f"{record.mountpoint}: {GLUSTERFS}. Unmount and mount again instead")


def _serving(record: MountRecord) -> int:
    """Return the pid of the server that answers, or 0. The record has an older one when the disk was full since."""
    try:
        return int(controlclient.brief_status(record.state_dir, STATUS_TIMEOUT_S).get("serverPid", 0))
    except controlclient.NotAnswering:
        return 0


def _replaced(record: MountRecord, old: int) -> int:
    """Wait until another server than the old one answers, and return its pid. Errors: MountFailed."""
    end = time.monotonic() + RESTART_TIMEOUT_S
    while time.monotonic() < end:
        now = read_record(record.state_dir)
        if now is None or not is_server(now.supervisor_pid):
            raise MountFailed(f"{record.mountpoint}: was unmounted meanwhile")
        if now.refused and now.noted_at > record.noted_at:
            raise MountFailed(f"{record.mountpoint}: {now.refused}")
        if (pid := _serving(record)) not in (0, old):
            return pid
        time.sleep(_POLL_S)
    raise MountFailed(f"{record.mountpoint}: no new server within {RESTART_TIMEOUT_S:.0f} s; see mount.log")
