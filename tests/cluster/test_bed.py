"""The test cluster is a real one: pods run, names resolve, services answer, a FUSE mount crosses from pod to pod."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import cluster as clusters
from tests.cluster.fixtures import Site, Storage
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.cluster.layout import CGROUP_ROOT, Layout
from tests.cluster.node_init import MNT_DETACH
from tests.servers import boto_client, make_bucket

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(900, func_only=True)]

RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SERVING = "import http.server, os; os.chdir('/etc'); http.server.test(http.server.SimpleHTTPRequestHandler, port=8080)"


def pod(name: str, container: Manifest, **spec: object) -> Manifest:
    """A pod of one container that is not started again and ends quickly."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container], **spec},
    }


def test_a_job_of_three_restricted_pods_completes(site: Site, kube: Kube, namespace: str) -> None:
    container = site.container(
        "python3", "-c", "import datastore.controller, datastore.csi, grpc, kopf, os; print('user', os.getuid())"
    )
    template = {"spec": {"restartPolicy": "Never", "containers": [{**container, "securityContext": RESTRICTED}]}}
    spec = {"completions": 3, "parallelism": 3, "template": template}
    kube.apply(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "three"}, "spec": spec}, namespace=namespace
    )
    took = kube.wait_condition("job", "three", "Complete", namespace=namespace)
    pods = kube.items("pods", namespace=namespace, selector="job-name=three")
    assert [kube.logs(each["metadata"]["name"], namespace=namespace) for each in pods] == ["user 65532\n"] * 3
    print(f"a job of three pods: {took:.1f} s from apply to complete")


def test_a_pod_reaches_a_service_by_its_name(site: Site, kube: Kube, namespace: str) -> None:
    web = {
        **site.container("python3", "-c", SERVING),
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    }
    ports = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": ports}
    kube.apply(pod("web", web), service, namespace=namespace)
    kube.wait_condition("pod", "web", "Ready", namespace=namespace)
    names = ("web", f"web.{namespace}.svc.cluster.local")
    # The pod is ready a moment before kube-proxy lets connections through to it.
    program = f"""
import time, urllib.request
end = time.monotonic() + 90
for name in {names}:
    while True:
        try:
            print(urllib.request.urlopen(f"http://{{name}}/hostname", timeout=10).read())
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
"""
    kube.apply(pod("client", site.container("python3", "-c", program)), namespace=namespace)
    kube.wait_phase("client", "Succeeded", namespace=namespace)
    assert kube.logs("client", namespace=namespace) == "b'web\\n'\n" * 2


def mounting_pod(site: Site, folder: str, manifest: Manifest, secret: Manifest) -> list[Manifest]:
    """A privileged pod that mounts the Datastore at FOLDER/data of the node, and its configuration."""
    text = yaml.safe_dump_all([manifest, secret])
    config = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "mount"},
        "stringData": {"datastore.yaml": text},
    }
    mounts: list[Manifest] = [
        {"name": "node", "mountPath": "/node", "mountPropagation": "Bidirectional"},
        {"name": "config", "mountPath": "/config"},
    ]
    command = ("datastore", "mount", "--foreground", "--allow-other", "/config/datastore.yaml", "data", "/node/data")
    container = {
        **site.container(*command),
        "securityContext": {"privileged": True, "runAsUser": 0},
        "env": [{"name": "HOME", "value": "/root"}],
        "volumeMounts": mounts,
    }
    node = {"name": "node", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    return [config, pod("mounting", container, volumes=[node, {"name": "config", "secret": {"secretName": "mount"}}])]


def test_a_mount_made_by_our_image_in_one_pod_is_read_and_written_in_another(
    site: Site, kube: Kube, namespace: str, storage: Storage
) -> None:
    bucket = make_bucket(storage.here, f"bed-{uuid.uuid4().hex[:12]}")
    client = boto_client(storage.here)
    client.put_object(Bucket=bucket, Key="given.txt", Body=b"from S3")
    s3 = {"bucket": bucket, "endpoint": storage.endpoint, "credentialsSecret": "keys"}
    api = {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "Datastore",
        "metadata": {"name": "data"},
        "spec": {"s3": s3},
    }
    keys = {"AWS_ACCESS_KEY_ID": storage.here.access_key, "AWS_SECRET_ACCESS_KEY": storage.here.secret_key}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys}
    folder = f"/var/lib/kubelet/{namespace}"
    kube.apply(*mounting_pod(site, folder, api, secret), namespace=namespace)

    program = (
        "import pathlib, time\n"
        "data = pathlib.Path('/node/data')\n"
        "while not data.is_mount(): time.sleep(0.05)\n"
        "print((data / 'given.txt').read_text())\n"
        "(data / 'made.txt').write_text('from a pod')\n"
        "print(sorted(each.name for each in data.iterdir()))\n"
    )
    seen = [{"name": "node", "mountPath": "/node", "mountPropagation": "HostToContainer"}]
    volume = {"name": "node", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    reader = {
        **site.container("python3", "-u", "-c", program),
        "securityContext": {"runAsUser": 0},
        "volumeMounts": seen,
    }
    kube.apply(pod("reader", reader, volumes=[volume]), namespace=namespace)
    took = kube.wait_phase("reader", "Succeeded", namespace=namespace)
    assert kube.logs("reader", namespace=namespace) == "from S3\n['given.txt', 'made.txt']\n"
    assert client.get_object(Bucket=bucket, Key="made.txt")["Body"].read() == b"from a pod"
    kube.delete("pod", "mounting", namespace=namespace)
    print(f"two pods, a mount, read and written: {took:.1f} s")


@pytest.mark.own_node
def test_the_kubelet_is_started_again_and_its_pods_live_on(site: Site, kube: Kube, namespace: str) -> None:
    assert site.own is not None
    kube.apply(pod("steady", site.container("sleep", "600")), namespace=namespace)
    kube.wait_condition("pod", "steady", "Ready", namespace=namespace)
    site.own.restart("kubelet")

    def reached() -> bool:
        with contextlib.suppress(KubeError):
            return kube.execute("steady", "echo", "alive", namespace=namespace) == "alive\n"
        return False

    kube.wait_for("the pod through the new kubelet", reached, namespace=namespace)
    found = kube.get("pod", "steady", namespace=namespace)
    assert found is not None
    assert [each["restartCount"] for each in found["status"]["containerStatuses"]] == [0]


@contextlib.contextmanager
def hanging_mount() -> Iterator[tuple[Path, int]]:
    """A FUSE mount of somebody else, whose server answers nothing; and the server's end of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        try:
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
            assert libc.mount(b"other", folder.encode(), b"fuse.datastore", 0, options) == 0, ctypes.get_errno()
            try:
                yield Path(folder), device
            finally:
                libc.umount2(folder.encode(), MNT_DETACH)
        finally:
            os.close(device)


def is_gone(device: int) -> bool:
    """Whether the file system of this server is mounted nowhere: not in any namespace."""
    try:
        os.read(device, 1 << 18)
    except OSError as error:
        return error.errno == errno.ENODEV
    return False


@pytest.mark.own_node
def test_clusters_run_side_by_side_and_leave_nothing_behind(site: Site) -> None:
    name = f"beside-{uuid.uuid4().hex[:8]}"
    with hanging_mount() as (place, device), contextlib.ExitStack() as ending:
        other = clusters.up(name, api_only=True)
        ending.callback(other.end)
        assert str(place) not in Path(f"/proc/{other.record.init_pid}/mountinfo").read_text()
        assert not is_gone(device)
        ctypes.CDLL(None).umount2(str(place).encode(), 0)
        site.kube.wait_for("end of a mount that the cluster found", lambda: is_gone(device), limit_s=60)
        assert Kube(other.kubeconfig).get("namespace", "default")
        processes = other.processes()
        assert len(processes) >= 4
    assert not Layout(name=name).state.exists()
    assert not list(CGROUP_ROOT.glob(f"*/{Layout(name=name).cgroup}"))
    assert not [each for each in processes if each.is_running()]
    assert clusters.find(name) is None
    assert site.kube.get("namespace", "default"), "the other cluster is still there"
