"""`datastore umount DIR|NAME`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli import lifecycle, mounttable
from datastore.cli.arguments import Target
from datastore.cli.console import note
from datastore.cli.directory import real_path
from datastore.cli.inspection import find
from datastore.cli.records import all_records
from datastore.cli.signals import watching
from datastore.mountinfo import FSTYPE
from datastore.units import parse_duration


def umount_command(
    target: Target,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Unmount at once; what can't be uploaded is kept on disk.")
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="Longest wait for uploads, e.g. 30s, 1h.")] = "10m",
) -> None:
    """Upload what is left and unmount. Exit code 6: changes remain; they are kept and uploaded at the next mount."""
    try:
        timeout_s = parse_duration(timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--timeout") from error
    if force and _detached_orphan(target):
        return
    record = find(target)
    with watching() as watch:
        lifecycle.unmount(record, watch, force=force, timeout_s=timeout_s)
    note(f"{record.name} is unmounted from {record.mountpoint}")


def _detached_orphan(target: str) -> bool:
    """A mount of ours that nobody keeps a record of any more."""
    path = real_path(target)
    at = mounttable.mounted_at(path)
    if at is None or at.fstype != FSTYPE or any(each.mountpoint == path for each in all_records()):
        return False
    mounttable.detach(path)
    note(f"{path} is unmounted; no record of this mount was found")
    return True
