"""The controller on a real API server, with versitygw, and with the rights of its service account only."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from datastore.api.names import MARKER
from tests.cluster.controlled import (
    READY_S,
    SYSTEM,
    Bench,
    Controller,
    condition,
    secret_of,
)
from tests.cluster.kube import KubeError, Manifest
from tests.promises import promise

NOBODY = "http://127.0.0.1:9"
"""No program of a test gets a port so low."""
OURS = {"component": "datastore-controller"}
pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(600, func_only=True)]


@promise("S-70")
def test_a_datastore_becomes_ready_with_a_claim_of_its_name(bench: Bench) -> None:
    bench.apply("digits", bench.spec("a/"))
    print(f"apply to Ready: {bench.ready('digits'):.1f} s")
    claim = bench.kube.get("pvc", "digits", namespace=bench.space)
    assert claim is not None
    assert claim["status"]["phase"] == "Bound"
    status = (bench.get("digits") or {})["status"]
    assert (status["claimName"], status["location"]) == ("digits", f"s3://{bench.bucket}/a/")
    assert status["capabilities"] == {
        "symlinks": True,
        "emptyDirs": True,
        "rename": True,
        "append": True,
        "chmod": True,
        "hardlinks": False,
        "atomicRename": False,
    }
    assert bench.objects() == [], "the probe leaves nothing"
    shown = bench.kube.kubectl("get", "dst", "digits", "--namespace", bench.space, "--no-headers").split()
    assert shown[:3] == ["digits", "s3", f"s3://{bench.bucket}/a/"]


@promise("S-71")
def test_a_wrong_key_is_named_and_its_correction_seen(bench: Bench) -> None:
    right = secret_of(bench.server)
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY="wrong"), namespace=bench.space)
    bench.apply("digits", bench.spec())
    assert "SignatureDoesNotMatch" in bench.reason("digits", "CredentialsInvalid")
    assert condition(bench.get("digits"), "CredentialsValid")["status"] == "False"
    bench.kube.apply(right, namespace=bench.space)
    bench.ready("digits")


@promise("S-71")
def test_a_missing_bucket_is_named_and_its_making_seen(bench: Bench) -> None:
    name = f"late-{uuid.uuid4().hex[:8]}"
    bench.apply("digits", bench.spec(s3={"bucket": name}))
    assert "NoSuchBucket" in bench.reason("digits", "BucketNotFound")
    bench.s3.create_bucket(Bucket=name)
    bench.ready("digits")


@promise("S-71")
def test_a_wrong_region_an_unreachable_endpoint_and_a_missing_secret_have_reasons(bench: Bench) -> None:
    bench.apply("region", bench.spec(s3={"region": "eu-nowhere-1"}))
    bench.apply("endpoint", bench.spec(s3={"endpoint": NOBODY}))
    bench.apply("secret", bench.spec(s3={"credentialsSecret": "other"}))
    assert bench.reason("endpoint", "EndpointUnreachable")
    assert "no Secret other" in bench.reason("secret", "SecretNotFound")
    assert "eu-nowhere-1" in bench.reason("region", "WrongRegion")
    bench.kube.apply(secret_of(bench.server, "other"), namespace=bench.space)
    bench.ready("secret")


@promise("S-71")
def test_a_datastore_that_worked_and_fails_is_degraded_and_keeps_its_claim(bench: Bench) -> None:
    bench.apply("digits", bench.spec())
    bench.ready("digits")
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY="wrong"), namespace=bench.space)
    bench.reason("digits", "CredentialsInvalid")
    assert condition(bench.get("digits"), "Degraded")["status"] == "True"
    assert bench.kube.get("pvc", "digits", namespace=bench.space) is not None
    bench.kube.apply(secret_of(bench.server), namespace=bench.space)
    bench.ready("digits")


@promise("S-72")
def test_a_claim_and_a_volume_deleted_or_edited_by_hand_come_back(bench: Bench) -> None:
    bench.apply("digits", bench.spec())
    bench.ready("digits")
    volume = bench.volume("digits")
    claim = bench.kube.get("pvc", "digits", namespace=bench.space)
    assert volume is not None
    assert claim is not None
    name = volume["metadata"]["name"]
    bench.kube.delete("pv", name, wait=False)
    bench.kube.wait_for("a new volume", lambda: _replaced(bench.kube.get("pv", name), volume), limit_s=READY_S)
    bench.kube.patch("pv", name, {"metadata": {"labels": {"datastore.dev/uid": "x"}}})
    bench.kube.delete("pvc", "digits", namespace=bench.space, wait=False)

    def renewed() -> bool:
        found = bench.kube.get("pvc", "digits", namespace=bench.space)
        return _replaced(found, claim) and found is not None and found["status"].get("phase") == "Bound"

    bench.kube.wait_for("a new claim, bound", renewed, limit_s=READY_S, namespace=bench.space)
    bench.ready("digits")


def _replaced(found: Manifest | None, before: Manifest) -> bool:
    return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]


@promise("S-72", "S-248", "S-249")
def test_edits_do_not_disturb_running_pods(bench: Bench) -> None:
    """The volume stays the same one, its claim stays bound, and grows."""
    bench.apply("digits", bench.spec(capacity="1Gi"))
    bench.ready("digits")
    before = bench.volume("digits")
    assert before is not None
    edits: list[dict[str, Any]] = [{"metadataTTL": "5s"}, {"readOnly": True}, {"conflict": "fail"}]
    for number, edit in enumerate(edits, start=2):
        bench.apply("digits", bench.spec(capacity=f"{number}Gi", **edit))

        def told(number: int = number, edit: dict[str, Any] = edit) -> bool:
            mount = ((bench.get("digits") or {}).get("status") or {}).get("mount", {"spec": {}})["spec"]
            return bool(mount.get("capacity") == number << 30 and edit.items() <= mount.items())

        bench.kube.wait_for("the settings for the nodes", told, limit_s=READY_S, namespace=bench.space)
        assert _bound(bench, "digits")
    begun = time.monotonic()

    def grown() -> bool:
        claim = bench.kube.get("pvc", "digits", namespace=bench.space)
        return claim is not None and claim["status"]["capacity"] == {"storage": "4Gi"}

    bench.kube.wait_for("the claim to show its capacity", grown, limit_s=READY_S, namespace=bench.space)
    print(f"a claim that no pod uses shows its growth after {time.monotonic() - begun:.1f} s")
    after = bench.volume("digits")
    assert after is not None
    assert (after["metadata"]["uid"], after["spec"]["csi"]) == (before["metadata"]["uid"], before["spec"]["csi"])
    assert after["spec"]["capacity"] == {"storage": "4Gi"}
    bench.ready("digits")
    events = [each for each in bench.kube.items("events", namespace=bench.space) if each["source"] == OURS]
    assert not [each["message"] for each in events if each["type"] == "Warning"]


def _bound(bench: Bench, claim: str) -> bool:
    found = bench.kube.get("pvc", claim, namespace=bench.space)
    return found is not None and found["status"].get("phase") == "Bound"


@promise("S-76")
def test_no_secret_is_ever_shown(bench: Bench, running: Controller) -> None:
    canary = f"CANARY{uuid.uuid4().hex}"
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY=canary), namespace=bench.space)
    bench.apply("digits", bench.spec())
    bench.apply("other", bench.spec(s3={"endpoint": NOBODY}))
    bench.reason("digits", "CredentialsInvalid")
    bench.reason("other", "EndpointUnreachable")
    shown = [running.log.read_text(), running.metrics()]
    for kind in ("datastores", "events", "pvc", "pv"):
        shown.append(bench.kube.kubectl("get", kind, "--all-namespaces", "--output=yaml"))
    assert not [text for text in shown if canary in text]
    assert canary.encode() not in Path(f"/proc/{running.pid}/environ").read_bytes()
    assert canary.encode() not in Path(f"/proc/{running.pid}/cmdline").read_bytes()


@promise("S-77")
def test_nobody_reaches_another_namespaces_secret_or_a_host_path(bench: Bench) -> None:
    with pytest.raises(KubeError, match="credentialsSecret"):
        bench.apply("a", bench.spec(s3={"credentialsSecret": "datastore-system/keys"}))
    bench.apply("local", {"local": {"path": "/etc"}})
    assert "--allow-local" in bench.reason("local", "LocalNotAllowed")
    bench.apply("lent", {"s3": {"bucket": bench.bucket, "endpoint": bench.server.endpoint}})
    assert "lends no identity" in bench.reason("lent", "CredentialsMissing")
    assert bench.kube.items("pvc", namespace=bench.space) == []


def _class(bench: Bench, name: str, **parameters: str) -> Manifest:
    secret = {"secretName": name, "secretNamespace": SYSTEM}
    place = {"bucket": bench.bucket, "endpoint": bench.server.endpoint, "create": "true"}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "csi.datastore.dev",
        "reclaimPolicy": "Delete",
        "parameters": {**place, **secret, **parameters},
    }


@promise("S-78")
def test_a_class_makes_a_manifest_of_three_lines_and_serves_plain_claims(bench: Bench) -> None:
    name = f"class-{uuid.uuid4().hex[:6]}"
    bench.kube.apply(secret_of(bench.server, name), namespace=SYSTEM)
    bench.kube.apply(_class(bench, name))
    try:
        bench.apply("short", {"storageClassName": name})
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "plain"},
            "spec": {
                "storageClassName": name,
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "3Gi"}},
            },
        }
        bench.kube.apply(claim, namespace=bench.space)
        bench.ready("short")
        bench.kube.wait_for("its Datastore", lambda: bench.get("plain") is not None, namespace=bench.space)
        bench.ready("plain")
        volume = bench.volume("short")
        assert volume is not None
        assert volume["spec"]["csi"]["nodePublishSecretRef"] == {"name": name, "namespace": SYSTEM}
        shown = (bench.volume("plain") or {})["spec"]
        assert (shown["accessModes"], shown["persistentVolumeReclaimPolicy"]) == (["ReadWriteMany"], "Delete")
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain", "it goes with its Datastore, not its claim"
        assert (bench.get("short") or {})["status"]["location"] == f"s3://{bench.bucket}/{bench.space}/short/"
        bench.kube.delete("pvc", "plain", namespace=bench.space)
        bench.gone("plain")
        assert bench.objects() == [f"{bench.space}/short/{MARKER}"]
        bench.kube.delete("datastore", "short", namespace=bench.space)
    finally:
        bench.kube.delete("storageclass", name)
        bench.kube.delete("secret", name, namespace=SYSTEM)


NOT_SUPPORTED: dict[str, dict[str, Any]] = {
    "dataSource": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "other"}},
    "dataSourceRef": {"dataSourceRef": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "x"}},
    "selector": {"selector": {"matchLabels": {"which": "that"}}},
    "volumeMode": {"volumeMode": "Block"},
    "accessModes": {"accessModes": ["ReadWriteOncePod"]},
}


@promise("S-209")
@pytest.mark.parametrize("binding", ["Immediate", "WaitForFirstConsumer"])
def test_a_claim_with_an_unsupported_request_is_refused(bench: Bench, binding: str) -> None:
    """One Event and a condition; no Datastore, and no volume."""
    name = f"class-{uuid.uuid4().hex[:6]}"
    bench.kube.apply({**_class(bench, name), "volumeBindingMode": binding})
    plain = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": name}
    for field, wrong in NOT_SUPPORTED.items():
        metadata = {"name": field.lower()}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": plain | wrong}
        bench.kube.apply(claim, namespace=bench.space)
    try:
        for field in NOT_SUPPORTED:

            def refused(field: str = field) -> bool:
                claim = bench.kube.get("pvc", field.lower(), namespace=bench.space)
                return f"spec.{field}" in condition(claim, "datastore.dev/Refused").get("message", "")

            bench.kube.wait_for(f"{field} refused", refused, limit_s=READY_S, namespace=bench.space)
        assert bench.kube.items("datastores", namespace=bench.space) == []

        def told() -> list[str]:
            events = bench.kube.items("events", namespace=bench.space)
            return [each["involvedObject"]["name"] for each in events if each["reason"] == "ClaimNotSupported"]

        # The Event follows the condition.
        bench.kube.wait_for("the Events", lambda: len(told()) >= len(NOT_SUPPORTED), namespace=bench.space)
        assert sorted(told()) == sorted(each.lower() for each in NOT_SUPPORTED)
        claims = bench.kube.items("pvc", namespace=bench.space)
        assert [each["status"]["phase"] for each in claims] == ["Pending"] * len(NOT_SUPPORTED)
    finally:
        bench.kube.delete("storageclass", name)


@promise("S-78")
def test_a_claim_of_another_driver_is_a_datastore_too(bench: Bench) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "disk"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    bench.apply("wrap", {"claim": {"name": "disk"}})
    assert "disk" in bench.reason("wrap", "ClaimNotFound")
    static = {**claim["spec"], "storageClassName": ""}  # type: ignore[dict-item]
    bench.kube.apply({**claim, "spec": static}, namespace=bench.space)
    bench.reason("wrap", "WaitingForBinding")
    assert (bench.get("wrap") or {})["status"]["claimName"] == "disk"
    bench.kube.delete("datastore", "wrap", namespace=bench.space)
    assert bench.kube.get("pvc", "disk", namespace=bench.space) is not None


@promise("S-148")
def test_a_class_that_is_not_there_is_named_and_its_coming_seen(bench: Bench) -> None:
    late, at_once = f"late-{uuid.uuid4().hex[:6]}", f"once-{uuid.uuid4().hex[:6]}"
    bench.apply("late", {"claim": {"storageClassName": late}})
    bench.apply("once", {"claim": {"storageClassName": at_once}})
    bench.apply("ours", {"storageClassName": late})
    for name, named in (("late", late), ("once", at_once)):
        assert f"no StorageClass {named}" in bench.reason(name, "StorageClassNotFound")
    plain = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "disk"}, "spec": plain}
    bench.kube.apply(claim, namespace=bench.space)
    bench.apply("wrap", {"claim": {"name": "disk"}})
    assert "no default" in bench.reason("wrap", "StorageClassNotFound")
    made = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "disks.example"}
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    try:
        bench.kube.apply(
            {**made, "metadata": {"name": late, "annotations": default}, "volumeBindingMode": "WaitForFirstConsumer"},
            {**made, "metadata": {"name": at_once}, "volumeBindingMode": "Immediate"},
        )
        bench.ready("late")
        bench.reason("once", "WaitingForBinding")
        bench.ready("wrap")
        assert "spec.claim" in bench.reason("ours", "StorageClassNotOurs")
        assert (bench.get("late") or {})["status"]["phase"] == "Ready"
    finally:
        for name in (late, at_once):
            bench.kube.delete("storageclass", name)


@promise("S-79")
def test_the_advice_in_the_refusal_of_an_edit_works_and_keeps_the_data(bench: Bench) -> None:
    bench.s3.put_object(Bucket=bench.bucket, Key="a", Body=b"1")
    bench.apply("digits", bench.spec(s3={"endpoint": "http://127.0.0.1:1"}))
    assert "check the endpoint" in bench.reason("digits", "EndpointUnreachable")
    for change in (bench.spec(), {"local": {"path": "/a"}}):
        with pytest.raises(KubeError, match="delete it and apply it again: with reclaimPolicy Retain its data stays"):
            bench.apply("digits", change)
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    bench.apply("digits", bench.spec())
    bench.ready("digits")
    assert "a" in bench.objects()


@promise("S-79")
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"s3": {"bucket": "another"}}, "bucket is immutable"),
        ({"s3": {"prefix": "b/"}}, "prefix is immutable"),
        ({"capacity": "1Gi"}, "capacity only grows"),
        ({"local": {"path": "/a"}}, "exactly one of"),
    ],
)
def test_fields_that_say_which_data_it_is_are_immutable(bench: Bench, change: dict[str, Any], complaint: str) -> None:
    bench.apply("digits", bench.spec("a/", capacity="2Gi"))
    with pytest.raises(KubeError, match=complaint):
        bench.kube.patch("datastore", "digits", {"spec": change}, namespace=bench.space)
