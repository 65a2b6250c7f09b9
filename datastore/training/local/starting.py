"""Starts the launcher of a job and waits until the launcher is ready, or has failed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from datastore import frames, ourprocess
from datastore.errors import DatastoreError, error_named
from datastore.training.local.records import JobDirectory

READY_TIMEOUT_S = 120.0
"""The longest wait for the launcher, which mounts the job's Datastores first; each mount takes seconds."""
STOP_TIMEOUT_S = 30.0
LAST_WORDS_TIMEOUT_S = 10.0


@contextmanager
def removed_on_failure(directory: JobDirectory) -> Iterator[None]:
    """A context in which a job that was just made is begun. If that fails, the job's directory is deleted, unless a
    launcher that was killed left a mount below it: then the error tells that as well."""
    try:
        yield
    except BaseException as error:
        try:
            directory.remove()
        except DatastoreError as left:
            raise DatastoreError("; ".join(filter(None, (str(error), str(left))))) from error
        raise


def start_launcher(directory: JobDirectory) -> None:
    """Start the launcher, and return when it is ready. Errors: the DatastoreError that it reported, or
    KeyboardInterrupt; the launcher has then been ended, and has undone what it did."""
    process, channel = ourprocess.start(
        "datastore.training.local", "--channel", [str(directory.path)], log_path=directory.launcher_log
    )
    try:
        with channel:
            answer, _ = frames.receive(channel, READY_TIMEOUT_S)
    except BaseException as error:
        if isinstance(error, frames.PeerGone):
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_TIMEOUT_S)  # it is about to end, and to log why
        ourprocess.end(process, STOP_TIMEOUT_S)
        if isinstance(error, frames.PeerGone):
            said = ourprocess.last_words(directory.launcher_log.read_bytes()) or "it said nothing"
            raise DatastoreError(f"the launcher ended without an answer: {said}") from error
        raise
    if answer.get("ready") is not True:
        ourprocess.end(process, STOP_TIMEOUT_S)
        raise error_named(str(answer.get("kind", "")), str(answer.get("error", "the launcher gave no reason")))
    ourprocess.let_go(process)
