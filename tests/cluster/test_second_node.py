"""A second node: one Datastore on both, and what stays, and what goes on, when one of them loses its power."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from datastore.api.names import MANAGER, volume_name
from datastore.training.cluster import names
from tests.cluster import cluster as clusters
from tests.cluster import managednfs
from tests.cluster.cluster import Cluster
from tests.cluster.controlled import condition, datastore_of
from tests.cluster.fixtures import ROLLOUT_S, SYSTEM, Product, Site, Storage
from tests.cluster.image import GANESHA, image_archive
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.cluster.test_node_plugin import MOUNT_DAEMON, NODE, is_ready, pods_of, wait_ready
from tests.cluster.volumes import LOOP, Loop, Volume
from tests.promises import promise
from tests.servers import boto_client, make_bucket

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.own_node, pytest.mark.timeout(1500, func_only=True)]
READY_S = 240.0
TTL_S = 2.0
LOST_S = 480.0
"""Kubernetes fails the pods of a Node that is gone within a minute; then they start elsewhere."""
FIRST, SECOND = "node-1", "node-2"

WRITER = """
import itertools, pathlib, time
place = pathlib.Path("/data/there"); place.mkdir(exist_ok=True)
for number in itertools.count(1):
    (place / f"f{number}").write_text(str(number) * 1000)
    print(number, flush=True)
    time.sleep(0.1)
"""
"""Says the number of each file when it is closed."""
CHECK = """
import pathlib, sys
for number in range(1, int(sys.argv[1]) + 1):
    assert pathlib.Path(f"/data/there/f{number}").read_text() == str(number) * 1000, number
"""
TRAINING = """
import os, pathlib, time
place = pathlib.Path("/out") / (os.environ["DATASTORE_JOB"] + "-" + os.environ["DATASTORE_ROLE"])
place.mkdir(exist_ok=True)
# What was being written when the power went is not whole.
first = step = max((int(each.name) for each in place.iterdir() if each.read_text() == each.name), default=0)
print("begins at step", first, flush=True)
while first == 0 or step < first + 5:
    step += 1
    (place / str(step)).write_text(str(step))
    time.sleep(0.5)
"""
"""Ends only when it goes on from a step that it saved."""


@pytest.fixture(scope="module")
def second(site: Site, kube: Kube, product: Product) -> Iterator[Cluster]:
    """Another node with the driver on it; afterwards the cluster has the first one alone."""
    assert site.own is not None
    wait_ready(kube)
    began = time.monotonic()
    node = clusters.join(site.own)
    try:
        node.load(image_archive())
        kube.wait_for("the driver on both", lambda: all(len(pods_of(kube, each)) == 2 for each in (NODE, MOUNT_DAEMON)))
        wait_ready(kube)
        print(f"a second node with the driver: {time.monotonic() - began:.1f} s")
        yield node
    finally:
        node.end()
        kube.delete("node", SECOND)
        for pod in pods_on(kube, SECOND):
            remove_by_force(kube, pod)
        scale(kube, 1)
        wait_ready(kube)


def pods_on(kube: Kube, node: str, namespace: str = "") -> list[Manifest]:
    return [each for each in kube.items("pods", namespace=namespace) if each["spec"].get("nodeName") == node]


def remove_by_force(kube: Kube, pod: Manifest) -> None:
    """As who knows that its node will not come back; Kubernetes does the same by itself a minute after its Node."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    with suppress(KubeError):  # Kubernetes was quicker
        kube.kubectl("delete", "pod", name, f"--namespace={namespace}", "--force", "--grace-period=0")


def scale(kube: Kube, replicas: int) -> None:
    kube.kubectl("scale", f"deployment/{MANAGER}", f"--namespace={SYSTEM}", f"--replicas={replicas}")
    limit = f"--timeout={ROLLOUT_S:.0f}s"
    kube.kubectl("rollout", "status", f"deployment/{MANAGER}", f"--namespace={SYSTEM}", limit, timeout_s=ROLLOUT_S + 30)


def leader(kube: Kube) -> str:
    """The pod that holds the controller's Lease."""
    lease = kube.get("lease", MANAGER, namespace=SYSTEM)
    return str(lease["spec"].get("holderIdentity", "")) if lease else ""


def lead_from(kube: Kube, node: str, other: str) -> None:
    """Two replicas of the controller, one on each node, and the one on `node` works."""

    def pods(where: str) -> set[str]:
        found = pods_of(kube, "controller")
        return {each["metadata"]["name"] for each in found if each["spec"].get("nodeName") == where}

    def replaced(names: set[str]) -> bool:
        # Not by the status of the Deployment, which may still be that from before.
        ready = {each["metadata"]["name"] for each in pods_of(kube, "controller") if is_ready(each)}
        return len(ready) == 2 and not ready & names

    def move(names: set[str], away_from: str) -> None:
        kube.kubectl("cordon", away_from)
        try:
            scale(kube, 2)
            for name in names:
                kube.delete("pod", name, namespace=SYSTEM)
            kube.wait_for("others in their place", lambda: replaced(names), limit_s=READY_S, namespace=SYSTEM)
        finally:
            kube.kubectl("uncordon", away_from)

    move(pods(other), other)
    kube.wait_for(f"a leader on {node}", lambda: leader(kube) in pods(node), limit_s=READY_S, namespace=SYSTEM)
    move(pods(node) - {leader(kube)}, node)
    assert leader(kube) in pods(node)


@pytest.fixture
def volume(site: Site, kube: Kube, storage: Storage, second: Cluster, namespace: str) -> Iterator[Volume]:
    """A Datastore `data`, and a pod on each node that writes to it: loop on the first, there on the second."""
    made = Volume(site, storage, namespace, make_bucket(storage.here, f"bucket-{namespace}"))
    s3 = {"bucket": made.bucket, "endpoint": storage.endpoint, "credentialsSecret": "keys"}
    kube.apply(made.secret(), datastore_of("data", {"s3": s3, "metadataTTL": f"{TTL_S:.0f}s"}), namespace=namespace)
    trained = make_bucket(storage.here, f"trained-{namespace}")
    kube.apply(datastore_of("out", {"s3": {**s3, "bucket": trained}}), namespace=namespace)
    try:
        kube.wait_condition("datastore", "data", "Ready", namespace=namespace, limit_s=READY_S)
        pods = (made.pod("loop", LOOP, nodeName=FIRST), made.pod("there", WRITER, nodeName=SECOND))
        kube.apply(*pods, namespace=namespace)
        for name in ("loop", "there"):
            kube.wait_phase(name, "Running", namespace=namespace, limit_s=READY_S)
        yield made
    finally:
        kube.kubectl("delete", "trainingjobs", "--all", f"--namespace={namespace}")
        for pod in kube.items("pods", namespace=namespace):
            if pod["spec"].get("nodeName") == SECOND and not second.alive():
                remove_by_force(kube, pod)
            else:
                kube.delete("pod", pod["metadata"]["name"], namespace=namespace)
        for name in ("data", "out"):
            kube.delete("datastore", name, namespace=namespace)


class Training:
    """Two TrainingJobs on the second node: `alone`, of one replica there, and `both`, which all starts again, with its
    master on the first node and its worker on the second."""

    REPLICAS = (("alone", "master"), ("both", "master"), ("both", "worker"))

    def __init__(self, kube: Kube, volume: Volume) -> None:
        self.kube, self.space, self.image = kube, volume.namespace, volume.site.image
        self.s3, self.bucket = boto_client(volume.storage.here), f"trained-{self.space}"

    def start(self) -> None:
        on_first = {"nodeSelector": {"kubernetes.io/hostname": FIRST}}
        on_first["tolerations"] = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]  # type: ignore[assignment]
        self.kube.kubectl("cordon", FIRST)
        try:
            both = {"master": {"template": {**self._template(), **on_first}}, "worker": {}}
            self.kube.apply(self._job("alone"), self._job("both", roles=both, restart="all"), namespace=self.space)
            self.kube.wait_for("their pods", lambda: None not in self._nodes(), limit_s=READY_S, namespace=self.space)
        finally:
            self.kube.kubectl("uncordon", FIRST)
        assert self._nodes() == [SECOND, FIRST, SECOND]
        self.kube.wait_for("their first steps", lambda: 0 not in self.steps(), limit_s=READY_S, namespace=self.space)

    def steps(self) -> list[int]:
        """How far each replica is, as the storage has it."""
        found = []
        for job, role in self.REPLICAS:
            listed = self.s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{job}-{role}/").get("Contents", [])
            found.append(max((int(each["Key"].rpartition("/")[2]) for each in listed if each["Size"]), default=0))
        return found

    def goes_on_from(self, steps: list[int]) -> None:
        """Both jobs succeed on the first node, from what was saved before."""

        def ended() -> bool:
            phases = {name: self._status(name).get("phase") for name in ("alone", "both")}
            failed = [name for name, phase in phases.items() if phase == "Failed"]
            assert not failed, [self._evidence(name) for name in failed]
            return set(phases.values()) == {"Succeeded"}

        self.kube.wait_for("end of the training", ended, limit_s=LOST_S, namespace=self.space)
        for (job, role), step in zip(self.REPLICAS, steps, strict=True):
            (replica,) = [each for each in self._evidence(job) if each["role"] == role]
            assert (replica["state"], replica["restarts"]) == ("Succeeded", 1)
            begun = int(re.findall(r"begins at step (\d+)", replica["log"])[-1])
            assert begun >= step
        assert [self._status(name)["restarts"] for name in ("alone", "both")] == [1, 1]

    def _status(self, name: str) -> dict[str, Any]:
        found = self.kube.get("trainingjob", name, namespace=self.space) or {}
        status: dict[str, Any] = found.get("status") or {}
        return status

    def _evidence(self, name: str) -> list[dict[str, Any]]:
        found = self.kube.get("configmap", names.evidence_name(name), namespace=self.space)
        assert found is not None
        replicas: list[dict[str, Any]] = json.loads(found["data"][names.EVIDENCE_KEY])["replicas"]
        return replicas

    def _nodes(self) -> list[str | None]:
        pods = {
            (pod["metadata"]["labels"][names.JOB], pod["metadata"]["labels"][names.ROLE]): pod["spec"].get("nodeName")
            for pod in self.kube.items("pods", namespace=self.space, selector=names.JOB)
        }
        return [pods.get(each) for each in self.REPLICAS]

    def _job(self, name: str, **spec: Any) -> Manifest:
        given = {
            "framework": "none",
            "image": self.image,
            "command": ["python3", "-c", TRAINING],
            "datastores": [{"name": "out", "path": "/out"}],
            "template": self._template(),
            **spec,
        }
        metadata = {"name": name}
        return {"apiVersion": "datastore.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": given}

    def _template(self) -> dict[str, Any]:
        return {"imagePullPolicy": "IfNotPresent", "securityContext": {"runAsUser": 0}}


@promise("S-294")
def test_the_server_of_an_export_moves_to_the_other_node_under_open_files(
    site: Site, kube: Kube, second: Cluster, managed: None, namespace: str
) -> None:
    second.load(image_archive(GANESHA))
    kube.kubectl("cordon", SECOND)
    try:
        kube.apply(datastore_of("results", {"nfs": {}, "reclaimPolicy": "Delete"}), namespace=namespace)
        kube.wait_condition("datastore", "results", "Ready", namespace=namespace, limit_s=READY_S)
    finally:
        kube.kubectl("uncordon", SECOND)
    found = kube.get("datastore", "results", namespace=namespace)
    assert found is not None
    name = volume_name(found["metadata"]["uid"])
    kube.apply(managednfs.pod(site, "loop", managednfs.LOOP, nodeName=FIRST), namespace=namespace)
    kube.wait_phase("loop", "Running", namespace=namespace, limit_s=READY_S)
    managednfs.goes_on(kube, namespace)

    def where() -> str:
        server = kube.get("pod", f"{name}-0", namespace=managednfs.SPACE)
        return str(server["spec"].get("nodeName")) if server else ""

    assert where() == FIRST
    kube.kubectl("cordon", FIRST)
    try:
        kube.kubectl("delete", "pod", f"{name}-0", f"--namespace={managednfs.SPACE}", "--wait=false")
        kube.wait_for(
            "the server on the other node",
            lambda: where() == SECOND and managednfs.replaced(kube, name),
            limit_s=READY_S,
            namespace=managednfs.SPACE,
        )
    finally:
        kube.kubectl("uncordon", FIRST)
    print(f"the server is on the other node, then 15 rounds: {managednfs.goes_on(kube, namespace):.1f} s")
    kube.delete("pod", "loop", namespace=namespace)
    kube.delete("datastore", "results", namespace=namespace)


@promise("S-85", "S-124")
def test_a_node_that_is_rebooted_has_its_volumes_again_and_loses_nothing(
    site: Site, kube: Kube, second: Cluster, storage: Storage, namespace: str
) -> None:
    """The pod `stays` comes back; `leaves` is deleted while the node is off, so nobody mounts its volume again."""
    assert site.own is not None
    names = ("stays", "leaves")
    volumes = {
        each: Volume(site, storage, namespace, make_bucket(storage.here, f"{each}-{namespace}")) for each in names
    }
    for name, volume in volumes.items():
        s3 = {**volume.spec["s3"], "credentialsSecret": "keys"}
        slowly = {"writeBack": {"maxDelay": "60s"}, "uploadLimit": "512Ki"}
        kube.apply(volume.secret(), datastore_of(name, {"s3": s3, **slowly}), namespace=namespace)
        kube.wait_condition("datastore", name, "Ready", namespace=namespace, limit_s=READY_S)
        claim = {"persistentVolumeClaim": {"claimName": name}}
        pod = volume.pod(name, WRITER.replace("1000", "100_000"), volume=claim, nodeName=SECOND, restartPolicy="Always")
        kube.apply(pod, namespace=namespace)

    def closed(name: str) -> int:
        return int(kube.tail(name, namespace=namespace) or 0)

    def sent(name: str) -> bool:
        wanted = {f"there/f{number}" for number in range(1, before[name] + 1)}
        listed = boto_client(storage.here).list_objects_v2(Bucket=volumes[name].bucket, Prefix="there/f")
        return wanted <= {each["Key"] for each in listed.get("Contents", [])}

    def back() -> bool:
        pod = kube.get("pod", "stays", namespace=namespace)
        assert pod is not None
        (container,) = pod["status"]["containerStatuses"]
        return container["restartCount"] > 0 and "running" in container["state"]

    for name in names:
        kube.wait_for(f"files of {name}", lambda: closed(name) > 30, limit_s=READY_S, namespace=namespace)  # noqa: B023
    before = {name: closed(name) for name in names}
    assert not any(map(sent, names)), "what was closed was sent at once"
    leaves = ("delete", "pod", "leaves", f"--namespace={namespace}", "--wait=false")
    clusters.reboot(site.own, second, meanwhile=lambda: kube.kubectl(*leaves))
    took_s = kube.wait_for("the pod again", back, limit_s=READY_S, namespace=namespace)
    print(f"when the node was ready again, its pod ran again after {took_s:.1f} s")
    for what, done in {
        "what the pod had closed": lambda: sent("stays"),
        "the end of the other pod": lambda: kube.get("pod", "leaves", namespace=namespace) is None,
    }.items():
        kube.wait_for(what, done, limit_s=READY_S, namespace=namespace)
    assert second.run("cat", "/proc/1/mountinfo").count(" - fuse.datastore ") == 2, "of the node and of the pod"
    assert left_files(kube) > 0
    assert not sent("leaves")

    claim = {"persistentVolumeClaim": {"claimName": "leaves"}}
    kube.apply(volumes["leaves"].pod("later", "pass", volume=claim, nodeName=SECOND), namespace=namespace)
    kube.wait_for("what the other pod had closed", lambda: sent("leaves"), limit_s=READY_S, namespace=namespace)
    kube.wait_for("no file that was left", lambda: left_files(kube) == 0, namespace=namespace)
    for name in ("stays", "later"):
        kube.delete("pod", name, namespace=namespace)
    for name in names:
        kube.delete("datastore", name, namespace=namespace)


def left_files(kube: Kube) -> float:
    """How many files the second node has of volumes that have left it."""
    (plugin,) = [each for each in pods_of(kube, NODE) if each["spec"].get("nodeName") == SECOND]
    path = f"/api/v1/namespaces/{SYSTEM}/pods/{plugin['metadata']['name']}:9808/proxy/metrics"
    lines = kube.kubectl("get", "--raw", path).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("datastore_csi_left_files{"))


@promise("S-237", "S-238", "S-363")
def test_one_datastore_on_two_nodes_one_of_which_loses_its_power(kube: Kube, second: Cluster, volume: Volume) -> None:
    """A training goes on elsewhere from what it saved."""
    space = volume.namespace

    def in_pod(name: str, script: str, *words: str) -> str:
        return kube.execute(name, "python3", "-c", script, *words, namespace=space)

    training = Training(kube, volume)
    training.start()
    pair = ("loop", "there")
    for number in range(4):
        writer, reader = pair[number % 2], pair[1 - number % 2]
        in_pod(writer, f"open('/data/note', 'w').write('{number} of {writer}')")
        time.sleep(TTL_S)
        assert in_pod(reader, "print(open('/data/note').read())") == f"{number} of {writer}\n"
    in_pod("loop", "import os; os.rename('/data/note', '/data/renamed')")
    time.sleep(TTL_S)
    assert in_pod("there", "import os; print(sorted(os.listdir('/data')))") == "['loop', 'renamed', 'there']\n"

    lead_from(kube, SECOND, FIRST)
    lost = leader(kube)
    loop = Loop(kube, volume)
    loop.goes_on()
    closed = int(kube.tail("there", namespace=space))
    assert closed > 0
    steps = training.steps()
    cut = datetime.now(UTC)
    second.end()
    loop.goes_on()
    in_pod("loop", CHECK, str(closed))
    kube.wait_for("another leader", lambda: leader(kube) not in ("", lost), limit_s=READY_S, namespace=SYSTEM)
    lease = kube.get("lease", MANAGER, namespace=SYSTEM)
    assert lease is not None
    failover_s = (datetime.fromisoformat(lease["spec"]["acquireTime"]) - cut).total_seconds()
    print(f"a node lost its power: {closed} files of it are whole, the controller failed over after {failover_s:.1f} s")
    assert leader(kube) in {each["metadata"]["name"] for each in pods_on(kube, FIRST, SYSTEM)}
    assert lost in {each["metadata"]["name"] for each in pods_on(kube, SECOND, SYSTEM)}, "it was not the Lease alone"

    # Before the Node goes: a minute after that Kubernetes ends its pods by itself.
    datastore = kube.get("datastore", "data", namespace=space)
    assert datastore is not None
    kube.delete("datastore", "data", namespace=space, wait=False)

    def in_the_way() -> str:
        return condition(kube.get("datastore", "data", namespace=space), "Ready").get("message", "")

    kube.wait_for("both in the way", lambda: "loop, there" in in_the_way(), limit_s=READY_S, namespace=space)
    (there,) = [each for each in pods_on(kube, SECOND, space) if each["metadata"]["name"] == "there"]
    remove_by_force(kube, there)
    kube.wait_for("one in the way", lambda: in_the_way() == "in use by: loop", limit_s=READY_S, namespace=space)

    kube.delete("node", SECOND)
    lost_at = time.monotonic()
    kube.wait_for("end of its CSINode", lambda: kube.get("csinode", SECOND) is None, limit_s=READY_S)
    assert [each for each in kube.items("volumeattachments") if each["spec"]["nodeName"] == SECOND] == []
    loop.goes_on()
    kube.delete("pod", "loop", namespace=space)
    took_s = kube.wait_for(
        "end of the Datastore",
        lambda: kube.get("datastore", "data", namespace=space) is None,
        limit_s=READY_S,
        namespace=space,
    )
    assert kube.get("pv", volume_name(datastore["metadata"]["uid"])) is None
    print(f"without pods the Datastore is gone after {took_s:.1f} s")

    training.goes_on_from(steps)
    print(f"the training has gone on, and ended, {time.monotonic() - lost_at:.1f} s after the Node was deleted")
