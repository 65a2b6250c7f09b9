"""A class with `provisioner: ganesha` on a real node: a Datastore's server comes, is replaced, and goes."""

from __future__ import annotations

import re
from functools import partial

import pytest
import yaml

from datastore.api.names import UID, volume_name
from tests.cluster.controlled import datastore_of
from tests.cluster.fixtures import SYSTEM, Site
from tests.cluster.kube import Kube, KubeError
from tests.cluster.managednfs import GONE_S, LOOP, MANIFESTS, READY_S, SPACE, goes_on, pod, replaced
from tests.cluster.test_node_plugin import pods_of
from tests.promises import promise

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.own_node, pytest.mark.timeout(1200, func_only=True)]
KINDS = "statefulsets,services,networkpolicies,persistentvolumeclaims,pods"
PROBE = "import sys; from datastore.backends.nfs.ganeshapod import probe; probe(sys.argv[1])"


@promise("S-291", "S-293", "S-294", "S-295", "S-296", "S-297")
def test_a_server_of_its_own_comes_is_replaced_under_open_files_grows_and_goes(
    site: Site, kube: Kube, managed: None, namespace: str
) -> None:
    kube.apply(datastore_of("results", {"nfs": {}, "reclaimPolicy": "Delete"}), namespace=namespace)
    took = kube.wait_condition("datastore", "results", "Ready", namespace=namespace, limit_s=READY_S)
    print(f"applied to Ready: {took:.1f} s")
    found = kube.get("datastore", "results", namespace=namespace)
    assert found is not None
    name = volume_name(found["metadata"]["uid"])
    kube.apply(pod(site, "loop", LOOP), namespace=namespace)
    kube.wait_phase("loop", "Running", namespace=namespace, limit_s=READY_S)
    goes_on(kube, namespace)
    address = found["status"]["location"].removeprefix("nfs://").partition("/")[0]

    def refused() -> bool:
        try:
            kube.execute("loop", "python3", "-c", PROBE, address, namespace=namespace)
        except KubeError as error:
            return "does not export /data" in str(error)  # else it was too busy to answer
        raise AssertionError("the pod is not among the clients")

    kube.wait_for("a refusal", refused, limit_s=READY_S, namespace=namespace)

    kube.kubectl("delete", "pod", f"{name}-0", f"--namespace={SPACE}", "--wait=false")
    kube.wait_for("another server", partial(replaced, kube, name), limit_s=READY_S, namespace=SPACE)
    print(f"the server's pod deleted, then 15 rounds: {goes_on(kube, namespace):.1f} s")

    kube.patch("datastore", "results", {"spec": {"capacity": "2Gi"}}, namespace=namespace)

    def grows() -> bool:
        claim = kube.get("pvc", name, namespace=SPACE)
        volume = kube.get("pv", name)
        assert claim is not None
        assert volume is not None
        asked = claim["spec"]["resources"]["requests"]["storage"]
        return (asked, volume["spec"]["capacity"]["storage"]) == ("2Gi", "2Gi")

    kube.wait_for("the claim asks for more", grows, limit_s=READY_S, namespace=SPACE)
    goes_on(kube, namespace)

    kube.delete("datastore", "results", namespace=namespace, wait=False)
    waits = partial(_says, kube, namespace, "loop")
    kube.wait_for("it waits for the pod", waits, limit_s=READY_S, namespace=namespace)
    goes_on(kube, namespace)
    kube.delete("pod", "loop", namespace=namespace)
    kube.wait_for("the end", lambda: kube.get("datastore", "results", namespace=namespace) is None, limit_s=GONE_S)
    kube.wait_for("nothing is left", lambda: kube.items(KINDS, namespace=SPACE, selector=UID) == [], namespace=SPACE)


def _says(kube: Kube, namespace: str, text: str) -> bool:
    found = kube.get("datastore", "results", namespace=namespace)
    assert found is not None, "it went under a pod"
    return any(text in each["message"] for each in found["status"]["conditions"] if each["type"] == "Ready")


@promise("S-299")
def test_the_controller_may_make_servers_in_that_namespace_only(kube: Kube, managed: None) -> None:
    """It uses all that it may do there, in the test above."""
    who = f"--as=system:serviceaccount:{SYSTEM}:datastore-controller"

    def may(verb: str, kind: str, namespace: str) -> bool:
        try:
            return kube.kubectl("auth", "can-i", verb, kind, who, f"--namespace={namespace}").strip() == "yes"
        except KubeError:
            return False

    (role,) = [each for each in yaml.safe_load_all(MANIFESTS.read_text()) if each["kind"] == "Role"]
    allowed = {(kind, verb) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    (controller,) = pods_of(kube, "controller")
    name = controller["metadata"]["name"]
    text = kube.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{name}:8080/proxy/metrics")
    calls = re.findall(r'^datastore_controller_api_requests_total\{resource="([^"]+)",verb="([^"]+)"\}', text, re.M)
    made = {(kind, verb) for kind, verb in calls if kind in {each for each, _ in allowed}}
    # Server-side apply of something new is authorised as create, too. This controller watches claims everywhere; one of
    # chosen namespaces needs the Role for it (test_controller_apart.py).
    watched = {("persistentvolumeclaims", verb) for verb in ("list", "watch")}
    assert allowed - made - watched == {(kind, "create") for kind, _ in allowed} - made
    assert {each for each in made - allowed if each[1] not in ("list", "watch")} == set()
    assert may("create", "statefulsets.apps", SPACE)
    assert not any(may("create", "statefulsets.apps", each) for each in ("default", SYSTEM))
    assert not any(
        may(verb, kind, SPACE) for verb, kind in (("create", "pods"), ("create", "roles"), ("get", "pods/exec"))
    )
