"""A volume with its claim and Secret as the controller would make them, and pods that use it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.fixtures import Site, Storage
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.servers import boto_client
from tests.survival import load as survival

DRIVER = "csi.datastore.dev"
GOES_ON_S = 240.0

LOOP = """
import hashlib, os, pathlib, time
place = pathlib.Path("/data/loop"); place.mkdir(exist_ok=True)
sums, number = {}, 0
while True:
    body = os.urandom(50_000)
    sums[number % 16] = hashlib.sha256(body).hexdigest()
    (place / f"f{number % 16}").write_bytes(body)
    for each, checksum in sums.items():
        assert hashlib.sha256((place / f"f{each}").read_bytes()).hexdigest() == checksum, f"f{each} has other bytes"
    assert len(os.listdir(place)) == len(sums)
    number += 1
    print("round", number, flush=True)
    time.sleep(0.05)
"""

SHOWS = """
import os, time
while True:
    s = os.statvfs("/data")
    print((s.f_blocks - s.f_bfree) * s.f_frsize, s.f_files - s.f_ffree, flush=True)
    time.sleep(1)
"""
"""What its df would show, each second."""

SERVERS = """
import contextlib, json, pathlib
found = []
for each in pathlib.Path("/var/lib/kubelet/plugins/csi.datastore.dev/state").glob("*/mount.json"):
    with contextlib.suppress(FileNotFoundError):  # unmounted just now
        found.append(json.loads(each.read_text()))
print(json.dumps(found))
"""
"""In the mount daemon's pod: what each mount tells of itself."""

OVERGROWN = """
import glob, json, os, sys
group_name, key, *folder = sys.argv[1:]
(folder,) = folder or ["/var/lib/kubelet/plugins/csi.datastore.dev/state"]
server = json.load(open(f"{folder}/{key}/mount.json"))["serverPid"]
(group,) = glob.glob(f"/sys/fs/cgroup/**/{group_name}", recursive=True)
version_2 = os.path.exists(f"{group}/memory.max")
limit = int(open(f"{group}/" + ("memory.max" if version_2 else "memory.limit_in_bytes")).read())
assert str(server) in open(f"{group}/cgroup.procs").read().split()

def kills():
    counted = open(f"{group}/" + ("memory.events" if version_2 else "memory.oom_control")).read().split()
    return int(counted[counted.index("oom_kill") + 1])

open(f"/proc/{server}/oom_score_adj", "w").write("1000")  # the server shall be the one that is too large
child = os.fork()
if child == 0:
    open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
    hoard = []
    while len(hoard) << 20 < limit and not kills():
        hoard.append(b"x" * (1 << 20))
    os._exit(0)
_, ended = os.waitpid(child, 0)
hoarder = int(os.WIFSIGNALED(ended))
print(json.dumps({"limit": limit, "server": server, "kills": kills() - hoarder, "hoarder": hoarder}))
"""
"""In the mount daemon's pod, or given the folder with the states of its mounts: bring a mount to its limit of memory,
such that the kernel ends its server; what was seen.

kills: without hoarder, 1 when the process that took the memory was killed as well. The kernel may do that: it no longer
sees a victim that is ending, and chooses the next largest when the memory is not back by then.
"""


@dataclass
class Volume:
    """A bucket as a claim `data` of a namespace, as the controller would make it; attributes: more of the volume's."""

    site: Site
    storage: Storage
    namespace: str
    bucket: str
    keys: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        here = self.storage.here
        self.keys = self.keys or {"AWS_ACCESS_KEY_ID": here.access_key, "AWS_SECRET_ACCESS_KEY": here.secret_key}

    @property
    def spec(self) -> dict[str, Any]:
        return {"s3": {"bucket": self.bucket, "endpoint": self.storage.endpoint}}

    @property
    def handle(self) -> str:
        return f"{self.namespace}/data/0001"

    def secret(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys", "namespace": self.namespace},
            "stringData": self.keys,
        }

    def objects(self, modes: tuple[str, ...] = ("ReadWriteMany",)) -> list[Manifest]:
        name = f"datastore-{self.namespace}"
        reference = {"name": "keys", "namespace": self.namespace}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Ti"},
                "accessModes": list(modes),
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"name": "data", "namespace": self.namespace},
                "csi": {
                    "driver": DRIVER,
                    "volumeHandle": self.handle,
                    "volumeAttributes": {"datastore.dev/spec": json.dumps(self.spec), **self.attributes},
                    "nodeStageSecretRef": reference,
                    "nodePublishSecretRef": reference,
                },
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": self.namespace},
            "spec": {
                "accessModes": list(modes),
                "storageClassName": "",
                "volumeName": name,
                "resources": {"requests": {"storage": "1Ti"}},
            },
        }
        return [self.secret(), volume, claim]

    def pod(
        self, name: str, script: str, *, mount: Manifest | None = None, volume: Manifest | None = None, **spec: Any
    ) -> Manifest:
        """A pod that runs a Python script with the claim at /data."""
        container = self.site.container("python3", "-u", "-c", script)
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data", **(mount or {})}]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 2,
                # The image's user is nobody in particular; a fresh bucket's directory is root's.
                "securityContext": {"runAsUser": 0},
                "containers": [container],
                "volumes": [{"name": "data", **(volume or {"persistentVolumeClaim": {"claimName": "data"}})}],
                **spec,
            },
        }


DRIVER_OF_LOAD = """
import json, pathlib, subprocess, sys, time
kinds, control = sys.argv[1:], pathlib.Path("/tmp/control")
control.mkdir()
running = []
for number, kind in enumerate(kinds):
    pathlib.Path("/data", kind).mkdir()
    command = [sys.executable, "/load/load.py", kind, f"/data/{kind}", str(control), str(number), "go on"]
    running.append(subprocess.Popen(command))
said = 0
while any(each.poll() is None for each in running):
    done = min(int((control / f"{kind}.count").read_text() or 0) if (control / f"{kind}.count").exists() else 0
               for kind in kinds)
    if done > said:
        said = done
        print("round", said, flush=True)
    time.sleep(0.1)
print(json.dumps({kind: json.loads((control / f"{kind}.json").read_text()) for kind in kinds}), flush=True)
"""
"""Runs the load of tests/survival on /data and says how far its slowest process is; at the end all reports."""


class Loop:
    """A pod that writes and reads with checksums."""

    def __init__(self, kube: Kube, volume: Volume, name: str = "loop") -> None:
        self.kube, self.volume, self.name, self.reached = kube, volume, name, 0

    def rounds(self) -> int:
        try:
            said = self.kube.tail(self.name, namespace=self.volume.namespace).split()
        except KubeError:  # a kubelet that has just started knows no pod yet
            return 0
        return int(said[1]) if len(said) == 2 and said[0] == "round" else 0

    def goes_on(self) -> None:
        pod = self.kube.get("pod", self.name, namespace=self.volume.namespace)
        assert pod is not None
        assert pod["status"]["phase"] == "Running", self.kube.logs(self.name, namespace=self.volume.namespace)[-2000:]
        reached = max(self.reached, self.rounds()) + 5
        limits = {"limit_s": GOES_ON_S, "namespace": self.volume.namespace}
        self.kube.wait_for(f"round {reached}", lambda: self.rounds() >= reached, **limits)  # type: ignore[arg-type]
        self.reached = reached


class SurvivalLoop(Loop):
    """A pod with the load of tests/survival: open and removed files, maps, appends, renames, listings, all checked."""

    def start(self) -> None:
        """Make it, and wait until each of its processes has done something."""
        space = self.volume.namespace
        source = Path(survival.__file__).read_text()
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "load"}, "data": {"load.py": source}}
        pod = self.volume.pod(self.name, DRIVER_OF_LOAD)
        (container,) = pod["spec"]["containers"]
        container["command"] += list(survival.KINDS)
        container["volumeMounts"].append({"name": "load", "mountPath": "/load"})
        # One processor: the rest of the node shall come to its turn.
        container["resources"] = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}
        pod["spec"]["volumes"].append({"name": "load", "configMap": {"name": "load"}})
        self.kube.apply(config, pod, namespace=space)
        self.kube.wait_phase(self.name, "Running", namespace=space, limit_s=GOES_ON_S)
        self.goes_on()

    def finish(self) -> dict[str, int]:
        """Let it end; the operations of each kind. Errors: AssertionError with what it saw or what the bucket lacks."""
        space = self.volume.namespace
        self.kube.execute(self.name, "touch", "/tmp/control/stop", namespace=space)
        self.kube.wait_phase(self.name, "Succeeded", namespace=space, limit_s=GOES_ON_S)
        # The whole log: --tail would count the pieces of a long line.
        reports = json.loads(self.kube.logs(self.name, namespace=space).splitlines()[-1])
        faults = {kind: report["errors"] + report["wrong"] for kind, report in reports.items()}
        assert not any(faults.values()), faults
        client = boto_client(self.volume.storage.here)
        for kind, report in reports.items():
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.volume.bucket, Prefix=f"{kind}/")
            keys = [each["Key"] for page in pages for each in page.get("Contents", []) if each["Key"][-1] != "/"]
            bodies = {key: client.get_object(Bucket=self.volume.bucket, Key=key)["Body"].read() for key in keys}
            stored = {key[len(kind) + 1 :]: hashlib.sha256(body).hexdigest() for key, body in bodies.items()}
            assert stored == report["content"], f"{kind}: the bucket has other content than was written"
        return {kind: report["operations"] for kind, report in reports.items()}
