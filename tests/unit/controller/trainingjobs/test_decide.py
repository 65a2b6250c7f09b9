"""datastore.controller.trainingjobs.decide, desired, replicas, overlay, capacity: the core, without a cluster.

A World does what a plan says, as the API server would, and plays the pods.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from datastore.api.model import ModelVersion
from datastore.api.names import LOGS_VOLUME
from datastore.api.objects import timestamp
from datastore.api.trainingjob import RoleName, TrainingJob, TrainingJobStatus
from datastore.controller.trainingjobs import desired, overlay
from datastore.controller.trainingjobs.capacity import lacking, too_large
from datastore.controller.trainingjobs.decide import decide, save_begun
from datastore.controller.trainingjobs.keeping import bounded
from datastore.controller.trainingjobs.plan import Observed, Plan
from datastore.training.cluster import names
from datastore.training.evidence import TOTAL_BYTES, Evidence, ReplicaEvidence
from datastore.training.policy import policy_of
from tests.promises import promise

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
FOUR = "roles: {master: {}, ps: {replicas: 1}, worker: {replicas: 2}}"
DATA = "datastores: [{name: digits, path: /data, readOnly: true}]"
READY: dict[str, Any] = {
    "metadata": {"name": "digits"},
    "status": {"claimName": "digits-claim", "conditions": [{"type": "Ready", "status": "True"}]},
}


def body(spec: str = "", framework: str = "tensorflow", name: str = "mnist") -> dict[str, Any]:
    given = yaml.safe_load(f"{{{spec}}}") or {}
    return {
        "apiVersion": "datastore.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team", "uid": "u-1", "generation": 1},
        "spec": {"framework": framework, "image": "registry/train:1", "command": ["python", "train.py"], **given},
    }


class World:
    """One TrainingJob, and what there is for it."""

    def __init__(self, spec: str = "", framework: str = "tensorflow") -> None:
        self.body = body(spec, framework)
        self.datastores: dict[str, Any] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.collected: frozenset[str] = frozenset()
        self.version: dict[str, Any] | None = None
        self.saves = 0
        self.board: Any = None
        self.room: str | None = None
        self.has_room = ""
        self.now = NOW
        self.kept: list[str] = []
        self.removed = False
        self.events: list[str] = []

    @property
    def job(self) -> TrainingJob:
        return TrainingJob.model_validate(self.body)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body.get("status") or {}
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        found: dict[str, str] = next((each for each in self.status.get("conditions") or [] if each["type"] == kind), {})
        return found.get("status", ""), found.get("reason", "")

    def the_board(self) -> Any:
        return self.board

    def decide(self) -> Plan:
        return decide(
            Observed(
                body=self.body,
                job=self.job,
                datastores=self.datastores,
                jobs=self.jobs,
                pods=self.pods,
                runs=self.runs,
                collected=self.collected,
                version=self.version,
                board=self.board,
                room=self.room,
                now=self.now,
            )
        )

    def settle(self, seconds: float = 0.0) -> Plan:
        """Let the controller work until nothing is to be done at once."""
        self.now += timedelta(seconds=seconds)
        for _ in range(20):
            plan = self.decide()
            self.act(plan)
            if not plan.again:
                return plan
        raise AssertionError("it never settles")

    def act(self, plan: Plan) -> None:
        for role in plan.make_roles:
            self._make(role, plan)
        for pod, rank in plan.ranks:
            (mine,) = [each for each in self.pods if each is pod]
            mine["metadata"]["annotations"] = {names.RANK: str(rank)}
            mine["spec"]["schedulingGates"] = []
        self.room = self.has_room if plan.look else None
        for each in plan.collect:
            self.kept.append(each)
            self.collected |= {self.jobs[each]["metadata"]["uid"]}
        for job, run in plan.start:
            self.jobs[job["metadata"]["labels"][names.ROLE]]["spec"]["suspend"] = not run
        self.board = json.loads(json.dumps(plan.board)) if plan.board else self.board
        if plan.save:
            self.saves += 1
            self.version = desired.model_version(self.job, "u-1", f"registry/train@sha256:{'a' * 64}")
            self.body["status"] = save_begun(self.body, plan.status, self.now)
            return
        if plan.status:
            self.body["status"] = json.loads(json.dumps(plan.status))
            TrainingJobStatus.model_validate(plan.status)
        self.events += [each.reason for each in plan.events]
        self.runs += [json.loads(json.dumps(each)) for each in plan.create]
        for gone in plan.delete:
            if gone.get("kind") == "TrainingJob":
                self.removed = True
            elif gone is self.board:
                self.board = None
            elif "containers" in gone["spec"]:
                self.pods = [pod for pod in self.pods if pod is not gone]
            else:
                del self.jobs[gone["metadata"]["labels"][names.ROLE]]

    def _make(self, role: RoleName, plan: Plan) -> None:
        topology = names.cluster_topology(self.job)
        policy = policy_of(self.job.spec, topology)
        attempt = self.status.get("restarts", 0) or plan.status.get("restarts", 0) if policy.restart == "all" else 0
        made = desired.role_job(self.job, "u-1", topology, policy, role, plan.claims, attempt, suspended=plan.suspended)
        made["metadata"] |= {"uid": f"{role}-{len(self.kept)}-{attempt}", "creationTimestamp": timestamp(self.now)}
        self.jobs[role] = {**made, "status": {"startTime": timestamp(self.now)}}

    def pod(self, role: str, index: int = 0, phase: str = "Running", code: int | None = None, **more: Any) -> None:
        """The newest pod of a replica is so now."""
        self.pods = [
            each
            for each in self.pods
            if (each["metadata"]["labels"][names.ROLE], each["metadata"]["labels"][names.INDEX]) != (role, str(index))
            or each["status"]["phase"] in ("Failed",)
        ]
        times = {"startedAt": timestamp(NOW)}
        state: dict[str, Any] = {"running": times} if phase == "Running" else {}
        if code is not None:
            state = {"terminated": {**times, "exitCode": code, "finishedAt": timestamp(self.now), **more}}
        labels = {**self.jobs[role]["spec"]["template"]["metadata"]["labels"], names.INDEX: str(index)}
        self.pods.append(
            {
                "metadata": {
                    "name": f"mnist-{role}-{index}-{len(self.pods)}",
                    "uid": f"p-{role}-{index}-{len(self.pods)}",
                    "labels": labels,
                    "creationTimestamp": timestamp(self.now),
                },
                "spec": {"containers": []},
                "status": {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]},
            }
        )

    def run_all(self) -> None:
        for role, job in self.jobs.items():
            for index in range(job["spec"]["completions"]):
                self.pod(role, index)


@promise("S-345")
def test_it_waits_for_its_datastores_and_says_so() -> None:
    world = World(f"{FOUR}, {DATA}")
    world.settle()
    assert world.jobs == {}
    assert "Datastore digits is not there" in world.status["message"]
    assert world.condition("DatastoresReady") == ("False", "Waiting")
    failing = {"type": "Ready", "status": "False", "message": "the bucket is not there"}
    world.datastores = {"digits": {"status": {"conditions": [failing]}}}
    world.settle()
    assert "the bucket is not there" in world.status["message"]
    world.datastores = {"digits": READY}
    world.settle()
    assert sorted(world.jobs) == ["master", "ps", "worker"]
    assert world.condition("DatastoresReady") == ("True", "Ready")
    pod = world.jobs["worker"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "digits-claim", "readOnly": True}
    assert pod["containers"][0]["volumeMounts"][0] == {"name": "datastore-0", "mountPath": "/data", "readOnly": True}


@promise("S-346")
def test_the_job_of_a_role() -> None:
    env = "env: [{name: A, value: '1'}, {name: B, value: $(A)}]"
    world = World(f"{env}, resources: {{limits: {{cpu: 2}}}}, roles: {{worker: {{replicas: 2, gpus: 3}}}}", "pytorch")
    world.settle()
    job = world.jobs["worker"]
    assert job["metadata"]["name"] == "mnist-worker"
    assert job["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"], pod["automountServiceAccountToken"]) == (
        "Never",
        "train-mnist",
        False,
    )
    assert pod["terminationGracePeriodSeconds"] == 5
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "2", "nvidia.com/gpu": "3"}
    variables = {each["name"]: each for each in container["env"]}
    assert list(variables)[:4] == ["DATASTORE_JOB", "DATASTORE_ROLE", "DATASTORE_INDEX", "DATASTORE_RANK"]
    assert variables["MASTER_ADDR"]["value"] == "mnist-master-0.train-mnist"
    assert variables["RANK"]["value"] == "$(DATASTORE_RANK)"
    assert list(variables)[-2:] == ["A", "B"]
    # A rank that is not the index is written by the controller before the pod starts.
    assert pod["schedulingGates"] == [{"name": names.RANK}]
    assert names.RANK in variables["DATASTORE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "schedulingGates" not in world.jobs["master"]["spec"]["template"]["spec"]
    world.pod("worker", 1, "Pending")
    world.pods[-1]["spec"]["schedulingGates"] = [{"name": names.RANK}]
    world.settle()
    assert world.pods[-1]["metadata"]["annotations"][names.RANK] == "2"


@promise("S-347")
def test_a_program_error_fails_the_index_and_a_lost_node_does_not() -> None:
    world = World(FOUR)
    world.settle()
    rules = world.jobs["worker"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["action"] == "FailIndex"
    assert rules[1]["onExitCodes"]["values"] == list(range(1, 128))
    assert world.jobs["worker"]["spec"]["backoffLimitPerIndex"] == 6
    collective = World("roles: {worker: {replicas: 2}}, backoffLimit: 3", "jax")
    collective.settle()
    assert collective.jobs["worker"]["spec"]["backoffLimitPerIndex"] == 0


@promise("S-348")
def test_a_chief_that_fails_by_itself_frees_everything_and_keeps_the_evidence() -> None:
    world = World(FOUR)
    world.settle()
    world.run_all()
    world.settle(5)
    assert (world.status["phase"], world.condition("Running")) == ("Running", ("True", "Started"))
    world.now += timedelta(seconds=10)
    world.pod("master", 0, "Failed", 1, message="step 1\nValueError: no such column\n")
    verdict = world.decide()
    assert verdict.delete == (), "how it ended is written before anything goes"
    world.settle(2)
    assert world.jobs == {}
    assert sorted(world.kept) == ["master", "ps", "worker"]
    assert not [each for each in world.pods if each["status"]["phase"] == "Running"]
    assert (world.status["phase"], world.condition("Failed")) == ("Failed", ("True", "TaskFailed"))
    assert world.condition("ResourcesFreed")[0] == "True"
    assert world.status["freedSeconds"] == 2.0
    assert world.status["evidence"] == "mnist-evidence"
    assert world.status["message"] == "master-0 ended with exit code 1; its log says: ValueError: no such column"
    assert world.events == ["TaskFailed", "ResourcesFreed"]
    assert world.settle(3600) == Plan()


@promise("S-349")
def test_a_controller_that_is_killed_anywhere_goes_on_where_it_was() -> None:
    """Nothing that it remembered is needed."""
    world = World(FOUR)
    world.settle()
    world.run_all()
    world.pod("master", 0, "Succeeded", 0)
    for _ in range(40):
        plan = world.decide()
        world.act(plan)
        world.collected = frozenset() if not plan.collect else world.collected
    assert (world.status["phase"], world.jobs) == ("Succeeded", {})
    assert world.events.count("Completed") == 1


@promise("S-347")
@pytest.mark.parametrize(("code", "lost"), [(137, False), (1, True)])
def test_a_worker_that_is_killed_or_lost_with_its_node_is_started_again_by_the_cluster(code: int, lost: bool) -> None:
    world = World(FOUR)
    world.settle()
    world.run_all()
    world.pod("worker", 1, "Failed", code)
    if lost:
        world.pods[-1]["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    world.settle(1)
    assert world.status["phase"] == "Restarting"
    assert f"worker-1 {'was lost' if lost else 'ended with exit code 137'}" in world.status["message"]
    assert "worker" in world.jobs
    world.pod("worker", 1)
    world.settle(1)
    assert (world.status["phase"], world.status["restarts"]) == ("Running", 1)


@promise("S-363")
def test_a_replica_on_a_node_that_does_not_answer_says_what_to_do() -> None:
    """The start on another node is counted, though the pod of the lost node is gone."""
    world = World(FOUR)
    world.settle()
    world.run_all()
    world.pod("worker", 1)
    world.pods[-1]["spec"]["nodeName"] = "node-2"
    tainted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    world.pods[-1]["status"]["conditions"] = [tainted]
    world.settle(1)
    assert world.status["phase"] == "Running"
    assert "worker-1 waits: its node node-2 does not answer" in world.status["message"]
    assert "delete the Node node-2" in world.status["message"]
    world.pod("worker", 1)
    world.pods[-1]["metadata"]["annotations"] = {"batch.kubernetes.io/job-index-failure-count": "1"}
    world.settle(1)
    assert (world.status["phase"], world.status["message"], world.status["restarts"]) == ("Running", "", 1)


@promise("S-363")
def test_a_collective_whose_pod_is_gone_with_its_node_starts_again() -> None:
    """The cluster removes the pod as soon as it has failed it, so the controller may never see it as failed."""
    world = World("roles: {worker: {replicas: 2}}, backoffLimit: 1", "pytorch")
    world.settle()
    for attempt in (0, 1):
        world.run_all()
        world.settle(1)
        world.pods = [each for each in world.pods if each["metadata"]["labels"][names.INDEX] != "1"]
        failed = {"type": "Failed", "status": "True", "reason": "FailedIndexes", "message": "Job has failed indexes"}
        world.jobs["worker"]["status"] |= {"failedIndexes": "1", "conditions": [failed]}
        world.settle(1)
        world.settle(1)
        assert world.status["restarts"] == 1
        assert (world.condition("Failed") == ("True", "BackoffLimitExceeded")) is bool(attempt)
    assert "worker-1 was lost with its machine (its pod is gone)" in world.status["message"]


@promise("S-347")
def test_a_collective_starts_again_as_a_whole_and_not_more_often_than_it_may() -> None:
    world = World("roles: {worker: {replicas: 2}}, backoffLimit: 2", "pytorch")
    for attempt in (0, 1):
        world.settle()
        assert {each["metadata"]["labels"][names.ATTEMPT] for each in world.jobs.values()} == {str(attempt)}
        world.run_all()
        world.pod("worker", 0, "Failed", 137)
        plan = world.settle()
        assert plan.after_s is not None, "a pause before it starts again"
        assert len(world.jobs) == 2
        world.settle(5)
        assert world.status["restarts"] == attempt + 1
    world.settle()
    world.run_all()
    world.pod("worker", 0, "Failed", 137)
    world.settle()
    world.settle()
    assert world.condition("Failed") == ("True", "BackoffLimitExceeded")


@promise("S-347")
@pytest.mark.parametrize("first", ["master", "worker"])
def test_a_collective_whose_master_fails_because_a_worker_was_killed_starts_again(first: str) -> None:
    """Whichever of the two nodes reports first, and during the pause before the restart."""
    world = World("roles: {worker: {replicas: 2}}", "pytorch")
    world.settle()
    world.run_all()
    ends = {"master": ("master", 0, "Failed", 1), "worker": ("worker", 1, "Failed", 137)}
    world.pod(*ends.pop(first))
    plan = world.settle()
    assert plan.after_s is not None
    assert world.condition("Failed") == ("", "")
    world.pod(*ends.popitem()[1])
    world.settle()
    world.settle(5)
    assert world.condition("Failed") == ("", "")
    assert world.status["restarts"] == 1


@promise("S-348")
def test_the_evaluator_goes_on_when_the_training_is_done_and_the_others_are_freed() -> None:
    world = World("roles: {master: {}, ps: {replicas: 1}, worker: {replicas: 1}, evaluator: {}}")
    world.settle()
    world.run_all()
    world.settle()
    world.pod("master", 0, "Succeeded", 0)
    world.settle(1)
    assert sorted(world.jobs) == ["evaluator", "master"]
    world.settle(30)
    assert sorted(world.jobs) == ["evaluator", "master"], "what is freed is not made again"
    world.pod("evaluator", 0, "Succeeded", 0)
    world.settle(1)
    world.settle(1)
    assert (world.status["phase"], world.jobs) == ("Succeeded", {})


@promise("S-350")
def test_deadline_free_and_time_to_live() -> None:
    world = World(f"{FOUR}, activeDeadlineSeconds: 100, ttlSecondsAfterFinished: 60")
    world.settle()
    world.run_all()
    plan = world.settle(10)
    assert plan.after_s == pytest.approx(90)
    world.settle(91)
    world.settle(1)
    assert world.condition("Failed") == ("True", "DeadlineExceeded")
    assert [world.removed, world.settle(61) and world.removed] == [False, True]
    freed = World(FOUR)
    freed.settle()
    freed.run_all()
    freed.body["metadata"]["annotations"] = {names.FREE: "now"}
    freed.settle(1)
    freed.settle(1)
    assert (freed.condition("Failed"), freed.jobs) == (("True", "Freed"), {})


@promise("S-350")
def test_suspend_gives_everything_back_and_resume_goes_on() -> None:
    world = World(FOUR)
    world.settle()
    world.run_all()
    world.settle(1)
    world.body["spec"]["suspend"] = True
    world.settle(1)
    world.settle(1)
    assert (world.status["phase"], world.jobs) == ("Suspended", {})
    assert "startTime" not in world.status, "a suspension sets the deadline back"
    assert world.condition("Suspended")[0] == "True"
    world.body["spec"]["suspend"] = False
    world.settle(1)
    world.run_all()
    world.settle(1)
    assert (world.status["phase"], world.condition("Suspended")[0]) == ("Running", "False")
    assert world.condition("ResourcesFreed")[0] == "False"


@promise("S-349")
def test_nothing_is_done_for_a_deleted_job() -> None:
    world = World(FOUR)
    world.settle()
    world.body["metadata"]["deletionTimestamp"] = timestamp(NOW)
    assert world.decide() == Plan()


@promise("S-351")
def test_a_gang_starts_when_all_of_it_has_room() -> None:
    world = World(f"{FOUR}, gang: true, startDeadlineSeconds: 60")
    world.has_room = "no node has room for a replica of mnist-ps"
    world.settle()
    assert all(each["spec"]["suspend"] for each in world.jobs.values())
    assert world.condition("Starved") == ("False", "Waiting")
    assert "no node has room" in world.status["message"]
    world.settle(61)
    assert world.condition("Starved") == ("True", "NotEnoughFree")
    world.has_room = ""
    world.settle(15)
    assert not any(each["spec"]["suspend"] for each in world.jobs.values())
    world.run_all()
    world.settle(1)
    assert (world.condition("Starved"), world.status["phase"]) == (("False", "Started"), "Running")


@promise("S-351")
def test_a_gang_that_does_not_start_in_time_gives_back_what_it_has_and_tries_again() -> None:
    world = World(f"{FOUR}, gang: true, startDeadlineSeconds: 60")
    world.settle()
    world.pod("master")
    world.settle(30)
    assert not any(each["spec"]["suspend"] for each in world.jobs.values())
    world.settle(31)
    assert all(each["spec"]["suspend"] for each in world.jobs.values())
    assert (world.condition("Starved"), world.events) == (("True", "NotStartedInTime"), ["Starved"])
    world.pods.clear()  # as the cluster does with suspended Jobs
    plan = world.settle(1)
    assert plan.after_s is not None
    assert 20 < plan.after_s < 60
    world.settle(plan.after_s)
    assert not any(each["spec"]["suspend"] for each in world.jobs.values())


@promise("S-351")
def test_a_gang_of_another_scheduler_is_left_to_it() -> None:
    world = World(f"{FOUR}, gang: true, template: {{schedulerName: volcano, labels: {{team: a}}}}")
    world.settle()
    assert not any(each["spec"]["suspend"] for each in world.jobs.values())
    pod = world.jobs["ps"]["spec"]["template"]
    assert (pod["spec"]["schedulerName"], pod["metadata"]["labels"]["team"]) == ("volcano", "a")


def node(name: str, cpu: str, **spec: Any) -> dict[str, Any]:
    status = {"allocatable": {"cpu": cpu, "pods": "10"}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": {"zone": name}}, "spec": spec, "status": status}


@promise("S-351")
def test_room_is_what_the_requests_of_others_leave_on_each_node() -> None:
    world = World("roles: {worker: {replicas: 2}}, resources: {requests: {cpu: '2'}}", "pytorch")
    world.settle()
    jobs = list(world.jobs.values())
    assert "no node has room" in lacking(jobs, [node("a", "5")], [])
    assert lacking(jobs, [node("a", "4"), node("b", "2")], []) == ""
    other = {"spec": {"nodeName": "b", "containers": [{"resources": {"requests": {"cpu": "100m"}}}]}}
    assert lacking(jobs, [node("a", "4"), node("b", "2")], [other])
    assert lacking(jobs, [node("a", "6", unschedulable=True)], [])
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    assert lacking(jobs, [node("a", "6", taints=[taint])], [])
    for job in jobs:
        job["spec"]["template"]["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
        job["spec"]["template"]["spec"]["nodeSelector"] = {"zone": "a"}
    assert lacking(jobs, [node("a", "6", taints=[taint])], []) == ""
    assert lacking(jobs, [node("b", "6")], [])


@promise("S-361")
@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "c"]}]}], True),
        ([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}], False),
        (
            [{"matchExpressions": [{"key": "zone", "operator": "Exists"}, {"key": "x", "operator": "DoesNotExist"}]}],
            True,
        ),
        ([{"matchExpressions": [{"key": "gpus", "operator": "Gt", "values": ["3"]}]}], True),
        ([{"matchExpressions": [{"key": "gpus", "operator": "Lt", "values": ["4"]}]}], False),
        ([{"matchExpressions": [{"key": "zone", "operator": "Gt", "values": ["3"]}]}], False),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}], True),
        ([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}, {}], False),
    ],
)
def test_a_gang_needs_room_on_the_nodes_that_its_affinity_asks_for(terms: list[Any], fits: bool) -> None:
    """As the scheduler reads node selector terms."""
    required = json.dumps(
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    )
    world = World(f"roles: {{worker: {{replicas: 2}}}}, template: {{affinity: {required}}}", "pytorch")
    world.settle()
    there = node("a", "9")
    there["metadata"]["labels"]["gpus"] = "4"
    assert (lacking(list(world.jobs.values()), [there], []) == "") is fits


@promise("S-352")
def test_each_time_of_a_schedule_makes_a_job_of_its_own() -> None:
    world = World("schedule: '0 * * * *'")
    plan = world.settle()
    assert plan.after_s == pytest.approx(3600, abs=1)
    assert (world.status["phase"], world.status["nextRun"]) == ("Scheduled", "2026-03-01T13:00:00Z")
    world.settle(3601)
    (run,) = world.runs
    assert run["metadata"]["name"] == "mnist-2603011300"
    assert run["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert "schedule" not in run["spec"]
    assert (world.status["lastRun"], world.status["nextRun"]) == ("mnist-2603011300", "2026-03-01T14:00:00Z")
    world.settle(3600)
    assert len(world.runs) == 1
    assert "still ran" in world.status["message"]
    run["status"] = {"phase": "Succeeded"}
    world.settle(3 * 3600)
    assert [each["metadata"]["name"] for each in world.runs[1:]] == ["mnist-2603011700"], "of those missed, the newest"


@promise("S-353")
@pytest.mark.parametrize(
    ("template", "allowed"),
    [
        ("{serviceAccountName: admin}", "serviceAccountName"),
        ("{hostNetwork: true}", "hostNetwork"),
        ("{volumes: [{name: v, hostPath: {path: /}}]}", "hostPath"),
        ("{securityContext: {privileged: true}}", "privileged"),
        ("{securityContext: {allowPrivilegeEscalation: true}}", "privileged"),
        ("{securityContext: {capabilities: {add: [SYS_ADMIN]}}}", "privileged"),
        ("{securityContext: {seccompProfile: {type: Unconfined}}}", "privileged"),
        ("{securityContext: {procMount: Unmasked}}", "privileged"),
    ],
)
@pytest.mark.parametrize("place", ["template: {0}", "roles: {{worker: {{template: {0}}}}}"])
def test_a_template_asks_for_no_more_than_the_administrator_allows(template: str, allowed: str, place: str) -> None:
    spec = TrainingJob.model_validate(body(place.format(template))).spec
    assert f"--allow-overlay {allowed} " in overlay.refusal(spec, frozenset(overlay.OVERLAYS) - {allowed})
    assert overlay.refusal(spec, {allowed}) == ""


@promise("S-353")
def test_a_template_may_take_rights_away() -> None:
    """As Pod Security's level restricted asks for."""
    context = "{runAsNonRoot: true, runAsUser: 1000, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, "
    context += "seccompProfile: {type: RuntimeDefault}, readOnlyRootFilesystem: true, privileged: false, fsGroup: 1}"
    spec = TrainingJob.model_validate(body(f"template: {{securityContext: {context}}}")).spec
    assert overlay.refusal(spec, frozenset()) == ""


@promise("S-353")
def test_a_user_who_is_not_root_may_write_by_an_fs_group() -> None:
    """Kubernetes has it in the security context of the pod; all the rest is the container's."""
    context = "securityContext: {runAsUser: 1000, fsGroup: 2000, fsGroupChangePolicy: OnRootMismatch}"
    world = World(f"{DATA}, template: {{{context}}}, tensorboard: {{datastore: digits}}")
    world.datastores = {"digits": READY}
    world.settle()
    world.run_all()
    world.settle()
    for made in (world.jobs["master"], world.the_board()):
        pod = made["spec"]["template"]["spec"]
        assert pod["securityContext"] == {"fsGroup": 2000, "fsGroupChangePolicy": "OnRootMismatch"}
        assert pod["containers"][0]["securityContext"] == {"runAsUser": 1000}


@promise("S-345")
def test_the_status_says_why_a_replica_does_not_start() -> None:
    world = World("command: [nosuch]")
    world.settle()
    world.pod("master", 0, "Pending")
    state = world.pods[0]["status"]["containerStatuses"][0]["state"]
    state["waiting"] = {"reason": "ContainerCreating"}
    world.settle()
    assert world.status["message"] == (
        "master-0 waits: ContainerCreating; if that lasts, `kubectl describe pod mnist-master-0-0` says why"
    )
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry/train:1"'}
    state["waiting"] = waiting
    world.settle()
    assert 'master-0 waits: ImagePullBackOff: Back-off pulling image "registry/train:1"' in world.status["message"]
    world.pod("master", 0, "Failed", 128, reason="StartError", message='exec: "nosuch": executable file not found')
    terminated = world.pods[-1]["status"]["containerStatuses"][0]["state"]["terminated"]
    terminated["startedAt"] = "1970-01-01T00:00:00Z"  # what the kubelet says of a container that never ran
    world.settle()
    world.settle(1)
    assert world.condition("Failed") == ("True", "TaskFailed")
    assert "executable file not found" in world.status["message"]
    assert "startTime" not in world.status


@promise("S-362")
def test_a_replica_that_no_node_has_room_for_says_what_the_largest_has() -> None:
    gpus = {"gpus": "16", "gpusPerTask": "16", "gpuResource": "amd.com/gpu"}
    world = World(", ".join(f"{name}: {value}" for name, value in gpus.items()))
    world.settle()
    jobs = list(world.jobs.values())
    small, large = node("small", "4"), node("large", "4")
    none = too_large(jobs, [small, large])
    assert "mnist-master asks for 16 amd.com/gpu, but no node has any" in none
    assert "spec.gpuResource" in none
    large["status"]["allocatable"]["amd.com/gpu"] = "8"
    told = too_large(jobs, [small, large])
    assert "the largest node, large, has 8 amd.com/gpu: lower spec.gpusPerTask" in told
    assert lacking(jobs, [small, large], []) == told
    large["status"]["allocatable"]["amd.com/gpu"] = "16"
    assert too_large(jobs, [small, large]) == too_large(jobs, []) == ""
    jobs[0]["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] = {"memory": "64Gi"}
    large["status"]["allocatable"]["memory"] = "32Gi"
    assert "has 32 GiB of memory: lower its resources" in too_large(jobs, [small, large])

    world.pod("master", 0, "Pending")
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    world.pods[-1]["status"]["conditions"] = [scheduled]
    world.settle()
    assert world.status["message"] == "master-0 waits: Unschedulable: 0/2 nodes"
    world.has_room = told
    world.settle(15)
    assert world.status["message"] == told
    assert (world.status["phase"], world.condition("Running")) == ("Pending", ("False", "Unschedulable"))
    before = world.status
    world.settle(15)
    assert world.status == before, "what is so already is not told again"
    world.pods[-1]["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    world.settle()
    assert world.condition("Running") == ("False", "Starting")
    world.pod("master")
    world.settle()
    assert (world.status["phase"], world.status["message"]) == ("Running", "")
    assert world.condition("Running") == ("True", "Started")


@promise("S-348")
def test_the_evidence_is_bounded_whatever_is_in_the_logs() -> None:
    log = "\x1b[31m" * 20_000
    fields = {"role": "worker", "state": "Failed", "exitCode": 1, "log": log}
    many = [ReplicaEvidence.model_validate({**fields, "index": number}) for number in range(40)]
    text = bounded(Evidence(replicas=many))
    assert len(text.encode()) < TOTAL_BYTES
    kept = Evidence.model_validate_json(text)
    assert len(kept.replicas) == 40
    assert all(log.endswith(each.log) and each.log for each in kept.replicas)


SAVING = f"{FOUR}, save: {{model: digits, from: /out/export/1}}, args: ['5'], "
SAVING += "datastores: [{name: all, path: /o}, {name: out, path: /out, subPath: runs/}]"


@promise("S-355")
def test_the_result_of_a_job_is_saved_once_after_all_its_pods_have_ended() -> None:
    world = World(SAVING)
    world.datastores = {"all": READY, "out": READY}
    world.settle()
    world.run_all()
    world.settle()
    world.pod("master", 0, "Succeeded", 0)
    assert world.decide().save is False
    world.settle()
    world.settle(1)
    assert (world.jobs, world.status["phase"], world.saves) == ({}, "Succeeded", 1)
    assert world.condition("Saved") == ("False", "Saving")
    version = world.version
    assert version is not None
    assert ModelVersion.model_validate(version)
    assert "ownerReferences" not in version["metadata"], "a version outlives its job"
    assert version["metadata"]["name"] == world.status["modelVersion"] == "mnist-u-1"
    assert version["spec"] == {
        "model": "digits",
        "from": {"datastore": "out", "path": "runs/export/1"},
        "origin": {
            "trainingJob": "mnist",
            "trainingJobUID": "u-1",
            "imageDigest": f"sha256:{'a' * 64}",
            "command": ["python", "train.py", "5"],
        },
    }
    version["status"] = {"phase": "Ready", "version": 3}
    world.settle()
    assert world.condition("Saved") == ("True", "Saved")
    assert "version 3 of Model digits" in str(world.status["conditions"])
    world.version = None
    world.settle(60)
    assert (world.saves, world.condition("Saved")) == (1, ("True", "Saved")), "one that was deleted is not made again"


@promise("S-361")
def test_a_save_from_a_datastore_with_write_back_is_refused() -> None:
    """A version would lack what a node has not sent yet."""
    world = World(SAVING)
    out = {**READY, "metadata": {"name": "out"}, "spec": {"writeBack": {"maxDelay": "1m"}}}
    world.datastores = {"all": READY, "out": out}
    world.settle()
    assert (world.status["phase"], world.jobs) == ("Failed", {})
    assert "Datastore out has writeBack" in world.status["message"]


@promise("S-355")
def test_a_job_that_fails_saves_nothing_and_a_save_that_fails_is_told() -> None:
    world = World(SAVING)
    world.datastores = {"all": READY, "out": READY}
    world.settle()
    world.run_all()
    world.pod("master", 0, "Failed", 1)
    world.settle()
    world.settle(1)
    assert (world.status["phase"], world.saves, world.condition("Saved")) == ("Failed", 0, ("", ""))
    world = World(SAVING)
    world.datastores = {"all": READY, "out": READY}
    world.settle()
    world.run_all()
    world.pod("master", 0, "Succeeded", 0)
    world.settle()
    world.settle(1)
    assert world.version is not None
    world.version["status"] = {"phase": "Failed", "message": "there is no directory runs/export/1"}
    world.settle()
    assert world.condition("Saved") == ("False", "Failed")
    assert world.status["phase"] == "Succeeded"


@promise("S-356")
def test_a_tensorboard_is_there_while_the_job_runs_and_when_somebody_asks() -> None:
    world = World(f"{FOUR}, {DATA}, tensorboard: {{datastore: digits, path: board, image: 'other:1'}}")
    world.settle()
    assert world.board is None
    world.datastores = {"digits": READY}
    world.settle()
    world.run_all()
    world.settle()
    board = world.the_board()
    assert board["metadata"]["name"] == "mnist-tensorboard"
    assert board["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    pod = board["spec"]["template"]["spec"]
    assert pod["volumes"] == [
        {"name": "board", "persistentVolumeClaim": {"claimName": "digits-claim", "readOnly": True}}
    ]
    (container,) = pod["containers"]
    assert container["image"] == "other:1"
    assert "/datastore/digits/board" in container["command"]
    assert "127.0.0.1" in container["command"], "no other pod reaches it"
    assert "datastore job tensorboard mnist" in world.status["tensorboard"]
    world.pod("master", 0, "Succeeded", 0)
    world.settle()
    world.settle(1)
    assert (world.board, world.status["phase"]) == (None, "Succeeded")
    assert "tensorboard" not in world.status
    world.body["metadata"]["annotations"] = {names.BOARD: "digits/other 1"}
    world.settle(1)
    asked = world.the_board()
    assert "/datastore/digits/other" in asked["spec"]["template"]["spec"]["containers"][0]["command"]
    assert asked["spec"]["activeDeadlineSeconds"] == 12 * 3600
    world.body["metadata"]["annotations"] = {}
    world.settle(1)
    assert world.board is None
    world.body["metadata"]["annotations"] = {names.BOARD: "others/secrets 2"}
    world.settle(1)
    assert world.board is None, "only of the job's own Datastores"


@promise("S-357")
def test_each_pod_asks_for_its_whole_log() -> None:
    """Of a Datastore of another driver the nodes know nothing, so that is refused."""
    logs = "datastores: [{name: digits, path: /data}], logs: {datastore: digits, path: logs}"
    world = World(f"{FOUR}, {logs}")
    world.datastores = {"digits": READY}
    world.settle()
    template = world.jobs["worker"]["spec"]["template"]
    assert json.loads(template["metadata"]["annotations"][names.LOGS]) == {
        "datastore": "digits",
        "path": "logs/mnist/worker",
    }
    (wish,) = [each for each in template["spec"]["volumes"] if each["name"] == LOGS_VOLUME]
    assert {each["path"] for each in wish["downwardAPI"]["items"]} == {"wanted", "index", "pod", "namespace"}
    assert any(each["name"] == LOGS_VOLUME for each in template["spec"]["containers"][0]["volumeMounts"])
    world = World(f"{FOUR}, {logs}")
    world.datastores = {"digits": {**READY, "spec": {"claim": {"name": "theirs"}}}}
    world.settle()
    assert (world.jobs, world.condition("Failed")) == ({}, ("True", "InvalidSpec"))
    assert "another driver's volume" in world.status["message"]
