"""The controller in its pod beside a real kubelet: how fast a rotated Secret reaches a mount; a volume that is tried"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from datastore.api.names import CREDENTIALS
from tests.cluster.controlled import condition, datastore_of
from tests.cluster.fixtures import SYSTEM, Product, Site, Storage, wait_rolled_out
from tests.cluster.kube import Kube, Manifest
from tests.cluster.layout import REPOSITORY
from tests.cluster.volumes import Volume
from tests.csi.accounts import run_accounts
from tests.promises import promise
from tests.servers import make_bucket

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.own_node, pytest.mark.timeout(1200, func_only=True)]
READY_S = 240.0
ROTATED_S = 240.0
"""It takes a few seconds, on a busy machine more. That it was not the kubelet by itself, which comes now and then,
is seen by the annotation of the pod, which makes the kubelet come at once."""

WRITER = """
import itertools, pathlib, time
held = open("/data/held", "w")
for number in itertools.count():
    try:
        pathlib.Path("/data/x").write_text(str(number))
        print("well", flush=True)
    except OSError:
        print("refused", flush=True)
    time.sleep(0.2)
"""


def says(kube: Kube, namespace: str, word: str) -> bool:
    return kube.tail("writer", namespace=namespace).strip() == word


@promise("S-86", "S-440")
def test_a_rotated_secret_reaches_the_mounts_of_a_datastore_within_seconds(
    site: Site, kube: Kube, product: Product, namespace: str
) -> None:
    assert site.own is not None
    with run_accounts() as accounts, site.own.exposing(int(accounts.server.endpoint.rpartition(":")[2])) as address:
        bucket = make_bucket(accounts.server, f"bucket-{namespace}")
        first, second = accounts.create("first", "canary-first-4711"), accounts.create("second", "canary-second-4712")
        volume = Volume(site, Storage(accounts.server, f"http://{address}"), namespace, bucket, first)
        kube.apply(volume.secret(), namespace=namespace)
        s3 = {"bucket": bucket, "endpoint": volume.storage.endpoint, "credentialsSecret": "keys"}
        kube.apply(datastore_of("data", {"s3": s3}), namespace=namespace)
        try:
            kube.wait_condition("datastore", "data", "Ready", namespace=namespace, limit_s=READY_S)
            kube.apply(volume.pod("writer", WRITER), namespace=namespace)
            kube.wait_phase("writer", "Running", namespace=namespace, limit_s=READY_S)
            kube.wait_for("a write", lambda: says(kube, namespace, "well"), limit_s=READY_S, namespace=namespace)

            def told() -> bool:
                daemons = kube.items("pods", namespace=SYSTEM, selector="app.kubernetes.io/component=mount-daemon")
                said = "".join(kube.logs(each["metadata"]["name"], namespace=SYSTEM) for each in daemons)
                reason = condition(kube.get("datastore", "data", namespace=namespace), "Ready").get("reason")
                return reason == "CredentialsInvalid" and "the store refuses the new keys of a volume" in said

            volume.keys = {**first, "AWS_SECRET_ACCESS_KEY": "mistyped"}
            kube.apply(volume.secret(), namespace=namespace)
            kube.wait_for("word of the mistake", told, limit_s=ROTATED_S, namespace=namespace)
            assert says(kube, namespace, "well")
            accounts.remove("first")
            kube.wait_for("a refusal", lambda: says(kube, namespace, "refused"), limit_s=READY_S, namespace=namespace)
            began = time.monotonic()
            volume.keys = second
            kube.apply(volume.secret(), namespace=namespace)
            kube.wait_for(
                "another write", lambda: says(kube, namespace, "well"), limit_s=ROTATED_S, namespace=namespace
            )
            print(f"Secret changed to live mount: {time.monotonic() - began:.1f} s")
            pod, secret = (kube.get(*each, namespace=namespace) for each in (("pod", "writer"), ("secret", "keys")))
            assert pod is not None
            assert secret is not None
            assert pod["metadata"]["annotations"][CREDENTIALS] == secret["metadata"]["resourceVersion"]
            assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
            kube.wait_condition("datastore", "data", "Ready", namespace=namespace, limit_s=ROTATED_S)
            names = [each["metadata"]["name"] for each in kube.items("pods", namespace=SYSTEM)]
            assert "canary" not in "".join(kube.logs(name, namespace=SYSTEM) for name in names)
        finally:
            kube.delete("pod", "writer", namespace=namespace)
            kube.delete("datastore", "data", namespace=namespace)


@pytest.fixture(scope="module")
def probing(kube: Kube, product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The product with the component claim-probe; afterwards without."""
    folder = tmp_path_factory.mktemp("probing")
    base, component = (
        os.path.relpath(path, folder.resolve())
        for path in (product.manifests, REPOSITORY / "manifests" / "claim-probe")
    )
    overlay = {"kind": "Kustomization", "resources": [base], "components": [component]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kube.kubectl("apply", "--kustomize", str(folder))
    wait_rolled_out(kube)
    yield
    kube.kubectl("delete", "--filename", str(REPOSITORY / "manifests" / "claim-probe" / "policy.yaml"))
    kube.kubectl("apply", "--kustomize", str(product.manifests))
    wait_rolled_out(kube)


def disk(namespace: str) -> list[Manifest]:
    """A claim of another kind of volume: a directory of the node."""
    name, size = f"disk-{namespace}", {"storage": "1Gi"}
    volume: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": size,
            "storageClassName": "",
            "hostPath": {"path": f"/run/{name}", "type": "DirectoryOrCreate"},
        },
    }
    claim: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "disk"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": size},
        },
    }
    return [volume, claim]


@promise("S-115", "S-135")
@pytest.mark.parametrize("level", ["privileged", "restricted"])
def test_the_capabilities_of_another_drivers_volume_are_probed_on_it(
    site: Site, kube: Kube, probing: None, namespace: str, level: str
) -> None:
    """Where Pod Security refuses root, on a volume that others may write to."""
    assert site.own is not None
    site.own.run("mkdir", "--mode", "755" if level == "privileged" else "777", f"/run/disk-{namespace}")
    kube.kubectl("label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={level}")
    kube.apply(*disk(namespace), namespace=namespace)
    try:
        kube.apply(datastore_of("wrap", {"claim": {"name": "disk", "probe": True}}), namespace=namespace)

        def tried() -> bool:
            status = (kube.get("datastore", "wrap", namespace=namespace) or {}).get("status") or {}
            return bool(status.get("capabilities"))

        seconds = kube.wait_for("what it can do", tried, limit_s=READY_S, namespace=namespace)
        print(f"claim tried in {seconds:.1f} s")
        status = (kube.get("datastore", "wrap", namespace=namespace) or {})["status"]
        assert status["capabilities"] == dict.fromkeys(
            ("symlinks", "emptyDirs", "rename", "append", "chmod", "hardlinks", "atomicRename"), True
        )
        assert (status["usage"]["objects"], status["volumeName"]) == (0, f"disk-{namespace}")
        assert condition({"status": status}, "Ready")["status"] == "True"
        kube.wait_for("end of the pod", lambda: kube.items("pods", namespace=namespace) == [], namespace=namespace)
        assert site.own.run("ls", "-A", f"/run/disk-{namespace}").strip() == ""
    finally:
        kube.kubectl("delete", "datastores", "--all", f"--namespace={namespace}")
        kube.delete("pvc", "disk", namespace=namespace)
        kube.delete("pv", f"disk-{namespace}")
