"""`datastore mount FILE [NAME] [DIR]`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest, load
from datastore.api.resolve import uses_default_chain
from datastore.cli import lifecycle
from datastore.cli.arguments import (
    DEFAULT_MEMORY,
    DEFAULT_TRANSPORT,
    AllowOther,
    Memory,
    Metrics,
    ReadOnly,
    Transport,
    mount_options,
)
from datastore.cli.console import note
from datastore.cli.directory import real_path
from datastore.cli.exitcodes import Unsynced
from datastore.cli.records import MOUNT_FILE, MountRecord
from datastore.cli.signals import Interrupted, SignalWatch, watching
from datastore.errors import MountFailed

_POLL_S = 1.0


def mount_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file with the Datastore; - is standard input.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Which Datastore, if the file holds several.")
    ] = None,
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="Where; made if missing. Default: ./NAME.")
    ] = None,
    read_only: ReadOnly = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until Ctrl-C, then upload what is left and unmount.")
    ] = False,
    transport: Transport = DEFAULT_TRANSPORT,
    allow_other: AllowOther = False,
    metrics: Metrics = "",
    memory: Memory = DEFAULT_MEMORY,
) -> None:
    """Mount a Datastore as a directory. What was not uploaded by an earlier mount there is uploaded now."""
    manifest = load(file)
    datastore, place = choose(manifest, name, directory)
    options = mount_options(read_only, allow_other, transport, metrics, memory)
    with watching() as watch:
        say_credentials(manifest, datastore)
        record = lifecycle.mount(manifest, datastore, real_path(place), options, watch)
        note(f"{datastore.name} ({record.location}) is mounted at {record.mountpoint}{_mode(record)}")
        if foreground:
            _stay(record, watch)
        elif (signum := watch.take()) is not None:
            _undo(record, watch, signum)


def choose(manifest: Manifest, name: str | None, directory: str | None) -> tuple[Datastore, str]:
    """Which Datastore, and where. A lone argument with a '/' is the directory: no Datastore has one in its name."""
    if name is not None and directory is None and (os.sep in name or name in (".", "..")):
        name, directory = None, name
    datastore = manifest.pick(name)
    return datastore, directory or os.path.join(os.curdir, datastore.name)


def say_credentials(manifest: Manifest, datastore: Datastore) -> None:
    """The Secret is in the cluster only: say whose keys are used here."""
    if uses_default_chain(manifest, datastore) and datastore.spec.s3:
        wanted = datastore.spec.s3.credentials_secret
        note(f"{manifest.source} holds no Secret {wanted}; your own AWS credentials are used for {datastore.name}")


def _mode(record: MountRecord) -> str:
    return ", read-only" if record.read_only else ""


def _undo(record: MountRecord, watch: SignalWatch, signum: int) -> None:
    lifecycle.unmount(record, watch, force=True)
    raise Interrupted(signum)


def _stay(record: MountRecord, watch: SignalWatch) -> None:
    note("press Ctrl-C to unmount")
    while watch.take() is None:
        watch.wait([], _POLL_S)
        if not (record.state_dir / MOUNT_FILE).exists():
            note(f"{record.mountpoint} was unmounted")
            return
        if not record.bind and not record.pids:
            raise MountFailed(
                f"{record.mountpoint}: the mount server has crashed; `datastore umount` removes the mount"
            )
    note("uploading what is left and unmounting; Ctrl-C again to stop waiting")
    try:
        lifecycle.unmount(record, watch)
    except Unsynced:
        # What could not be uploaded now is kept on disk; staying mounted would not send it either.
        lifecycle.unmount(record, force=True)
        raise
