"""datastore.controller.trainingjobs.reconciler: what it says of a TrainingJob that it does not run, or can't save."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from datastore.api.resources import Resource
from datastore.api.trainingjob import TrainingJob, TrainingJobStatus
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.trainingjobs.informers import Informers
from datastore.controller.trainingjobs.reconciler import REFUSED_S, Reconciler
from datastore.controller.trainingjobs.settings import Settings
from datastore.training.cluster.names import ATTEMPT, ROLE
from datastore.training.cluster.names import JOB as JOB_LABEL
from datastore.training.driver import Observed
from datastore.training.evidence import Evidence
from tests.promises import promise
from tests.unit.controller.playedclient import PlayedClient

KEY = ("team", "mnist")
ENDED = "2026-03-01T12:00:00Z"


class Kept(Recorder):
    """events: what was recorded."""

    def __init__(self, client: Client, instance: str) -> None:
        super().__init__(client, instance)
        self.events: list[Event] = []

    async def record(self, about: Any, event: Event) -> None:
        self.events.append(event)


JOB: dict[str, Any] = {
    "apiVersion": "datastore.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "mnist", "namespace": "team", "uid": "u-1", "generation": 1},
    "spec": {
        "framework": "none",
        "image": "registry/train:1",
        "command": ["train"],
        "datastores": [{"name": "out", "path": "/out"}],
        "save": {"model": "digits", "from": "/out/export"},
    },
}


def quota(used: int) -> ApiError:
    return ApiError(403, "Forbidden", f"exceeded quota: used {used} of {used}")


def status_of(*, saves_models: bool) -> dict[str, Any]:
    settings, client = Settings(identity="c", saves_models=saves_models), PlayedClient(JOB)
    informers = Informers(lambda _: None, saves_models=saves_models)
    informers.trainingjobs.put(JOB)
    asyncio.run(Reconciler(client, Kept(client, "c"), informers, settings).reconcile(KEY))
    status: dict[str, Any] = (informers.trainingjobs.get(KEY) or {})["status"]
    return status


@promise("S-355")
def test_a_job_has_not_finished_while_its_save_is_tried_again() -> None:
    done = {"type": "Succeeded", "status": "True", "reason": "Succeeded", "message": "", "lastTransitionTime": ENDED}
    body = {**JOB, "status": {"phase": "Succeeded", "completionTime": ENDED, "conditions": [done]}}
    client = PlayedClient(JOB, quota(5))
    informers = Informers(lambda _: None, saves_models=True)
    informers.trainingjobs.put(body)
    reconciler = Reconciler(client, Kept(client, "c"), informers, Settings(identity="c", saves_models=True))
    assert asyncio.run(reconciler.reconcile(KEY)) == REFUSED_S
    status = TrainingJobStatus.model_validate((informers.trainingjobs.get(KEY) or {})["status"])
    saved = next(each for each in status.conditions or [] if each.type == "Saved")
    assert (saved.status, "exceeded quota" in saved.message) == ("False", True)
    seen = Observed(job=TrainingJob.model_validate(JOB), status=status, evidence=Evidence(replicas=[]), where="cluster")
    assert not seen.finished


@promise("S-355")
def test_a_save_is_refused_clearly_where_no_models_are_kept() -> None:
    found = status_of(saves_models=False)
    assert found["phase"] == "Failed"
    assert "spec.save: this cluster saves no Models (the component models is not installed)" in found["message"]
    assert status_of(saves_models=True)["message"] == "waits: Datastore out is not there"


@promise("S-355")
def test_a_save_that_the_cluster_refuses_for_now_is_told_once_and_tried_again() -> None:
    early, client = "2026-01-01T00:00:00Z", PlayedClient(JOB, quota(5))
    informers, recorder = Informers(lambda _: None, saves_models=True), Kept(client, "c")
    reconciler = Reconciler(client, recorder, informers, Settings(identity="c", saves_models=True))

    def saved() -> dict[str, Any]:
        """Return condition Saved after one more try."""
        assert asyncio.run(reconciler.reconcile(KEY)) == 10.0
        conditions = (informers.trainingjobs.get(KEY) or {})["status"]["conditions"]
        return next(dict(each) for each in conditions if each["type"] == "Saved")

    verdict = {"type": "Succeeded", "status": "True", "reason": "Succeeded", "lastTransitionTime": early}
    informers.trainingjobs.put({**JOB, "status": {"phase": "Succeeded", "conditions": [verdict]}})
    first = saved()
    assert (first["status"], first["reason"]) == ("False", "Saving")
    assert "exceeded quota: used 5 of 5" in first["message"]
    first["lastTransitionTime"] = early
    status = (informers.trainingjobs.get(KEY) or {})["status"]
    informers.trainingjobs.put({**JOB, "status": {**status, "conditions": [verdict, first]}})
    assert saved() == first
    assert len(recorder.events) == 1
    client.refusal = quota(6)
    assert saved()["lastTransitionTime"] == early, "it is False as before"
    assert "used 6 of 6" in recorder.events[1].message


class Ending(PlayedClient):
    """A cluster whose namespace is being deleted, if `ends`."""

    ends = True

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return {"metadata": {"name": name, **({"deletionTimestamp": ENDED} if self.ends else {})}}


@promise("S-441")
@pytest.mark.parametrize("ends", [True, False])
def test_the_jobs_go_with_their_namespace_once_its_pods_are_deleted(ends: bool) -> None:
    """Kubernetes would keep a failed pod until its Job has made the next one, which such a namespace does not take."""
    client = Ending(JOB)
    client.ends = ends
    informers = Informers(lambda _: None, saves_models=True)
    informers.trainingjobs.put(JOB)
    tell = {each.resource.plural: each.tell for each in informers.watches()}
    owners = [{"kind": "TrainingJob", "name": "mnist", "uid": "u-1"}]
    metadata = {"namespace": "team", "labels": {JOB_LABEL: "mnist", ROLE: "master", ATTEMPT: "0"}}
    role = {**metadata, "name": "mnist-master", "uid": "j", "ownerReferences": owners}
    tell["jobs"]({"type": "ADDED", "object": {"metadata": role, "spec": {}, "kind": "Job"}})
    pod = {"metadata": {**metadata, "name": "mnist-master-0", "uid": "p", "deletionTimestamp": ENDED}}
    tell["pods"]({"type": "ADDED", "object": {**pod, "spec": {}, "status": {"phase": "Running"}}})
    asyncio.run(
        Reconciler(client, Kept(client, "c"), informers, Settings(identity="c", saves_models=True)).reconcile(KEY)
    )
    assert client.deleted == ([("jobs", "mnist-master")] if ends else [])
