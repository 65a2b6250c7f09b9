"""What a launcher does for a TrainingJob: the one interface of the command and of notebooks to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from datastore.api.manifest import Manifest
from datastore.api.trainingjob import RoleName, TrainingJob, TrainingJobStatus
from datastore.errors import DatastoreError
from datastore.training.conditions import SAVING
from datastore.training.evidence import Evidence


class NoSuchJob(DatastoreError):
    """No TrainingJob has this name."""


class JobExists(DatastoreError):
    """Another TrainingJob has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job, its training cluster and what became of it. where: 'local' or the name of a cluster's context."""

    job: TrainingJob
    status: TrainingJobStatus
    evidence: Evidence
    where: str

    @property
    def finished(self) -> bool:
        """Whether nothing will change by itself any more."""
        if self.status.phase == "Succeeded" and self.job.spec.save is not None:
            return any(each.type == "Saved" and each.reason != SAVING for each in self.status.conditions or [])
        return self.status.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of one replica, without its end."""

    role: RoleName
    index: int
    text: str


class Driver(Protocol):
    """Runs training clusters. Errors of all methods: NoSuchJob and any other DatastoreError.

    Every call is idempotent but create.
    """

    def create(self, job: TrainingJob, manifest: Manifest) -> Observed:
        """Make the job and let it run, unless it is suspended. Errors: JobExists; then, and at any, nothing is left."""
        ...

    def observe(self, name: str, namespace: str) -> Observed:
        """What it does now, or did."""
        ...

    def observe_all(self, namespace: str | None = None) -> Sequence[Observed]:
        """All jobs, of one namespace or of all, by name."""
        ...

    def suspend(self, name: str, namespace: str, *, suspended: bool) -> None:
        """Stop it and give everything back, or let it go on. Errors: DatastoreError when it has finished."""
        ...

    def free(self, name: str, namespace: str) -> float:
        """End all its processes at once; the job, its logs and its numbers stay. Returns the seconds that took."""
        ...

    def logs(
        self, name: str, namespace: str, role: RoleName | None = None, index: int | None = None, *, follow: bool = False
    ) -> Iterator[LogLine]:
        """What its replicas wrote, each from the beginning of what is left; follow: until the job has finished."""
        ...

    def metrics(self, name: str, namespace: str) -> Sequence[dict[str, Any]]:
        """What each running replica uses now: role, index, cpu, memory, received, sent, gpu, gpuMemory; or why."""
        ...

    def delete(self, name: str, namespace: str) -> None:
        """End it and forget it; what is in its Datastores stays."""
        ...
