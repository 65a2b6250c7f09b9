"""`datastore umount DIR|NAME`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from datastore import beneath
from datastore.cli.arguments import seconds_of
from datastore.cli.console import fail, note
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.inspection import complete_mounted, find
from datastore.errors import DatastoreError
from datastore.mountinfo import FSTYPE
from datastore.mounting import mounttable, unmounting
from datastore.mounting.directory import real_path
from datastore.mounting.records import MountRecord, all_records
from datastore.mounting.signals import Interrupted, SignalWatch, watching


def umount_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|NAME", help="Directory or name of a mounted Datastore.", autocompletion=complete_mounted
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Unmount all mounts of this user.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", "-f", help="Unmount in any case; changes that can't be uploaded are kept on disk (NFS: lost)."
        ),
    ] = False,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="The longest time to wait for uploads, e.g. 30s or 1h. Default: 10m, with --force 10s.",
        ),
    ] = "",
) -> None:
    """Upload what is left and unmount. If changes can't be uploaded, the mount stays, and the exit code is 6."""
    if (target is None) != everything:
        raise typer.BadParameter("name one mount, or all with --all", param_hint="DIR|NAME")
    timeout_s = seconds_of("--timeout", timeout) if timeout else None
    if target is None:
        raise typer.Exit(_unmount_all(force, timeout_s))
    if force and _detached_orphan(target):
        return
    record = find(target)
    with watching() as watch:
        _unmount(record, watch, force, timeout_s)


def _unmount(record: MountRecord, watch: SignalWatch, force: bool, timeout_s: float | None) -> None:
    unmounting.unmount(record, watch, force=force, timeout_s=timeout_s, say=note)
    note(f"{record.name} is unmounted from {record.mountpoint}")


def _unmount_all(force: bool, timeout_s: float | None) -> ExitCode:
    """Unmount one mount after the other, within timeout_s in all; print each failure, return the first one's code.
    A mount below another one goes first: until then the other one is busy."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    code = ExitCode.OK
    with watching() as watch:
        for record in reversed(all_records()):  # they are sorted by mount point
            if record.ended:
                continue  # it is unmounted already; only changes that could not be uploaded are left
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                _unmount(record, watch, force, left_s)
            except DatastoreError as error:
                fail(str(error))
                code = code or exit_code_for(error)
            if (signum := watch.take()) is not None:
                raise Interrupted(signum)
    return code


def _detached_orphan(target: str) -> bool:
    """Unmount `target` if it is a Datastore mount that has no record any more; return whether it was one."""
    path = real_path(target)
    at = mounttable.mounted_at(path)
    if at is None or at.fstype != FSTYPE or any(each.mountpoint == path for each in all_records()):
        return False
    mounttable.end_dead(path)
    freed = beneath.free(path)
    note(f"{path} is unmounted; no record of this mount was found{', and it can be written again' if freed else ''}")
    return True
