"""Kubernetes' own suite for storage drivers, unpatched, against the driver: `make long LONG=external-storage`.

tests/cluster/build.sh external makes the suite and the program of its pods. Their images are not pulled: one of ours,
with that program, bears their names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from tests.cluster.fixtures import SYSTEM, Product, Site, Storage
from tests.cluster.image import suite_image
from tests.cluster.kube import Kube
from tests.cluster.volumes import DRIVER
from tests.promises import promise
from tests.servers import make_bucket, tools_dir

pytestmark = [pytest.mark.e2e_external, pytest.mark.own_node, pytest.mark.timeout(7200, func_only=True)]
SUITE_S = 7000.0
REGISTRY = "localhost/e2e"
IMAGES = ("busybox:1.37.0-1", "nginx:1.14-4", "jessie-dnsutils:1.7")
FOCUS = r"External.Storage"
SKIPPED = r"\[Feature:|\[FeatureGate:|\[Disruptive\]|\[Slow\]|with any volume data source"
"""What needs features that a cluster may not have, kills kubelets, takes an hour (and busybox's own shell), or pulls
programs of others to fill a volume by dataSourceRef, which is refused (S-209)."""
CAPABILITIES = {
    "persistence": True,
    "exec": True,
    "multipods": True,
    "RWX": True,
    "capReadOnlyMany": True,
    "fsGroup": True,
    "volumeMountGroup": True,
    "controllerExpansion": True,
    "nodeExpansion": True,
    # Refused with the reason (S-209), or none of an object store's.
    "block": False,
    "pvcDataSource": False,
    "snapshotDataSource": False,
    "readWriteOncePod": False,
    "topology": False,
}
FAILING = {
    "rwop pod created with an initial fsgroup": "makes a ReadWriteOncePod claim all the same: refused (S-209)",
}
"""Tests of the suite that fail, by a part of their names, and why."""
LEAST_PASSED = 25
"""Of 26 that are not skipped: 10 minutes."""


@promise("S-216")
def test_the_suite_for_storage_drivers(
    site: Site, kube: Kube, product: Product, storage: Storage, tmp_path: Path
) -> None:
    assert site.own is not None
    suite = tools_dir() / "e2e.test"
    if not suite.exists():
        pytest.fail(f"{suite} is missing: tests/cluster/build.sh external makes it")
    site.own.load(suite_image())
    for name in IMAGES:
        site.own.run("ctr", "images", "tag", "--force", f"{REGISTRY}/agnhost:2.59", f"{REGISTRY}/{name}")
    keys = {"AWS_ACCESS_KEY_ID": storage.here.access_key, "AWS_SECRET_ACCESS_KEY": storage.here.secret_key}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "suite-keys"}, "stringData": keys}
    kube.apply(secret, namespace=SYSTEM)
    parameters = {
        "endpoint": storage.endpoint,
        "bucket": make_bucket(storage.here, "external-storage"),
        "prefix": "${pvc.namespace}/${pvc.name}/",
        "create": "true",
        "secretName": "suite-keys",
        "secretNamespace": SYSTEM,
    }
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "suite"}}
    kube.apply({**kind, "provisioner": DRIVER, "reclaimPolicy": "Delete", "parameters": parameters})
    given = {
        "driver.yaml": {
            "StorageClass": {"FromExistingClassName": "suite"},
            "DriverInfo": {
                "Name": DRIVER,
                "Capabilities": CAPABILITIES,
                "SupportedSizeRange": {"Min": "1Mi", "Max": "1Ti"},
            },
            "Timeouts": {"ClaimProvision": "90s"},  # the one that is refused waits for as long
        },
        "registries.yaml": dict.fromkeys(("promoterE2eRegistry", "gcRegistry", "sigStorageRegistry"), REGISTRY),
    }
    for name, document in given.items():
        (tmp_path / name).write_text(yaml.safe_dump(document))
    command = [
        *(
            str(suite),
            f"-kubeconfig={kube.kubeconfig}",
            "-provider=skeleton",
            f"-storage.testdriver={tmp_path}/driver.yaml",
        ),
        *(f"-report-dir={tmp_path}", "-num-nodes=1"),
        *(f"-ginkgo.focus={FOCUS}", f"-ginkgo.skip={SKIPPED}", f"-ginkgo.timeout={SUITE_S:.0f}s", "-test.timeout=3h"),
    ]
    began = time.monotonic()
    environment = {**os.environ, "KUBE_TEST_REPO_LIST": str(tmp_path / "registries.yaml")}
    try:
        with (tmp_path / "suite.log").open("wb") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=SUITE_S + 60, check=False)
    finally:
        kube.delete("storageclass", "suite")
        kube.delete("secret", "suite-keys", namespace=SYSTEM)
    passed, failed = outcome(tmp_path)
    print(f"{len(passed)} of {len(passed) + len(failed)} pass in {time.monotonic() - began:.0f} s", file=sys.stderr)
    unexpected = {name: why for name, why in failed.items() if not any(part in name for part in FAILING)}
    assert unexpected == {}
    assert len(passed) >= LEAST_PASSED


def outcome(folder: Path) -> tuple[list[str], dict[str, str]]:
    """What passed, and what failed with the reason, of the suite's reports. Setting up counts as passed too."""
    passed, failed = [], {}
    for report in folder.glob("junit*.xml"):
        for case in ET.parse(report).iter("testcase"):
            name = case.get("name", "")
            if "External Storage" not in name or case.find("skipped") is not None:
                continue
            problem = next((each for each in case if each.tag in ("failure", "error")), None)
            if problem is None:
                passed.append(name)
            else:
                failed[name] = (problem.get("message") or problem.text or "")[:500]
    return passed, failed
