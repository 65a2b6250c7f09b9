"""datastore doctor NAME --cluster and datastore release, over a kubectl that is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datastore.api.names import FINALIZER
from datastore.cli.app import app, exit_code_of
from datastore.cli.clusterchecks import cluster_checks
from datastore.cli.findings import Level
from datastore.cli.kubectl import Kubectl
from datastore.errors import DatastoreError


def pod(
    name: str, *, ready: bool = True, claim: str = "", component: str = "", phase: str = "Running"
) -> dict[str, Any]:
    volumes = [{"persistentVolumeClaim": {"claimName": claim}}] if claim else []
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "labels": {"component": component}},
        "spec": {"volumes": volumes, "nodeName": "n-1"},
        "status": {"phase": phase, "conditions": conditions},
    }


class PlayedCluster:
    """What a whole cluster answers; a test takes links away."""

    def __init__(self) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}
        provisioned = {"type": "Provisioned", "status": "True", "reason": "Bound", "message": ""}
        self.status: dict[str, Any] = {
            "observedGeneration": 2,
            "backend": "s3",
            "location": "s3://digits/",
            "claimName": "digits",
            "volumeName": "v",
            "conditions": [ready, provisioned],
        }
        self.objects: dict[tuple[str, str], Any] = {
            ("customresourcedefinitions", "datastores.datastore.dev"): {},
            ("datastores.datastore.dev", "digits"): {
                "metadata": {"name": "digits", "generation": 2},
                "spec": {"s3": {"credentialsSecret": "keys"}},
                "status": self.status,
            },
            ("secrets", "keys"): {"data": {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}},
            ("persistentvolumeclaims", "digits"): {
                "metadata": {"name": "digits"},
                "spec": {"volumeName": "v"},
                "status": {"phase": "Bound"},
            },
            ("csidrivers", "csi.datastore.dev"): {},
        }
        self.pods = [pod("train", claim="digits")]
        self.components = {name: [pod(f"{name}-1")] for name in ("controller", "node", "keeper")}
        self.events: list[Any] = []

    def get(self, kind: str, name: str = "", *, selector: str = "", namespace: str | None = None) -> Any:
        if name:
            return self.objects.get((kind, name))
        if selector:
            return self.components[selector.rpartition("=")[2]]
        return self.pods if kind == "pods" else self.events


def failures(cluster: PlayedCluster) -> list[tuple[str, str]]:
    return [(each.check, each.text) for each in cluster_checks(cluster, "digits") if each.level is Level.FAIL]


def test_a_whole_chain_has_no_broken_link() -> None:
    findings = list(cluster_checks(PlayedCluster(), "digits"))
    assert [each.check for each in findings] == [
        "cluster", "controller", "object", "secret", "backend", "claim", "keeper", "node", "pods",
    ]  # fmt: skip
    assert {each.level for each in findings} == {Level.OK}


@pytest.mark.parametrize(
    ("missing", "check"),
    [
        (("customresourcedefinitions", "datastores.datastore.dev"), "cluster"),
        (("datastores.datastore.dev", "digits"), "object"),
        (("secrets", "keys"), "secret"),
        (("persistentvolumeclaims", "digits"), "claim"),
        (("csidrivers", "csi.datastore.dev"), "driver"),
    ],
)
def test_the_first_missing_link_is_named_and_ends_the_walk(missing: tuple[str, str], check: str) -> None:
    cluster = PlayedCluster()
    del cluster.objects[missing]
    assert [each[0] for each in failures(cluster)] == [check]


def test_a_failing_backend_is_told_in_the_servers_words_with_the_last_errors() -> None:
    cluster = PlayedCluster()
    cluster.status["conditions"][0] = {
        "type": "Ready",
        "status": "False",
        "reason": "AccessDenied",
        "message": "no way",
    }
    about = {"kind": "Pod", "name": "train"}
    cluster.events = [{"type": "Warning", "involvedObject": about, "reason": "FailedMount", "message": "timed out"}]
    findings = list(cluster_checks(cluster, "digits"))
    assert (findings[-2].check, findings[-2].text) == ("backend", "AccessDenied: no way")
    assert "FailedMount: timed out" in findings[-1].text


def test_a_node_plugin_that_is_not_ready_is_named_with_its_node() -> None:
    cluster = PlayedCluster()
    cluster.components["node"] = [pod("node-1"), pod("node-2", ready=False)]
    assert failures(cluster) == [("node", "not ready: node-2 on n-1")]


def test_one_ready_replica_of_the_controller_is_enough() -> None:
    cluster = PlayedCluster()
    cluster.components["controller"] = [pod("c-1"), pod("c-2", ready=False)]
    assert failures(cluster) == []
    cluster.components["controller"] = []
    assert failures(cluster)[0][0] == "controller"


def test_a_secret_without_a_key_is_named_by_the_key() -> None:
    cluster = PlayedCluster()
    cluster.objects[("secrets", "keys")] = {"data": {"AWS_ACCESS_KEY_ID": ""}}
    assert failures(cluster) == [("secret", "Secret keys has no AWS_SECRET_ACCESS_KEY")]


def test_deletion_and_staleness_are_told() -> None:
    cluster = PlayedCluster()
    cluster.status["observedGeneration"] = 1
    assert "not acted on the present spec" in failures(cluster)[0][1]
    cluster.objects[("datastores.datastore.dev", "digits")]["metadata"]["deletionTimestamp"] = "x"
    assert "being deleted" in failures(cluster)[0][1]


KUBECTL = """#!/usr/bin/env python3
import pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "get":
    print((here / "object").read_text())
if (here / "refuses").exists():
    sys.exit((here / "refuses").read_text())
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a kubectl that answers with `object`, and writes its calls down."""
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def release(kubectl: Path, metadata: dict[str, Any]) -> int:
    (kubectl / "object").write_text(json.dumps({"metadata": metadata, "status": {"location": "s3://digits/"}}))
    return exit_code_of(lambda: app(["release", "digits", "-n", "team"], standalone_mode=False))


def test_release_takes_our_finalizer_off_and_no_other(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release(kubectl, {"deletionTimestamp": "x", "finalizers": ["other", FINALIZER]}) == 0
    calls = (kubectl / "calls").read_text().splitlines()
    assert "--namespace=team" in calls[1]
    assert json.loads(calls[1].partition("--patch=")[2].rpartition(" --namespace")[0]) == [
        {"op": "test", "path": "/metadata/finalizers/1", "value": FINALIZER},
        {"op": "remove", "path": "/metadata/finalizers/1"},
    ]
    assert "s3://digits/ stays there" in "".join(capsys.readouterr())


def test_release_refuses_a_datastore_that_is_not_being_deleted(kubectl: Path) -> None:
    assert release(kubectl, {"finalizers": [FINALIZER]}) == 1
    assert len((kubectl / "calls").read_text().splitlines()) == 1


def test_kubectls_own_words_reach_the_user(kubectl: Path) -> None:
    (kubectl / "object").write_text("")
    (kubectl / "refuses").write_text("Unable to connect to the server")
    with pytest.raises(DatastoreError, match="kubectl get: Unable to connect"):
        Kubectl().get("pods")


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DatastoreError, match="kubectl is not on PATH"):
        Kubectl().get("pods")
