"""On API servers of their own: a controller of a few namespaces, and how all of it is removed again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import yaml

from datastore.api.names import CREDENTIALS, MANAGED_BY, MANAGER, OWNER, volume_name
from datastore.cli.app import exit_code_of, run
from tests.cluster.controlled import (
    READY_S,
    ROOT,
    SYSTEM,
    Bench,
    account_kubeconfig,
    controller,
    pod_on_no_node,
    secret_of,
)
from tests.cluster.kube import REMOVED_S, Kube, Manifest
from tests.promises import promise
from tests.servers import Server, tools_dir

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(900, func_only=True)]
MANIFESTS = ROOT / "manifests"
ALONE = ("--check", "5s")
REMOVAL = ("delete", "--kustomize", str(MANIFESTS), "--ignore-not-found")
"""As docs/OPERATIONS.md says."""


def _space(kube: Kube, server: Server, name: str) -> Bench:
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kube.apply(secret_of(server), namespace=name)
    return Bench(kube, server, name)


def _volume_of(namespace: str) -> Manifest:
    """A volume as another controller would have made it, of which the Datastore is gone."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "theirs", "labels": {MANAGED_BY: MANAGER}, "annotations": {OWNER: f"{namespace}/x"}},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "csi": {"driver": "csi.datastore.dev", "volumeHandle": "x"},
        },
    }


def _may(kube: Kube, verb: str, kind: str) -> None:
    """Wait until the controller has this right: the API server learns of a binding a moment after it was made."""
    asked = ("auth", "can-i", verb, kind, "-n", "team", f"--as=system:serviceaccount:{SYSTEM}:{MANAGER}")
    kube.wait_for(f"the right to {verb} {kind}", lambda: kube.kubectl(*asked).strip() == "yes", limit_s=READY_S)


@promise("S-114")
def test_a_controller_of_one_namespace_needs_no_rights_in_others(
    fresh: Kube, s3_server: Server, tmp_path: Path
) -> None:
    ours, theirs = _space(fresh, s3_server, "team"), _space(fresh, s3_server, "other")
    fresh.apply_folder(MANIFESTS / "overlays" / "namespaced")
    theirs.apply("digits", theirs.spec())
    fresh.apply(_volume_of("other"))
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    for verb, kind in (("get", "secrets"), ("patch", "pods"), ("list", "persistentvolumes")):
        _may(fresh, verb, kind)
    with controller(account, tmp_path, *ALONE, "--namespace", "team") as running:
        ours.apply("digits", ours.spec("a/", s3={"create": True}, reclaimPolicy="Delete"))
        print(f"apply to Ready: {ours.ready('digits'):.1f} s")
        fresh.wait_for("service account", lambda: bool(fresh.get("serviceaccount", "default", namespace="team")))
        fresh.apply(pod_on_no_node("train", "digits"), namespace="team")
        fresh.apply(secret_of(s3_server, note="rotated"), namespace="team")

        def told() -> bool:
            pod = fresh.get("pod", "train", namespace="team")
            return pod is not None and CREDENTIALS in pod["metadata"].get("annotations", {})

        fresh.wait_for("the annotation", told, limit_s=READY_S, namespace="team")
        fresh.kubectl("delete", "pod", "train", "--namespace=team", "--grace-period=0", "--force")
        fresh.delete("datastore", "digits", namespace="team")
        assert ours.objects() == []
        assert running.status("/livez") == 200
        log = running.log.read_text()
    assert "orbidden" not in log
    left = theirs.get("digits")
    assert left is not None
    assert "status" not in left
    assert "finalizers" not in left["metadata"]
    assert fresh.get("pv", "theirs") is not None


@promise("S-286", "S-114")
def test_a_controller_of_one_namespace_notices_that_the_claim_of_an_nfs_server_is_deleted(
    fresh: Kube, s3_server: Server, tmp_path: Path
) -> None:
    """The claim is in the servers' namespace. Nothing else would look at it for five minutes."""
    ours = _space(fresh, s3_server, "team")
    fresh.apply_folder(MANIFESTS / "overlays" / "namespaced")
    fresh.kubectl("apply", "--filename", str(MANIFESTS / "managed-nfs" / "managed-nfs.yaml"))
    example = yaml.safe_load((MANIFESTS / "examples" / "storageclass-nfs-managed.yaml").read_text())
    fresh.apply({**example, "parameters": {**example["parameters"], "clients": "10.0.0.0/8"}})
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    _may(fresh, "list", "persistentvolumes")
    with controller(account, tmp_path, "--namespace", "team") as running:
        ours.apply("results", {"nfs": {}})
        ours.reason("results", "ServerStarting")
        name = volume_name((ours.get("results") or {})["metadata"]["uid"])
        there = f"--namespace={example['parameters']['namespace']}"
        # No node runs the server, so the kubelet's word is written here.
        said = '{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}'
        fresh.kubectl("wait", "--for=create", f"pod/{name}-0", there, "--timeout=60s")
        fresh.kubectl("patch", "pod", f"{name}-0", there, "--subresource=status", f"--patch={said}")
        ours.ready("results")
        fresh.kubectl("delete", "persistentvolumeclaim", name, there, "--wait=false")
        assert "which has the data" in ours.reason("results", "StorageRefused")
        assert "orbidden" not in running.log.read_text()


@promise("S-113", "S-115")
def test_the_components_take_rights_away_and_give_them(tmp_path: Path) -> None:
    parts = {
        name: os.path.relpath(MANIFESTS / name, tmp_path.resolve()) for name in (".", "without-rotation", "claim-probe")
    }
    overlay = {"kind": "Kustomization", "resources": [parts.pop(".")], "components": list(parts.values())}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = [each for each in yaml.safe_load_all(Kube(tmp_path).kubectl("kustomize", str(tmp_path))) if each]
    assert not [each for each in made if "rotation" in each["metadata"]["name"]]
    policies = [each["metadata"]["name"] for each in made if each["kind"] == "ValidatingAdmissionPolicy"]
    assert sorted(policies) == [
        "datastore-controller-probe",
        "datastore-controller-probe-image",
        "datastore-node",
        "datastore-node-usage",
    ]
    deployments = {each["metadata"]["name"]: each for each in made if each["kind"] == "Deployment"}
    pod = deployments["datastore-controller"]["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert (environment["WATCH_SECRETS"], environment["PROBE_CLAIMS"]) == ("false", "true")


@promise("S-247")
def test_a_controller_that_comes_before_the_definitions_waits_for_them(
    fresh: Kube, s3_server: Server, tmp_path: Path
) -> None:
    """Where it began without them it would never see a Datastore, and say that all is well."""
    parts = [each for each in yaml.safe_load_all(fresh.kubectl("kustomize", str(MANIFESTS))) if each]
    definitions = [each for each in parts if each["kind"] == "CustomResourceDefinition"]
    others = yaml.safe_dump_all([each for each in parts if each not in definitions])
    fresh.kubectl("apply", "--server-side", "--filename=-", given=others)
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    with controller(account, tmp_path, *ALONE, ready=False) as running:
        fresh.wait_for("its word", lambda: "waits for the kinds that it watches" in running.log.read_text())
        assert running.status("/readyz") == 503
        fresh.apply(*definitions)
        fresh.wait_for("readiness", lambda: running.status("/readyz") == 200)
        bench = _space(fresh, s3_server, "team")
        bench.apply("digits", bench.spec())
        bench.ready("digits")


@promise("S-247")
def test_a_controller_whose_definition_is_removed_ends_with_one_line_that_names_it(fresh: Kube, tmp_path: Path) -> None:
    fresh.apply_folder(MANIFESTS)
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    with controller(account, tmp_path, *ALONE) as running:
        fresh.kubectl("delete", "crd", "datastores.datastore.dev", timeout_s=REMOVED_S)
        fresh.wait_for("its end", lambda: running.status("/livez") == 0)
        said = running.log.read_text()
        (line,) = [line for line in said.splitlines() if "can't continue" in line]
        assert "no CustomResourceDefinition datastores.datastore.dev" in line
        assert "datastore crd | kubectl apply -f -" in line
        assert "Traceback" not in said


def _ours(kube: Kube) -> list[str]:
    """Everything of ours that the cluster still holds."""
    kinds = (
        "crd,clusterrole,clusterrolebinding,csidriver,validatingadmissionpolicy,validatingadmissionpolicybinding,"
        "persistentvolume,namespace"
    )
    text = kube.kubectl("get", kinds, "--output=name")
    return [line for line in text.split() if "datastore" in line or "kopf" in line]


def _data(bench: Bench) -> None:
    bench.s3.put_object(Bucket=bench.bucket, Key="kept/x", Body=b"1")


@promise("S-117")
def test_removed_in_the_documented_order_nothing_stays_but_the_data(
    fresh: Kube, s3_server: Server, tmp_path: Path
) -> None:
    fresh.apply_folder(MANIFESTS)
    bench = _space(fresh, s3_server, "team")
    _data(bench)
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    with controller(account, tmp_path, *ALONE):
        bench.apply("kept", bench.spec("kept/"))
        bench.apply("made", bench.spec("made/", s3={"create": True}, reclaimPolicy="Delete"))
        bench.ready("kept")
        bench.ready("made")
        fresh.kubectl("delete", "datastores", "--all", "--all-namespaces", timeout_s=REMOVED_S)
    fresh.kubectl(*REMOVAL, timeout_s=REMOVED_S)
    assert _ours(fresh) == []
    assert fresh.items("pvc", namespace="team") == []
    assert bench.objects() == ["kept/x"]


@promise("S-117")
def test_removed_the_other_way_round_each_is_released_by_hand(
    fresh: Kube, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is gone, so nobody takes its finalizers off; the definition waits for them."""
    fresh.apply_folder(MANIFESTS)
    bench = _space(fresh, s3_server, "team")
    _data(bench)
    account = account_kubeconfig(fresh.kubeconfig, fresh, tmp_path)
    with controller(account, tmp_path, *ALONE):
        bench.apply("kept", bench.spec("kept/", reclaimPolicy="Delete"))
        bench.ready("kept")
    removal = threading.Thread(target=fresh.kubectl, args=REMOVAL, kwargs={"timeout_s": REMOVED_S})
    removal.start()
    try:

        def going() -> bool:
            return "deletionTimestamp" in (bench.get("kept") or {"metadata": {}})["metadata"]

        fresh.wait_for("the Datastore waiting", going, limit_s=READY_S)
        monkeypatch.setenv("KUBECONFIG", str(fresh.kubeconfig))
        monkeypatch.setenv("PATH", str(tools_dir()), prepend=":")
        assert exit_code_of(lambda: run(["remove-finalizer", "kept", "-n", "team"])) == 0
    finally:
        removal.join(REMOVED_S + 60)
    assert not removal.is_alive()
    assert [each for each in _ours(fresh) if not each.startswith("persistentvolume/")] == []
    # The garbage collector does not follow owners of a kind that is gone, so the claims are left, too.
    for kind in ("pvc", "pv"):
        fresh.kubectl("delete", kind, "--all-namespaces", f"--selector={MANAGED_BY}={MANAGER}", timeout_s=READY_S)
    assert _ours(fresh) == []
    assert fresh.items("pvc", namespace="team") == []
    assert bench.objects() == ["kept/x"]
