"""What is done next about a ModelExport, from what is observed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from datastore.controller.models.decide import Plan
from datastore.controller.models.exports import ObservedExport, decide_export
from datastore.controller.runtime.ownimage import Image
from tests.promises import promise
from tests.unit.controller.models.test_decide import NOW, datastore, volume
from tests.unit.controller.models.test_update import ended, model

ANSWER = {"version": 6, "digest": "sha256:00", "files": 3, "bytes": 2048, "location": "s3://partner/out"}


def export(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "out", "namespace": "team", "uid": "0123456789", "generation": 1}
    asked = {"model": "digits", "to": {"datastore": "partner", "path": "out"}, **spec}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "ModelExport", "metadata": metadata, "spec": asked}


def looked_at(body: dict[str, Any], **more: Any) -> Plan:
    known: dict[str, Any] = {
        "model": model(),
        "store": datastore("models"),
        "store_volume": volume("models"),
        "target": datastore("partner"),
        "target_volume": volume("partner"),
        "image": Image("image", "Never"),
    }
    return decide_export(ObservedExport(export=body, now=NOW, **(known | more)))


def request(plan: Plan) -> dict[str, Any]:
    (job,) = plan.create
    found: dict[str, Any] = json.loads(job["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"])
    return found


def claims(plan: Plan) -> dict[str, bool]:
    volumes = plan.create[0]["spec"]["template"]["spec"]["volumes"]
    found = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
    return {each["claimName"]: each["readOnly"] for each in found}


@promise("S-404")
def test_a_directory_goes_from_bucket_to_bucket_and_a_file_through_a_mount() -> None:
    """Keys of another namespace never come into the Job."""
    plan = looked_at(export(version=6))
    asked = request(plan)
    assert (asked["do"], asked["version"], asked["path"], asked["format"]) == ("export", 6, "out", "directory")
    assert asked["target"]["spec"]["s3"]["bucket"] == "partner"
    assert claims(plan) == {}
    tar = looked_at(export(version=3, format="tar", to={"datastore": "partner", "path": "out.tar"}))
    assert request(tar)["version"] == 3
    assert claims(tar) == {}
    pod = tar.create[0]["spec"]["template"]["spec"]
    (own,) = [each["csi"] for each in pod["volumes"] if "csi" in each]
    assert (own["volumeAttributes"], own["nodePublishSecretRef"]) == (
        {"datastore": "partner"},
        {"name": "partner-keys"},
    )
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    elsewhere = looked_at(export(version=3, format="tar"), target_volume=volume("partner", "admin"))
    assert claims(elsewhere) == {"partner": False}
    assert "fsGroup" not in elsewhere.create[0]["spec"]["template"]["spec"]["securityContext"]
    central = looked_at(export(), store_volume=volume("models", "admin"), target_volume=volume("partner", "admin"))
    assert claims(central) == {"models": True, "partner": False}
    assert not [each for each in central.create[0]["spec"]["template"]["spec"]["volumes"] if "secret" in each]


@promise("S-404")
def test_an_alias_is_taken_from_the_model_before_the_store() -> None:
    """Not what a Job found last: the alias may just have been moved in the Model, or by a laptop in the store."""
    listed = request(looked_at(export(alias="prod"), model=model({"prod": 7})))
    assert (listed["version"], listed["alias"]) == (7, "prod")
    other = request(looked_at(export(alias="prod")))
    assert (other["version"], other["alias"]) == (None, "prod")


@promise("S-404")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"target": datastore("partner", readOnly=True)}, "DatastoreReadOnly"),
        ({"model": None}, "ModelNotFound"),
        ({"target": None}, "DatastoreNotFound"),
        ({"store": datastore("models", "False")}, "DatastoreNotReady"),
        ({"image": None}, "ImageUnknown"),
    ],
)
def test_the_status_says_what_an_export_waits_for(more: dict[str, Any], why: str) -> None:
    plan = looked_at(export(), **more)
    assert plan.status is not None
    assert (plan.create, plan.status["phase"], plan.status["conditions"][0]["reason"]) == ((), "Pending", why)


@promise("S-404")
def test_the_result_of_an_export_is_reported_once() -> None:
    """How far it is, then where it is; one that failed stays failed."""
    (job,) = looked_at(export()).create
    running = looked_at(export(), job=job, progress={"phase": "reading", "percent": 40})
    assert running.status is not None
    assert (running.status["phase"], running.status["progress"]["percent"]) == ("Exporting", 40)
    done = looked_at(export(), job=ended(job, "Complete"), answer=ANSWER)
    assert done.status is not None
    assert (done.status["phase"], done.status["version"], done.status["size"]) == ("Complete", 6, "2 KiB")
    assert done.status["message"] == "digits:6 is at s3://partner/out"
    assert looked_at({**export(), "status": dict(done.status)}) == Plan()
    failed = looked_at(export(), job=ended(job, "Failed"), answer={"reason": "VersionDamaged", "error": "x: differs"})
    assert failed.status is not None
    assert (failed.status["phase"], "x: differs" in failed.status["message"]) == ("Failed", True)
    assert looked_at({**export(), "status": dict(failed.status)}) == Plan()
    assert looked_at(export(), job=ended(job, "Complete"), answer={}).delete == (ended(job, "Complete"),)
