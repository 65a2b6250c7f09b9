"""`python -m datastore.training.local --channel FD DIRECTORY` is the process of the launcher of one job.

It says {"ready": true} or {"error": ..., "kind": ...} over the channel.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from datastore import frames, logs
from datastore.errors import DatastoreError
from datastore.mounting.signals import Interrupted, SignalWatch, watching
from datastore.training.local.launcher import Launcher
from datastore.training.local.records import JobDirectory
from datastore.training.local.scheduling import Scheduler

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 20.0
"""How long to wait for the lock. Commands hold it briefly to look for a launcher, or longer to clean up after it."""


def main(arguments: list[str]) -> int:
    """Run the launcher; return the exit code: 1 when it could not start or failed, 0 also when the job failed."""
    parser = argparse.ArgumentParser(prog="python -m datastore.training.local")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args(arguments)
    logs.setup()
    directory = JobDirectory(given.directory)
    with socket.socket(fileno=given.channel) as channel, watching() as watch:
        lock = directory.lock(LOCK_TIMEOUT_S)
        try:
            if lock is None:
                raise DatastoreError(f"TrainingJob {directory.name} has a launcher already")
            directory.write_failure("")
            return _launch(directory, watch, channel)
        except (DatastoreError, OSError) as error:
            if channel.fileno() < 0:  # this command has its answer already: the next command reports the failure
                log.exception("the launcher failed")
                with suppress(OSError):
                    directory.write_failure(str(error))
                return 1
            frames.send(channel, {"error": str(error), "kind": type(error).__name__})
            return 1
        except Interrupted:
            return 1
        finally:
            if lock is not None:
                os.close(lock)


def _launch(directory: JobDirectory, watch: SignalWatch, channel: socket.socket) -> int:
    submitter = directory.load_submitter()
    if directory.load_job().spec.schedule is not None:
        scheduler = Scheduler(directory, submitter, watch)
        frames.send(channel, {"ready": True})
        channel.close()
        scheduler.run()
        return 0
    launcher = Launcher(directory=directory, submitter=submitter, watch=watch)
    try:
        launcher.prepare()
        frames.send(channel, {"ready": True})
        channel.close()
        launcher.run()
    finally:
        launcher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
