"""What the controller of TrainingJobs watches, and which TrainingJob each event concerns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datastore.api.objects import is_owned
from datastore.api.resources import DATASTORES, JOBS, PODS, TRAININGJOBS, VERSIONS
from datastore.api.trainingjob import ROLES
from datastore.controller.runtime.informers import InformerStore, key_of
from datastore.controller.runtime.queue import Key
from datastore.controller.runtime.watches import Watch
from datastore.training.cluster import names

Raw = Mapping[str, Any]


class Informers:
    """The informer stores. wake: has a TrainingJob reconciled; saves_models: whether to watch ModelVersions."""

    def __init__(self, wake: Callable[[Key], None], *, saves_models: bool) -> None:
        self.trainingjobs = InformerStore()
        self.datastores = InformerStore()
        self.jobs = InformerStore()
        self.pods = InformerStore()
        self.versions = InformerStore()
        self.stores = {
            "TrainingJob": self.trainingjobs,
            "Job": self.jobs,
            "Pod": self.pods,
            "ModelVersion": self.versions,
        }
        self._saves_models = saves_models
        self._pods_of: dict[Key, set[Key]] = {}
        """The pods of each TrainingJob, so that no search among all pods, perhaps thousands, is needed."""
        self._wake = wake

    def watches(self) -> Sequence[Watch]:
        """Return the watches; of Jobs, pods and ModelVersions only those made for TrainingJobs are watched."""
        versions = Watch(resource=VERSIONS, tell=self._version, labels=names.JOB)
        return (
            *([versions] if self._saves_models else []),
            Watch(resource=TRAININGJOBS, tell=self._trainingjob),
            Watch(resource=DATASTORES, tell=self._datastore),
            Watch(resource=JOBS, tell=self._job, labels=names.JOB),
            Watch(resource=PODS, tell=self._pod, labels=names.JOB),
        )

    def pods_of(self, key: Key) -> list[dict[str, Any]]:
        return [pod for each in self._pods_of.get(key, ()) if (pod := self.pods.get(each)) is not None]

    def jobs_of(self, key: Key) -> dict[str, dict[str, Any]]:
        """Return the Jobs that a TrainingJob owns, by role."""
        body = self.trainingjobs.get(key)
        found = (self.jobs.get((key[0], names.job_name(key[1], role))) for role in ROLES)
        return {
            job["metadata"]["labels"][names.ROLE]: job
            for job in found
            if job is not None and body is not None and is_owned(job, body["metadata"]["uid"])
        }

    def board_of(self, key: Key) -> dict[str, Any] | None:
        """Return the Job of a TrainingJob's TensorBoard; None when there is none of ours."""
        body, job = self.trainingjobs.get(key), self.jobs.get((key[0], names.board_name(key[1])))
        ours = body is not None and job is not None and is_owned(job, body["metadata"]["uid"])
        return job if ours else None

    def runs_of(self, key: Key) -> list[dict[str, Any]]:
        """Return the TrainingJobs that the schedule of this TrainingJob made."""
        return [
            each
            for each in self.trainingjobs.values()
            if each["metadata"].get("namespace") == key[0]
            and (each["metadata"].get("labels") or {}).get(names.SCHEDULE) == key[1]
        ]

    def _trainingjob(self, event: Raw) -> None:
        self._wake(self.trainingjobs.take(event))

    def _datastore(self, event: Raw) -> None:
        """Wake the TrainingJobs that use a Datastore."""
        namespace, name = self.datastores.take(event)
        for each in self.trainingjobs.values():
            used = each["spec"].get("datastores") or []
            if each["metadata"].get("namespace") == namespace and any(one.get("name") == name for one in used):
                self._wake(key_of(each))

    def _job(self, event: Raw) -> None:
        self.jobs.take(event)
        self._wake(_owner(event["object"]))

    def _version(self, event: Raw) -> None:
        self.versions.take(event)
        self._wake(_owner(event["object"]))

    def _pod(self, event: Raw) -> None:
        key, owner = self.pods.take(event), _owner(event["object"])
        known = self._pods_of.setdefault(owner, set())
        if self.pods.get(key) is None:
            known.discard(key)
            if not known:
                del self._pods_of[owner]
        else:
            known.add(key)
        self._wake(owner)


def _owner(body: Raw) -> Key:
    return (body["metadata"].get("namespace", ""), body["metadata"]["labels"][names.JOB])
