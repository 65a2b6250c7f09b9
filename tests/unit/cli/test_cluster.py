"""datastore doctor NAME --cluster and datastore remove-finalizer, over a cluster that is played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastore.api.names import FINALIZER
from datastore.api.resources import DATASTORES, EXPORTS, PODS, VERSIONS, Resource
from datastore.cli.app import exit_code_of, run
from datastore.cli.clusterchecks import cluster_checks
from datastore.cli.exitcodes import ExitCode
from datastore.cli.findings import Level
from datastore.errors import AccessDenied
from tests.playedapi import PlayedApi, played_api
from tests.promises import promise

HANDLE = "team/digits/u-1"
MOUNTED = f'datastore_mount_up{{volume="{HANDLE}"}} 1.0\ndatastore_mount_up{{volume="other"}} 0.0\n'


def pod(
    name: str, *, ready: bool = True, claim: str = "", node: str = "n-1", phase: str = "Running", waiting: str = ""
) -> dict[str, Any]:
    volumes = [{"persistentVolumeClaim": {"claimName": claim}}] if claim else []
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    status: dict[str, Any] = {"phase": phase, "conditions": conditions}
    if waiting:
        status["containerStatuses"] = [{"state": {"waiting": {"reason": waiting, "message": "as it is"}}}]
    ports = [{"name": "http", "containerPort": 9809}]
    return {
        "metadata": {"name": name, "namespace": "system"},
        "spec": {"volumes": volumes, "nodeName": node, "containers": [{"ports": ports}]},
        "status": status,
    }


def event(kind: str, name: str, reason: str, message: str = "", when: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    about = {"kind": kind, "name": name, "resourceVersion": when}
    return {"type": "Warning", "involvedObject": about, "reason": reason, "message": message, "lastTimestamp": when}


class PlayedCluster:
    """What a whole cluster answers; a test takes links away."""

    namespace = "lab"

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
            ("datastores", "digits"): {
                "metadata": {"name": "digits", "namespace": "team", "uid": "u-1", "generation": 2},
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
        self.components = {name: [pod(f"{name}-1")] for name in ("controller", "node", "mount-daemon")}
        self.events: list[Any] = []
        self.workloads: list[Any] = []
        self.numbers = {"mount-daemon-1": MOUNTED, "node-1": f'datastore_csi_volume_mounted{{volume="{HANDLE}"}} 1.0\n'}
        self.others: list[Any] = []
        self.forbidden: set[str] = set()

    def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Any:
        self._check(resource.plural)
        return self.objects.get((resource.plural, name))

    def list(self, resource: Resource, *, namespace: str | None = None, selector: str = "") -> list[Any]:
        self._check(resource.plural)
        if selector:
            return self.components[selector.rpartition("=")[2]] if resource is PODS else self.workloads
        return {"pods": self.pods, "events": self.events}.get(resource.plural, self.others)

    def _check(self, kind: str) -> None:
        if kind in self.forbidden:
            raise AccessDenied(f"{kind} is forbidden: User x cannot get it")

    def text(self, path: str) -> str:
        self._check("pods/proxy")
        assert path.startswith("/api/v1/namespaces/system/pods/")
        return self.numbers[path.split("/")[6].partition(":")[0]]


@pytest.fixture
def cluster() -> PlayedCluster:
    return PlayedCluster()


def failures(cluster: PlayedCluster) -> list[tuple[str, str]]:
    return [(each.check, each.text) for each in cluster_checks(cluster, "digits") if each.level is Level.FAIL]


def test_a_whole_chain_has_no_broken_link(cluster: PlayedCluster) -> None:
    findings = list(cluster_checks(cluster, "digits"))
    assert [each.check for each in findings] == [
        "cluster", "controller", "object", "secret", "backend", "claim", "mount-daemon", "node", "mount", "pods",
    ]  # fmt: skip
    assert {each.level for each in findings} == {Level.OK}


@pytest.mark.parametrize(
    ("missing", "check"),
    [
        (("customresourcedefinitions", "datastores.datastore.dev"), "cluster"),
        (("datastores", "digits"), "object"),
        (("secrets", "keys"), "secret"),
        (("persistentvolumeclaims", "digits"), "claim"),
        (("csidrivers", "csi.datastore.dev"), "driver"),
    ],
)
def test_the_first_missing_link_is_named_and_ends_the_walk(
    cluster: PlayedCluster, missing: tuple[str, str], check: str
) -> None:
    del cluster.objects[missing]
    assert [each[0] for each in failures(cluster)] == [check]


def test_a_failing_backend_is_reported_in_the_servers_words(cluster: PlayedCluster) -> None:
    cluster.status["conditions"][0] = {
        "type": "Ready",
        "status": "False",
        "reason": "AccessDenied",
        "message": "no way",
    }
    cluster.events = [event("Pod", "train", "FailedMount", "timed out")]
    findings = list(cluster_checks(cluster, "digits"))
    assert (findings[-2].check, findings[-2].text) == ("backend", "AccessDenied: no way")
    assert "FailedMount: timed out" in findings[-1].text


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("CredentialsInvalid", ExitCode.ACCESS),
        ("AccessDenied", ExitCode.ACCESS),
        ("ClockSkew", ExitCode.ACCESS),
        ("BucketNotFound", ExitCode.STORAGE),
        ("EndpointUnreachable", ExitCode.STORAGE),
        ("InvalidSpec", ExitCode.USAGE),
        ("SomethingElse", ExitCode.ERROR),
    ],
)
def test_a_failing_backend_has_the_exit_code_of_a_mount(cluster: PlayedCluster, reason: str, code: ExitCode) -> None:
    cluster.status["conditions"][0] = {"type": "Ready", "status": "False", "reason": reason, "message": "no"}
    assert [each.code for each in cluster_checks(cluster, "digits") if each.level is Level.FAIL] == [code]


@pytest.mark.parametrize("missing", [("secrets", "keys"), ("datastores", "digits")])
def test_a_missing_object_has_the_exit_code_of_a_wrong_manifest(
    cluster: PlayedCluster, missing: tuple[str, str]
) -> None:
    del cluster.objects[missing]
    assert [each.code for each in cluster_checks(cluster, "digits") if each.level is Level.FAIL] == [ExitCode.USAGE]


def test_a_node_plugin_that_is_not_ready_is_named_with_its_node(cluster: PlayedCluster) -> None:
    cluster.components["node"] = [pod("node-1", node="n-2"), pod("node-2", ready=False, waiting="CrashLoopBackOff")]
    assert failures(cluster) == [("node", "not ready: node-2 on n-1 (CrashLoopBackOff: as it is)")]


@pytest.mark.parametrize("component", ["node", "mount-daemon"])
def test_only_the_nodes_of_its_pods_matter(cluster: PlayedCluster, component: str) -> None:
    cluster.components[component] = [pod(f"{component}-1"), pod(f"{component}-2", ready=False, node="n-2")]
    assert failures(cluster) == []
    cluster.components[component] = [pod(f"{component}-2", node="n-2")]
    assert failures(cluster) == [(component, f"no pod of daemonset/datastore-{component} on n-1")]


def test_a_workload_without_pods_is_told_from_one_that_is_not_installed(cluster: PlayedCluster) -> None:
    cluster.components["controller"] = []
    assert failures(cluster) == [("controller", "deployment/datastore-controller is not installed")]
    cluster.workloads = [{"metadata": {"namespace": "system"}, "spec": {"replicas": 0}}]
    assert failures(cluster) == [("controller", "no pod of deployment/datastore-controller runs; 0 are wanted")]
    todo = [each.todo for each in cluster_checks(cluster, "digits") if each.level is Level.FAIL]
    assert todo == ["kubectl -n system describe deployment/datastore-controller"]


@promise("S-144")
@pytest.mark.parametrize(
    ("pod_of", "numbers", "text"),
    [
        ("node-1", f'datastore_csi_volume_mounted{{volume="{HANDLE}"}} 0.0', "n-1 has lost the mount"),
        ("mount-daemon-1", f'datastore_mount_up{{volume="{HANDLE}"}} 0.0', "server on n-1 does not answer"),
        ("mount-daemon-1", "", "n-1 has lost the mount"),
    ],
)
def test_a_dead_mount_is_named_with_its_node(cluster: PlayedCluster, pod_of: str, numbers: str, text: str) -> None:
    cluster.numbers[pod_of] = numbers
    found = failures(cluster)
    assert [each[0] for each in found] == ["mount"]
    assert text in found[0][1]


def test_unsent_changes_are_a_warning(cluster: PlayedCluster) -> None:
    for what, count in {"files": 2, "bytes": 3072}.items():
        cluster.numbers["mount-daemon-1"] += f'datastore_mount_unsent_{what}{{volume="{HANDLE}"}} {count}\n'
    warned = [each.text for each in cluster_checks(cluster, "digits") if each.level is Level.WARN]
    assert warned == ["the mount's server on n-1 answers; 2 files (3 KiB) are not in the storage yet"]


@promise("S-144")
def test_a_pod_that_can_not_mount_is_the_broken_link_with_the_kubelets_words(cluster: PlayedCluster) -> None:
    cluster.pods = [pod("train", claim="digits", phase="Pending"), pod("done", claim="digits", phase="Succeeded")]
    assert failures(cluster) == []
    cluster.events = [event("Pod", "train", "FailedMount", "MountVolume.SetUp failed")]
    assert failures(cluster) == [("pods", "pod train waits on n-1: FailedMount: MountVolume.SetUp failed")]


def test_a_pending_claim_is_explained_and_waiting_for_the_first_pod_is_no_fault(cluster: PlayedCluster) -> None:
    cluster.status |= {"backend": "claim", "volumeName": ""}
    cluster.objects[("persistentvolumeclaims", "digits")]["status"]["phase"] = "Pending"
    cluster.status["conditions"][1]["reason"] = "WaitingForFirstPod"
    assert failures(cluster) == []
    cluster.events = [event("PersistentVolumeClaim", "digits", "ProvisioningFailed", "no such class")]
    text = "PersistentVolumeClaim digits is Pending: ProvisioningFailed: no such class"
    assert failures(cluster) == [("claim", text)]


@promise("S-145")
def test_objects_that_the_user_may_not_read_are_skipped(cluster: PlayedCluster) -> None:
    """A user of one namespace learns what he may know."""
    cluster.forbidden = {"customresourcedefinitions", "csidrivers", "pods/proxy"}
    cluster.status["conditions"][0] = {"type": "Ready", "status": "False", "reason": "AccessDenied", "message": "no"}
    findings = list(cluster_checks(cluster, "digits"))
    assert [each.level for each in findings if each.check == "definition"] == [Level.WARN]
    assert failures(cluster) == [("backend", "AccessDenied: no")]
    cluster.status["conditions"][0] = {"type": "Ready", "status": "True"}
    assert failures(cluster) == []
    cluster.forbidden = {"datastores", "events"}
    assert [each[0] for each in failures(cluster)] == ["object"]


def test_a_datastore_of_another_namespace_is_found(cluster: PlayedCluster) -> None:
    cluster.others = [cluster.objects.pop(("datastores", "digits"))]
    assert failures(cluster) == [("object", "there is no Datastore digits in namespace lab, but in team")]


def test_the_last_errors_are_the_newest_of_each_kind(cluster: PlayedCluster) -> None:
    said = [("Ready is False: gone", "2026-01-01T00:00:02Z"), ("Provisioned is False: gone", "2026-01-01T00:00:01Z")]
    cluster.events = [event("Datastore", "digits", "ClaimLost", message, when) for message, when in said]
    cluster.events.append(
        event("Pod", "train", "FailedScheduling") | {"lastTimestamp": None, "eventTime": "2026-01-02"}
    )
    told = [each.text for each in cluster_checks(cluster, "digits") if each.check == "last errors"]
    assert [each.split()[0] for each in told] == ["2026-01-01T00:00:02Z", "2026-01-02"]


def test_one_ready_replica_of_the_controller_is_enough(cluster: PlayedCluster) -> None:
    cluster.components["controller"] = [pod("c-1"), pod("c-2", ready=False)]
    assert failures(cluster) == []
    cluster.components["controller"] = []
    assert failures(cluster)[0][0] == "controller"


def test_a_secret_without_a_key_is_named_by_the_key(cluster: PlayedCluster) -> None:
    cluster.objects[("secrets", "keys")] = {"data": {"AWS_ACCESS_KEY_ID": ""}}
    assert failures(cluster) == [("secret", "Secret keys has no AWS_SECRET_ACCESS_KEY")]


def test_a_deletion_and_a_stale_status_are_reported(cluster: PlayedCluster) -> None:
    cluster.status["observedGeneration"] = 1
    assert "not acted on the present spec" in failures(cluster)[0][1]
    cluster.objects[("datastores", "digits")]["metadata"]["deletionTimestamp"] = "x"
    assert "being deleted" in failures(cluster)[0][1]


DIGITS = DATASTORES.path("team", "digits")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedApi]:
    """A cluster that the user is logged in to."""
    with played_api() as played:
        monkeypatch.setenv("KUBECONFIG", str(played.kubeconfig(tmp_path, "default")))
        yield played


def remove_finalizer(api: PlayedApi, metadata: dict[str, Any]) -> int:
    api.objects[DIGITS] = {"metadata": metadata, "status": {"location": "s3://digits/"}}
    return exit_code_of(lambda: run(["remove-finalizer", "digits", "-n", "team"]))


def test_remove_finalizer_takes_ours_off_and_no_other(api: PlayedApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert remove_finalizer(api, {"deletionTimestamp": "x", "finalizers": ["other", FINALIZER]}) == 0
    patch = [
        {"op": "test", "path": "/metadata/finalizers/1", "value": FINALIZER},
        {"op": "remove", "path": "/metadata/finalizers/1"},
    ]
    assert api.asked[1:] == [("PATCH", DIGITS, patch)]
    assert "s3://digits/ stays there" in "".join(capsys.readouterr())


def test_remove_finalizer_refuses_a_datastore_that_is_not_being_deleted(api: PlayedApi) -> None:
    assert remove_finalizer(api, {"finalizers": [FINALIZER]}) == 1
    assert [method for method, _, _ in api.asked] == ["GET"]


def test_remove_finalizer_takes_what_kubectl_prints(api: PlayedApi, capsys: pytest.CaptureFixture[str]) -> None:
    """A ModelVersion, too, as it has the same finalizer; the other kinds have none."""
    going = {"deletionTimestamp": "x", "finalizers": [FINALIZER]}
    version = VERSIONS.path("team", "v")
    api.objects |= {DIGITS: {"metadata": going}, version: {"metadata": going, "status": {"location": "s3://m/v"}}}
    named = ["datastore.datastore.dev/digits", "modelversion.datastore.dev/v"]
    assert exit_code_of(lambda: run(["remove-finalizer", *named, "-n", "team"])) == 0
    assert [target for method, target, _ in api.asked if method == "PATCH"] == [DIGITS, version]
    assert "ModelVersion v is removed; whatever is at s3://m/v stays there" in "".join(capsys.readouterr())
    assert exit_code_of(lambda: run(["remove-finalizer", "trainingjob/t", "-n", "team"])) == 2


def test_the_api_servers_message_reaches_the_user(api: PlayedApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.refused[DIGITS] = (403, "datastores is forbidden: User x cannot get it")
    assert remove_finalizer(api, {}) != 0
    assert "datastores is forbidden: User x cannot get it" in capsys.readouterr().err


@promise("S-144")
def test_doctor_asks_the_cluster_of_the_context(api: PlayedApi, capsys: pytest.CaptureFixture[str]) -> None:
    """Links that are really asked for, up to the first that is missing."""
    api.objects["/apis/apiextensions.k8s.io/v1/customresourcedefinitions/datastores.datastore.dev"] = {"metadata": {}}
    api.refused["/api/v1/pods"] = (403, "pods is forbidden")
    code = exit_code_of(lambda: run(["doctor", "digits", "--cluster"]))
    said = capsys.readouterr().out
    assert code == ExitCode.USAGE
    assert "the API server answers, and Datastores are defined" in said
    assert "could not look" in said
    assert "there is no Datastore digits in namespace default" in said


def export(api: PlayedApi, target: str) -> dict[str, Any] | None:
    """The spec of the ModelExport that `datastore model export` makes there; None: it refuses."""
    api.asked.clear()
    arguments = ["model", "export", "digits:1", target, "--cluster", "-n", "team"]
    code = exit_code_of(lambda: run(arguments))
    posted = [body["spec"] for method, _, body in api.asked if method == "POST"]
    assert (code == 0) == bool(posted)
    return dict(posted[0]) if posted else None


@promise("S-404")
def test_an_export_to_a_bucket_goes_to_the_datastore_that_reaches_there(
    api: PlayedApi, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"all": "s3://partner/", "deep": "s3://partner/models/", "other": "s3://partner-2/", "new": ""}
    for name, location in places.items():
        status = {"status": {"location": location}} if location else {}
        api.objects[DATASTORES.path("team", name)] = {"metadata": {"name": name}, **status}
    api.objects[EXPORTS.path("team")] = {"metadata": {"name": "digits-x"}}  # what a POST is answered

    made = export(api, "s3://partner/models/digits/1")
    assert made == {
        "model": "digits",
        "version": 1,
        "to": {"datastore": "deep", "path": "digits/1"},
        "format": "directory",
    }
    made = export(api, "oci:s3://partner/layout")
    assert made is not None
    assert (made["to"], made["format"]) == ({"datastore": "all", "path": "layout"}, "oci")
    assert export(api, "s3://stranger/digits") is None
    assert "no Datastore of namespace team is there; apply one with bucket stranger" in "".join(capsys.readouterr())
