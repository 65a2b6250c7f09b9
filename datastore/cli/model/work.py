"""Run long work in a thread of its own, with a bar or lines of JSON on standard error; Ctrl-C ends the work."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

import typer
from rich.progress import TaskID, TextColumn

from datastore.cli.console import note
from datastore.cli.progressbar import bar
from datastore.models.errors import VersionDamaged
from datastore.models.manifest import VersionManifest
from datastore.models.progress import Event, Progress, Stopped
from datastore.models.registry import Models
from datastore.models.verifying import first_of, verify
from datastore.mounting.signals import Interrupted, watching
from datastore.units import format_size

T = TypeVar("T")

_POLL_S = 0.1


class Shown(StrEnum):
    """How progress is shown."""

    AUTO = "auto"
    JSON = "json"
    NONE = "none"


ProgressOption = Annotated[
    Shown,
    typer.Option(
        "--progress",
        help="How progress is shown on standard error. auto: a progress bar on a terminal; json: a line of JSON "
        "for each event; none: not at all.",
    ),
]


def run(job: Callable[[Progress], T], shown: Shown) -> T:
    """Run a job and return its result. Ctrl-C ends it and removes what it made; after another signal it can be resumed.

    A second signal raises Interrupted without waiting for the job. Errors: the job's; Interrupted.
    """
    with _display(shown) as display, watching() as watch:
        progress = Progress(display.tell)
        work = _Work(job, progress)
        work.thread.start()
        signum = None
        while work.thread.is_alive():
            work.thread.join(_POLL_S)
            if (came := watch.take()) is None:
                continue
            if signum is not None:
                raise Interrupted(came)
            signum = came
            progress.stop(resume=signum != signal.SIGINT)
            note("interrupted: ending; once more to leave at once")
    if signum is not None and isinstance(work.error, Stopped):
        raise Interrupted(signum) from work.error
    if work.error is not None:
        raise work.error
    return work.results[0]


def verified(models: Models, model: str, number: int, not_done: str, shown: Shown) -> VersionManifest:
    """Read every byte of a version. Errors: VersionDamaged, which says what is `not_done` with it."""
    manifest, damages = run(lambda told: verify(models, model, number, told), shown)
    if damages:
        raise VersionDamaged(f"{model}:{number} is not {not_done}: {first_of(damages)}")
    return manifest


class _Work(Generic[T]):
    def __init__(self, job: Callable[[Progress], T], progress: Progress) -> None:
        self.results: list[T] = []
        self.error: BaseException | None = None
        self._job = job
        self._progress = progress
        self.thread = threading.Thread(target=self._run, name="work", daemon=True)

    def _run(self) -> None:
        try:
            self.results.append(self._job(self._progress))
        except BaseException as error:  # run() raises it in the main thread
            self.error = error


class _display:  # noqa: N801  (used as a function)
    """A context manager that shows the events of the work."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._task = TaskID(0)
        self._bar = bar(TextColumn("{task.description}"), shown=shown is Shown.AUTO)

    def __enter__(self) -> _display:
        self._bar.start()
        self._task = self._bar.add_task("", files="", size="", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, event: Event) -> None:
        if self._shown is Shown.JSON:
            sys.stderr.write(json.dumps(event.to_json()) + "\n")
            sys.stderr.flush()
            return
        counted = event.files_total > 0
        self._bar.update(
            self._task,
            description=event.phase,
            completed=event.bytes + event.files,
            total=event.bytes_total + event.files_total if counted else None,
            files=f"{event.files:,}/{event.files_total:,} files" if counted else "",
            size=f"{format_size(event.bytes)}/{format_size(event.bytes_total)}" if counted else "",
        )
