"""Does spec.schedule on this machine: a process that creates a job at each time of the schedule."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from datastore.errors import DatastoreError
from datastore.mounting.signals import SignalWatch
from datastore.training.local.records import JobDirectory, LocalState, Submitter, directory_of
from datastore.training.local.starting import removed_on_failure, start_launcher
from datastore.training.schedule import due, next_run, run_name, run_of

log = logging.getLogger(__name__)

TICK_S = 1.0


class Scheduler:
    """Runs the schedule of one job until it is suspended, deleted or ended."""

    def __init__(self, directory: JobDirectory, submitter: Submitter, watch: SignalWatch) -> None:
        self._directory = directory
        self._submitter = submitter
        self._watch = watch
        self._job = directory.load_job()
        self._seen = datetime.now(UTC)
        before = directory.read_state().status
        self._last_run = before.last_run
        self._say("")

    def run(self) -> None:
        """Run the schedule until a command or a signal stops it."""
        while True:
            stop = self._directory.read_wanted()
            if stop or self._watch.take() is not None:
                return
            now = datetime.now(UTC)
            if (time := due(self._job, self._seen, now)) is not None:
                self._seen = time
                self._start(time)
            self._watch.wait([], TICK_S)

    def _start(self, time: datetime) -> None:
        if self._last_run and directory_of(self._last_run, self._job.namespace).alive:
            self._say(f"{self._last_run} still ran at {time:%Y-%m-%d %H:%M} UTC, so that time was skipped")
            return
        run = run_of(self._job, time)
        made = directory_of(run.name, run.namespace)
        try:
            made.make(run, self._directory.load_manifest(), self._submitter)
            with removed_on_failure(made):
                start_launcher(made)
        except (DatastoreError, OSError) as error:
            log.warning("a run of the schedule could not start: %s", error)
            self._say(f"{run_name(self._job, time)} could not start: {error}")
            return
        self._last_run = run.name
        self._say("")

    def _say(self, message: str) -> None:
        status: dict[str, Any] = {
            "phase": "Scheduled",
            "message": message,
            "nextRun": next_run(self._job, self._seen),
            **({"lastRun": self._last_run} if self._last_run else {}),
        }
        state = LocalState.model_validate({"status": status, "evidence": {"replicas": []}})
        with suppress(OSError):  # for example while the disk is full: the next run reports it
            self._directory.write_state(state)
