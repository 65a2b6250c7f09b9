"""What a Model has its store told: aliases of its manifest, and versions that Servings name by number."""

from __future__ import annotations

import json
from typing import Any

from datastore.controller.models.decide import Plan
from datastore.controller.models.update import CONDITION, ObservedModel, decide_model
from datastore.controller.runtime.ownimage import Image
from tests.promises import promise
from tests.unit.controller.models.test_decide import NOW, datastore, volume

ANSWER = {"store": "s3://models/", "latest": 7, "versions": 7, "aliases": {"prod": 6}}
JOB = "digits-update-01234567"


def model(aliases: dict[str, int] | None = None, **status: Any) -> dict[str, Any]:
    listed = [{"name": name, "version": number} for name, number in (aliases or {}).items()]
    known = {"latestVersion": 7, "versions": 7, "aliases": [{"name": "prod", "version": 6}], **status}
    metadata = {"name": "digits", "namespace": "team", "uid": "0123456789", "generation": 3}
    api = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Model"}
    return {**api, "metadata": metadata, "spec": {"aliases": listed}, "status": known}


def serving(name: str, model: str = "digits", **which: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"}, "spec": {"model": model, **which}}


def looked_at(body: dict[str, Any], **more: Any) -> Plan:
    known: dict[str, Any] = {
        "store": datastore("models"),
        "store_volume": volume("models"),
        "image": Image("image", "Never"),
    }
    return decide_model(ObservedModel(model=body, now=NOW, **(known | more)))


def request(plan: Plan) -> dict[str, Any]:
    (job,) = plan.create
    found: dict[str, Any] = json.loads(job["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"])
    return found


def ended(job: Any, how: str) -> dict[str, Any]:
    return {**job, "status": {"conditions": [{"type": how, "status": "True"}]}}


def told(plan: Plan) -> tuple[str, str, str]:
    assert plan.status is not None
    (found,) = [each for each in plan.status["conditions"] if each["type"] == CONDITION]
    return found["status"], found["reason"], found["message"]


@promise("S-402")
def test_a_model_that_agrees_with_its_store_is_not_changed() -> None:
    assert looked_at(model()) == Plan()
    assert looked_at(model({"prod": 6})) == Plan()


@promise("S-402")
def test_a_differing_alias_is_moved_by_a_job_and_reported() -> None:
    """One Job at a time, with the store's Secret alone; what the store says then stands in the status."""
    body = model({"prod": 5, "canary": 7}, conditions=[{"type": "Ready", "status": "True", "reason": "Stored"}])
    plan = looked_at(body)
    (job,) = plan.create
    asked = request(plan)
    assert (job["metadata"]["name"], asked["do"], asked["model"]) == (JOB, "update", "digits")
    assert (asked["moves"], asked["pins"]) == ({"prod": 5, "canary": 7}, {})
    assert told(plan)[:2] == ("False", "JobCreated")
    later = looked_at(model({"prod": 4}), job=job)
    assert (later.create, later.soon) == ((), True)
    answer = {**ANSWER, "aliases": {"prod": 5, "canary": 7}}
    done = looked_at(body, job=ended(job, "Complete"), answer=answer)
    assert done.delete == (ended(job, "Complete"),)
    assert told(done)[:2] == ("True", "Updated")
    assert done.status is not None
    assert done.status["aliases"] == [{"name": "prod", "version": 5}, {"name": "canary", "version": 7}]
    assert "prod means version 5" in done.events[0].message
    assert looked_at({**body, "status": dict(done.status)}) == Plan()


@promise("S-402")
def test_a_failed_move_is_reported_and_retried_after_a_change() -> None:
    """Another manifest, or another version."""
    body = model({"prod": 9})
    (job,) = looked_at(body).create
    failed = ended(job, "Failed")
    why = {"reason": "ModelNotFound", "error": "there is no version 9"}
    plan = looked_at(body, job=failed, answer=why)
    assert told(plan) == ("False", "ModelNotFound", "there is no version 9")
    assert (plan.delete, plan.events[0].warning) == ((), True)
    assert looked_at(model({"prod": 5}), job=failed, answer=why).delete == (failed,)
    assert looked_at(model({"prod": 9}, latestVersion=9), job=failed, answer=why).delete == (failed,)
    back = looked_at({**model({"prod": 6}), "status": {**body["status"], "conditions": plan.status["conditions"]}})  # type: ignore[index]
    assert told(back)[0] == "True"
    away = looked_at(body, store=None)
    assert told(away)[:2] == ("False", "DatastoreNotFound")
    lost = looked_at(body, job=ended(job, "Complete"), answer={})
    assert lost.delete == (ended(job, "Complete"),)


@promise("S-407")
def test_a_version_that_a_serving_names_is_noted_in_the_store() -> None:
    """By its number, as long as the Serving is there; an alias speaks for itself."""
    servings = [
        serving("pinned", version=5),
        serving("follows", alias="prod"),
        serving("early", version=8),
        serving("other", model="faces", version=5),
    ]
    plan = looked_at(model(), servings=servings)
    who = {"version": 5, "who": "Serving team/pinned", "serving": "pinned"}
    assert request(plan)["pins"] == {"uid-pinned": who}
    done = looked_at(model(), servings=servings, job=ended(plan.create[0], "Complete"), answer=ANSWER)
    assert done.status is not None
    assert done.status["served"] == [{"version": 5, "serving": "pinned", "uid": "uid-pinned"}]
    body = model(served=done.status["served"])
    assert looked_at(body, servings=servings) == Plan()
    moved = looked_at(body, servings=[serving("pinned", version=6)])
    assert request(moved)["pins"] == {"uid-pinned": {**who, "version": 6, "was": 5}}
    gone = looked_at(body)
    assert request(gone)["pins"] == {"uid-pinned": {"was": 5}}
    after = looked_at(body, job=ended(gone.create[0], "Complete"), answer=ANSWER)
    assert after.status is not None
    assert after.status["served"] == []
