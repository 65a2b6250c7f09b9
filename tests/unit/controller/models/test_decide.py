"""What is done next about a ModelVersion, from what is observed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from datastore.api.names import FINALIZER
from datastore.api.volumecontext import DRIVER, SPEC
from datastore.controller.models.decide import Observed, Plan, decide, store_of
from datastore.controller.models.volume import OWNED_BY
from datastore.controller.runtime.ownimage import Image
from tests.promises import promise

NOW = "2026-01-01T00:00:00Z"
ANSWER = {
    "version": 7,
    "digest": "sha256:00",
    "files": 3,
    "bytes": 2048,
    "saved": NOW,
    "location": "s3://models/digits/7",
    "store": "s3://models/",
    "latest": 7,
    "versions": 2,
    "aliases": {"prod": 6},
    "new": True,
}


def version(status: dict[str, Any] | None = None, going: bool = False, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "digits-7", "namespace": "team", "uid": "0123456789", "generation": 1}
    metadata["finalizers"] = [FINALIZER]
    if going:
        metadata["deletionTimestamp"] = NOW
    origin = {} if "version" in spec else {"from": {"datastore": "runs", "path": "7"}}
    asked = {"model": "digits", **origin, **spec}
    body = {"apiVersion": "datastore.dev/v1alpha1", "kind": "ModelVersion", "metadata": metadata, "spec": asked}
    return {**body, "status": status} if status else body


def datastore(name: str, ready: str = "True", **spec: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": "R", "message": "the bucket is gone"}
    status = {"claimName": name, "conditions": [condition], "location": f"s3://{name}"}
    return {"metadata": {"name": name, "namespace": "team"}, "spec": spec, "status": status}


def volume(bucket: str, secret_namespace: str = "team") -> dict[str, Any]:
    context = {SPEC: json.dumps({"s3": {"bucket": bucket, "endpoint": "https://s3.example.org"}})}
    secret = {"name": f"{bucket}-keys", "namespace": secret_namespace}
    return {"spec": {"csi": {"driver": DRIVER, "volumeAttributes": context, "nodePublishSecretRef": secret}}}


def observed(body: dict[str, Any], **more: Any) -> Observed:
    known: dict[str, Any] = {
        "model": {"metadata": {"name": "digits", "generation": 1}, "spec": {}},
        "store": datastore("models"),
        "store_volume": volume("models"),
        "source": datastore("runs"),
        "source_volume": volume("runs"),
        "image": Image("image", "Never"),
    }
    return Observed(version=body, now=NOW, **(known | more))


def reason(plan: Plan) -> str:
    assert plan.status is not None
    return str(plan.status["conditions"][0]["reason"])


def ended(how: str, name: str = "digits-7-save-01234567") -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": how, "status": "True"}]}}


def saved() -> dict[str, Any]:
    plan = decide(observed(version(), job=ended("Complete"), answer=ANSWER))
    assert plan.status is not None
    return dict(plan.status)


@promise("S-393")
def test_a_save_is_a_job_with_nothing_but_what_it_needs() -> None:
    plan = decide(observed(version(labels={"a": "b"})))
    (job,) = plan.create
    pod = job["spec"]["template"]["spec"]
    request = json.loads(pod["containers"][0]["env"][0]["value"])
    assert (request["do"], request["model"], request["path"], request["saveId"]) == (
        "save",
        "digits",
        "7",
        "0123456789",
    )
    assert request["store"]["spec"]["s3"]["bucket"] == "models"
    assert request["labels"] == {"a": "b"}
    secrets = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    assert secrets == {"models-keys", "runs-keys"}
    assert not pod["automountServiceAccountToken"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert job["metadata"]["ownerReferences"][0]["uid"] == "0123456789"
    assert not [each for each in pod["volumes"] if "persistentVolumeClaim" in each]


@promise("S-393")
def test_a_source_that_is_no_bucket_is_mounted_read_only() -> None:
    """Its pod is deleted soon after its end: until then nobody can delete the claim."""
    export = {"spec": {"csi": {"driver": DRIVER, "volumeAttributes": {SPEC: '{"nfs":{"server":"h","path":"/a"}}'}}}}
    (job,) = decide(observed(version(), source_volume=export)).create
    pod = job["spec"]["template"]["spec"]
    claims = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [{"claimName": "runs", "readOnly": True}]
    (of_buckets,) = decide(observed(version())).create
    assert job["spec"]["ttlSecondsAfterFinished"] <= 60 < of_buckets["spec"]["ttlSecondsAfterFinished"]


@promise("S-396")
def test_a_model_and_the_store_of_a_namespace_are_made_on_first_use() -> None:
    (made,) = decide(observed(version(), model=None)).create
    assert (made["kind"], made["metadata"]["name"]) == ("Model", "digits")
    (made,) = decide(observed(version(), store=None, classes=("central",))).create
    assert (made["kind"], made["metadata"]["name"], made["spec"]) == (
        "Datastore",
        "models",
        {"storageClassName": "central", "reclaimPolicy": "Retain"},
    )


@promise("S-393")
@pytest.mark.parametrize(
    ("more", "why", "words"),
    [
        ({"source": None}, "DatastoreNotFound", "there is no Datastore runs"),
        ({"store": None}, "DatastoreNotFound", "nor one StorageClass"),
        ({"store": None, "classes": ("a", "b")}, "DatastoreNotFound", "nor one StorageClass"),
        ({"store": datastore("models", "False")}, "DatastoreNotReady", "the bucket is gone"),
        ({"store_volume": volume("models", "admin")}, "SecretElsewhere", "namespace admin"),
        ({"image": None}, "ImageUnknown", "its own pod"),
    ],
)
def test_the_status_says_what_a_save_waits_for(more: dict[str, Any], why: str, words: str) -> None:
    plan = decide(observed(version(), **more))
    assert plan.status is not None
    assert not plan.create
    assert (plan.status["phase"], reason(plan)) == ("Pending", why)
    assert words in plan.status["message"]
    assert plan.events[0].warning


@promise("S-394")
def test_the_result_of_a_save_is_reported_once() -> None:
    plan = decide(observed(version(), job=ended("Complete"), answer=ANSWER))
    assert plan.status is not None
    assert plan.model_status is not None
    assert (plan.status["phase"], plan.status["version"], plan.status["size"]) == ("Ready", 7, "2 KiB")
    assert plan.model_status["aliases"] == [{"name": "prod", "version": 6}]
    again = decide(observed(version(saved())))
    assert [each["kind"] for each in again.apply] == ["PersistentVolume", "PersistentVolumeClaim"]
    same = decide(observed(version(), job=ended("Complete"), answer={**ANSWER, "new": False}))
    assert reason(same) == "SameBytes"
    lost = decide(observed(version(), job=ended("Complete"), answer={}))
    assert lost.delete == (ended("Complete"),)
    failed = decide(observed(version(), job=ended("Failed"), answer={"reason": "SourceChanged", "error": "x: changed"}))
    assert failed.status is not None
    assert (failed.status["phase"], reason(failed)) == ("Failed", "SourceChanged")
    assert "x: changed" in failed.status["message"]
    assert decide(observed(version(dict(failed.status)))) == Plan()


@promise("S-394")
def test_the_progress_of_a_save_is_in_the_status() -> None:
    job = {"metadata": {"name": "digits-7-save-01234567"}, "status": {}}
    progress = {"phase": "reading", "percent": 40}
    plan = decide(observed(version(), job=job, progress=progress))
    assert plan.status is not None
    assert (plan.status["progress"], plan.status["phase"]) == (progress, "Saving")
    plan = decide(observed(version(), job=job, waiting="Unschedulable: no node"))
    assert reason(plan) == "PodPending"


def claim(uid: str = "0123456789", **more: Any) -> dict[str, Any]:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": "digits-7", "labels": {OWNED_BY: uid}, **more}}


@promise("S-395")
def test_the_status_names_the_claim_of_a_version() -> None:
    plan = decide(observed(version(saved()), claim=claim(), store_volume=None))
    assert plan.status is not None
    assert (plan.status["claim"], plan.status["phase"]) == ("digits-7", "Ready")


@promise("S-395")
def test_a_claim_of_another_owner_is_not_changed() -> None:
    plan = decide(observed(version(saved()), claim=claim("other")))
    assert plan.status is not None
    assert not plan.apply
    assert "claim" not in plan.status
    assert "not ours" in plan.status["message"]


@promise("S-397")
def test_an_unused_version_is_deleted() -> None:
    """Who uses it, the claim, the bytes by a Job, the end."""
    going = version(saved(), going=True)
    used = decide(observed(going, claim=claim(), in_use="pod reader"))
    assert used.status is not None
    assert not used.delete
    assert "in use by pod reader" in used.status["message"]
    assert decide(observed(going, claim=claim())).delete == (claim(),)
    assert decide(observed(going, claim=claim(deletionTimestamp=NOW))).delete == ()
    (job,) = decide(observed(going)).create
    assert json.loads(job["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"])["do"] == "delete"
    name = job["metadata"]["name"]
    refused = decide(
        observed(
            going, job=ended("Failed", name), answer={"reason": "VersionInUse", "error": "the alias prod means it"}
        )
    )
    assert refused.status is not None
    assert refused.finalizer is None
    assert "the alias prod" in refused.status["message"]
    left = {"store": "s3://models/", "latest": 6, "versions": 1, "aliases": {"prod": 6}}
    gone = decide(observed(going, job=ended("Complete", name), answer=left))
    assert (gone.finalizer, (gone.model_status or {})["latestVersion"]) == (False, 6)
    none = decide(observed(going, job=ended("Complete", name), answer={**left, "latest": 0, "versions": 0}))
    assert [(each["status"], each["reason"]) for each in (none.model_status or {})["conditions"]] == [
        ("False", "NoVersion")
    ]
    assert decide(observed(going, namespace_ends=True)) == Plan(finalizer=False)
    assert decide(observed(going, store=None, store_volume=None)) == Plan(finalizer=False)


@promise("S-397")
def test_a_deletion_waits_for_a_store_that_is_not_ready() -> None:
    """Otherwise the version would stay there, and nobody would be told; one that was never saved is not waited for."""
    away = {"store": datastore("models", "False")}
    told = decide(observed(version(saved(), going=True), **away))
    assert (told.finalizer, reason(told)) == (None, "DatastoreNotReady")
    assert "the bucket is gone" in (told.status or {})["message"]
    assert "remove-finalizer mv/" in (told.status or {})["message"]
    assert decide(observed(version(going=True), **away)).finalizer is False
    assert decide(observed(version(saved(), going=True), store_volume=None)).finalizer is None


@promise("S-397")
def test_a_deletion_waits_until_the_controller_knows_its_own_image() -> None:
    """An interrupted save may have written the version, too, so a Job has to look."""
    for going in (version(going=True), version(saved(), going=True)):
        told = decide(observed(going, image=None))
        assert (told.finalizer, reason(told)) == (None, "ImageUnknown")
        assert len(decide(observed(going)).create) == 1


@promise("S-397")
def test_a_deletion_that_failed_is_tried_again_after_a_minute() -> None:
    """Not at once: an alias may mean the version for months."""
    going = version(saved(), going=True)
    (made,) = decide(observed(going)).create
    job = ended("Failed", made["metadata"]["name"])
    job["status"]["conditions"][0]["lastTransitionTime"] = NOW
    answer = {"reason": "VersionInUse", "error": "the alias prod means it"}
    told = decide(observed(going, job=job, answer=answer))
    assert (reason(told), told.delete, told.soon) == ("VersionInUse", (), False)
    later = {"job": job, "answer": answer}
    waits = decide(replace(observed(going, **later), now="2026-01-01T00:00:59Z"))
    assert waits.delete == ()
    assert decide(replace(observed(going, **later), now="2026-01-01T00:01:00Z")).delete == (job,)


@promise("S-397")
@pytest.mark.parametrize(
    ("store", "why"),
    [
        (datastore("models", "False"), "DatastoreNotReady"),
        (datastore("models", readOnly=True), "DatastoreReadOnly"),
    ],
)
def test_a_version_does_not_leave_its_bytes_in_a_store_that_is_not_reached_now(store: dict[str, Any], why: str) -> None:
    """It waits, and says so, until the store can be written or is deleted itself."""
    going = version(saved(), going=True)
    waits = decide(observed(going, store=store))
    assert (waits.finalizer, waits.create, reason(waits)) == (None, (), why)
    assert waits.status is not None
    assert "the bytes are not deleted: Datastore models" in waits.status["message"]
    assert decide(observed(going, store_volume=None)).finalizer is None
    ends = {**store, "metadata": {**store["metadata"], "deletionTimestamp": NOW}}
    assert decide(observed(going, store=ends)) == Plan(finalizer=False)


@promise("S-397")
def test_a_version_remembers_its_store() -> None:
    """Its Model may be deleted before it, or made again with another store."""
    first = decide(observed(version(), model={"metadata": {"name": "digits"}, "spec": {"store": "central"}}))
    assert first.status is not None
    assert first.status["store"] == "central"
    body = version(dict(first.status))
    assert (store_of(body, None), store_of(version(), None)) == ("central", "models")


@promise("S-379")
def test_nothing_is_written_to_a_datastore_with_readonly() -> None:
    """Nothing is saved to it; a version that it has already may be adopted, unless an alias is to be moved."""
    store = datastore("models", readOnly=True)
    assert reason(decide(observed(version(), store=store))) == "DatastoreReadOnly"
    assert reason(decide(observed(version(version=7, aliases=["prod"]), store=store))) == "DatastoreReadOnly"
    assert len(decide(observed(version(version=7), store=store)).create) == 1
    assert len(decide(observed(version(), source=datastore("runs", readOnly=True))).create) == 1


@promise("S-397")
def test_deleting_a_reference_to_a_version_keeps_its_bytes() -> None:
    """Of a version that another save had made, or that the object only names."""
    named = version(saved(), going=True, version=7)
    assert decide(observed(named)).finalizer is False
    same = decide(observed(version(), job=ended("Complete"), answer={**ANSWER, "new": False}))
    assert decide(observed(version(dict(same.status or {}), going=True))).finalizer is False


@promise("S-397")
def test_a_running_save_is_ended_before_its_version_is_deleted() -> None:
    job = {"metadata": {"name": "digits-7-save-01234567"}, "status": {}}
    assert decide(observed(version(going=True), job=job)).delete == (job,)
