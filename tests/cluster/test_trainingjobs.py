"""The controller of TrainingJobs on a real API server with the cluster's own Job controller; pods are played."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import ValidationError

import datastore.training
from datastore.api.names import usage_name
from datastore.api.trainingjob import TrainingJob
from datastore.controller.trainingjobs.__main__ import NAME as ACCOUNT
from datastore.kubeclient import of_context
from datastore.metering import Meter, Sample
from datastore.training.cluster import names
from datastore.training.cluster.driver import KubernetesDriver
from tests.cluster.cluster import Cluster
from tests.cluster.controlled import (
    ROOT,
    SYSTEM,
    Controller,
    account_kubeconfig,
    condition,
    controller,
    datastore_of,
    granted,
)
from tests.cluster.kube import Kube, KubeError, Manifest
from tests.cluster.playedpods import RUNS, playing
from tests.promises import promise

pytestmark = [pytest.mark.e2e_training_cluster, pytest.mark.timeout(600, func_only=True)]
SOON_S = 120.0
FOUR = {"master": {}, "ps": {"replicas": 1}, "worker": {"replicas": 2}}
CROWD = 100
KILLS = 3


def training_job(name: str, **spec: Any) -> Manifest:
    given = {"framework": "tensorflow", "image": "none", "command": ["train"], "roles": FOUR, **spec}
    given = {field: value for field, value in given.items() if value is not None}
    metadata = {"name": name}
    return {"apiVersion": "datastore.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": given}


@pytest.fixture(scope="session")
def account(api_server: Cluster, api_kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rights are those with the component models."""
    found = yaml.safe_load_all((ROOT / "manifests" / "models" / "models.yaml").read_text())
    api_kube.apply(*(each for each in found if each["metadata"]["name"] == "datastore-training-models"))
    return account_kubeconfig(api_server.kubeconfig, api_kube, tmp_path_factory.mktemp("training"), ACCOUNT)


@pytest.fixture(scope="session")
def running(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with controller(account, tmp_path_factory.mktemp("training"), name="t-1", training=True) as found:
        yield found


@pytest.fixture
def team(api_kube: Kube) -> Iterator[str]:
    """A namespace."""
    name = f"team-{uuid.uuid4().hex[:6]}"
    api_kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    account = partial(api_kube.get, "serviceaccount", "default", namespace=name)
    api_kube.wait_for("service account", lambda: bool(account()))
    yield name
    api_kube.delete("namespace", name, wait=False)


class Team:
    """What most tests do: submit, and look."""

    def __init__(self, kube: Kube, space: str) -> None:
        self.kube, self.space = kube, space

    def submit(self, name: str = "mnist", **spec: Any) -> None:
        self.kube.apply(training_job(name, **spec), namespace=self.space)

    def job(self, name: str = "mnist") -> Manifest:
        return self.kube.get("trainingjob", name, namespace=self.space) or {}

    def status(self, name: str = "mnist") -> dict[str, Any]:
        found: dict[str, Any] = self.job(name).get("status") or {}
        return found

    def phase(self, phase: str, name: str = "mnist", limit_s: float = SOON_S) -> float:
        return self.kube.wait_for(
            f"{name} {phase}", lambda: self.status(name).get("phase") == phase, limit_s=limit_s, namespace=self.space
        )

    def datastore(self, name: str) -> None:
        """One that is Ready: nobody else looks after it here."""
        self.kube.apply(datastore_of(name, {"s3": {"bucket": "out"}}), namespace=self.space)
        ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}
        ready["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        status = {"claimName": name, "conditions": [ready]}
        self.kube.patch("datastore", name, {"status": status}, namespace=self.space, subresource="status")

    def items(self, kind: str) -> list[Manifest]:
        return self.kube.items(kind, namespace=self.space)

    def on_a_node_that_tells(self, node: str, pods: list[Manifest]) -> None:
        """Bind these pods to a node, of which a ConfigMap tells what its pods use."""
        for pod in pods:
            name = pod["metadata"]["name"]
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
            binding["target"] = {"apiVersion": "v1", "kind": "Node", "name": node}
            path = f"/api/v1/namespaces/{self.space}/pods/{name}/binding"
            self.kube.kubectl("create", "--raw", path, "--filename=-", given=json.dumps(binding))
        meter = Meter()
        for at_s in (0, 3):
            meter.add(Sample(at_s=at_s, cpu_s=at_s, memory_bytes=1 << 20))
        uids = ["another-tenants-pod", *(pod["metadata"]["uid"] for pod in pods)]
        told = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": usage_name(node)}}
        told["data"] = {uid: json.dumps(meter.dump()) for uid in uids}
        self.kube.apply(told, namespace=SYSTEM)

    def nothing_left(self) -> None:
        def gone() -> bool:
            kinds = ("jobs", "pods", "services", "secrets")
            there = [each for kind in kinds for each in self.items(kind)]
            return not there and {each["metadata"]["name"] for each in self.items("configmaps")} <= {"kube-root-ca.crt"}

        # The cluster's garbage collector looks for new kinds every half minute.
        self.kube.wait_for("nothing left", gone, limit_s=240, namespace=self.space)

    def no_pods(self) -> None:
        """What is freed has ended; the cluster's garbage collector removes it a moment later."""
        self.kube.wait_for("no pods", lambda: not self.items("pods"), namespace=self.space)


@pytest.fixture
def bench(api_kube: Kube, team: str, running: Controller) -> Team:
    return Team(api_kube, team)


def role_of(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][names.ROLE])


def job_of(body: Manifest) -> str:
    return str(body["metadata"]["labels"][names.JOB])


@promise("S-346", "S-348", "S-349", "S-359")
def test_from_submit_to_freed_and_deleted(bench: Team, api_server: Cluster) -> None:
    """What its node told of its pods is kept, and nothing of other tenants' pods."""
    bench.submit(framework="mpi", roles={"master": {}, "worker": {"replicas": 2}})
    ends = False
    with playing(api_server.kubeconfig, lambda pod: 0 if ends and role_of(pod) == "master" else RUNS):
        bench.phase("Running")
        service = bench.kube.get("service", "train-mnist", namespace=bench.space)
        assert service is not None
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
        bench.kube.wait_for("four pods", lambda: len(bench.items("pods")) == 3, namespace=bench.space)
        ranks = {
            (role_of(pod), pod["metadata"]["annotations"].get(names.RANK, "0"), pod["spec"]["hostname"])
            for pod in bench.items("pods")
        }
        assert ranks == {
            ("master", "0", "mnist-master-0"),
            ("worker", "1", "mnist-worker-0"),
            ("worker", "2", "mnist-worker-1"),
        }
        # Without a kubelet, a pod of a node that is ended would stay.
        bench.on_a_node_that_tells("node-1", [pod for pod in bench.items("pods") if role_of(pod) == "master"])
        ends = True
        bench.phase("Succeeded")
    assert bench.items("jobs") == []
    bench.no_pods()
    status = bench.status()
    assert condition(bench.job(), "ResourcesFreed")["status"] == "True"
    print(f"from the last step to freed: {status['freedSeconds']:.1f} s")
    kept = bench.kube.get("configmap", status["evidence"], namespace=bench.space)
    assert kept is not None
    replicas = json.loads(kept["data"][names.EVIDENCE_KEY])["replicas"]
    assert [(each["role"], each["index"], each["state"]) for each in replicas] == [
        ("master", 0, "Succeeded"),
        ("worker", 0, "Freed"),
        ("worker", 1, "Freed"),
    ]
    assert "another-tenants-pod" not in kept["data"][names.USAGE_KEY]
    replicas = KubernetesDriver(of_context({"KUBECONFIG": str(api_server.kubeconfig)})).observe("mnist", bench.space)
    assert [each.usage and each.usage.cpu_seconds for each in replicas.evidence.replicas] == [3.0, None, None]
    bench.kube.delete("configmap", usage_name("node-1"), namespace=SYSTEM)


@promise("S-358")
def test_the_namespace_is_that_of_kubectls_context_and_a_notebook_submits(
    bench: Team, api_server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a file that names none, and for every verb."""
    document = yaml.safe_load(api_server.kubeconfig.read_text())
    for each in document["contexts"]:
        each["context"]["namespace"] = bench.space
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "datastore.cli", "job", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with playing(api_server.kubeconfig, lambda pod: 0 if role_of(pod) == "master" else RUNS):
        job = datastore.training.submit(training_job("mnist"), cluster=True)
        assert job.namespace == bench.space
        assert job.wait(SOON_S).status.phase == "Succeeded"
    assert "<td>master-0</td><td>Succeeded" in job._repr_html_()
    assert datastore.training.job("mnist").phase == "Succeeded"
    assert [each["metadata"]["name"] for each in json.loads(said("list", "-o", "json"))] == ["mnist"]
    assert "phase: Succeeded" in said("get", "mnist")
    said("logs", "mnist")
    assert json.loads(said("delete", "mnist", "-o", "json")) == [{"name": "mnist", "namespace": bench.space}]


@promise("S-347", "S-348")
def test_a_failure_of_its_own_leaves_the_others_until_the_evidence_is_kept(bench: Team, api_server: Cluster) -> None:
    bench.submit()
    fails = False
    with playing(
        api_server.kubeconfig, lambda pod: 3 if fails and pod["spec"]["hostname"] == "mnist-worker-1" else RUNS
    ):
        bench.phase("Running")
        fails = True
        bench.phase("Failed")
    kept = bench.kube.get("configmap", "mnist-evidence", namespace=bench.space)
    assert kept is not None
    found = {
        f"{each['role']}-{each['index']}": (each["state"], each.get("exitCode"))
        for each in json.loads(kept["data"][names.EVIDENCE_KEY])["replicas"]
    }
    assert found == {
        "master-0": ("Freed", None),
        "ps-0": ("Freed", None),
        "worker-0": ("Freed", None),
        "worker-1": ("Failed", 3),
    }
    assert "worker-1 ended with exit code 3" in bench.status()["message"]


@promise("S-347")
def test_a_killed_worker_is_started_again_alone_and_a_collective_as_a_whole(bench: Team, api_server: Cluster) -> None:
    bench.submit("single")
    bench.submit("whole", framework="pytorch", roles={"worker": {"replicas": 1}})
    killed: set[str] = set()

    def outcome(pod: Manifest) -> int | None:
        name = pod["metadata"]["labels"][names.JOB]
        if killed >= {"single", "whole"} and role_of(pod) in ("master", "worker"):
            return 0 if name == "whole" and restarted("whole") else RUNS
        if role_of(pod) == "worker" and name not in killed and running(name):
            killed.add(name)
            return 137
        # Its connection breaks, so it fails by itself.
        breaks = name == "whole" and name in killed and role_of(pod) == "master" and not restarted(name)
        return 1 if breaks else RUNS

    def running(name: str) -> bool:
        return bench.status(name).get("phase") == "Running"

    def restarted(name: str) -> bool:
        return bool(bench.status(name).get("restarts"))

    with playing(api_server.kubeconfig, outcome):
        bench.phase("Succeeded", "whole")
        assert bench.status("whole")["restarts"] == 1
        bench.kube.wait_for("restart", lambda: restarted("single"), namespace=bench.space)
        bench.phase("Running", "single")

        def failed(job: str) -> int:
            found = bench.kube.get("job", job, namespace=bench.space) or {}
            return int((found.get("status") or {}).get("failed", 0))

        bench.kube.wait_for("the count", lambda: failed("single-worker") == 1, namespace=bench.space)
        assert failed("single-ps") == 0


@promise("S-350")
def test_suspend_resume_free_and_time_to_live(bench: Team, api_server: Cluster) -> None:
    with playing(api_server.kubeconfig, lambda pod: RUNS):
        bench.submit()
        bench.phase("Running")
        bench.kube.patch("trainingjob", "mnist", {"spec": {"suspend": True}}, namespace=bench.space)
        bench.phase("Suspended")
        bench.no_pods()
        bench.kube.patch("trainingjob", "mnist", {"spec": {"suspend": False}}, namespace=bench.space)
        bench.phase("Running")
        free = {"metadata": {"annotations": {names.FREE: "now"}}}
        bench.kube.patch("trainingjob", "mnist", free, namespace=bench.space)
        bench.phase("Failed")
        assert condition(bench.job(), "Failed")["reason"] == "Freed"
        bench.kube.patch("trainingjob", "mnist", {"spec": {"ttlSecondsAfterFinished": 3}}, namespace=bench.space)
        bench.kube.wait_for("its end", lambda: not bench.job(), limit_s=SOON_S, namespace=bench.space)
    bench.nothing_left()


@promise("S-349")
def test_a_job_deleted_in_each_phase_leaves_nothing_and_a_lost_node_is_survived(
    bench: Team, api_server: Cluster
) -> None:
    """Nothing of it stays. S-347: what ran on a node that is gone is started again, whatever its exit code."""
    bench.datastore("out")
    alone: dict[str, Any] = {"framework": "none", "roles": {"master": {}}}
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "waits": ("Pending", alone | {"datastores": [{"name": "missing", "path": "/data"}]}),
        "gang": ("Pending", {"gang": True}),
        "starts": ("Pending", alone),
        "runs": ("Running", {"datastores": [{"name": "out", "path": "/out"}]}),
        "lost": ("Running", {"framework": "none", "roles": {"master": {}, "worker": {"replicas": 1}}}),
        "evaluates": ("Running", {"roles": {"master": {}, "ps": {"replicas": 1}, "evaluator": {}}}),
        "sleeps": ("Suspended", alone | {"suspend": True}),
        "plans": ("Scheduled", alone | {"schedule": "0 0 1 1 *"}),
        "good": ("Succeeded", {"roles": {"master": {}, "ps": {"replicas": 1}}}),
        "bad": ("Failed", {"roles": {"master": {}, "ps": {"replicas": 1}}}),
    }
    gone: set[str] = set()
    """The pods of a node that was taken away."""

    def outcome(pod: Manifest) -> int | None:
        name, role = job_of(pod), role_of(pod)
        if name in ("evaluates", "good", "bad") and role == "master":
            return int(name == "bad")
        if name == "lost" and role == "worker" and not gone:
            gone.add(pod["metadata"]["name"])
            lose(pod)
        return RUNS

    def lose(pod: Manifest) -> None:
        """As the cluster does with the pods of a Node that is no more (podgc)."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
        condition["lastTransitionTime"] = pod["status"]["startTime"]
        ended = {"exitCode": 1, "reason": "Error", "startedAt": None, "finishedAt": None}
        status = {"phase": "Failed", "conditions": [condition]}
        status["containerStatuses"] = [{**pod["status"]["containerStatuses"][0], "state": {"terminated": ended}}]
        name = pod["metadata"]["name"]
        bench.kube.patch("pod", name, {"status": status}, namespace=bench.space, subresource="status")
        bench.kube.kubectl(
            "delete", "pod", name, f"--namespace={bench.space}", "--wait=false", "--grace-period=0", "--force"
        )

    def workers() -> list[str]:
        there = [pod for pod in bench.items("pods") if (job_of(pod), role_of(pod)) == ("lost", "worker")]
        return [pod["metadata"]["name"] for pod in there]

    with playing(api_server.kubeconfig, outcome, but=lambda pod: job_of(pod) == "starts"):
        bench.kube.apply(*(training_job(name, **spec) for name, (_, spec) in jobs.items()), namespace=bench.space)
        for name, (phase, _) in jobs.items():
            if name != "lost":
                bench.phase(phase, name)
        said = {"evaluates": "the evaluator continues", "gang": "no node has room", "waits": "missing is not there"}
        bench.kube.wait_for(
            "their words",
            lambda: all(words in bench.status(name).get("message", "") for name, words in said.items()),
            namespace=bench.space,
        )
        bench.kube.wait_for(
            "another worker", lambda: bool(gone and workers() and not gone & set(workers())), namespace=bench.space
        )
        bench.kube.wait_for(
            "its phase", lambda: bench.status("lost").get("phase") in ("Running", "Restarting"), namespace=bench.space
        )
        there = {"gang", "starts", "runs", "lost", "evaluates"}
        bench.kube.wait_for(
            "what is freed", lambda: {job_of(each) for each in bench.items("jobs")} == there, namespace=bench.space
        )
        bench.kube.kubectl("delete", "trainingjobs", "--all", f"--namespace={bench.space}", "--wait=false")
        bench.nothing_left()
    assert bench.items("trainingjobs") == []


@promise("S-345", "S-353")
def test_a_refused_trainingjob_is_reported(bench: Team) -> None:
    bench.submit("noimage", image=None)
    bench.submit("root", template={"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})
    bench.submit("odd", template={"volumes": [{"name": "v", "nonsense": {}, "emptyDir": {"sizeLimit": "much"}}]})
    bench.submit("waits", datastores=[{"name": "digits", "path": "/data"}])
    for name, words in (
        ("noimage", "spec.image is missing"),
        ("root", "hostPath"),
        ("odd", "sizeLimit|quantity|quantities"),
    ):
        bench.phase("Failed", name)
        assert re.search(words, bench.status(name)["message"])
        assert condition(bench.job(name), "Failed")["reason"] == "InvalidSpec"
    bench.phase("Pending", "waits")
    assert bench.status("waits")["message"] == "waits: Datastore digits is not there"
    assert bench.items("jobs") == []
    for name in ("noimage", "root", "odd", "waits"):
        bench.kube.delete("trainingjob", name, namespace=bench.space)
    bench.nothing_left()


@promise("S-364")
def test_the_framework_may_be_left_out_for_one_process(bench: Team) -> None:
    """The API server's rule counts processes as the command does."""
    one: list[dict[str, Any]] = [
        {"roles": None},
        {"roles": {"master": {}, "worker": {"replicas": 0}}},
        {"roles": {"master": {"replicas": 0}, "worker": {}}},
        {"roles": {"worker": {"template": {"labels": {"a": "b"}}}}, "gpus": 8, "gpusPerTask": 8},
    ]
    several: list[dict[str, Any]] = [
        {"roles": {"worker": {"replicas": 2}}},
        {"roles": {"master": {"replicas": 0}, "worker": {"replicas": 2}}},
        {"roles": {"evaluator": {}}},
        {"roles": {"ps": {"replicas": 1}}},
        {"roles": None, "gpus": 9, "gpusPerTask": 8},
        {"roles": {"master": {"replicas": 0}}, "gpus": 16, "gpusPerTask": 8},
    ]
    for spec in one:
        body = training_job("one", framework=None, suspend=True, **spec)
        assert TrainingJob.model_validate(body).spec.framework == "none"
        bench.kube.apply(body, namespace=bench.space)
        bench.kube.delete("trainingjob", "one", namespace=bench.space)
    for spec in several:
        body = training_job("several", framework=None, suspend=True, **spec)
        with pytest.raises(ValidationError, match="has no framework: with several processes"):
            TrainingJob.model_validate(body)
        with pytest.raises(KubeError, match="framework is missing: with several processes"):
            bench.kube.apply(body, namespace=bench.space)
    bench.submit("alone", framework=None, roles=None)
    bench.kube.wait_for("its Job", lambda: bool(bench.items("jobs")), namespace=bench.space)
    assert "framework" not in bench.job("alone")["spec"]
    bench.kube.delete("trainingjob", "alone", namespace=bench.space)


@promise("S-351", "S-352")
def test_a_gang_without_a_node_starts_nothing_and_a_schedule_makes_a_run(bench: Team) -> None:
    bench.submit("gang", gang=True)
    bench.submit("often", schedule="* * * * *", suspend=False)
    bench.kube.wait_for(
        "word", lambda: "no node has room" in bench.status("gang").get("message", ""), namespace=bench.space
    )
    assert all(each["spec"]["suspend"] for each in bench.items("jobs") if each["metadata"]["name"].startswith("gang"))
    bench.kube.wait_for("a plan", lambda: bool(bench.status("often").get("nextRun")), namespace=bench.space)
    # As a controller finds it that was away for a while: nobody waits for the next minute here.
    past = (datetime.now(UTC) - timedelta(minutes=2)).strftime("%Y-%m-%dT%H:%M:00Z")
    bench.kube.patch("trainingjob", "often", {"status": {"nextRun": past}}, namespace=bench.space, subresource="status")
    bench.kube.wait_for("a run", lambda: bool(bench.status("often").get("lastRun")), limit_s=180, namespace=bench.space)
    run = bench.job(bench.status("often")["lastRun"])
    assert run["metadata"]["labels"][names.SCHEDULE] == "often"
    for name in ("gang", "often"):
        bench.kube.delete("trainingjob", name, namespace=bench.space)
    bench.nothing_left()


@promise("S-441")
def test_a_deleted_namespace_takes_a_job_that_runs_with_it(bench: Team, api_server: Cluster) -> None:
    """Kubernetes keeps a pod that SIGTERM ended until it has made the next one, which that namespace does not take."""
    kube, space = bench.kube, bench.space
    with playing(api_server.kubeconfig, lambda _: RUNS):
        bench.submit(framework=None, roles=None)
        bench.phase("Running")
    kube.delete("namespace", space, wait=False)
    ended = {"name": names.CONTAINER, "image": "none", "imageID": "", "restartCount": 0, "ready": False}
    ended["state"] = {"terminated": {"exitCode": 143, "reason": "Error"}}

    def gone() -> bool:
        for pod in bench.items("pods"):
            with contextlib.suppress(KubeError):  # it is gone by now
                change = {"status": {"phase": "Failed", "containerStatuses": [ended]}}
                kube.patch("pod", pod["metadata"]["name"], change, namespace=space, subresource="status")
        return kube.get("namespace", space) is None

    kube.wait_for("the end of the namespace", gone, namespace=space)


def test_the_rules_of_the_role_are_the_calls_made(running: Controller) -> None:
    """The tests above have made every kind of call, with these rights and no others."""
    allowed = granted(ROOT / "manifests" / "base" / "training-rbac.yaml")
    watched = {"trainingjobs", "datastores", "jobs", "pods", "leases"}
    made = running.calls() | {(each, verb) for each in watched for verb in ("list", "watch")}
    # The Jobs of a gang are started on a cluster with room only. Reading a log is counted by nobody; a server-side
    # apply of something new is authorised as create, too. An object of a name that is taken is looked at, which only a
    # controller that was killed in between does.
    made |= {("pods/log", "get"), ("configmaps", "create")}
    # The rights of the component models.
    allowed |= {("modelversions", verb) for verb in ("get", "list", "watch", "create")}
    rare = {("modelversions", verb) for verb in ("get", "list", "watch", "create")}
    rare |= {("jobs", "get"), ("jobs", "patch"), ("services", "get"), ("trainingjobs", "get")}
    assert sorted(made - allowed) == []
    assert sorted(allowed - made - rare) == []


@promise("S-349", "S-355")
def test_a_controller_killed_in_any_phase_loses_nothing(
    bench: Team, api_server: Cluster, account: Path, running: Controller, tmp_path: Path
) -> None:
    """Killed again and again while eight jobs go from submit to freed and saved; the next one goes on."""
    many = [f"j{number}" for number in range(8)]
    bench.datastore("out")
    saving = {"datastores": [{"name": "out", "path": "/out"}], "save": {"model": "digits", "from": "/out/export"}}
    # The one of the other tests must not help.
    psutil.Process(running.pid).send_signal(signal.SIGSTOP)
    try:
        kills = 0
        with playing(api_server.kubeconfig, lambda pod: 0 if role_of(pod) == "master" else RUNS):
            bench.kube.apply(*(training_job(name, **saving) for name in many), namespace=bench.space)
            while kills < KILLS or not all(_finished(each) for each in bench.items("trainingjobs")):
                # What a killed one held is free after 15 s; here at once.
                bench.kube.delete("lease", ACCOUNT, namespace=SYSTEM)
                with controller(account, tmp_path, name=f"k-{kills}", training=True) as other:
                    bench.kube.wait_for("it leads", other.works)
                    time.sleep(0.5 * (kills + 1))
                    if kills < KILLS:
                        psutil.Process(other.pid).kill()
                        kills += 1
                    else:
                        for name in many:
                            bench.phase("Succeeded", name)
    finally:
        psutil.Process(running.pid).send_signal(signal.SIGCONT)
    assert bench.items("jobs") == []
    kept = [each for each in bench.items("configmaps") if each["metadata"]["name"].endswith("-evidence")]
    assert len(kept) == len(many)

    def saves() -> list[str]:
        return [each["spec"]["origin"]["trainingJob"] for each in bench.items("modelversions")]

    bench.kube.wait_for("the saves", lambda: len(saves()) >= len(many), namespace=bench.space)
    assert sorted(saves()) == many
    made = bench.status("j0")["modelVersion"]
    done = {"status": {"phase": "Ready", "version": 3}}
    bench.kube.patch("modelversion", made, done, namespace=bench.space, subresource="status")
    bench.kube.wait_for(
        "word", lambda: condition(bench.job("j0"), "Saved").get("status") == "True", namespace=bench.space
    )


def _finished(body: Manifest) -> bool:
    return (body.get("status") or {}).get("phase") == "Succeeded"


@promise("S-349")
def test_a_hundred_trainingjobs_of_four_replicas(bench: Team, api_server: Cluster, running: Controller) -> None:
    """None is lost; what the controller needs for them is printed."""
    process = psutil.Process(running.pid)
    before = sum(process.cpu_times()[:2])
    began = time.monotonic()
    with playing(api_server.kubeconfig, lambda pod: 0 if role_of(pod) == "master" else RUNS):
        bench.kube.apply(*(training_job(f"j{number}") for number in range(CROWD)), namespace=bench.space)

        def all_done() -> bool:
            return sum(_finished(each) for each in bench.items("trainingjobs")) == CROWD

        bench.kube.wait_for("all Succeeded", all_done, limit_s=500, namespace=bench.space)
    cpu_s = sum(process.cpu_times()[:2]) - before
    freed = sorted(each["status"]["freedSeconds"] for each in bench.items("trainingjobs"))
    print(
        f"{CROWD} TrainingJobs of 4: {time.monotonic() - began:.0f} s, controller {cpu_s:.1f} s of CPU, "
        f"{running.peak_mib():.0f} MiB; freed after {freed[CROWD // 2]:.1f} s (median), {freed[-1]:.1f} s (most)"
    )
    assert bench.items("jobs") == []
    assert running.peak_mib() <= 250


@promise("S-354")
def test_only_users_with_the_right_create_trainingjobs(api_kube: Kube) -> None:
    """The controller's account reads no Secret, runs nothing in a pod, and grants nothing."""
    who = f"--as=system:serviceaccount:{SYSTEM}:{ACCOUNT}"
    for verb, what in (("get", "secrets"), ("create", "pods/exec"), ("create", "pods"), ("create", "rolebindings")):
        done = _can(api_kube, verb, what, who)
        assert done == "no", (verb, what)
    assert _can(api_kube, "create", "jobs.batch", who) == "yes"


def _can(kube: Kube, verb: str, what: str, who: str) -> str:
    review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    group, resource = ("batch", "jobs") if what == "jobs.batch" else ("", what.partition("/")[0])
    group = "rbac.authorization.k8s.io" if resource == "rolebindings" else group
    attributes = {"verb": verb, "group": group, "resource": resource, "namespace": "default"}
    if "/" in what:
        attributes["subresource"] = what.partition("/")[2]
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    text = kube.kubectl("create", "--raw", review, "--filename=-", who, given=json.dumps(body))
    return "yes" if json.loads(text)["status"]["allowed"] else "no"
