"""A class with `provisioner: ganesha` over a disk that every node of a test cluster has, and a pod that works on its
Datastore `results`."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.controlled import ROOT
from tests.cluster.fixtures import Product, Site
from tests.cluster.image import GANESHA, image_archive
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.cluster.test_node_plugin import MOUNT_DAEMON, pods_of, wait_ready
from tests.cluster.volumes import GOES_ON_S

SPACE = "datastore-nfs"
READY_S = 300.0
GONE_S = 300.0
MANIFESTS = ROOT / "manifests" / "managed-nfs" / "managed-nfs.yaml"

LOOP = """
import hashlib, os, pathlib, time
place = pathlib.Path("/data/loop"); place.mkdir(exist_ok=True)
first = open(place / "open", "w+b", buffering=0)
removed = open(place / "removed", "w+b"); removed.write(b"still here"); removed.flush(); (place / "removed").unlink()
whole, number = hashlib.sha256(), 0
while True:
    body = os.urandom(50_000)
    (place / f"f{number % 16}").write_bytes(body)
    assert (place / f"f{number % 16}").read_bytes() == body, number
    first.seek(0, 2); first.write(body); whole.update(body)
    if number % 10 == 0:
        os.fsync(first.fileno())
        first.seek(0)
        assert hashlib.file_digest(first, "sha256").digest() == whole.digest(), number
        removed.seek(0); assert removed.read() == b"still here"
    if number % 100 == 99:
        first.truncate(0); whole = hashlib.sha256()
    number += 1
    print("round", number, flush=True)
    time.sleep(0.02)
"""
"""Files that stay open, one of them without a name, beside others that come and go."""


def pod(site: Site, name: str, script: str, **spec: Any) -> Manifest:
    container = {**site.container("python3", "-u", "-c", script), "volumeMounts": [{"name": "v", "mountPath": "/data"}]}
    # Nobody in particular: the image's own user.
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "results"}}
    given = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    return {**body, "spec": {**given, "volumes": [volume], **spec}}


@pytest.fixture(scope="module")
def disk(site: Site, kube: Kube) -> Iterator[str]:
    """A StorageClass as an administrator has one, with one volume; the nodes have one root file system."""
    name = f"disk-{uuid.uuid4().hex[:8]}"
    place = Path("/var/tmp", name)
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "kubernetes.io/no-provisioner",
        "allowVolumeExpansion": True,
    }
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": name,
        "hostPath": {"path": str(place), "type": "DirectoryOrCreate"},
    }
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    kube.apply(storage_class, volume)
    yield name
    kube.delete("pv", name)
    kube.delete("storageclass", name)
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def managed(site: Site, kube: Kube, product: Product, disk: str) -> Iterator[None]:
    """The class of docs/NFS.md over that disk, for pods of the first node; the rights; the servers' image."""
    assert site.own is not None, "own_node"
    wait_ready(kube)
    site.own.load(image_archive(GANESHA))
    kube.kubectl("apply", "--filename", str(MANIFESTS))
    (daemon, *_) = sorted(pods_of(kube, MOUNT_DAEMON), key=lambda each: str(each["spec"]["nodeName"]))
    example = yaml.safe_load((ROOT / "manifests" / "examples" / "storageclass-nfs-managed.yaml").read_text())
    own = {"claimStorageClass": disk, "capacity": "1Gi", "clients": f"{daemon['status']['podIP']}/32"}
    kube.apply({**example, "parameters": {**example["parameters"], **own}})
    yield
    kube.delete("storageclass", example["metadata"]["name"])
    kube.kubectl("delete", "--filename", str(MANIFESTS), timeout_s=GONE_S)


def rounds(kube: Kube, space: str) -> int:
    try:
        said = kube.tail("loop", namespace=space).split()
    except KubeError:
        return 0
    return int(said[1]) if len(said) == 2 and said[0] == "round" else 0


def goes_on(kube: Kube, space: str) -> float:
    """Wait for rounds that begin now; how long that took."""
    found = kube.get("pod", "loop", namespace=space)
    assert found is not None
    assert found["status"]["phase"] == "Running", kube.logs("loop", namespace=space)[-2000:]
    target = rounds(kube, space) + 15
    return kube.wait_for(f"round {target}", lambda: rounds(kube, space) >= target, limit_s=GOES_ON_S, namespace=space)


def replaced(kube: Kube, name: str) -> bool:
    found = kube.get("statefulset", name, namespace=SPACE)
    server = kube.get("pod", f"{name}-0", namespace=SPACE)
    ready = found is not None and bool(found["status"].get("readyReplicas"))
    return ready and server is not None and "deletionTimestamp" not in server["metadata"]
