"""A volume with its claim and Secret as the controller would make them, and pods that use it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.fixtures import Site, Storage
from tests.cluster.kube import Kube, KubeError, Manifest

DRIVER = "csi.datastore.dev"
GOES_ON_S = 90.0

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
"""In the keeper's pod: what each mount tells of itself."""

OVERGROWN = """
import glob, json, os, sys
group_name, key = sys.argv[1:]
state = f"/var/lib/kubelet/plugins/csi.datastore.dev/state/{key}/mount.json"
server = json.load(open(state))["serverPid"]
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
"""In the keeper's pod: bring a mount to its limit of memory, such that the kernel ends its server; what was seen.

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


class Loop:
    """A pod that writes and reads with checksums."""

    def __init__(self, kube: Kube, volume: Volume, name: str = "loop") -> None:
        self.kube, self.volume, self.name, self.reached = kube, volume, name, 0

    def rounds(self) -> int:
        try:
            said = self.kube.kubectl("logs", self.name, f"--namespace={self.volume.namespace}", "--tail=1").split()
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
