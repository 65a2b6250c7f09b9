"""`datastore warm DIR|NAME [PATH]`: fill the cache ahead of time, with progress on standard error."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID

from datastore import controlclient
from datastore.cli.arguments import Target
from datastore.cli.console import note
from datastore.cli.inspection import SERVER_DIED, containing, find
from datastore.cli.progressbar import bar
from datastore.errors import DatastoreError, error_named
from datastore.mounting.records import MountRecord
from datastore.mounting.signals import Interrupted, watching
from datastore.units import format_size

SILENCE_TIMEOUT_S = 900.0
"""Longest time without progress. The server lists first, silently: 3 million objects are 3,000 pages of 0.3 s."""


def warm_command(
    target: Target,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Fetch only this file or directory of the mount.")] = "",
) -> None:
    """Fetch a mounted Datastore, or a part of it, into the cache."""
    record, inner = _locate(target, path)
    if record.in_kernel:
        raise DatastoreError(f"{record.mountpoint} is served by the kernel alone, there is nothing to fetch")
    if record.ended:
        raise DatastoreError(f"{record.mountpoint}: is not mounted; mount it there again, then its cache can be filled")
    if not record.pids:
        raise controlclient.NotAnswering(f"{record.mountpoint}: {SERVER_DIED}")
    started = time.monotonic()
    last = _follow(record, inner)
    files, size = _number(last, "done_files"), format_size(_number(last, "done_bytes"))
    note(f"{files:,} files, {size} are in the cache ({time.monotonic() - started:.1f} s)")


def _locate(target: str, path: str) -> tuple[MountRecord, str]:
    try:
        record, below = find(target), ""
    except DatastoreError:
        # The target may also be a directory inside a mount.
        if (found := containing(target)) is None:
            raise
        record, below = found
    if os.path.isabs(path):
        path = os.path.relpath(path, record.mountpoint)
    inner = os.path.normpath(os.path.join(below, path)) if below or path else ""
    if inner == os.pardir or inner.startswith(os.pardir + os.sep):
        raise DatastoreError(f"{path} is not inside {record.mountpoint}")
    return record, "" if inner == os.curdir else inner


def _follow(record: MountRecord, path: str) -> dict[str, Any]:
    """Have the server fetch, show its progress, return the last counts. Errors: those that it reports; Interrupted."""
    last: dict[str, Any] = {}
    with watching() as watch, controlclient.connected(record.state_dir) as connection, bar() as progress:
        task = progress.add_task("", files="", size="", total=None)
        connection.send({"op": "warm", "path": path})
        while (answer := connection.receive(SILENCE_TIMEOUT_S, watch)) is not None:
            if "ok" in answer:
                _check(answer)
                return {**last, **answer}
            last = answer["progress"] if isinstance(answer.get("progress"), dict) else answer
            _show(progress, task, last)
        raise Interrupted(watch.take() or 2)


def _check(answer: dict[str, Any]) -> None:
    if answer["ok"] is True:
        return
    told = answer.get("errors")
    reasons = [str(each) for each in told] if isinstance(told, list) else [str(answer.get("error", "no reason given"))]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    raise error_named(
        str(answer.get("kind", "")), f"not everything is in the cache: {reasons[0] if reasons else ''}{more}"
    )


def _show(progress: Progress, task: TaskID, answer: dict[str, Any]) -> None:
    total = answer.get("bytes")
    files = f"{_number(answer, 'done_files'):,}"
    if isinstance(answer.get("files"), int):
        files += f"/{answer['files']:,}"
    done = _number(answer, "done_bytes")
    progress.update(
        task,
        completed=done,
        total=total if isinstance(total, int) else None,
        files=f"{files} files",
        size=format_size(done) + (f"/{format_size(total)}" if isinstance(total, int) else ""),
    )


def _number(answer: dict[str, Any], field: str) -> int:
    value = answer.get(field)
    return value if isinstance(value, int) else 0
