"""Starts the launcher of a job and waits until it is sure to run, or says why not."""

from __future__ import annotations

import signal
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
        _end(process)
        if isinstance(error, frames.PeerGone):
            raise DatastoreError(f"the launcher ended without an answer: {_last_words(directory)}") from error
        raise
    if answer.get("ready") is not True:
        _end(process)
        raise error_named(str(answer.get("kind", "")), str(answer.get("error", "the launcher gave no reason")))
    # Popen warns about a child that was not waited for; this one is meant to outlive us.
    process.returncode = process.poll() or 0


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _last_words(directory: JobDirectory) -> str:
    with suppress(OSError):
        lines = [line for line in directory.launcher_log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"
    return "it said nothing"
