"""The chart by helm itself: it makes what kustomize makes, its values take effect, and it comes and goes whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from datastore.api.datastore import API_VERSION
from datastore.manifests.chartwriter import NOT_NAMESPACED
from tests.cluster.fixtures import PRIVATE_RANGES, SYSTEM, Site, Storage
from tests.cluster.kube import Kube, Manifest
from tests.cluster.layout import REPOSITORY
from tests.cluster.volumes import Volume
from tests.servers import boto_client, make_bucket, tools_dir

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(1200, func_only=True)]
CHART = REPOSITORY / "manifests" / "chart"
RELEASE = "datastore"
READY_S = 240.0
STEP_S = 600.0
LABEL = "datastore.test/here"


def helm(kube: Kube | None, *arguments: str) -> str:
    """What helm printed."""
    built = tools_dir() / "helm"
    program = str(built) if built.exists() else shutil.which("helm")
    if program is None:
        pytest.fail("helm is missing; make cluster-tools builds it")
    where = [] if kube is None else [f"--kubeconfig={kube.kubeconfig}"]
    command = [program, *arguments, f"--namespace={SYSTEM}", *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout


def by_place(text: str) -> dict[tuple[str, ...], Manifest]:
    """The objects of a stream of YAML that the chart has too: helm makes the namespace by --create-namespace."""
    objects = [each for each in yaml.safe_load_all(text) if each and each["kind"] not in ("Namespace", "ConfigMap")]
    for each in objects:
        if each["kind"] in NOT_NAMESPACED:  # kustomize does not know all of them
            each["metadata"].pop("namespace", None)
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                container["env"].sort(key=lambda variable: variable["name"])  # a patch puts its own first
    metadata = [(each["kind"], each["metadata"]) for each in objects]
    places = [(kind, its.get("namespace", ""), its["name"]) for kind, its in metadata]
    assert len(set(places)) == len(places)
    return dict(zip(places, objects, strict=True))


ONE_REPLICA = frozenset({"Deployment", "ClusterRole"})
"""What that overlay has otherwise than the chart, whose replicas are a value."""


@pytest.mark.parametrize(
    ("chosen", "resource", "component", "apart"),
    [
        ("", "manifests", "", frozenset()),
        ("rotation.enabled=false", "manifests", "without-rotation", frozenset()),
        ("userRoles.enabled=false", "manifests", "without-user-roles", frozenset()),
        ("claimProbe.enabled=true", "manifests", "claim-probe", frozenset()),
        ("podMonitor.enabled=true", "manifests", "monitoring", frozenset()),
        ("namespaces={team}", "manifests/overlays/namespaced", "", ONE_REPLICA),
    ],
)
def test_helm_makes_what_kustomize_makes(
    kube: Kube, tmp_path: Path, chosen: str, resource: str, component: str, apart: frozenset[str]
) -> None:
    switched = ["--set", chosen] if chosen else []
    made = by_place(helm(None, "template", RELEASE, str(CHART), "--include-crds", *switched))
    here = tmp_path.resolve()
    document = {"resources": [os.path.relpath(REPOSITORY / resource, here)]}
    if component:
        document["components"] = [os.path.relpath(REPOSITORY / "manifests" / component, here)]
    (here / "kustomization.yaml").write_text(yaml.safe_dump(document))
    expected = by_place(kube.kubectl("kustomize", str(here)))
    assert sorted(made) == sorted(expected)
    for place, each in expected.items():
        assert made[place] == each or place[0] in apart, place


def test_each_controller_is_replicated_also_that_of_a_component(kube: Kube, tmp_path: Path) -> None:
    here = tmp_path.resolve()
    document = {
        "resources": [os.path.relpath(REPOSITORY / "manifests" / "base", here)],
        "components": [os.path.relpath(REPOSITORY / "manifests" / name, here) for name in ("models", "replicated")],
    }
    (here / "kustomization.yaml").write_text(yaml.safe_dump(document))
    for folder in (here, REPOSITORY / "manifests" / "overlays" / "prod"):
        made = list(by_place(kube.kubectl("kustomize", str(folder))).values())
        controllers = [each for each in made if each["kind"] == "Deployment"]
        assert [each["spec"]["replicas"] for each in controllers] == [2] * len(controllers)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("allowRange={10.0.0.0/8}", "additional properties 'allowRange' not allowed"),
        ("node.maxVolume=5", "additional properties 'maxVolume' not allowed"),
        ("userRoles.enabled=no", "got string, want boolean"),
        ("namespaces=team", "got string, want array"),
    ],
)
def test_a_value_that_the_chart_does_not_have_is_refused(chosen: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        helm(None, "template", RELEASE, str(CHART), "--set", chosen)


def values(site: Site) -> dict[str, Any]:
    """Each value that the chart has, other than by default."""
    repository, _, tag = site.image.rpartition(":")
    here = {"kubernetes.io/os": "linux", LABEL: "yes"}
    anywhere = [{"operator": "Exists"}, {"key": LABEL, "operator": "Equal", "value": "no", "effect": "NoExecute"}]
    critical = "system-node-critical"

    def part(millicores: int, memory: str, **more: Any) -> dict[str, Any]:
        resources = {"requests": {"cpu": f"{millicores}m", "memory": memory}, "limits": {"memory": "500Mi"}}
        common = {"tolerations": anywhere, "nodeSelector": here, "resources": resources, "priorityClassName": critical}
        return {**common, **more}

    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": site.pull_policy},
        "allowRanges": list(PRIVATE_RANGES),
        "controller": part(11, "101Mi", replicas=2),
        "node": part(12, "102Mi", mountMemory="256Mi", maxVolumes=7, cacheSizeVolume="3Gi", cacheSizeNode="6Gi"),
        "mountDaemon": part(13, "103Mi", resources={"requests": {"cpu": "13m", "memory": "103Mi"}}),
    }


@pytest.fixture
def installed(site: Site, kube: Kube, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The chart with these values, on a node with the label that they select; at the end nothing of it."""
    given = values(site)
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(given))
    kube.kubectl("label", "nodes", "--all", f"{LABEL}=yes", "--overwrite")
    options = ("--create-namespace", f"--values={tmp_path / 'values.yaml'}", "--wait", "--timeout=480s")
    begun = time.monotonic()
    try:
        helm(kube, "install", RELEASE, str(CHART), *options)
        print(f"helm install --wait: {time.monotonic() - begun:.1f} s")
        yield given
        helm(kube, "uninstall", RELEASE, "--wait")
        left = kube.kubectl(
            "get",
            "deployments,daemonsets,serviceaccounts,clusterroles,clusterrolebindings,csidrivers",
            "--all-namespaces",
            "--selector=app.kubernetes.io/part-of=kube-datastore",
            "--output=name",
        )
        assert left == ""
        assert kube.get("crd", "datastores.datastore.dev") is not None
    finally:
        helm(kube, "uninstall", RELEASE, "--ignore-not-found", "--wait")
        kube.kubectl("delete", f"--filename={CHART / 'crds'}", "--ignore-not-found", timeout_s=STEP_S)
        kube.delete("namespace", SYSTEM)
        kube.kubectl("label", "nodes", "--all", f"{LABEL}-")


def test_the_chart_is_installed_works_and_goes(
    site: Site, kube: Kube, storage: Storage, namespace: str, installed: dict[str, Any]
) -> None:
    for component, value in (("controller", "controller"), ("node", "node"), ("mount-daemon", "mountDaemon")):
        chosen = installed[value]
        # helm's --wait takes a DaemonSet that is updated OnDelete, as the mount daemon's, for ready at once.
        ready = partial(are_ready, kube, component, chosen.get("replicas", 1))
        kube.wait_for(f"ready pods of the {component}", ready, limit_s=READY_S, namespace=SYSTEM)
        for pod in pods_of(kube, component):
            check_pod(pod, chosen)
    environment = {each["name"]: each.get("value") for each in pods_of(kube, "node")[0]["spec"]["containers"][0]["env"]}
    assert environment["MOUNT_MEMORY"] == "256Mi"

    volume = Volume(site, storage, namespace, make_bucket(storage.here, f"bucket-{namespace}"))
    boto_client(storage.here).put_object(Bucket=volume.bucket, Key="x", Body=b"by helm")
    metadata = {"name": "data", "namespace": namespace}
    s3 = {**volume.spec["s3"], "credentialsSecret": "keys"}
    datastore = {"apiVersion": API_VERSION, "kind": "Datastore", "metadata": metadata, "spec": {"s3": s3}}
    kube.apply(volume.secret(), datastore, namespace=namespace)
    kube.wait_condition("datastore", "data", "Ready", namespace=namespace, limit_s=READY_S)
    kube.apply(volume.pod("reads", "print(open('/data/x').read())"), namespace=namespace)
    kube.wait_phase("reads", "Succeeded", namespace=namespace, limit_s=READY_S)
    assert kube.logs("reads", namespace=namespace) == "by helm\n"
    kube.delete("pod", "reads", namespace=namespace)
    kube.kubectl("delete", "datastores", "data", f"--namespace={namespace}", timeout_s=STEP_S)
    own = site.own
    if own is not None:
        gone = "the volume leaves the node"
        kube.wait_for(gone, lambda: "fuse.datastore" not in own.run("cat", "/proc/mounts"), limit_s=READY_S)
    check_upgrade_to_namespaces(kube, namespace)


def check_upgrade_to_namespaces(kube: Kube, namespace: str) -> None:
    """S-134"""
    chosen = ("--reuse-values", "--set", f"namespaces={{{namespace}}}")
    helm(kube, "upgrade", RELEASE, str(CHART), *chosen, "--wait", "--timeout=480s")

    def both_are_told() -> bool:
        containers = [each for pod in pods_of(kube, "controller") for each in pod["spec"]["containers"]]
        told = [{"name": "NAMESPACES", "value": namespace} in each["env"] for each in containers]
        return told == [True, True]

    kube.wait_for("both replicas in this namespace", both_are_told, namespace=SYSTEM)


def pods_of(kube: Kube, component: str) -> list[Manifest]:
    return kube.items("pods", namespace=SYSTEM, selector=f"app.kubernetes.io/component={component}")


def are_ready(kube: Kube, component: str, count: int) -> bool:
    pods = pods_of(kube, component)
    statuses = [each for pod in pods for each in pod["status"].get("containerStatuses", [])]
    return len(pods) == len(statuses) == count and all(each["ready"] for each in statuses)


def check_pod(pod: Manifest, chosen: dict[str, Any]) -> None:
    """The live pod is as the values say, the numbers of its priority included."""
    spec = pod["spec"]
    assert all(each in spec["tolerations"] for each in chosen["tolerations"])
    assert spec["nodeSelector"] == chosen["nodeSelector"]
    assert (spec["priorityClassName"], spec["priority"]) == ("system-node-critical", 2_000_001_000)
    assert spec["containers"][0]["resources"] == chosen["resources"]
