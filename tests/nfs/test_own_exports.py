"""Datastores with `nfs: {}` in a cluster: from a manifest to an export of their own on a real NFS host, and its end."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from datastore.api.names import DEFAULT_NFS_CLASS, volume_name
from datastore.api.volumecontext import SOURCE
from tests.cluster import cluster as clusters
from tests.cluster.controlled import (
    ROOT,
    SYSTEM,
    account_kubeconfig,
    condition,
    controller,
    datastore_of,
    pod_on_no_node,
)
from tests.cluster.kube import Kube, Manifest
from tests.nfs.host.guest import CHECKOUT, Guest
from tests.nfs.host.server import NFSServer
from tests.nfs.hosting import Class
from tests.nfs.test_csi_kernel import Node, Volume
from tests.promises import promise

pytestmark = pytest.mark.timeout(1800, func_only=True)
CROWD = 50
SLOW_S = 300.0
"""Most of it takes seconds; this only ends a hang."""
LOOP = """
import os, sys, time
stop, told, *places = sys.argv[1:]
rounds = 0
while not os.path.exists(stop):
    for place in places:
        body = os.urandom(65536)
        with open(f"{place}/f{rounds % 4}", "wb") as file:
            file.write(body)
        with open(f"{place}/f{rounds % 4}", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == body, place
    rounds += 1
    with open(f"{told}.new", "w") as file:
        file.write(str(rounds))
    os.rename(f"{told}.new", told)
print("well")
"""
"""Writes to all places and reads it from the server, round by round, and tells how many there were."""


@dataclass(frozen=True)
class Site:
    """A cluster without a node, our controller, and a class whose host is the guest."""

    kube: Kube
    cls: Class

    def apply(self, space: str, *datastores: Manifest) -> None:
        self.kube.apply(*datastores, namespace=space)

    def ready(self, space: str, names: set[str], limit_s: float = 600.0) -> float:
        def all_ready() -> bool:
            found = {each["metadata"]["name"]: each for each in self.kube.items("datastores", namespace=space)}
            return all(condition(found.get(name), "Ready").get("status") == "True" for name in names)

        return self.kube.wait_for(f"{len(names)} Datastores are Ready", all_ready, limit_s=limit_s, namespace=space)

    def volume(self, space: str, name: str) -> Manifest:
        found = self.kube.get("datastore", name, namespace=space)
        assert found is not None
        volume = self.kube.get("pv", volume_name(found["metadata"]["uid"]))
        assert volume is not None
        return volume

    def paths(self, space: str) -> dict[str, str]:
        """Where each Datastore of the namespace is exported."""
        found = {}
        for volume in self.kube.items("pv", namespace=""):
            if volume["spec"]["claimRef"]["namespace"] == space:
                source = json.loads(volume["spec"]["csi"]["volumeAttributes"][SOURCE])
                assert source["server"] == self.cls.host.address
                found[volume["spec"]["claimRef"]["name"]] = str(source["path"])
        return found

    def node(self, name: str, address: str) -> None:
        """A node of the cluster, as far as anybody can see."""
        self.kube.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        status = json.dumps({"status": {"addresses": [{"type": "InternalIP", "address": address}]}})
        self.kube.kubectl("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={status}")


@pytest.fixture(scope="module")
def site(nfs_host: NFSServer, nfs_client: Guest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All in the guests' network, where nothing but them is."""
    if reason := clusters.obstacle(api_only=True):
        pytest.fail(reason)
    clusters.sweep()
    cluster = clusters.up(f"api-{uuid.uuid4().hex[:8]}", api_only=True, owned=True)
    cls = Class(host=nfs_host)
    nfs_host.shell(f"mkdir -m 0755 {cls.root}")
    try:
        kube = Kube(cluster.kubeconfig, also=(SYSTEM,))
        kube.apply_folder(ROOT / "manifests")
        made = Site(kube, cls)
        made.node("node-1", nfs_client.address)
        folder = tmp_path_factory.mktemp("controller")
        account = account_kubeconfig(cluster.kubeconfig, kube, folder)
        kube.apply(*secret_and_class(cls), namespace=SYSTEM)
        with controller(account, folder, "--allow-endpoint", f"nfs://{nfs_host.address}"):
            yield made
    finally:
        cluster.end()
        # A script that the controller has begun is still at work there, for ten seconds at most.
        wait = "for _ in $(seq 75); do pgrep -f 'python3 -I -S' >/dev/null || break; sleep 0.2; done"
        take = f"grep -l '{cls.root}/' /etc/exports.d/*.exports | xargs -r rm -f; exportfs -ra; rm -rf {cls.root}"
        nfs_host.shell(f"{wait}; {take}; [ ! -e {cls.root} ]")


def secret_and_class(cls: Class) -> tuple[Manifest, Manifest]:
    key = (cls.host.directory / "id").read_text()
    secret = {"username": "root", "ssh-privatekey": key}
    parameters = {
        "backend": "nfs",
        "capacity": "8Mi",
        "secretName": "nas",
        "secretNamespace": SYSTEM,
        **cls.all_parameters(),
    }
    metadata = {"name": "nfs", "annotations": {DEFAULT_NFS_CLASS: "true"}}
    return (
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nas"}, "stringData": secret},
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": metadata,
            "provisioner": "csi.datastore.dev",
            "reclaimPolicy": "Retain",
            "allowVolumeExpansion": True,
            "parameters": parameters,
        },
    )


@pytest.fixture
def space(site: Site) -> str:
    name = f"team-{uuid.uuid4().hex[:6]}"
    site.kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@promise("S-280", "S-281", "S-282", "S-283", "S-287")
def test_fifty_at_once_have_exports_and_half_of_them_go_while_another_is_used(
    site: Site, space: str, nfs_client: Guest
) -> None:
    names = [f"d{number:02}" for number in range(CROWD)]
    going, staying = names[: CROWD // 2], names[CROWD // 2 :]
    own = {"nfs": {}, "reclaimPolicy": "Delete"}
    site.apply(space, *(datastore_of(name, {**own, "capacity": "16Mi"} if name == "d02" else own) for name in names))
    took = site.ready(space, set(names))
    print(f"{CROWD} exports were made in {took:.0f} s")
    served = site.cls.left()["served"]
    paths = site.paths(space)
    assert len(served) == CROWD
    assert len(set(re.findall(r"fsid=(\d+)", " ".join(served)))) == CROWD
    assert all(f"\t{nfs_client.address}/32(" in line or f"\t{nfs_client.address}(" in line for line in served)
    shown = site.kube.get("datastore", "d02", namespace=space)
    assert shown is not None
    assert shown["status"]["storageClassName"] == "nfs"
    assert shown["status"]["location"] == f"nfs://{site.cls.host.address}{paths['d02']}"
    claim = site.kube.get("pvc", "d02", namespace=space)
    assert claim is not None
    assert claim["status"]["phase"] == "Bound"
    assert claim["status"]["capacity"]["storage"] == "16Mi"

    here, full = f"/mnt/{space}", f"/mnt/{space}/d02"
    mounts = [f"mount -t nfs -o vers=4.2 {site.cls.host.address}:{paths[each]} {here}/{each}" for each in staying]
    places = " ".join(f"{here}/{each}" for each in staying)
    python = f"{CHECKOUT}/.venv/bin/python"
    nfs_client.run("tee", f"/tmp/loop-{space}.py", text=LOOP)
    nfs_client.shell(f"mkdir -p {full} {places}\n" + "\n".join(mounts), timeout_s=500)
    nfs_client.shell(f"mount -t nfs -o vers=4.2 {site.cls.host.address}:{paths['d02']} {full}")
    loop = f"{python} /tmp/loop-{space}.py /tmp/stop-{space} /tmp/rounds-{space} {places}"
    nfs_client.shell(f"{loop} >/tmp/said-{space} 2>&1 &")

    def rounds() -> int:
        assert (said := nfs_client.shell(f"cat /tmp/said-{space}")) == "", said
        return int(nfs_client.shell(f"cat /tmp/rounds-{space} || echo 0"))

    try:
        site.kube.wait_for("the loop is at work on all that stay", lambda: rounds() > 0, limit_s=SLOW_S)
        with pytest.raises(AssertionError, match=r"No space left on device|Disk quota exceeded"):
            nfs_client.shell(f"dd if=/dev/zero of={full}/file bs=1M count=20 conv=fsync")
        site.kube.patch("datastore", "d02", {"spec": {"capacity": "32Mi"}}, namespace=space)

        def grown() -> bool:
            mib = int(nfs_client.shell(f"df --output=size --block-size=1M {full} | tail -n 1"))
            return mib == 32 and site.volume(space, "d02")["spec"]["capacity"]["storage"] == "32Mi"

        site.kube.wait_for("the quota grows under the mount", grown, limit_s=SLOW_S, namespace=space)
        nfs_client.shell(f"dd if=/dev/zero of={full}/file bs=1M count=20 conv=fsync; umount {full}")

        train = pod_on_no_node("train", "d00")
        # The cluster ends pods of nodes that it does not know.
        train["spec"]["nodeName"] = "node-1"
        site.kube.apply(train, namespace=space)
        before = rounds()
        site.kube.kubectl("delete", "datastore", *going, f"--namespace={space}", "--wait=false")
        left = {*staying, "d00"}

        def gone() -> bool:
            return {each["metadata"]["name"] for each in site.kube.items("datastores", namespace=space)} == left

        site.kube.wait_for("half of them are gone", gone, limit_s=SLOW_S, namespace=space)
        served = site.cls.left()["served"]
        assert len(served) == CROWD // 2 + 1
        assert any(line.startswith(f"{paths['d00']}\t") for line in served), "a pod uses it"
        assert not any(line.startswith(f"{paths['d01']}\t") for line in served)
        site.kube.delete("pod", "train", namespace=space)
        left.remove("d00")
        site.kube.wait_for("the one that was in use is gone", gone, limit_s=SLOW_S, namespace=space)
        site.kube.wait_for("programs go on all the while", lambda: rounds() > before, limit_s=SLOW_S)
        # A node that comes has all of them, without anybody asking.
        site.node("node-2", "10.99.0.77")

        def for_both() -> bool:
            return len(site.cls.left()["served"]) == 2 * len(left)

        site.kube.wait_for("exports are served to the new node", for_both, limit_s=SLOW_S, namespace=space)
        before = rounds()
        site.kube.wait_for("the loop goes on", lambda: rounds() > before + 1, limit_s=SLOW_S)
        nfs_client.shell(f"touch /tmp/stop-{space}")
        said = f"cat /tmp/said-{space}"
        site.kube.wait_for("the loop ends", lambda: bool(nfs_client.shell(said)), limit_s=SLOW_S)
        assert nfs_client.shell(said) == "well\n"
    finally:
        nfs_client.shell(f"touch /tmp/stop-{space}; umount -i -l {full} {places} || true")
        site.kube.delete("node", "node-2")
    assert not any(f"_{name}_" in directory for directory in site.cls.left()["names"] for name in going)


@promise("S-289")
def test_an_export_that_exists_is_bound_where_the_administrator_lists_its_server(
    site: Site, space: str, nfs_client: Guest, export: Callable[..., str], tmp_path: Path
) -> None:
    """A node mounts by the kernel's client just what the controller wrote (S-232)."""
    path = export()
    there = {"nfs": {"server": site.cls.host.address, "path": path}, "reclaimPolicy": "Delete"}
    site.apply(space, datastore_of("there", there))
    site.apply(space, datastore_of("other", {"nfs": {"server": "nas.example.org", "path": "/srv"}}))
    site.ready(space, {"there"}, SLOW_S)
    claim = site.kube.get("pvc", "there", namespace=space)
    assert claim is not None
    assert claim["status"]["phase"] == "Bound"
    written = site.volume(space, "there")["spec"]["csi"]
    assert json.loads(written["volumeAttributes"]["datastore.dev/spec"])["nfs"] == {
        "server": site.cls.host.address,
        "path": path,
    }
    node = Node(nfs_client, tmp_path)
    node.start()
    try:
        volume = Volume(node, "", "", f"there-{space}", written=written)
        place = volume.start()
        nfs_client.shell(f"echo from-a-pod >{place}/x")
        assert site.cls.host.shell(f"cat {path}/x; rm {path}/x") == "from-a-pod\n"
        assert volume.stats().volume_condition.message.startswith("mounted by the kernel's NFS client, version 4")
        volume.unpublish()
        volume.unstage()
    finally:
        node.kill()

    def refused() -> bool:
        found = site.kube.get("datastore", "other", namespace=space)
        return condition(found, "Ready").get("reason") == "EndpointNotAllowed"

    site.kube.wait_for("it is refused", refused, limit_s=SLOW_S, namespace=space)
    site.kube.delete("datastore", "there", namespace=space)
    assert site.cls.host.shell(f"ls -d {path}").strip() == path
