"""`datastore unsent DIR|NAME`: list, send, save elsewhere, or discard what a mount could not upload (S-47)."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from datastore import controlclient
from datastore.cli.arguments import Output, Target
from datastore.cli.console import Format, note, print_columns, print_json
from datastore.cli.inspection import find
from datastore.errors import DatastoreError
from datastore.mounting import unmounting, unsent
from datastore.mounting.errors import Unsynced
from datastore.mounting.records import MountRecord
from datastore.mounting.signals import Interrupted, watching
from datastore.mounting.silence import storage_words
from datastore.units import format_size

DISCARD_TIMEOUT_S = 60.0
RETRY_TIMEOUT_S = 3600.0
"""The time that a mount server itself allows for uploading everything (its FLUSH_TIMEOUT_S)."""


def unsent_command(
    target: Target,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Copy the listed files below this directory; they stay listed."),
    ] = None,
    discard: Annotated[
        str | None,
        typer.Option("--discard", metavar="PATH", help="Drop the changes of one file for good; PATH as it is listed."),
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Upload all changes of the mount now, and wait for that.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """List the files that are not uploaded, and why.

    A file that another client changed first is not uploaded any more.
    It is kept until you save it elsewhere or discard it.
    """
    if (save is not None) + (discard is not None) + retry > 1:
        raise typer.BadParameter("use one of --save, --discard and --retry", param_hint="--save")
    record = find(target)
    if retry:
        _retry(record)
    elif save is not None:
        _save(record, save)
    elif discard is not None:
        _discard(record, discard)
    else:
        _list(record, output)


def _list(record: MountRecord, output: Format) -> None:
    files = unsent.unsent_files(record.state_dir)
    if output is Format.JSON:
        print_json(files)
        return
    if not files:
        _note_none(record)
        return
    rows = [[each["path"], format_size(each["bytes"]), _state(each)] for each in files]
    print_columns(["PATH", "SIZE", "STATE"], rows)


def _state(each: dict[str, Any]) -> str:
    if each["stuck"]:
        return f"kept: {each['error']}"
    return f"tried again: {each['error']}" if each["error"] else "waiting"


def _retry(record: MountRecord) -> None:
    """Have the server upload all files. Errors: Unsynced with what is left; Interrupted, but the server continues."""
    if record.in_kernel:  # no server of ours keeps changes of it
        note(f"everything of {record.name} is uploaded")
        return
    if not record.pids:
        raise DatastoreError(f"{record.mountpoint}: is not mounted; mounting it there again uploads what is left")
    with watching() as watch, controlclient.connected(record.state_dir) as connection:
        connection.send({"op": "flush"})
        answer = connection.receive(RETRY_TIMEOUT_S, watch)
        if answer is None:
            raise Interrupted(watch.take() or signal.SIGINT)
    if answer.get("ok") is not True:
        raise Unsynced(f"{record.mountpoint}: {'; '.join(map(str, answer.get('errors', [])))}")
    note(f"everything of {record.name} is uploaded")


def _save(record: MountRecord, directory: Path) -> None:
    """Copy each file below the directory; of several of one path the newest gets the name. Errors: DatastoreError
    naming the first file that can't be copied or exists already. A copy that breaks off is removed, so that each file
    there is whole."""
    files = unsent.unsent_files(record.state_dir, every=True)
    newest = {each["path"]: each for each in files}  # the oldest come first
    for each in files:
        target = directory / each["path"].lstrip("/")
        if ".." in Path(each["path"]).parts:
            target = directory / each["staging"]
        if each is not newest[each["path"]]:
            target = target.with_name(f"{target.name}.{each['staging']}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(each["file"], "rb") as source, target.open("xb") as copy:
                try:
                    shutil.copyfileobj(source, copy, 1 << 20)
                    copy.flush()
                except BaseException:
                    target.unlink(missing_ok=True)
                    raise
        except FileExistsError as error:
            raise DatastoreError(f"{target} exists already; name another directory") from error
        except OSError as error:
            raise DatastoreError(
                f"{each['path']} can't be copied to {target}: {error.strerror}; repeat it with another directory"
            ) from error
        note(f"{each['path']} is saved as {target}{_gaps(each['missing'])}")
    if not files:
        _note_none(record)


def _note_none(record: MountRecord) -> None:
    """Say why nothing is listed: everything is uploaded, or the mount's server has it only in memory."""
    if kept := unmounting.in_memory(record):
        note(
            f"nothing of {record.name} is kept on disk; what programs wrote and the server has not stored, the mount's"
            f" process has in memory: {kept}"
        )
    else:
        note(f"everything of {record.name} is uploaded")


def _gaps(missing: int) -> str:
    return f" ({format_size(missing)} of it were never changed or fetched and are zeros)" if missing else ""


def _discard(record: MountRecord, path: str) -> None:
    try:
        with controlclient.connected(record.state_dir) as connection:
            connection.send({"op": "discard", "path": path})
            answer = connection.receive(DISCARD_TIMEOUT_S) or {}
        if answer.get("late") is True:
            raise _undecided(record, path)
        if answer.get("ok") is not True:
            raise DatastoreError("; ".join(map(str, answer.get("errors", []))) or f"{path} could not be discarded")
        count = int(answer.get("discarded", 0))
    except controlclient.NotAnswering:
        if record.pids:
            raise
        count = unsent.discard(record.state_dir, path)
    if not count:
        raise DatastoreError(f"{path}: no upload of this path has failed; see datastore unsent {record.name}")
    note(f"{path} is discarded")


def _undecided(record: MountRecord, path: str) -> DatastoreError:
    """Return the error of a discard that was not done in time: the server does not drop a file that is being sent."""
    try:
        silent = storage_words(controlclient.status(record.state_dir))
    except controlclient.NotAnswering:
        silent = ""
    return DatastoreError(
        f"{path}: is not discarded yet, as an upload or a rename of it is under way{f' ({silent})' if silent else ''}; "
        f"if that fails, the file is discarded then unless it is open; if it succeeds, it is in the storage, where you "
        f"can remove it; `datastore unsent {record.mountpoint}` lists it until then"
    )
