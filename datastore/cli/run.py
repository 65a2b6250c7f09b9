"""`datastore run -f FILE --mount NAME=DIR ... -- COMMAND`: mount, run, upload, unmount; one exit code for all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer

from datastore import ourprocess
from datastore.api.datastore import Datastore
from datastore.api.manifest import load
from datastore.cli.console import fail, note
from datastore.cli.exitcodes import ExitCode
from datastore.cli.mount import end_mount, say_credentials
from datastore.cli.mountarguments import (
    DEFAULT_TRANSPORT,
    AllowOther,
    Gid,
    ReadOnly,
    Transport,
    Uid,
    Umask,
    complete_datastores,
    mount_options,
)
from datastore.controlclient import PROGRAM_FILE
from datastore.errors import DatastoreError
from datastore.mounting import lifecycle, mounttable, unmounting, unsent
from datastore.mounting.directory import real_path
from datastore.mounting.records import MountRecord
from datastore.mounting.signals import SignalWatch, watching

_WAIT_S = 60.0


def run_command(
    file: Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="YAML file with the Datastores.")],
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Command to run, with its arguments, after --.")
    ],
    mount: Annotated[
        list[str] | None,
        typer.Option(
            "--mount",
            "-m",
            metavar="NAME=DIR",
            help="Mount the Datastore NAME at DIR; can be repeated.",
            autocompletion=complete_datastores,
        ),
    ] = None,
    read_only: ReadOnly = False,
    transport: Transport = DEFAULT_TRANSPORT,
    allow_other: AllowOther = False,
    uid: Uid = "",
    gid: Gid = "",
    umask: Umask = "",
) -> None:
    """Mount Datastores, run a command, upload what it wrote, and unmount. The exit code is the command's.

    It is 128 + N if signal N ended the command.
    If the command succeeds, it is 75 if changes can't be uploaded, else 76 if programs still use a directory.
    """
    manifest = load(file)
    if not mount:
        there = ", ".join(each.name for each in manifest.datastores)
        raise typer.BadParameter(
            f"say what to mount: --mount NAME=DIR, once for each Datastore; {file} has {there}", param_hint="--mount"
        )
    wanted = [_parse_mount(each) for each in mount]
    chosen: list[tuple[Datastore, str]] = [(manifest.pick(name), real_path(place)) for name, place in wanted]
    for at, (datastore, mountpoint) in enumerate(chosen):
        if mountpoint in [other for _, other in chosen[:at]]:
            raise typer.BadParameter(
                f"{datastore.name} can't be mounted at {mountpoint}, where another --mount of this command is; "
                "give each a directory of its own",
                param_hint="--mount",
            )
    options = mount_options(read_only, allow_other, transport, uid=uid, gid=gid, umask=umask)
    records: list[MountRecord] = []
    with watching() as watch:
        try:
            for datastore, mountpoint in chosen:
                say_credentials(manifest, datastore)
                record = lifecycle.mount(manifest, datastore, mountpoint, options, watch, ends_with_us=True)
                records.append(record)
            watch.check()
            code = run_to_the_end(command, watch, records=records)
        except BaseException:
            unmount_all(records, watch)
            raise
        ended = unmount_all(records, watch)
    raise typer.Exit(code or ended)


def _parse_mount(text: str) -> tuple[str, str]:
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise typer.BadParameter(f"{text!r} is not NAME=DIR", param_hint="--mount")
    return name, place


def run_to_the_end(
    command: list[str],
    watch: SignalWatch,
    variables: Mapping[str, str] | None = None,
    begun: str = "",
    records: Sequence[MountRecord] = (),
) -> int:
    """Run a command and pass signals on; return its exit code, 128 + N after signal N. The command gets SIGTERM if this
    process is killed. variables: extra environment. begun: what the user is told once the command has started. records:
    mounts that end with us, and stay for the command's end if this process is killed."""
    environment = {**os.environ, **(variables or {})}
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=ourprocess.end_with_parent)
    except FileNotFoundError as error:
        # The error names the command, even if what is missing is the interpreter of a script.
        fail(f"{error.filename or command[0]}: no such command")
        return ExitCode.COMMAND_NOT_FOUND
    except OSError as error:
        fail(f"{command[0]}: can't be executed: {error.strerror}")
        return ExitCode.NOT_EXECUTABLE
    for record in records:
        with suppress(OSError):  # a full disk
            (record.state_dir / PROGRAM_FILE).write_text(str(process.pid))
    if begun:
        note(begun)
    while (code := process.poll()) is None:
        if (signum := watch.take()) is not None:
            if not (signum == signal.SIGINT and _terminal_sends_sigint()):
                process.send_signal(signum)
        else:
            watch.wait([], _WAIT_S)
    return 128 - code if code < 0 else code


def _terminal_sends_sigint() -> bool:
    """Return whether Ctrl-C reaches the command without us; a second SIGINT could make it stop without cleanup."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def unmount_all(records: list[MountRecord], watch: SignalWatch) -> ExitCode:
    """Upload the changes of all mounts and unmount them, the last one first; report what fails.

    Return RUN_UNSYNCED when an upload or unmount failed, else DETACHED when a directory is still used, else OK.
    """
    # Signals that came before are not meant for the unmount; later ones are.
    while watch.take() is not None:
        pass
    ended = ExitCode.OK
    for record in reversed(records):
        try:
            if end_mount(record, watch) is ExitCode.DETACHED and ended is ExitCode.OK:
                ended = ExitCode.DETACHED
        except DatastoreError as error:
            fail(str(error))
            ended = ExitCode.RUN_UNSYNCED
            _force(record)
    return ended


def _force(record: MountRecord) -> None:
    """Unmount by force after a failure, so that no mount is left; unsent data is kept on disk, or reported as lost."""
    if not (record.pids or mounttable.mounted_at(record.mountpoint)):
        return
    try:
        unmounting.unmount(record, force=True, detach=True, say=note)
    except DatastoreError as error:
        if mounttable.mounted_at(record.mountpoint) or not unsent.remaining(record.state_dir):
            fail(str(error))
