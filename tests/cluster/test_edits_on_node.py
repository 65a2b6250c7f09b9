"""Edits of a Datastore beside a real kubelet and the controller: pods go on, and the nodes come to show what is new."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from datastore.api.names import volume_name
from datastore.api.volumecontext import DRIVER
from tests.cluster.controlled import datastore_of
from tests.cluster.fixtures import SYSTEM, Product, Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.cluster.test_node_plugin import MOUNT_DAEMON, pods_of, wait_ready
from tests.cluster.volumes import LOOP, SERVERS, Loop, Volume
from tests.promises import promise
from tests.servers import make_bucket

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(1500, func_only=True)]
READY_S = 240.0
REACHED_S = 400.0
"""The kubelet publishes again by itself now and then (components.py), and the node asks then."""

TOTAL = """
import os, time
while True:
    s = os.statvfs("/data")
    print(s.f_blocks * s.f_frsize, flush=True)
    time.sleep(0.5)
"""
"""What its df would show as the size, twice a second."""


@pytest.fixture
def volume(site: Site, kube: Kube, storage: Storage, product: Product, namespace: str) -> Iterator[Volume]:
    """Its Secret is there, and a Datastore `data` on its bucket."""
    wait_ready(kube)
    made = Volume(site, storage, namespace, make_bucket(storage.here, f"bucket-{namespace}"))
    s3 = {"bucket": made.bucket, "endpoint": storage.endpoint, "credentialsSecret": "keys"}
    kube.apply(made.secret(), datastore_of("data", {"s3": s3, "capacity": "1Gi"}), namespace=namespace)
    try:
        kube.wait_condition("datastore", "data", "Ready", namespace=namespace, limit_s=READY_S)
        yield made
    finally:
        for pod in kube.items("pods", namespace=namespace):
            kube.delete("pod", pod["metadata"]["name"], namespace=namespace)
        kube.delete("datastore", "data", namespace=namespace)


def size_shown(kube: Kube, pod: str, namespace: str) -> int:
    """The size that the pod sees."""
    return int(kube.tail(pod, namespace=namespace).strip() or 0)


def settings_on_node(kube: Kube, bucket: str) -> Any:
    """What the mount of the bucket tells of itself, in the mount daemon's pod."""
    (daemon,) = pods_of(kube, MOUNT_DAEMON)
    said = json.loads(kube.execute(daemon["metadata"]["name"], "python3", "-c", SERVERS, namespace=SYSTEM))
    return next(each for each in said if each["source"].get("bucket") == bucket)


@promise("S-230", "S-231")
def test_every_edit_under_a_pod_that_reads_and_writes(kube: Kube, volume: Volume) -> None:
    """The same volume, claim, mount and pod; and what changed is shown in the end."""
    space = volume.namespace
    kube.apply(volume.pod("loop", LOOP), volume.pod("total", TOTAL), namespace=space)
    for name in ("loop", "total"):
        kube.wait_phase(name, "Running", namespace=space, limit_s=READY_S)
    loop = Loop(kube, volume)
    loop.goes_on()
    datastore = kube.get("datastore", "data", namespace=space)
    assert datastore is not None
    name = volume_name(datastore["metadata"]["uid"])
    before = [kube.get("pv", name), kube.get("pvc", "data", namespace=space), kube.get("pod", "loop", namespace=space)]
    server = settings_on_node(kube, volume.bucket)["serverPid"]

    edits: list[Manifest] = [
        {"capacity": "2Gi"},
        {"metadataTTL": "3s"},
        {"conflict": "fail"},
        {"writeBack": {"maxDelay": "2s"}},
        {"writeBack": None},
        {"cache": {"size": "64Mi"}},
        {"readOnly": True},
        {"readOnly": None},
        {"reclaimPolicy": "Archive"},
        {"s3": {"region": "us-east-1"}},
        {"s3": {"forcePathStyle": True}},
        {"attributes": "listing"},
    ]
    for edit in edits:
        kube.patch("datastore", "data", {"spec": edit}, namespace=space)
        loop.goes_on()
    began = time.monotonic()
    kube.wait_for(
        "the mount shows the last edit",
        lambda: settings_on_node(kube, volume.bucket)["attributes"] == "listing",
        limit_s=REACHED_S,
        namespace=space,
    )
    print(f"attributes edited to another server on the node: {time.monotonic() - began:.1f} s")
    kube.wait_for(
        "df shows the size", lambda: size_shown(kube, "total", space) == 2 << 30, limit_s=READY_S, namespace=space
    )
    shown = settings_on_node(kube, volume.bucket)
    assert (shown["conflict"], shown["metadata_ttl_s"]) == ("fail", 3.0)
    assert shown["cache_size_bytes"] <= 64 << 20, "its share of that, where the disk is full"
    assert (shown["source"]["region"], shown["read_only"]) == ("us-east-1", False)
    assert shown["serverPid"] != server
    loop.goes_on()
    after = [kube.get("pv", name), kube.get("pvc", "data", namespace=space), kube.get("pod", "loop", namespace=space)]
    uids = [[each["metadata"]["uid"] if each else "" for each in both] for both in (before, after)]
    assert uids[0] == uids[1]
    assert after[2] is not None
    assert after[2]["status"]["containerStatuses"][0]["restartCount"] == 0
    events = kube.items("events", namespace=space)
    assert "ClaimLost" not in [each["reason"] for each in events]
    assert not any("lost" in each["message"] for each in events)


@promise("S-249")
def test_a_plain_claim_of_a_class_grows(site: Site, kube: Kube, storage: Storage, volume: Volume) -> None:
    """As PersistentVolumeClaims of any class with allowVolumeExpansion do."""
    space = volume.namespace
    name = f"grows-{space}"
    secret = {**volume.secret(), "metadata": {"name": name, "namespace": SYSTEM}}
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": DRIVER,
        "allowVolumeExpansion": True,
        "parameters": {
            "bucket": volume.bucket,
            "endpoint": storage.endpoint,
            "secretName": name,
            "secretNamespace": SYSTEM,
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "plain"},
        "spec": {
            "storageClassName": name,
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    kube.apply(secret, namespace=SYSTEM)
    kube.apply(storage_class)
    try:
        kube.apply(claim, namespace=space)
        source = {"persistentVolumeClaim": {"claimName": "plain"}}
        kube.apply(volume.pod("grown", TOTAL, volume=source), namespace=space)
        kube.wait_phase("grown", "Running", namespace=space, limit_s=READY_S)
        kube.wait_for("df", lambda: size_shown(kube, "grown", space) == 1 << 30, limit_s=READY_S, namespace=space)
        began = time.monotonic()
        kube.patch("pvc", "plain", {"spec": {"resources": {"requests": {"storage": "3Gi"}}}}, namespace=space)

        def grown() -> bool:
            found = kube.get("pvc", "plain", namespace=space)
            return found is not None and found["status"]["capacity"]["storage"] == "3Gi"

        kube.wait_for("the claim says it", grown, limit_s=READY_S, namespace=space)
        claimed_s = time.monotonic() - began
        kube.wait_for(
            "df shows it", lambda: size_shown(kube, "grown", space) == 3 << 30, limit_s=READY_S, namespace=space
        )
        print(f"a plain claim grown: its status after {claimed_s:.1f} s, df after {time.monotonic() - began:.1f} s")
        found = kube.get("pvc", "plain", namespace=space)
        assert found is not None
        assert not found["status"].get("conditions")
    finally:
        kube.delete("pod", "grown", namespace=space)
        kube.delete("pvc", "plain", namespace=space)
        kube.delete("storageclass", name)
        kube.delete("secret", name, namespace=SYSTEM)
