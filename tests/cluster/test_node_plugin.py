"""The node plugin on a real kubelet: pods on a volume, and what they see when anything of ours is replaced."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import pytest

from datastore.api.datastore import API_VERSION
from datastore.api.volumecontext import MEMORY
from datastore.csi.mountdaemon.cgroups import group_name, limit_of
from datastore.csi.plugin import STARTUP_TAINT
from datastore.csi.request import key_of
from tests.cluster.fixtures import SYSTEM, Product, Site, Storage
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.cluster.volumes import DRIVER, LOOP, OVERGROWN, SERVERS, SHOWS, Loop, SurvivalLoop, Volume
from tests.csi.accounts import run_accounts
from tests.promises import promise
from tests.servers import boto_client, make_bucket

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(1200, func_only=True)]
NODE, MOUNT_DAEMON = "node", "mount-daemon"
READY_S = 240.0
ROTATED_S = 300.0
"""The kubelet publishes again by itself now and then (components.py), when it has the time."""


@pytest.fixture(scope="module")
def node_plugin(site: Site, product: Product) -> None:
    """Mount daemon and node plugin, running."""
    wait_ready(site.kube)


def pods_of(kube: Kube, component: str) -> list[Manifest]:
    return kube.items("pods", namespace=SYSTEM, selector=f"app.kubernetes.io/component={component}")


def wait_ready(kube: Kube) -> None:
    def there() -> bool:
        pods = [pods_of(kube, component) for component in (NODE, MOUNT_DAEMON)]
        return all(pods) and all(is_ready(pod) for each in pods for pod in each)

    kube.wait_for("both DaemonSets ready", there, limit_s=READY_S, namespace=SYSTEM)


def is_ready(pod: Manifest) -> bool:
    conditions = pod["status"].get("conditions", [])
    leaving = "deletionTimestamp" in pod["metadata"]
    return not leaving and any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@contextmanager
def in_use(kube: Kube, made: Volume) -> Iterator[Volume]:
    """The volume's objects; at the end its pods go first, while the driver is still there."""
    namespace = made.namespace
    kube.apply(*made.objects(), namespace=namespace)
    try:
        yield made
    finally:
        for pod in kube.items("pods", namespace=namespace):
            kube.delete("pod", pod["metadata"]["name"], namespace=namespace)
        kube.delete("pvc", "data", namespace=namespace)
        kube.delete("pv", f"datastore-{namespace}")


@pytest.fixture
def volume(site: Site, kube: Kube, storage: Storage, node_plugin: None, namespace: str) -> Iterator[Volume]:
    with in_use(kube, Volume(site, storage, namespace, make_bucket(storage.here, f"bucket-{namespace}"))) as made:
        yield made


@pytest.fixture
def runs(kube: Kube, volume: Volume) -> Callable[..., str]:
    """A script in a pod that ends well; what it printed."""

    def run(name: str, script: str, **more: Any) -> str:
        kube.apply(volume.pod(name, script, **more), namespace=volume.namespace)
        kube.wait_phase(name, "Succeeded", namespace=volume.namespace, limit_s=READY_S)
        return kube.logs(name, namespace=volume.namespace)

    return run


Runs = Callable[..., str]


@promise("S-80")
def test_two_pods_use_one_volume(kube: Kube, volume: Volume, storage: Storage, runs: Runs) -> None:
    boto_client(storage.here).put_object(Bucket=volume.bucket, Key="given", Body=b"given")
    script = (
        "import time\n"
        "print(open('/data/given').read(), flush=True)\n"
        "open('/data/x', 'w').write('x')\n"
        "print('written', flush=True)\n"
        "time.sleep(3600)\n"
    )
    began = time.time()
    kube.apply(volume.pod("first", script), namespace=volume.namespace)
    kube.wait_phase("first", "Running", namespace=volume.namespace, limit_s=READY_S)
    running_s = time.time() - began
    log = ("logs", "first", f"--namespace={volume.namespace}", "--timestamps")
    kube.wait_for("its file", lambda: "written" in kube.kubectl(*log), limit_s=READY_S, namespace=volume.namespace)
    at = re.sub(r"(\.\d{6})\d*", r"\1", kube.kubectl(*log).split()[0])
    read_s = datetime.fromisoformat(at).timestamp() - began
    print(f"pod on a volume: apply to running {running_s:.1f} s, to its first read {read_s:.1f} s")
    assert runs("second", "print(open('/data/x').read()); open('/data/y', 'w').write('y')") == "x\n"
    assert boto_client(storage.here).get_object(Bucket=volume.bucket, Key="y")["Body"].read() == b"y"
    assert kube.execute("first", "cat", "/data/y", namespace=volume.namespace) == "y"


@promise("S-82")
def test_a_read_only_pod_can_not_write(volume: Volume, runs: Runs) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}}
    script = "import errno\ntry: open('/data/x', 'w')\nexcept OSError as error: print(errno.errorcode[error.errno])"
    assert runs("reader", script, volume=claim) == "EROFS\n"
    assert runs("reader-by-mount", script, mount={"readOnly": True}) == "EROFS\n"


@promise("S-83")
def test_a_user_who_is_not_root_writes_by_fsgroup(volume: Volume, runs: Runs) -> None:
    script = "import os; open('/data/x', 'a').write('x'); s = os.stat('/data/x'); print(s.st_uid, s.st_gid)"
    restricted = {
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "runAsNonRoot": True,
        "fsGroup": 3000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert runs("grouped", script, securityContext=restricted) == "1000 3000\n"


def test_a_subpath_of_a_volume(volume: Volume, runs: Runs, storage: Storage) -> None:
    runs("writer", "open('/data/x', 'w').write('x')", mount={"subPath": "deep/down"})
    assert boto_client(storage.here).get_object(Bucket=volume.bucket, Key="deep/down/x")["Body"].read() == b"x"


@promise("S-84")
def test_an_inline_volume(volume: Volume, runs: Runs, storage: Storage) -> None:
    attributes = {"bucket": volume.bucket, "endpoint": storage.endpoint, "prefix": "inline/"}
    inline = {"csi": {"driver": DRIVER, "volumeAttributes": attributes, "nodePublishSecretRef": {"name": "keys"}}}
    runs("inline", "open('/data/x', 'w').write('x')", volume=inline)
    assert boto_client(storage.here).get_object(Bucket=volume.bucket, Key="inline/x")["Body"].read() == b"x"


@pytest.fixture
def digits(kube: Kube, volume: Volume, storage: Storage) -> Iterator[str]:
    """A Datastore of that name, Ready, with one file of 5,000,000 bytes; beside the volume, whose Secret it has."""
    boto_client(storage.here).put_object(Bucket=volume.bucket, Key="digits/large", Body=bytes(5_000_000))
    s3 = {**volume.spec["s3"], "prefix": "digits/", "credentialsSecret": "keys"}
    metadata = {"name": "digits", "namespace": volume.namespace}
    kube.apply(
        {"apiVersion": API_VERSION, "kind": "Datastore", "metadata": metadata, "spec": {"s3": s3}},
        namespace=volume.namespace,
    )
    kube.wait_condition("datastore", "digits", "Ready", namespace=volume.namespace, limit_s=READY_S)
    yield "digits"
    for pod in kube.items("pods", namespace=volume.namespace):
        kube.delete("pod", pod["metadata"]["name"], namespace=volume.namespace)
    kube.delete("datastore", "digits", namespace=volume.namespace)


def by_name(name: str, **more: Any) -> Manifest:
    return {"csi": {"driver": DRIVER, "volumeAttributes": {"datastore": name}, **more}}


@promise("S-120")
def test_an_inline_volume_names_a_datastore(
    kube: Kube, volume: Volume, digits: str, runs: Runs, storage: Storage
) -> None:
    kube.apply(volume.pod("keyless", "pass", volume=by_name(digits)), namespace=volume.namespace)
    kube.apply(volume.pod("mistaken", "pass", volume=by_name("digit")), namespace=volume.namespace)
    runs("named", "open('/data/x', 'w').write('x')", volume=by_name(digits, nodePublishSecretRef={"name": "keys"}))
    assert boto_client(storage.here).get_object(Bucket=volume.bucket, Key="digits/x")["Body"].read() == b"x"
    for pod, line in (
        ("keyless", "an inline volume of Datastore digits needs nodePublishSecretRef: {name: keys}; or use"),
        ("mistaken", f"there is no Datastore digit in namespace {volume.namespace}"),
    ):
        kube.wait_for(line, lambda: line in said_of(kube, pod, volume), namespace=volume.namespace)  # noqa: B023


def said_of(kube: Kube, pod: str, volume: Volume) -> str:
    """The messages of a pod's events."""
    events = kube.items("events", namespace=volume.namespace)
    return "\n".join(each["message"] for each in events if each["involvedObject"].get("name") == pod)


@promise("S-121")
def test_df_and_the_kubelet_show_the_usage_of_a_volume(kube: Kube, volume: Volume, digits: str) -> None:
    claim = {"persistentVolumeClaim": {"claimName": digits}}
    kube.apply(volume.pod("shows", SHOWS, volume=claim), namespace=volume.namespace)
    kube.wait_phase("shows", "Running", namespace=volume.namespace, limit_s=READY_S)

    def by_df() -> tuple[int, int]:
        used, files = kube.tail("shows", namespace=volume.namespace).split() or (0, 0)
        return int(used), int(files)

    took_s = kube.wait_for("df shows it", lambda: by_df()[0] > 0, limit_s=READY_S, namespace=volume.namespace)
    used, files = by_df()
    assert 5_000_000 <= used < 5_100_000
    assert files >= 1

    def by_kubelet() -> tuple[int, int]:
        (node,) = kube.items("nodes", namespace="")
        summary = json.loads(
            kube.kubectl("get", "--raw", f"/api/v1/nodes/{node['metadata']['name']}/proxy/stats/summary")
        )
        pods = [each for each in summary["pods"] if each["podRef"]["namespace"] == volume.namespace]
        volumes = [each for pod in pods for each in pod.get("volume", [])]
        shown: dict[str, int] = next((each for each in volumes if each["name"] == "data"), {})
        return shown.get("usedBytes", 0), shown.get("inodesUsed", 0)

    kubelet_s = kube.wait_for(
        "the kubelet shows it", lambda: by_kubelet()[0] > 0, limit_s=400.0, namespace=volume.namespace
    )
    told, counted = by_kubelet()
    assert 0 <= used - told < 4096, "df counts in blocks"
    assert counted == files
    print(f"use of a volume: df after {took_s:.1f} s, the kubelet after {kubelet_s:.1f} s more; {told} bytes")


@promise("S-119")
@pytest.mark.own_node
def test_the_start_up_taint_goes_when_the_plugin_is_ready(kube: Kube, volume: Volume) -> None:
    (node,) = kube.items("nodes", namespace="")
    name = node["metadata"]["name"]

    def waits() -> bool:
        conditions = (kube.get("pod", "waits", namespace=volume.namespace) or {})["status"].get("conditions", [])
        return any(each.get("reason") == "Unschedulable" and "taint" in each["message"] for each in conditions)

    kube.kubectl("taint", "node", name, f"{STARTUP_TAINT}=:NoSchedule")
    try:
        kube.apply(volume.pod("waits", "open('/data/x', 'w').write('x')"), namespace=volume.namespace)
        kube.wait_for("the pod has no node", waits, namespace=volume.namespace)
        began = time.monotonic()
        replaced(kube, NODE)
        kube.wait_phase("waits", "Succeeded", namespace=volume.namespace, limit_s=READY_S)
        print(f"start-up taint: plugin's pod deleted to the end of a pod that waited {time.monotonic() - began:.1f} s")
    except BaseException:
        with suppress(KubeError):
            kube.kubectl("taint", "node", name, f"{STARTUP_TAINT}-")
        raise
    (node,) = kube.items("nodes", namespace="")
    assert STARTUP_TAINT not in [each["key"] for each in node["spec"].get("taints", [])]


@promise("S-118")
def test_a_mount_that_takes_too_much_memory_ends_and_comes_back_alone(
    site: Site, kube: Kube, storage: Storage, node_plugin: None, namespace: str
) -> None:
    bucket = make_bucket(storage.here, f"bucket-{namespace}")
    given = Volume(site, storage, namespace, bucket, attributes={MEMORY: "192Mi"})
    inline = {"bucket": bucket, "endpoint": storage.endpoint, "prefix": "other/"}
    other_volume = {"csi": {"driver": DRIVER, "volumeAttributes": inline, "nodePublishSecretRef": {"name": "keys"}}}
    with in_use(kube, given) as volume:
        pods = [volume.pod("loop", LOOP), volume.pod("other", LOOP, volume=other_volume)]
        kube.apply(*pods, namespace=namespace)
        for name in ("loop", "other"):
            kube.wait_phase(name, "Running", namespace=namespace, limit_s=READY_S)
        loop, other = Loop(kube, volume), Loop(kube, volume, "other")
        loop.goes_on()
        other.goes_on()
        (daemon,) = pods_of(kube, MOUNT_DAEMON)
        name = daemon["metadata"]["name"]
        others = servers(kube, name, bucket)["other/"]
        which = (group_name(volume.handle), key_of(volume.handle))
        told = json.loads(kube.execute(name, "python3", "-c", OVERGROWN, *which, namespace=SYSTEM))
        assert (told["limit"], told["kills"]) == (limit_of(192 << 20), 1)
        began = time.monotonic()
        loop.goes_on()
        took_s = time.monotonic() - began
        print(f"a mount at its limit of memory: five more rounds after {took_s:.1f} s; {told}")
        other.goes_on()
        page = kube.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{name}:9809/proxy/metrics")
        assert f'datastore_mount_oom_kills_total{{volume="{volume.handle}"}} {1.0 + told["hoarder"]}\n' in page
        after = servers(kube, name, bucket)
        assert after[""] not in (0, told["server"])
        assert after["other/"] == others


def servers(kube: Kube, daemon: str, bucket: str) -> dict[str, int]:
    """The pid of the server of each mount of the bucket, by its prefix. Mounts of others may come and go meanwhile."""
    said = json.loads(kube.execute(daemon, "python3", "-c", SERVERS, namespace=SYSTEM))
    of_bucket = [each for each in said if each["source"].get("bucket") == bucket]
    return {each["source"].get("prefix", ""): each["serverPid"] for each in of_bucket}


KILL = """
import contextlib, json, os, pathlib, sys
for each in pathlib.Path("/var/lib/kubelet/plugins/csi.datastore.dev/state").glob("*/mount.json"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # unmounted just now, or ended
        if pid := json.loads(each.read_text())[sys.argv[1]]:  # 0 while there is none
            os.kill(pid, 9)
"""
"""In the mount daemon's pod: kill -9 of each mount's process that its record has by this name."""


def replaced(kube: Kube, name: str) -> None:
    """Delete a DaemonSet's pod and wait for the next one."""
    (old,) = pods_of(kube, name)
    kube.delete("pod", old["metadata"]["name"], namespace=SYSTEM)
    wait_ready(kube)


def killed(kube: Kube, what: str) -> None:
    """kill -9 of the supervisors or of the mount servers of the node."""
    (daemon,) = pods_of(kube, MOUNT_DAEMON)
    kube.execute(daemon["metadata"]["name"], "python3", "-c", KILL, what, namespace=SYSTEM)


def rolled(kube: Kube) -> None:
    where = f"--namespace={SYSTEM}"
    kube.kubectl("rollout", "restart", "daemonset/datastore-node", where)
    kube.kubectl("rollout", "status", "daemonset/datastore-node", where, "--timeout=240s", timeout_s=270)


@promise("S-89")
def test_killed_processes_come_back_under_the_load_of_survival(
    site: Site, kube: Kube, volume: Volume, runs: Runs
) -> None:
    loop = SurvivalLoop(kube, volume)
    loop.start()
    ends: dict[str, Callable[[], None]] = {
        "a mount server": lambda: killed(kube, "serverPid"),
        "its successor": lambda: killed(kube, "serverPid"),
        "its supervisor": lambda: killed(kube, "supervisorPid"),
        "the plugin's pod": lambda: replaced(kube, NODE),
        "the mount daemon's pod": lambda: replaced(kube, MOUNT_DAEMON),
        "the rolled DaemonSet": lambda: rolled(kube),
    }
    if (own := site.own) is not None:
        ends["the kubelet"] = lambda: own.restart("kubelet", signal.SIGKILL)
        ends["containerd"] = lambda: own.restart("containerd", signal.SIGKILL)
    for what, end in ends.items():
        began = time.monotonic()
        end()
        loop.goes_on()
        print(f"{what} ended: its load goes on after {time.monotonic() - began:.1f} s")
    assert runs("after", "import os; print(len(os.listdir('/data/list')) >= 300)") == "True\n"
    print(f"operations without an error or a wrong byte: {loop.finish()}")


WRITER = """
import pathlib, time
while True:
    try:
        pathlib.Path("/data/x").write_text("x")
        print("well", flush=True)
    except OSError:
        print("refused", flush=True)
    time.sleep(0.5)
"""


@promise("S-86")
@pytest.mark.own_node
def test_a_rotated_secret_reaches_a_live_mount(site: Site, kube: Kube, node_plugin: None, namespace: str) -> None:

    def says(word: str) -> bool:
        return kube.tail("writer", namespace=namespace).strip() == word

    assert site.own is not None
    with run_accounts() as accounts, site.own.exposing(int(accounts.server.endpoint.rpartition(":")[2])) as address:
        bucket = make_bucket(accounts.server, f"bucket-{namespace}")
        first, second = accounts.create("first", "canary-first-4711"), accounts.create("second", "canary-second-4712")
        given = Volume(site, Storage(accounts.server, f"http://{address}"), namespace, bucket, first)
        with in_use(kube, given) as volume:
            kube.apply(volume.pod("writer", WRITER), namespace=namespace)
            kube.wait_phase("writer", "Running", namespace=namespace, limit_s=READY_S)
            kube.wait_for("a first write", lambda: says("well"), limit_s=READY_S, namespace=namespace)
            accounts.remove("first")
            kube.wait_for("a refused write", lambda: says("refused"), limit_s=READY_S, namespace=namespace)
            began = time.monotonic()
            volume.keys = second
            kube.apply(volume.secret(), namespace=namespace)
            kube.wait_for("another write", lambda: says("well"), limit_s=ROTATED_S, namespace=namespace)
            print(f"Secret changed to live mount: {time.monotonic() - began:.1f} s")
            names = [each["metadata"]["name"] for each in kube.items("pods", namespace=SYSTEM)]
            assert "canary" not in "".join(kube.logs(name, namespace=SYSTEM) for name in names)
