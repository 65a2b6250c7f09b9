"""The interface by which the command and notebooks use every launcher of TrainingJobs, and what all launchers check."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from datastore.api.manifest import Manifest
from datastore.api.trainingjob import RoleName, TrainingJob, TrainingJobStatus
from datastore.errors import DatastoreError
from datastore.training import schedule
from datastore.training.conditions import SAVING
from datastore.training.evidence import Evidence
from datastore.training.results import place_of_result
from datastore.training.topology import Task, tasks_of
from datastore.training.variables import check_roles


class NoSuchJob(DatastoreError):
    """No TrainingJob has this name."""


class JobExists(DatastoreError):
    """Another TrainingJob has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"TrainingJob {name} exists already; `datastore job delete {name}` removes it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job, its status and the evidence of its replicas. where: 'local' or 'cluster'."""

    job: TrainingJob
    status: TrainingJobStatus
    evidence: Evidence
    where: str

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more, for good; its result may still be being saved."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def finished(self) -> bool:
        """Whether the job has ended and its result, if it is to be saved, is saved or could not be saved."""
        if self.status.phase == "Succeeded" and self.job.spec.save is not None:
            return any(each.type == "Saved" and each.reason != SAVING for each in self.status.conditions or [])
        return self.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of the log of one replica, without its newline."""

    role: RoleName
    index: int
    text: str


def newest(lines: Iterable[LogLine], tail: int | None) -> Iterator[LogLine]:
    """Yield the last `tail` lines of each replica, also if the rest can't be read; all of them if tail is None."""
    if tail is None:
        yield from lines
        return
    last: dict[tuple[RoleName, int], deque[LogLine]] = {}
    try:
        for line in lines:
            last.setdefault((line.role, line.index), deque(maxlen=tail)).append(line)
    finally:
        for each in last.values():
            yield from each


def check(job: TrainingJob) -> None:
    """Check what can be checked of a job by itself. Errors: InvalidManifest."""
    check_roles(job, tasks_of(job.spec))
    schedule.check(job)
    if job.spec.save is not None:
        place_of_result(job)


def check_goes_on(name: str, phase: str | None) -> None:
    """Errors: DatastoreError when the job has finished."""
    if phase in ("Succeeded", "Failed"):
        raise DatastoreError(f"TrainingJob {name} has finished ({phase}); submit it again under another name")


def chosen(job: TrainingJob, role: RoleName | None, index: int | None) -> list[Task]:
    """Return the tasks whose logs are wanted; None: any. Errors: DatastoreError when there is none."""
    found = [each for each in tasks_of(job.spec) if role in (None, each.role) and index in (None, each.index)]
    if not found:
        raise DatastoreError(f"TrainingJob {job.name} has no {role or 'replica'}{'' if index is None else f' {index}'}")
    return found


class Driver(Protocol):
    """Runs training jobs. Every call but create is idempotent. Errors of all: NoSuchJob and other DatastoreErrors."""

    def create(self, job: TrainingJob, manifest: Manifest) -> Observed:
        """Create the job and run it unless it is suspended. Errors: JobExists. After any error nothing is left."""
        ...

    def observe(self, name: str, namespace: str) -> Observed:
        """Return the present state of the job, or its last state if it has ended."""
        ...

    def observe_all(self, namespace: str | None = None) -> Sequence[Observed]:
        """Return all jobs of a namespace, or of all namespaces (None), by name."""
        ...

    def suspend(self, name: str, namespace: str, *, suspended: bool) -> None:
        """Stop the job and free its resources, or resume it. Errors: DatastoreError when it has finished."""
        ...

    def free(self, name: str, namespace: str) -> float:
        """End all processes of the job, keep its logs and figures, and return how many seconds that took."""
        ...

    def logs(
        self,
        name: str,
        namespace: str,
        role: RoleName | None = None,
        index: int | None = None,
        *,
        follow: bool = False,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """Yield the lines of the replicas' logs, from the oldest line kept; with tail, from that many before the end of
        each. follow: continue until the job has ended."""
        ...

    def metrics(self, name: str, namespace: str) -> Sequence[dict[str, Any]]:
        """Return what each running replica uses now: role and index, and those of cpu, memory, received, sent, gpu and
        gpuMemory that are known, or else `why`, the reason why nothing is known."""
        ...

    def delete(self, name: str, namespace: str) -> Sequence[str]:
        """End and remove the job; what is in its Datastores stays. Return a text for each Datastore to which not
        everything could be uploaded; what is left is kept on disk."""
        ...
