"""What becomes of data, claims and namespaces when a Datastore is deleted."""

from __future__ import annotations

import uuid

import pytest

from datastore.api.names import MARKER
from datastore.api.volumecontext import DRIVER
from datastore.cli.app import exit_code_of, run
from tests.cluster.cluster import Cluster
from tests.cluster.controlled import (
    READY_S,
    Bench,
    condition,
    secret_of,
)
from tests.cluster.kube import Manifest
from tests.promises import promise
from tests.servers import make_bucket, tools_dir

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(600, func_only=True)]


@promise("S-73")
def test_retain_leaves_everything(bench: Bench) -> None:
    bench.s3.put_object(Bucket=bench.bucket, Key="a/x", Body=b"1")
    bench.apply("digits", bench.spec("a/", s3={"create": True}))
    bench.ready("digits")
    assert "stays" in (bench.get("digits") or {})["status"]["onDeletion"]
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    assert bench.objects() == ["a/x"]


@promise("S-73")
def test_delete_removes_what_was_made_for_it_and_nothing_else(bench: Bench) -> None:
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


@promise("S-73")
def test_delete_removes_a_bucket_that_it_made(bench: Bench) -> None:
    name = f"made-{uuid.uuid4().hex[:8]}"
    bench.apply("digits", bench.spec(s3={"bucket": name, "create": True}, reclaimPolicy="Delete"))
    bench.ready("digits")
    assert [each["Key"] for each in bench.s3.list_objects_v2(Bucket=name)["Contents"]] == [MARKER]
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    assert name not in [each["Name"] for each in bench.s3.list_buckets()["Buckets"]]


@promise("S-73")
def test_archive_renames(bench: Bench) -> None:
    bench.apply("digits", bench.spec("a/", s3={"create": True}, reclaimPolicy="Archive"))
    bench.ready("digits")
    uid = (bench.get("digits") or {})["metadata"]["uid"]
    bench.s3.put_object(Bucket=bench.bucket, Key="a/d/x", Body=b"1")
    bench.kube.delete("datastore", "digits", namespace=bench.space)
    assert bench.objects() == [f"a.archived-{uid}/d/x"]


@promise("S-78")
def test_the_data_is_removed_where_it_was_made_whatever_becomes_of_the_class(bench: Bench) -> None:
    """The class is deleted first, comes back for another bucket, and then as it was."""
    other, name = f"other-{uuid.uuid4().hex[:8]}", f"class-{bench.space}"
    make_bucket(bench.server, other)

    def remade(bucket: str) -> None:
        bench.kube.delete("storageclass", name)
        bench.kube.apply(storage_class(name, bench, bucket))

    bench.kube.apply(storage_class(name, bench, bench.bucket))
    bench.apply("own", {"storageClassName": name, "reclaimPolicy": "Delete"})
    bench.ready("own")
    before = (bench.get("own") or {})["status"]
    key = f"{bench.space}/own/x"
    bench.s3.put_object(Bucket=bench.bucket, Key=key, Body=b"1")
    bench.kube.delete("storageclass", name)
    bench.reason("own", "StorageClassNotFound")
    after = (bench.get("own") or {})["status"]
    assert {each: after.get(each) for each in before if each not in ("conditions", "phase")} == {
        each: before[each] for each in before if each not in ("conditions", "phase")
    }
    remade(other)
    assert f"s3://{other}/" in bench.reason("own", "StorageClassChanged")
    bench.kube.delete("datastore", "own", namespace=bench.space, wait=False)
    advice = "kubectl datastore remove-finalizer own"
    bench.kube.wait_for(
        "advice in the status",
        lambda: advice in condition(bench.get("own"), "Ready").get("message", ""),
        limit_s=READY_S,
        namespace=bench.space,
    )
    assert key in bench.objects()
    remade(bench.bucket)
    bench.gone("own")
    assert bench.objects() == []
    assert "Contents" not in bench.s3.list_objects_v2(Bucket=other)
    bench.kube.delete("storageclass", name)


def storage_class(name: str, bench: Bench, bucket: str) -> Manifest:
    parameters = {"bucket": bucket, "endpoint": bench.server.endpoint, "create": "true", "secretName": "keys"}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": DRIVER,
        "parameters": {**parameters, "secretNamespace": bench.space},
    }


@promise("S-74", "S-132")
@pytest.mark.parametrize(("inline", "shown"), [(False, "train"), (True, "train (inline)")])
def test_deletion_waits_for_the_pods_and_names_them(bench: Bench, inline: bool, shown: str) -> None:
    bench.apply("digits", bench.spec("a/", s3={"create": True}, reclaimPolicy="Delete"))
    bench.ready("digits")
    bench.s3.put_object(Bucket=bench.bucket, Key="a/x", Body=b"1")
    bench.use("train", "digits", inline=inline)
    bench.kube.delete("datastore", "digits", namespace=bench.space, wait=False)
    bench.kube.wait_for(
        "the pod's name in the status",
        lambda: f"in use by: {shown}" in condition(bench.get("digits"), "Ready").get("message", ""),
        limit_s=READY_S,
        namespace=bench.space,
    )
    assert "a/x" in bench.objects()
    bench.kube.kubectl("delete", "pod", "train", "--namespace", bench.space, "--grace-period=0", "--force")
    bench.gone("digits")
    assert bench.objects() == []


@promise("S-75")
def test_a_namespace_goes_with_its_datastores_and_their_data(bench: Bench) -> None:
    """Its Secret may go first."""
    for number in range(5):
        bench.apply(f"d{number}", bench.spec(f"{number}/", s3={"create": True}, reclaimPolicy="Delete"))
    for number in range(5):
        bench.ready(f"d{number}")
    bench.kube.delete("namespace", bench.space, wait=False)
    bench.kube.wait_for("end of the namespace", lambda: bench.kube.get("namespace", bench.space) is None, limit_s=300)
    assert bench.objects() == []


@promise("S-75")
def test_a_datastore_released_by_hand_leaves_its_data_and_no_volume(
    bench: Bench, api_server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys do not work any more, so its data can't be removed, and it says so until its finalizer is gone."""
    bench.apply("digits", bench.spec("a/", s3={"create": True}, reclaimPolicy="Delete"))
    bench.ready("digits")
    volume = bench.volume("digits")
    assert volume is not None
    bench.kube.apply(secret_of(bench.server, AWS_SECRET_ACCESS_KEY="wrong"), namespace=bench.space)
    bench.reason("digits", "CredentialsInvalid")
    bench.kube.delete("datastore", "digits", namespace=bench.space, wait=False)
    bench.kube.wait_for(
        "advice in the status",
        lambda: "kubectl datastore remove-finalizer" in condition(bench.get("digits"), "Ready").get("message", ""),
        limit_s=READY_S,
        namespace=bench.space,
    )
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))
    monkeypatch.setenv("PATH", str(tools_dir()), prepend=":")
    assert exit_code_of(lambda: run(["remove-finalizer", "digits", "-n", bench.space])) == 0
    bench.gone("digits")
    name = volume["metadata"]["name"]
    bench.kube.wait_for("end of the volume", lambda: bench.kube.get("pv", name) is None, limit_s=READY_S)
    assert bench.objects() == [f"a/{MARKER}"]
