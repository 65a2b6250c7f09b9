"""The controller on a real API server, with versitygw, and with the rights of its own service account only."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from datastore.api.names import MARKER, volume_name
from datastore.cli.main import app, exit_code_of
from tests.cluster.cluster import Cluster
from tests.cluster.controlled import (
    SYSTEM,
    Controller,
    account_kubeconfig,
    condition,
    controller,
    datastore_of,
    secret_of,
)
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.servers import Server, boto_client, free_port, make_bucket, run_versitygw, tools_dir

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
REASON_S = 15.0
"""10 s as promised, and what the watch of this test takes on a busy machine."""
READY_S = 60.0


@pytest.fixture(scope="module")
def cluster(api_server: Cluster) -> Kube:
    kube = Kube(api_server.kubeconfig, also=(SYSTEM,))
    try:
        kube.apply_folder(ROOT / "manifests")
    except KubeError:
        # The objects of a kind can't come with its definition; the second time it is there.
        kube.wait_condition("crd", "clusterkopfpeerings.kopf.dev", "Established")
        kube.apply_folder(ROOT / "manifests")
    return kube


@pytest.fixture(scope="module")
def account(api_server: Cluster, cluster: Kube, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return account_kubeconfig(api_server.kubeconfig, cluster, tmp_path_factory.mktemp("account"))


@pytest.fixture(scope="module")
def running(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with controller(account, tmp_path_factory.mktemp("controller"), "--check", "5s") as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with run_versitygw() as found:
        yield found


@pytest.fixture
def space(cluster: Kube, server: Server) -> Iterator[str]:
    """A namespace with the right Secret `keys`; it must go when it is deleted."""
    name = f"team-{uuid.uuid4().hex[:6]}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    cluster.apply(secret_of(server), namespace=name)
    yield name
    cluster.delete("namespace", name, wait=False)
    cluster.wait_for("end of the namespace", lambda: cluster.get("namespace", name) is None, limit_s=60, namespace=name)


class Bench:
    """What most tests do: make a Datastore on a bucket of its own, and look."""

    def __init__(self, kube: Kube, server: Server, space: str) -> None:
        self.kube, self.server, self.space = kube, server, space
        self.s3 = boto_client(server)
        self.bucket = f"b-{uuid.uuid4().hex[:8]}"
        make_bucket(server, self.bucket)

    def spec(self, prefix: str = "", **more: Any) -> dict[str, Any]:
        s3 = {"bucket": self.bucket, "endpoint": self.server.endpoint, "credentialsSecret": "keys"}
        s3 |= {"prefix": prefix} if prefix else {}
        return {"s3": s3 | more.pop("s3", {}), **more}

    def apply(self, name: str, spec: dict[str, Any]) -> None:
        self.kube.apply(datastore_of(name, spec), namespace=self.space)

    def get(self, name: str) -> Manifest | None:
        return self.kube.get("datastore", name, namespace=self.space)

    def volume(self, name: str) -> Manifest | None:
        found = self.get(name)
        return self.kube.get("pv", volume_name(found["metadata"]["uid"])) if found else None

    def ready(self, name: str) -> float:
        return self.kube.wait_condition("datastore", name, "Ready", namespace=self.space, limit_s=READY_S)

    def reason(self, name: str, reason: str) -> str:
        """Wait for Ready=False with this reason; its message."""

        def told() -> bool:
            found = condition(self.get(name), "Ready")
            return found.get("status") == "False" and found.get("reason") == reason

        self.kube.wait_for(f"reason {reason} of {name}", told, limit_s=REASON_S, namespace=self.space)
        return condition(self.get(name), "Ready")["message"]

    def gone(self, name: str) -> None:
        self.kube.wait_for(f"end of {name}", lambda: self.get(name) is None, limit_s=READY_S, namespace=self.space)

    def objects(self) -> list[str]:
        return [each["Key"] for each in self.s3.list_objects_v2(Bucket=self.bucket).get("Contents", [])]


@pytest.fixture
def bench(cluster: Kube, server: Server, space: str, running: Controller) -> Bench:
    return Bench(cluster, server, space)


def test_a_datastore_becomes_ready_with_a_claim_of_its_name(bench: Bench) -> None:
    """S-70"""
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


def test_a_wrong_key_is_named_and_its_correction_seen(bench: Bench) -> None:
    """S-71"""
    right = secret_of(bench.server)
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY="wrong"), namespace=bench.space)
    bench.apply("digits", bench.spec())
    assert "SignatureDoesNotMatch" in bench.reason("digits", "CredentialsInvalid")
    assert condition(bench.get("digits"), "CredentialsValid")["status"] == "False"
    bench.kube.apply(right, namespace=bench.space)
    bench.ready("digits")


def test_a_missing_bucket_is_named_and_its_making_seen(bench: Bench) -> None:
    """S-71"""
    name = f"late-{uuid.uuid4().hex[:8]}"
    bench.apply("digits", bench.spec(s3={"bucket": name}))
    assert "NoSuchBucket" in bench.reason("digits", "BucketNotFound")
    bench.s3.create_bucket(Bucket=name)
    bench.ready("digits")


def test_a_wrong_region_an_unreachable_endpoint_and_a_missing_secret_have_reasons(bench: Bench) -> None:
    """S-71"""
    bench.apply("region", bench.spec(s3={"region": "eu-nowhere-1"}))
    bench.apply("endpoint", bench.spec(s3={"endpoint": f"http://127.0.0.1:{free_port()}"}))
    bench.apply("secret", bench.spec(s3={"credentialsSecret": "other"}))
    assert bench.reason("endpoint", "EndpointUnreachable")
    assert "no Secret other" in bench.reason("secret", "SecretNotFound")
    assert "eu-nowhere-1" in bench.reason("region", "WrongRegion")
    bench.kube.apply(secret_of(bench.server, "other"), namespace=bench.space)
    bench.ready("secret")


def test_what_worked_and_fails_is_degraded_and_keeps_its_claim(bench: Bench) -> None:
    """S-71"""
    bench.apply("digits", bench.spec())
    bench.ready("digits")
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY="wrong"), namespace=bench.space)
    bench.reason("digits", "CredentialsInvalid")
    assert condition(bench.get("digits"), "Degraded")["status"] == "True"
    assert bench.kube.get("pvc", "digits", namespace=bench.space) is not None
    bench.kube.apply(secret_of(bench.server), namespace=bench.space)
    bench.ready("digits")


def test_a_claim_and_a_volume_deleted_or_edited_by_hand_come_back(bench: Bench) -> None:
    """S-72"""
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


def test_a_changed_spec_reaches_the_volume(bench: Bench) -> None:
    """S-72"""
    bench.apply("digits", bench.spec(capacity="1Gi"))
    bench.ready("digits")
    bench.apply("digits", bench.spec(capacity="2Gi", metadataTTL="5s"))

    def carried() -> bool:
        volume = bench.volume("digits")
        text = volume["spec"]["csi"]["volumeAttributes"]["datastore.dev/spec"] if volume else "{}"
        return bool(json.loads(text).get("metadataTTL") == "5s" and json.loads(text).get("capacity") == 2 << 30)

    bench.kube.wait_for("the new spec in the volume", carried, limit_s=READY_S)
    bench.ready("digits")


def test_retain_leaves_everything(bench: Bench) -> None:
    """S-73"""
    bench.s3.put_object(Bucket=bench.bucket, Key="a/x", Body=b"1")
    bench.apply("digits", bench.spec("a/", s3={"create": True}))
    bench.ready("digits")
    assert "stays" in (bench.get("digits") or {})["status"]["onDeletion"]
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    assert bench.objects() == ["a/x"]


def test_delete_removes_what_was_made_for_it_and_nothing_else(bench: Bench) -> None:
    """S-73"""
    bench.s3.put_object(Bucket=bench.bucket, Key="old/x", Body=b"1")
    bench.apply("own", bench.spec("own/", s3={"create": True}, reclaimPolicy="Delete"))
    bench.apply("old", bench.spec("old/", s3={"create": True}, reclaimPolicy="Delete"))
    bench.ready("own")
    bench.ready("old")
    bench.s3.put_object(Bucket=bench.bucket, Key="own/y", Body=b"2")
    assert (bench.get("own") or {})["status"]["onDeletion"] == f"all of s3://{bench.bucket}/own/ is removed (Delete)"
    assert "nobody" in (bench.get("old") or {})["status"]["onDeletion"]
    volume = bench.volume("own")
    assert volume is not None
    bench.kube.delete("datastore", "own", namespace=bench.space)
    bench.kube.delete("datastore", "old", namespace=bench.space)
    assert bench.objects() == ["old/x"]
    assert bench.kube.get("pv", volume["metadata"]["name"]) is None
    assert bench.kube.get("pvc", "own", namespace=bench.space) is None


def test_delete_removes_a_bucket_that_it_made(bench: Bench) -> None:
    """S-73"""
    name = f"made-{uuid.uuid4().hex[:8]}"
    bench.apply("digits", bench.spec(s3={"bucket": name, "create": True}, reclaimPolicy="Delete"))
    bench.ready("digits")
    assert [each["Key"] for each in bench.s3.list_objects_v2(Bucket=name)["Contents"]] == [MARKER]
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    assert name not in [each["Name"] for each in bench.s3.list_buckets()["Buckets"]]


def test_archive_renames(bench: Bench) -> None:
    """S-73"""
    bench.apply("digits", bench.spec("a/", s3={"create": True}, reclaimPolicy="Archive"))
    bench.ready("digits")
    uid = (bench.get("digits") or {})["metadata"]["uid"]
    bench.s3.put_object(Bucket=bench.bucket, Key="a/d/x", Body=b"1")
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    assert bench.objects() == [f"a.archived-{uid}/d/x"]


def test_deletion_waits_for_the_pods_and_names_them(bench: Bench) -> None:
    """S-74"""
    bench.apply("digits", bench.spec("a/", s3={"create": True}, reclaimPolicy="Delete"))
    bench.ready("digits")
    bench.s3.put_object(Bucket=bench.bucket, Key="a/x", Body=b"1")
    container = {"name": "main", "image": "none", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "digits"}}]
    # Nothing runs it here, but it is on a node and has not ended: that is use.
    spec = {"containers": [container], "volumes": volumes, "nodeName": "absent", "terminationGracePeriodSeconds": 0}
    spec["automountServiceAccountToken"] = False
    bench.kube.wait_for(
        "service account", lambda: bool(bench.kube.get("serviceaccount", "default", namespace=bench.space))
    )
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec}
    bench.kube.apply(pod, namespace=bench.space)
    bench.kube.delete("datastore", "digits", namespace=bench.space, wait=False)
    bench.kube.wait_for(
        "the pod's name in the status",
        lambda: "in use by: train" in condition(bench.get("digits"), "Ready").get("message", ""),
        limit_s=READY_S,
        namespace=bench.space,
    )
    assert "a/x" in bench.objects()
    bench.kube.kubectl("delete", "pod", "train", "--namespace", bench.space, "--grace-period=0", "--force")
    bench.gone("digits")
    assert bench.objects() == []


def test_a_namespace_goes_with_its_datastores_and_their_data(bench: Bench) -> None:
    """S-75: its Secret may go first."""
    for number in range(5):
        bench.apply(f"d{number}", bench.spec(f"{number}/", s3={"create": True}, reclaimPolicy="Delete"))
    for number in range(5):
        bench.ready(f"d{number}")
    bench.kube.delete("namespace", bench.space, wait=False)
    bench.kube.wait_for("end of the namespace", lambda: bench.kube.get("namespace", bench.space) is None, limit_s=60)
    assert bench.objects() == []


def test_a_datastore_released_by_hand_leaves_its_data_and_no_volume(
    bench: Bench, api_server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-75: its keys do not work any more, so its data can't be removed, and it says so until it is released."""
    bench.apply("digits", bench.spec("a/", s3={"create": True}, reclaimPolicy="Delete"))
    bench.ready("digits")
    volume = bench.volume("digits")
    assert volume is not None
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY="wrong"), namespace=bench.space)
    bench.reason("digits", "CredentialsInvalid")
    bench.kube.delete("datastore", "digits", namespace=bench.space, wait=False)
    bench.kube.wait_for(
        "advice in the status",
        lambda: "kubectl datastore release" in condition(bench.get("digits"), "Ready").get("message", ""),
        limit_s=READY_S,
        namespace=bench.space,
    )
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))
    monkeypatch.setenv("PATH", str(tools_dir()), prepend=":")
    assert exit_code_of(lambda: app(["release", "digits", "-n", bench.space], standalone_mode=False)) == 0
    bench.gone("digits")
    name = volume["metadata"]["name"]
    bench.kube.wait_for("end of the volume", lambda: bench.kube.get("pv", name) is None, limit_s=READY_S)
    assert bench.objects() == [f"a/{MARKER}"]


def test_no_secret_is_ever_shown(bench: Bench, running: Controller) -> None:
    """S-76"""
    canary = f"CANARY{uuid.uuid4().hex}"
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY=canary), namespace=bench.space)
    bench.apply("digits", bench.spec())
    bench.apply("other", bench.spec(s3={"endpoint": "http://127.0.0.1:9"}))
    bench.reason("digits", "CredentialsInvalid")
    bench.reason("other", "EndpointUnreachable")
    shown = [running.log.read_text(), running.metrics()]
    for kind in ("datastores", "events", "pvc", "pv"):
        shown.append(bench.kube.kubectl("get", kind, "--all-namespaces", "--output=yaml"))
    assert not [text for text in shown if canary in text]
    assert canary.encode() not in Path(f"/proc/{running.pid}/environ").read_bytes()
    assert canary.encode() not in Path(f"/proc/{running.pid}/cmdline").read_bytes()


def test_nobody_reaches_another_namespaces_secret_or_a_host_path(bench: Bench) -> None:
    """S-77"""
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


def test_a_class_makes_a_manifest_of_three_lines_and_serves_plain_claims(bench: Bench) -> None:
    """S-78"""
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
        assert (bench.get("short") or {})["status"]["location"] == f"s3://{bench.bucket}/{bench.space}/short/"
        bench.kube.delete("pvc", "plain", namespace=bench.space)
        bench.gone("plain")
        assert bench.objects() == [f"{bench.space}/short/{MARKER}"]
        bench.kube.delete("datastore", "short", namespace=bench.space)
    finally:
        bench.kube.delete("storageclass", name)
        bench.kube.delete("secret", name, namespace=SYSTEM)


def test_a_claim_of_another_driver_is_a_datastore_too(bench: Bench) -> None:
    """S-78"""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "disk"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    bench.apply("wrap", {"claim": {"name": "disk"}})
    assert "disk" in bench.reason("wrap", "ClaimNotFound")
    bench.kube.apply({**claim, "spec": {**claim["spec"], "storageClassName": "other"}}, namespace=bench.space)  # type: ignore[dict-item]
    bench.ready("wrap")
    assert (bench.get("wrap") or {})["status"]["claimName"] == "disk"
    bench.kube.delete("datastore", "wrap", namespace=bench.space)
    assert bench.kube.get("pvc", "disk", namespace=bench.space) is not None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"s3": {"bucket": "another"}}, "bucket is immutable"),
        ({"s3": {"prefix": "b/"}}, "prefix is immutable"),
        ({"capacity": "1Gi"}, "capacity only grows"),
        ({"local": {"path": "/a"}}, "exactly one of"),
    ],
)
def test_what_says_which_data_it_is_never_changes(bench: Bench, change: dict[str, Any], complaint: str) -> None:
    """S-79"""
    bench.apply("digits", bench.spec("a/", capacity="2Gi"))
    with pytest.raises(KubeError, match=complaint):
        bench.kube.patch("datastore", "digits", {"spec": change}, namespace=bench.space)


RARE = {("datastores", "get"), ("namespaces", "get"), ("persistentvolumes", "get")}
"""Made only when a finalizer was taken off by hand, a removal has failed for a minute, a watch was missed for 10 s."""


def test_the_rules_of_the_role_are_the_calls_made(running: Controller) -> None:
    """Last but for the crowd: the tests above have made every kind of call, with these rights and no others."""
    documents = yaml.safe_load_all((ROOT / "manifests" / "base" / "controller-rbac.yaml").read_text())
    allowed = {
        (resource, verb)
        for document in documents
        for rule in document.get("rules", [])
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if resource != "clusterkopfpeerings"
    }
    watched = {"datastores", "persistentvolumes", "persistentvolumeclaims", "storageclasses", "leases"}
    made = running.calls() | {(each, verb) for each in watched for verb in ("list", "watch")}
    # Server-side apply of something new is authorised as create, too.
    made |= {(each, "create") for each in ("persistentvolumes", "persistentvolumeclaims", "leases")}
    assert sorted(made - allowed) == []
    assert sorted(allowed - made - RARE) == []


def test_the_watch_is_proven_alive(running: Controller) -> None:
    assert running.status("/livez") == 200
    assert running.status("/readyz") == 200
    assert "datastore_controller_active 1.0" in running.metrics()


def test_two_replicas_of_a_peering_take_turns(
    cluster: Kube, server: Server, account: Path, space: str, tmp_path: Path
) -> None:
    bench = Bench(cluster, server, space)
    shared = ("--peering", "datastore-controller", "--check", "5s")
    with controller(account, tmp_path, *shared, "--priority", "1", name="low"):
        with controller(account, tmp_path, *shared, "--priority", "2", name="high") as high:
            bench.kube.wait_for("the higher one at work", lambda: "active 1.0" in high.metrics(), limit_s=READY_S)
            bench.apply("first", bench.spec("a/"))
            bench.ready("first")
        bench.apply("second", bench.spec("b/"))
        bench.ready("second")
        bench.kube.delete("datastore", "first", namespace=space)
        bench.kube.delete("datastore", "second", namespace=space)


CROWD = 1000


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_thousand_datastores(bench: Bench, running: Controller) -> None:
    """Applied at once: Ready within 120 s, at most 250 MiB; deleted: nothing is left."""
    spec = bench.spec(reclaimPolicy="Delete")
    many = [
        datastore_of(f"d{number}", {**spec, "s3": {**spec["s3"], "prefix": f"{number}/", "create": True}})
        for number in range(CROWD)
    ]
    before = len(bench.kube.items("pv"))
    started = time.monotonic()
    bench.kube.apply(*many, namespace=bench.space)
    applied_s = time.monotonic() - started

    def ready() -> bool:
        found = bench.kube.items("datastores", namespace=bench.space)
        return sum(condition(each, "Ready").get("status") == "True" for each in found) == CROWD

    bench.kube.wait_for("all Ready", ready, limit_s=400)
    ready_s = time.monotonic() - started
    started = time.monotonic()
    bench.kube.kubectl("delete", "datastores", "--all", "--wait=false", "--namespace", bench.space, timeout_s=300)
    bench.kube.wait_for("all gone", lambda: not bench.kube.items("datastores", namespace=bench.space), limit_s=400)
    gone_s = time.monotonic() - started
    print(f"applied {applied_s:.0f} s, Ready {ready_s:.0f} s, gone {gone_s:.0f} s, {running.peak_mib():.0f} MiB")
    assert bench.objects() == []
    assert bench.kube.items("pvc", namespace=bench.space) == []
    assert len(bench.kube.items("pv")) == before
    assert running.peak_mib() <= 250
    assert ready_s <= 120
