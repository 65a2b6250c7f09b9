"""Does spec.save on this machine, by a process that runs `datastore model save` with the job's file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from datastore.api.trainingjob import TrainingJob
from datastore.errors import DatastoreError
from datastore.training.local.records import JobDirectory
from datastore.training.results import command_of_result, place_of_result

_STOP_TIMEOUT_S = 30.0


def save(job: TrainingJob, directory: JobDirectory, run: str, stopped: Callable[[], bool]) -> str:
    """Save the result of a job; return MODEL:VERSION. run: saves with the same `run` make one version. stopped: called
    repeatedly until the save has ended; it waits a moment and returns whether to stop the save. Errors: DatastoreError
    with the command's own reason, or when the save was stopped."""
    assert job.spec.save is not None
    datastore, path = place_of_result(job)
    arguments = [job.spec.save.model, "--from", f"{datastore}/{path}", "--file", str(directory.manifest_file)]
    arguments += ["--training-job", job.name, "--training-job-uid", run, "--save-id", run]
    arguments += [f"--training-command={word}" for word in command_of_result(job)]
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "datastore.cli", "model", "save", *arguments, "--progress", "none", "-o", "json"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # If the launcher is killed, the next command finds this process by the variable, and ends it.
            env={**os.environ, "DATASTORE_RUN": run},
        )
        while process.poll() is None:
            if stopped():
                _end(process)
                raise DatastoreError("it was stopped while it was saved")
        if process.returncode != 0:
            raise DatastoreError(_last_words(errors))
        output.seek(0)
        made = json.load(output)
    return f"{made['model']}:{made['version']}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "the save ended without a reason"
