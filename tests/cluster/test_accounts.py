"""What the API server lets our service accounts do, beyond their roles: policies that a real API server keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastore.api.names import usage_name
from datastore.api.resources import DATASTORES, EXPORTS, MODELS, SERVINGS, TRAININGJOBS, VERSIONS, Resource
from datastore.controller.datastores.claimprobe import pod_for
from datastore.controller.datastores.effective import effective_spec
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.ownimage import Image
from datastore.csi.plugin import STARTUP_TAINT
from tests.cluster.cluster import Cluster
from tests.cluster.controlled import ROOT, SYSTEM, account_kubeconfig, answer, datastore_of, pod_on_no_node
from tests.cluster.kube import Kube, Manifest
from tests.promises import promise

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(600, func_only=True)]
SOON_S = 120.0
MERGE = "application/merge-patch+json"
TAINT = {"key": STARTUP_TAINT, "effect": "NoSchedule"}
OTHER = {"key": "example.org/reserved", "effect": "NoSchedule"}


@pytest.fixture
def nodes(api_kube: Kube) -> Iterator[tuple[str, str]]:
    """Two Nodes, each with our taint and another one, and a pod of the node plugin on the first."""
    names = ("node-a", "node-b")
    for name in names:
        api_kube.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        # The API server gives a new Node a taint of its own, which nobody here takes off.
        api_kube.patch("node", name, {"spec": {"taints": [TAINT, OTHER]}})
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "plugin-a"},
        "spec": {
            "containers": [{"name": "main", "image": "none"}],
            "nodeName": "node-a",
            "serviceAccountName": "datastore-node",
            "tolerations": [{"operator": "Exists"}],
        },
    }
    api_kube.apply(pod, namespace=SYSTEM)
    yield names
    api_kube.kubectl("delete", "pod", "plugin-a", "--namespace", SYSTEM, "--grace-period=0", "--force")
    for name in names:
        api_kube.delete("node", name)


@promise("S-214")
def test_the_node_plugin_changes_its_own_node_only(
    api_server: Cluster, api_kube: Kube, nodes: tuple[str, str], tmp_path: Path
) -> None:
    account = account_kubeconfig(api_server.kubeconfig, api_kube, tmp_path, "datastore-node", "plugin-a")

    def said(node: str, change: dict[str, Any]) -> tuple[int, str]:
        return answer(account, "PATCH", f"/api/v1/nodes/{node}", change, MERGE)

    ours = {"spec": {"taints": [OTHER]}}

    def refused() -> bool:
        return "changes no Node but its own" in said("node-b", {"metadata": {"labels": {"x": "y"}}})[1]

    # A policy that was just made holds a moment later, and so do the rights of the account.
    api_kube.wait_for("a refusal", refused, limit_s=SOON_S)
    assert "changes no Node but its own" in said("node-b", ours)[1]
    for change in (
        {"spec": {"taints": [TAINT]}},
        {"spec": {"taints": None}},
        {"spec": {"taints": [OTHER, {"key": "x", "effect": "NoExecute"}]}},
        {"spec": {"unschedulable": True}},
    ):
        assert "takes its start-up taint off, and changes nothing else" in said("node-a", change)[1]
    assert "changes no labels" in said("node-a", {"metadata": {"labels": {"x": "y"}}})[1]
    assert said("node-a", ours) == (200, "")
    assert ((api_kube.get("node", "node-a") or {})["spec"])["taints"] == [OTHER]


@promise("S-360")
def test_the_node_plugin_tells_what_pods_use_of_its_own_node_only(
    api_server: Cluster, api_kube: Kube, nodes: tuple[str, str], tmp_path: Path
) -> None:
    """It reads nothing of what other nodes tell."""
    account = account_kubeconfig(api_server.kubeconfig, api_kube, tmp_path, "datastore-node", "plugin-a")
    maps = f"/api/v1/namespaces/{SYSTEM}/configmaps"
    own, other = (usage_name(node) for node in nodes)

    def make(name: str) -> tuple[int, str]:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": "1"}}
        return answer(account, "POST", maps, body, "application/json")

    def refused() -> bool:
        code, told = make(other)
        if code == 201:
            api_kube.delete("configmap", other, namespace=SYSTEM)
        return "writes no ConfigMap but that of its own node" in told

    api_kube.wait_for("a refusal", refused, limit_s=SOON_S)
    assert make(own)[0] == 201
    assert answer(account, "PATCH", f"{maps}/{own}", {"data": {"a": "2"}}, MERGE) == (200, "")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": other}, "data": {"a": "1"}}
    api_kube.apply(body, namespace=SYSTEM)
    for change in ({}, {"data": {"a": "2"}}):
        code, told = answer(account, "PATCH", f"{maps}/{other}", change, MERGE)
        assert code != 200
        assert "writes no ConfigMap but that of its own node" in told
    for path in (f"{maps}/{own}", f"{maps}/{other}", maps, "/api/v1/configmaps"):
        assert answer(account, "GET", path, None, "application/json")[0] == 403
    for name in (own, other):
        api_kube.delete("configmap", name, namespace=SYSTEM)


ALL_KINDS = (DATASTORES, TRAININGJOBS, MODELS, VERSIONS, EXPORTS, SERVINGS)
JSON = "application/json"


def allowed(account: Path, resource: Resource, space: str) -> set[str]:
    """What this identity may ask of a kind. No object is made: what is allowed fails later, as 400 or 404."""
    one = resource.path(space, "none")
    requests: dict[str, tuple[str, str, Any, str]] = {
        "list": ("GET", resource.path(space), None, JSON),
        "get": ("GET", one, None, JSON),
        "create": ("POST", resource.path(space), {}, JSON),
        "update": ("PUT", one, {}, JSON),
        "patch": ("PATCH", one, {}, MERGE),
        "delete": ("DELETE", one, {}, JSON),
        "delete all": ("DELETE", resource.path(space), {}, JSON),
        "see status": ("GET", resource.path(space, "none", "status"), None, JSON),
        "update status": ("PUT", resource.path(space, "none", "status"), {}, JSON),
        "patch status": ("PATCH", resource.path(space, "none", "status"), {}, MERGE),
    }
    return {what for what, request in requests.items() if answer(account, *request)[0] != 403}


@promise("S-422")
@pytest.mark.parametrize("role", ["view", "edit", "admin"])
def test_the_roles_view_and_edit_include_our_kinds(
    api_server: Cluster, api_kube: Kube, space: str, tmp_path: Path, role: str
) -> None:
    person = f"person-{role}"
    api_kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": person}}, namespace=SYSTEM)
    subject = [f"--clusterrole={role}", f"--serviceaccount={SYSTEM}:{person}", f"--namespace={space}"]
    api_kube.kubectl("create", "rolebinding", person, *subject)
    account = account_kubeconfig(api_server.kubeconfig, api_kube, tmp_path, person)
    reads = {"list", "get", "see status"}
    writes = set() if role == "view" else {"create", "update", "patch", "delete"}

    def aggregated() -> bool:
        return allowed(account, DATASTORES, space) == reads | writes

    api_kube.wait_for("the rights", aggregated, limit_s=SOON_S)
    for resource in ALL_KINDS:
        assert allowed(account, resource, space) == reads | writes, resource.plural
        assert allowed(account, resource, "default") == set(), resource.plural
    if writes:
        local = datastore_of("own", {"local": {"path": "/nowhere"}})
        assert answer(account, "POST", DATASTORES.path(space), local, JSON)[0] == 201
        assert answer(account, "PATCH", DATASTORES.path(space, "own"), {"spec": {"readOnly": True}}, MERGE)[0] == 200
        ready = {"status": {"phase": "Ready"}}
        assert answer(account, "PATCH", DATASTORES.path(space, "own", "status"), ready, MERGE)[0] == 403
        assert answer(account, "DELETE", DATASTORES.path(space, "own"), {}, JSON)[0] == 200
    api_kube.delete("serviceaccount", person, namespace=SYSTEM)


POLICY = ROOT / "manifests" / "claim-probe" / "policy.yaml"


@pytest.fixture
def probing(api_kube: Kube) -> Iterator[None]:
    api_kube.kubectl("apply", "--filename", str(POLICY))
    yield
    api_kube.kubectl("delete", "--filename", str(POLICY))


@promise("S-115")
def test_a_policy_that_misses_the_controllers_deployment_refuses_no_pod_of_others(
    api_kube: Kube, account: Path, space: str, tmp_path: Path
) -> None:
    api_kube.wait_for("service account", lambda: bool(api_kube.get("serviceaccount", "default", namespace=space)))
    whole = POLICY.read_text()
    missing = tmp_path / "policy.yaml"
    missing.write_text(whole.replace("paramRef: {name: datastore-controller,", "paramRef: {name: nobody,"))
    assert missing.read_text() != whole
    body: Manifest = datastore_of("disk", {"claim": {"name": "disk"}})
    body["metadata"] |= {"namespace": space, "uid": "0001"}
    probe = pod_for(effective_spec(body, None, Settings()), "disk", Image("example.org/miner:1", "Never"), "")
    path = f"/api/v1/namespaces/{space}/pods"
    api_kube.kubectl("apply", "--filename", str(missing))
    try:

        def refused() -> bool:
            status, said = answer(account, "POST", path, probe, JSON)
            if status == 201:  # A policy that was just made holds a moment later.
                api_kube.kubectl("delete", "pod", "--all", "--namespace", space, "--grace-period=0", "--force")
            return "no params found" in said

        api_kube.wait_for("a refusal of the pod that tries a volume", refused, limit_s=SOON_S)
        status, said = answer(account, "POST", path, {**probe, "metadata": {**probe["metadata"], "labels": {}}}, JSON)
        assert (status, "has the label" in said) == (422, True), said
        api_kube.apply(pod_on_no_node("other", "disk"), namespace=space)
        api_kube.delete("pod", "other", namespace=space)
    finally:
        api_kube.kubectl("delete", "--filename", str(missing))


@promise("S-115")
@pytest.mark.usefixtures("probing")
def test_a_pod_that_tries_a_volume_has_the_controllers_image(api_kube: Kube, account: Path, space: str) -> None:
    """Who has the controller's token starts no image of his own in a tenant's namespace."""
    api_kube.wait_for("service account", lambda: bool(api_kube.get("serviceaccount", "default", namespace=space)))
    body: Manifest = datastore_of("disk", {"claim": {"name": "disk"}})
    body["metadata"] |= {"namespace": space, "uid": "0001"}
    effective = effective_spec(body, None, Settings())
    own = api_kube.get("deployment", "datastore-controller", namespace=SYSTEM)
    assert own is not None
    image = own["spec"]["template"]["spec"]["containers"][0]["image"]

    def said(image: str) -> tuple[int, str]:
        pod = pod_for(effective, "disk", Image(image, "Never"), "")
        return answer(account, "POST", f"/api/v1/namespaces/{space}/pods", pod, "application/json")

    told: list[tuple[int, str]] = []

    def remove() -> None:
        api_kube.kubectl("delete", "pod", "--all", "--namespace", space, "--grace-period=0", "--force")

    def refused() -> bool:
        told.append(said("example.org/miner:1"))
        if told[-1][0] == 201:  # A policy that was just made holds a moment later.
            remove()
        return "has the controller's image" in told[-1][1]

    api_kube.wait_for("a refusal of the image", refused, limit_s=SOON_S)
    assert said(image)[0] == 201
    remove()
