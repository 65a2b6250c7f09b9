"""A thousand Datastores, with the controller in its pod under the limit of memory that the manifests give it."""

from __future__ import annotations

import json
import time

import pytest

from tests.cluster.controlled import Bench, condition, datastore_of
from tests.cluster.fixtures import SYSTEM, Product, Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.cluster.test_node_plugin import pods_of, wait_ready
from tests.cluster.volumes import Volume
from tests.promises import promise

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.own_node, pytest.mark.timeout(300, func_only=True)]

CROWD = 1000
USED = 3
READY_S = 90.0
GONE_S = 180.0
LOOK_S = 2.0
"""Between two looks at all of them: each costs the API server as much as many of them."""
PEAK = "print(open('/proc/1/status').read().split('VmHWM:')[1].split()[0])"
LEFT = """
import glob, json, pathlib
def command(process):
    try:
        return (pathlib.Path(process) / "cmdline").read_bytes().split(b"\\0")
    except OSError:  # it has just ended
        return []
print(json.dumps({
    "mounts": [line for line in open("/proc/self/mountinfo") if " - fuse.datastore" in line],
    "processes": [each for each in glob.glob("/proc/[0-9]*") if b"datastore.fuse" in command(each)],
    "directories": glob.glob("/var/lib/kubelet/plugins/csi.datastore.dev/state/*"),
    "cgroups": glob.glob("/sys/fs/cgroup/memory/**/datastore-????????????????", recursive=True),
}))
"""
"""In the mount daemon's pod, which sees all of these: what mounts have left."""


@promise("S-240")
@pytest.mark.timeout(1500, func_only=True)
def test_a_thousand_datastores(site: Site, kube: Kube, product: Product, storage: Storage, namespace: str) -> None:
    """Ready within 120 s, at most 250 MiB; deleted: nothing is left, in the cluster or on the node."""
    wait_ready(kube)
    (controller,) = pods_of(kube, "controller")
    name = controller["metadata"]["name"]
    assert controller["spec"]["containers"][0]["resources"]["limits"] == {"memory": "250Mi"}

    def peak_mib() -> float:
        return int(kube.execute(name, "python3", "-c", PEAK, namespace=SYSTEM)) / 1024

    def left() -> dict[str, list[str]]:
        (daemon,) = pods_of(kube, "mount-daemon")
        found: dict[str, list[str]] = json.loads(
            kube.execute(daemon["metadata"]["name"], "python3", "-c", LEFT, namespace=SYSTEM)
        )
        return found

    bench = Bench(kube, storage.here, namespace)
    volume = Volume(site, storage, namespace, bench.bucket)
    kube.apply(volume.secret(), namespace=namespace)
    spec = bench.spec(reclaimPolicy="Delete", s3={"endpoint": storage.endpoint, "create": True})
    many = [
        datastore_of(f"d{number}", {**spec, "s3": {**spec["s3"], "prefix": f"{number}/"}}) for number in range(CROWD)
    ]
    started = time.monotonic()
    kube.apply(*many, namespace=namespace, timeout_s=300)
    applied_s = time.monotonic() - started

    def ready() -> bool:
        time.sleep(LOOK_S)
        found = kube.items("datastores", namespace=namespace)
        return sum(condition(each, "Ready").get("status") == "True" for each in found) == CROWD

    def gone() -> bool:
        time.sleep(LOOK_S)
        return not kube.items("datastores", namespace=namespace)

    kube.wait_for("all Ready", ready, limit_s=400, namespace=SYSTEM)
    ready_s = time.monotonic() - started
    users = [
        volume.pod(f"uses-{each}", "open('/data/x', 'w').write('x')", volume=claim_of(f"d{each}"))
        for each in range(USED)
    ]
    kube.apply(*users, namespace=namespace)
    for user in users:
        kube.wait_phase(user["metadata"]["name"], "Succeeded", namespace=namespace, limit_s=READY_S)
        kube.delete("pod", user["metadata"]["name"], namespace=namespace)
    assert len(bench.objects()) >= USED
    started = time.monotonic()
    kube.kubectl("delete", "datastores", "--all", "--wait=false", "--namespace", namespace, timeout_s=300)
    kube.wait_for("all gone", gone, limit_s=400, namespace=SYSTEM)
    gone_s = time.monotonic() - started
    print(f"applied {applied_s:.0f} s, Ready {ready_s:.0f} s, gone {gone_s:.0f} s, {peak_mib():.0f} MiB")
    assert bench.objects() == []
    assert kube.items("pvc", namespace=namespace) == []
    mine = [each for each in kube.items("pv") if each["spec"].get("claimRef", {}).get("namespace") == namespace]
    assert mine == []
    kube.wait_for("a clean node", lambda: not any(left().values()), limit_s=GONE_S, namespace=SYSTEM)
    (after,) = pods_of(kube, "controller")
    assert after["metadata"]["name"] == name
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0, "it was ended, maybe for its memory"
    assert peak_mib() <= 250
    assert ready_s <= 120


def claim_of(datastore: str) -> Manifest:
    return {"persistentVolumeClaim": {"claimName": datastore}}
