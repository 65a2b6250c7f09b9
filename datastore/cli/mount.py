"""`datastore mount FILE [NAME] [DIR]`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest, load
from datastore.api.resolve import uses_own_credentials
from datastore.cli.console import note
from datastore.cli.exitcodes import ExitCode
from datastore.cli.mountarguments import (
    DEFAULT_MEMORY,
    DEFAULT_TRANSPORT,
    AllowOther,
    Gid,
    Memory,
    Metrics,
    ReadOnly,
    Transport,
    Uid,
    Umask,
    complete_datastores,
    mount_options,
)
from datastore.controlclient import MOUNT_FILE
from datastore.errors import InvalidManifest, MountFailed
from datastore.mounting import lifecycle, unmounting
from datastore.mounting.directory import real_path, record_at
from datastore.mounting.errors import Unsynced
from datastore.mounting.records import MountRecord
from datastore.mounting.signals import Interrupted, SignalWatch, watching

_POLL_S = 1.0


def mount_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file with the Datastore; - means standard input.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the Datastore; needed if the file holds several.",
            autocompletion=complete_datastores,
        ),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="Directory to mount at; it is made if missing. Default: ./NAME."),
    ] = None,
    read_only: ReadOnly = False,
    foreground: Annotated[
        bool,
        typer.Option("--foreground", help="Stay in the foreground until Ctrl-C, then upload what is left and unmount."),
    ] = False,
    transport: Transport = DEFAULT_TRANSPORT,
    allow_other: AllowOther = False,
    metrics: Metrics = "",
    memory: Memory = DEFAULT_MEMORY,
    uid: Uid = "",
    gid: Gid = "",
    umask: Umask = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="First unmount what is mounted at DIR, as umount does.")
    ] = False,
) -> None:
    """Mount a Datastore as a directory. Changes that an earlier mount there could not upload are uploaded now.

    Example: `datastore mount datastore.yaml photos ~/photos`
    """
    manifest = load(file)
    datastore, place = choose(manifest, name, directory)
    options = mount_options(read_only, allow_other, transport, metrics, memory, uid, gid, umask)
    with watching() as watch:
        say_credentials(manifest, datastore)
        mountpoint = real_path(place)
        before = record_at(mountpoint) if replace else None
        if before is not None and not before.ended:
            unmounting.unmount(before, watch, say=note)
            watch.check()
        record = lifecycle.mount(manifest, datastore, mountpoint, options, watch)
        note(f"{datastore.name} ({record.location}) is mounted at {record.mountpoint}{_mode(record)}")
        if foreground:
            raise typer.Exit(_stay(record, watch))
        if (signum := watch.take()) is not None:
            _undo(record, watch, signum)


def choose(manifest: Manifest, name: str | None, directory: str | None) -> tuple[Datastore, str]:
    """Return the Datastore and its directory. A lone argument with a '/' is the directory: no name has a '/'."""
    if name is not None and directory is None and (os.sep in name or name in (".", "..")):
        name, directory = None, name
    try:
        datastore = manifest.pick(name)
    except InvalidManifest as error:
        if name is None or directory is not None:
            raise
        raise InvalidManifest(f"{error}; if this is the directory, write ./{name}") from None
    return datastore, directory or os.path.join(os.curdir, datastore.name)


def say_credentials(manifest: Manifest, datastore: Datastore) -> None:
    """Note that the user's own keys are used, if the Datastore names a Secret but the manifest holds none."""
    if uses_own_credentials(manifest, datastore):
        wanted, whose = datastore.spec.credentials_secret, "AWS credentials" if datastore.spec.s3 else "SSH keys"
        note(f"{manifest.source} holds no Secret {wanted}; your own {whose} are used for {datastore.name}")


def _mode(record: MountRecord) -> str:
    return ", read-only" if record.read_only else ""


def _undo(record: MountRecord, watch: SignalWatch, signum: int) -> None:
    unmounting.unmount(record, watch, force=True, say=note)
    raise Interrupted(signum)


def _stay(record: MountRecord, watch: SignalWatch) -> ExitCode:
    note("press Ctrl-C to unmount")
    while watch.take() is None:
        watch.wait([], _POLL_S)
        if not (record.state_dir / MOUNT_FILE).exists():
            note(f"{record.mountpoint} was unmounted")
            return ExitCode.OK
        if not record.in_kernel and not record.pids:
            raise MountFailed(
                f"{record.mountpoint}: the mount server has crashed; `datastore umount` removes the mount"
            )
    note("uploading what is left and unmounting; Ctrl-C again to stop waiting")
    try:
        return end_mount(record, watch)
    except Unsynced:
        # What could not be uploaded now is kept on disk; staying mounted would not upload it either.
        unmounting.unmount(record, force=True, detach=True, say=note)
        raise


def end_mount(record: MountRecord, watch: SignalWatch) -> ExitCode:
    """Upload what is left and unmount; return DETACHED, and note who uses the directory, when it is still in use."""
    users = unmounting.unmount(record, watch, detach=True, say=note)
    if not users:
        return ExitCode.OK
    note(f"{users}; it was detached, what they still write is uploaded, and the mount ends with them")
    return ExitCode.DETACHED
