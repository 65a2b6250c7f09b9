"""Starts the launcher of a job and waits until it is sure to run, or says why not."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from datastore import frames, ourprocess
from datastore.errors import DatastoreError, error_named
from datastore.training.local.launcher import Submitter
from datastore.training.local.records import JobDirectory

READY_TIMEOUT_S = 120.0
"""Each mount answers within seconds; a job has a few."""
STOP_TIMEOUT_S = 30.0
LAST_WORDS_TIMEOUT_S = 10.0


def start_launcher(directory: JobDirectory, submitter: Submitter) -> None:
    """Errors: what the launcher told, any DatastoreError; KeyboardInterrupt. Then it has undone what it did."""
    process, channel = ourprocess.start(
        "datastore.training.local", "--channel", [str(directory.path)], log_path=directory.launcher_log
    )
    try:
        with channel:
            hello = {
                "environment": submitter.environment,
                "directory": submitter.directory,
                "container": submitter.container,
            }
            frames.send(channel, hello)
            answer, _ = frames.receive(channel, READY_TIMEOUT_S)
    except BaseException as error:
        if isinstance(error, frames.PeerGone):
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_TIMEOUT_S)  # it is about to end, and to say why
        ourprocess.end(process, STOP_TIMEOUT_S)
        if isinstance(error, frames.PeerGone):
            said = ourprocess.last_words(directory.launcher_log.read_bytes()) or "it said nothing"
            raise DatastoreError(f"the launcher ended without an answer: {said}") from error
        raise
    if answer.get("ready") is not True:
        ourprocess.end(process, STOP_TIMEOUT_S)
        raise error_named(str(answer.get("kind", "")), str(answer.get("error", "the launcher gave no reason")))
    ourprocess.let_go(process)
