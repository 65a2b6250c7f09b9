"""Decides from a TrainingJob's spec and the observed objects what to do next. Pure and level-triggered.

decide() knows nothing of earlier calls. What must not be forgotten is written into the object before it is acted on:
how the job ended (condition Succeeded or Failed) before anything is freed, and how often all replicas were restarted
(status.restarts) before the old Jobs are deleted. So a controller that is killed at any point continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from datastore.api.datastore import API_VERSION
from datastore.api.objects import condition, is_true, owner_reference, timestamp
from datastore.api.trainingjob import KIND, ROLES, RoleName, TrainingJob
from datastore.controller.runtime.conditions import Event, Finding, merged
from datastore.controller.trainingjobs import desired
from datastore.controller.trainingjobs.overlay import template_of
from datastore.training import schedule
from datastore.training.cluster import names
from datastore.training.cluster.replicas import UNSCHEDULABLE, Replica, active, replicas_of, time_of
from datastore.training.conditions import SAVING
from datastore.training.policy import (
    Finish,
    Release,
    Restart,
    RunPolicy,
    Seen,
    Settle,
    State,
    TaskState,
    counts,
    decisive,
    policy_of,
)
from datastore.training.policy import decide as decide_run
from datastore.training.results import place_of_result
from datastore.training.topology import Topology

Raw = Mapping[str, Any]
JSON = dict[str, Any]

EVALUATING = "Evaluating"
"""Reason of Running when the training has succeeded and the evaluator continues: no freed Job is made again."""
STARTING, STARTED = "Starting", "Started"
"""Reasons of Starved=False: the gang is starting; all its replicas have started, and are no longer treated as a gang.
Reasons of Running: the pods that had no node have one now; a replica has started."""
REFUSED = "Refused"
"""Reason of Saved=False: the cluster will never accept the job's ModelVersion."""
CAPACITY_S = 15.0
"""How soon a gang is checked again that waits for room, or whose replicas are starting."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
"""Bounds of the wait after a gang's start failed; the wait is half of the age that its Jobs had then."""
SCHEDULERS = ("kueue.x-k8s.io/queue-name", "scheduling.x-k8s.io/pod-group", "scheduling.k8s.io/group-name")
"""Labels and annotations with which another scheduler starts the replicas of a gang together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that decide() knows of a TrainingJob.

    job: None if its spec can't be acted on; invalid says why. datastores: those that it uses, by name. jobs: its Jobs
    by role; pods: all its pods; runs: TrainingJobs that its schedule made. collected: uids of the Jobs whose evidence
    is in the ConfigMap that stays. version: the ModelVersion of its save. board: the Job of its TensorBoard;
    board_refused: the wish whose TensorBoard the cluster refused. room: why a waiting gang does not fit as a whole, or
    why no node ever has room for a replica; '' when there is room; None when the nodes were not looked at.
    """

    body: Raw
    job: TrainingJob | None
    invalid: str = ""
    datastores: Mapping[str, Raw] = field(default_factory=dict)
    jobs: Mapping[str, Raw] = field(default_factory=dict)
    pods: Sequence[Raw] = ()
    runs: Sequence[Raw] = ()
    collected: frozenset[str] = frozenset()
    version: Raw | None = None
    board: Raw | None = None
    board_refused: str | None = None
    room: str | None = None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in the order of Reconciler._act(). again: decide again at once, else after after_s or at an event.

    make_roles: roles whose Jobs are to be made, suspended or not, with the claims of the Datastores. create: other
    objects. ranks: pods whose rank is to be written, which lets them start. look: find out whether there is room.
    collect: roles whose evidence is to be kept. start: Jobs to run (True) or to suspend (False). save: make the
    ModelVersion. board: the Job of a TensorBoard to make.
    """

    create: tuple[JSON, ...] = ()
    make_roles: tuple[RoleName, ...] = ()
    claims: Mapping[str, str] = field(default_factory=dict)
    suspended: bool = False
    ranks: tuple[tuple[Raw, int], ...] = ()
    look: bool = False
    collect: frozenset[str] = frozenset()
    start: tuple[tuple[Raw, bool], ...] = ()
    save: bool = False
    board: JSON | None = None
    delete: tuple[Raw, ...] = ()
    status: JSON = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    again: bool = False
    after_s: float | None = None


@dataclass(slots=True)
class _Status:
    """The new status, changed step by step from the old one."""

    seen: Observed
    fields: JSON = field(init=False)

    def __post_init__(self) -> None:
        before = self.seen.body.get("status") or {}
        generation = self.seen.body["metadata"].get("generation", 1)
        self.fields = {"phase": "Pending", "restarts": 0, **before, "observedGeneration": generation}

    def condition(self, kind: str) -> Raw:
        """Return a condition as it is now; {} without one."""
        return condition({"status": self.fields}, kind)

    def holds(self, kind: str) -> bool:
        return is_true({"status": self.fields}, kind)

    def set(self, kind: str, holds: bool, reason: str, message: str = "", since: datetime | None = None) -> None:
        """Set a condition; its time becomes now when it changes between true and false, or when `since` is given."""
        before = self.condition(kind)
        status = "True" if holds else "False"
        same = before.get("status") == status
        made = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:4096],
            "lastTransitionTime": before["lastTransitionTime"] if same and not since else timestamp(self.seen.now),
            "observedGeneration": self.fields["observedGeneration"],
        }
        conditions = [made if each["type"] == kind else each for each in self.fields.get("conditions") or []]
        self.fields["conditions"] = conditions if before else [*conditions, made]

    def phase(self, phase: str, message: str) -> None:
        """Set the phase and the message, the summary for people."""
        self.fields |= {"phase": phase, "message": message[:4096]}

    @property
    def restarts(self) -> int:
        """How many restarts there were, of single replicas or of all together, as RunPolicy.restart says."""
        return int(self.fields.get("restarts") or 0)


def decide(seen: Observed) -> Plan:
    """Return what to do about a TrainingJob and its TensorBoard."""
    plan = _decided(seen)
    if seen.job is None or "deletionTimestamp" in seen.body["metadata"]:
        return plan
    told = dict(plan.status or seen.body.get("status") or {})
    told.pop("tensorboard", None)
    if seen.board is not None:
        told["tensorboard"] = _board_told(seen.board, seen.job.name)
    if told != (plan.status or seen.body.get("status") or {}):
        plan = replace(plan, status=told)
    wanted, there = _wanted_board(seen, seen.job), seen.board
    if there is not None:
        same = wanted is not None and there["metadata"].get("annotations", {}).get(names.BOARD) == wanted.wish
        if same or "deletionTimestamp" in there["metadata"]:
            return plan
        return replace(plan, delete=(*plan.delete, there), again=True)
    if wanted is None or wanted.wish == seen.board_refused:
        return plan
    if _not_ready(wanted.datastore, seen.datastores.get(wanted.datastore)):
        return plan
    claim = seen.datastores[wanted.datastore]["status"]["claimName"]
    made = desired.board_job(seen.job, seen.body["metadata"]["uid"], wanted, claim)
    return replace(plan, board=made, again=True)


def _board_told(board: Raw, job: str) -> str:
    if is_true(board, "Failed"):
        name, failed = board["metadata"]["name"], condition(board, "Failed")
        why = f"{failed.get('reason', '')}: {failed.get('message', '')}"
        return f"its Job {name} has failed ({why}); `kubectl logs job/{name}` tells more"
    return f"`datastore job tensorboard {job}` shows it"


def _wanted_board(seen: Observed, job: TrainingJob) -> desired.Board | None:
    """Return the TensorBoard that a user asked for, else that of spec.tensorboard while the job runs, else None."""
    wish = str((seen.body["metadata"].get("annotations") or {}).get(names.BOARD, ""))
    datastore, _, path = wish.partition(" ")[0].partition("/")
    if any(each.name == datastore for each in job.spec.datastores):
        return desired.Board(datastore=datastore, path=path.strip("/"), wish=wish)
    place = job.spec.tensorboard
    ended = any(is_true(seen.body, kind) for kind in ("Succeeded", "Failed", "Suspended"))
    if place is None or ended or not seen.jobs:
        return None
    return desired.Board(datastore=place.datastore, path=place.path, wish="")


def _decided(seen: Observed) -> Plan:
    if "deletionTimestamp" in seen.body["metadata"]:
        return Plan()  # owner references: the cluster deletes what belongs to the TrainingJob
    status = _Status(seen)
    if status.holds("Succeeded") or status.holds("Failed"):
        return _wind_up(seen, status)
    if seen.job is None:
        return _verdict(seen, status, Finish(False, "InvalidSpec", seen.invalid), seen.now)
    if names.FREE in (seen.body["metadata"].get("annotations") or {}):
        return _verdict(
            seen, status, Finish(False, "Freed", "it was ended by `free`, before it had finished"), seen.now
        )
    if seen.job.spec.suspend:
        return _suspended(seen, status)
    if seen.job.spec.schedule is not None:
        return _scheduled(seen, seen.job, status)
    return _training(seen, seen.job, status)


# While the job runs.


def _training(seen: Observed, job: TrainingJob, status: _Status) -> Plan:
    topology = names.cluster_topology(job)
    policy = policy_of(job.spec, topology)
    attempt = status.restarts if policy.restart == "all" else 0
    before = [each for each in seen.jobs.values() if each["metadata"]["labels"].get(names.ATTEMPT) != str(attempt)]
    old_pods = [each for each in seen.pods if each["metadata"]["labels"].get(names.ATTEMPT) != str(attempt)]
    if before or active(old_pods):
        return _free(seen, status, before, old_pods)
    released = status.condition("Running").get("reason") == EVALUATING
    missing = tuple(role for role in desired.roles_of(topology) if role not in seen.jobs)
    if missing and not released:
        return _make(seen, job, status, missing)
    replicas = replicas_of(topology, seen.jobs, seen.pods)
    if ranks := tuple(_ranks(topology, replicas)):
        return Plan(ranks=ranks, again=True)
    starting = _is_gang(job) and status.condition("Starved").get("reason") != STARTED
    if starting and (plan := _gang(seen, job, status, replicas)) is not None:
        return plan
    plan = _follow(seen, policy, status, _as_released(replicas, policy, missing) if released else replicas)
    return replace(plan, after_s=min(plan.after_s or CAPACITY_S, CAPACITY_S)) if starting else plan


def _make(seen: Observed, job: TrainingJob, status: _Status, missing: tuple[RoleName, ...]) -> Plan:
    waits = [_not_ready(name, seen.datastores.get(name)) for name in dict.fromkeys(e.name for e in job.spec.datastores)]
    if said := [each for each in waits if each]:
        status.set("DatastoresReady", False, "Waiting", "; ".join(said))
        status.phase("Pending", f"waits: {'; '.join(said)}")
        return _told(seen, status)
    if job.spec.logs and (seen.datastores[job.spec.logs.datastore].get("spec") or {}).get("claim"):
        message = (
            f"spec.logs: Datastore {job.spec.logs.datastore} is another driver's volume, which our nodes don't know"
        )
        return _verdict(seen, status, Finish(False, "InvalidSpec", f"{message}; name one that is not"), seen.now)
    if job.spec.save:
        name, _ = place_of_result(job)
        if (seen.datastores[name].get("spec") or {}).get("writeBack"):
            message = (
                f"spec.save.from: Datastore {name} has writeBack, so a version would lack what a node has not sent "
                "yet; save from one without"
            )
            return _verdict(seen, status, Finish(False, "InvalidSpec", message), seen.now)
    status.set("DatastoresReady", True, "Ready")
    claims = {each.name: seen.datastores[each.name]["status"]["claimName"] for each in job.spec.datastores}
    if _is_gang(job):
        status.set("Starved", False, "Waiting")
    if status.holds("ResourcesFreed"):
        status.set("ResourcesFreed", False, "Started")
    if status.holds("Suspended"):
        status.set("Suspended", False, "Resumed")
    status.fields.pop("freedSeconds", None)
    return Plan(make_roles=missing, claims=claims, suspended=_is_gang(job), status=status.fields, again=True)


def _not_ready(name: str, datastore: Raw | None) -> str:
    if datastore is None:
        return f"Datastore {name} is not there"
    if is_true(datastore, "Ready") and datastore["status"].get("claimName"):
        return ""
    why = condition(datastore, "Ready").get("message")
    return f"Datastore {name} is not Ready" + (f": {why}" if why else "")


def _is_gang(job: TrainingJob) -> bool:
    """Return whether all replicas start together or none, and no other scheduler ensures that."""
    templates = [template_of(job.spec, role) for role in ROLES]
    named = {name for each in templates for name in (*each.labels, *each.annotations)}
    return job.spec.gang and not any(each.scheduler_name for each in templates) and not named & set(SCHEDULERS)


def _ranks(topology: Topology, replicas: Sequence[Replica]) -> list[tuple[Raw, int]]:
    """Return the pods that wait for their rank, each with the rank."""
    return [
        (pod, topology.first_rank(replica.task.role) + replica.task.index)
        for replica in replicas
        for pod in replica.pods
        if any(gate["name"] == names.RANK for gate in pod["spec"].get("schedulingGates") or [])
    ]


def _follow(seen: Observed, policy: RunPolicy, status: _Status, replicas: Sequence[Replica]) -> Plan:
    started = [each.started_at for each in replicas if each.started_at]
    if started and "startTime" not in status.fields:
        status.fields["startTime"] = timestamp(min(started))
    told_running = status.condition("Running").get("reason")
    if started and not status.holds("Running") and told_running != UNSCHEDULABLE:
        status.set("Running", True, STARTED)
    if policy.restart == "replica":
        status.fields["restarts"] = max(status.restarts, sum(each.restarts for each in replicas))
    start = time_of(status.fields.get("startTime"))
    decision = decide_run(
        policy,
        Seen(
            tasks=[each.state for each in replicas],
            restarts=status.restarts,
            running_s=(seen.now - start).total_seconds() if start else 0.0,
            trained_s=_trained_s(seen, policy, replicas),
            failed_s=_failed_s(seen, replicas),
        ),
    )
    status.fields["roles"] = counts([each.state for each in replicas])
    match decision:
        case Finish():
            return _verdict(seen, status, decision, _end_of(decision, replicas, seen.now))
        case Release():
            return _release(seen, status, decision)
        case Restart() if policy.restart == "all":
            return _restart_all(seen, status, decision, replicas, policy)
        case Settle():
            return _told(seen, status, decision.seconds)
    if broken := _given_up(seen.jobs):
        return _verdict(seen, status, broken, seen.now)
    if isinstance(decision, Restart):
        status.phase("Restarting", f"{decision.why}; restart {status.restarts + 1} of {policy.backoff_limit}")
        return _told(seen, status)
    unschedulable = any(each.unschedulable for each in replicas)
    if unschedulable and seen.room is None:
        return Plan(look=True, again=True)
    waiting = next((f"{each.task.name} waits: {each.waiting}" for each in replicas if each.waiting), "")
    if unschedulable and seen.room:
        waiting = seen.room
    running = any(each.state.state is State.RUNNING for each in replicas)
    if unschedulable and not running and told_running != EVALUATING:
        status.set("Running", False, UNSCHEDULABLE, waiting)
    elif told_running == UNSCHEDULABLE:
        status.set("Running", running, STARTED if running else STARTING)
    told = waiting or status.condition("Running").get("message", "")
    status.phase("Running" if running else "Restarting" if status.restarts else "Pending", told)
    return _told(seen, status, decision.seconds)


def _trained_s(seen: Observed, policy: RunPolicy, replicas: Sequence[Replica]) -> float | None:
    wanted = decisive(policy, replicas)
    if not all(each.state.state is State.SUCCEEDED for each in wanted):
        return None
    return max((seen.now - (each.ended_at or seen.now)).total_seconds() for each in wanted)


def _failed_s(seen: Observed, replicas: Sequence[Replica]) -> float | None:
    """Return the seconds since the first replica failed; None if that can't be told, as its node's clock is ahead."""
    ends = [each.ended_at for each in replicas if each.ended_at and each.state.state is State.FAILED]
    since_s = (seen.now - min(ends, default=seen.now)).total_seconds()
    return since_s if ends and since_s >= 0 else None


def _end_of(decision: Finish, replicas: Sequence[Replica], now: datetime) -> datetime:
    """Return when the training ended: when its last replica ended, or now if the controller ends it."""
    if decision.reason in ("EvaluatorEnded", "DeadlineExceeded"):
        return now
    return max((each.ended_at for each in replicas if each.ended_at), default=now)


def _given_up(jobs: Mapping[str, Raw]) -> Finish | None:
    """Return the verdict on a Job that Kubernetes marked as failed though no pod tells why: its pods were deleted."""
    for job in jobs.values():
        if is_true(job, "Failed"):
            why = condition(job, "Failed").get("message", "")
            return Finish(False, "JobFailed", f"the Job {job['metadata']['name']} has failed: {why}")
    return None


def _as_released(replicas: Sequence[Replica], policy: RunPolicy, missing: Sequence[str]) -> list[Replica]:
    """Return the replicas after the training's success: one whose Job is gone has succeeded before, or was freed."""
    wanted = [each.task for each in decisive(policy, replicas)]
    return [
        Replica(state=TaskState(task=each.task, state=State.SUCCEEDED if each.task in wanted else State.FREED))
        if each.task.role in missing
        else each
        for each in replicas
    ]


def _release(seen: Observed, status: _Status, decision: Release) -> Plan:
    message = "the training has succeeded; the evaluator continues"
    status.set("Running", True, EVALUATING, message)
    status.phase("Running", message)
    if status.fields != seen.body.get("status"):
        return Plan(status=status.fields, again=True)
    roles = {task.role for task in decision.tasks}
    jobs = [each for role, each in seen.jobs.items() if role in roles]
    return _free(seen, status, jobs, [each for each in seen.pods if each["metadata"]["labels"][names.ROLE] in roles])


def _restart_all(
    seen: Observed, status: _Status, decision: Restart, replicas: Sequence[Replica], policy: RunPolicy
) -> Plan:
    failed = [each.ended_at or seen.now for each in replicas if each.state.state is State.FAILED]
    number = status.restarts + 1
    status.phase("Restarting", f"{decision.why}; restart {number} of {policy.backoff_limit}")
    left_s = decision.delay_s - (seen.now - min(failed)).total_seconds()
    if left_s > 0 and any(each.ended_at for each in replicas):
        return _told(seen, status, left_s)
    status.fields["restarts"] = number
    event = Event(reason="Restarting", message=status.fields["message"], warning=True)
    return Plan(status=status.fields, events=(event,), again=True)


# A gang.


def _gang(seen: Observed, job: TrainingJob, status: _Status, replicas: Sequence[Replica]) -> Plan | None:
    """Start all replicas together or none; return None while they are starting and their deadline is not over."""
    jobs = list(seen.jobs.values())
    made = time_of(min(each["metadata"]["creationTimestamp"] for each in jobs)) or seen.now
    waits = [each for each in jobs if each["spec"].get("suspend")]
    deadline = timedelta(seconds=job.spec.start_deadline_seconds)
    if not waits:
        if all(each.state.state is not State.PENDING for each in replicas):
            status.set("Starved", False, STARTED)
            return Plan(status=status.fields, again=True)
        starting = status.condition("Starved")
        if starting["reason"] != STARTING:
            return _start_gang(status, ())
        if seen.now - (time_of(starting["lastTransitionTime"]) or seen.now) < deadline:
            return None
        message = (
            f"not all replicas could start within {job.spec.start_deadline_seconds} s; their resources are released"
        )
        status.set("Starved", True, "NotStartedInTime", message)
        status.fields.pop("startTime", None)
        status.phase("Pending", message)
        event = Event(reason="Starved", message=message, warning=True)
        return Plan(start=tuple((each, False) for each in jobs), status=status.fields, events=(event,), after_s=1.0)
    starved = status.condition("Starved")
    if status.holds("Starved") and starved["reason"] == "NotStartedInTime":
        at = time_of(starved["lastTransitionTime"]) or seen.now
        wait_s = min(max((at - made).total_seconds() / 2, FIRST_RETRY_S), LAST_RETRY_S)
        left_s = wait_s - (seen.now - at).total_seconds()
        if left_s > 0 or active(seen.pods):
            return Plan(after_s=max(left_s, 1.0))
    if seen.room is None:
        return Plan(look=True, again=True)
    if seen.room == "":
        return _start_gang(status, waits)
    late = seen.now - made > deadline
    status.set("Starved", late, "NotEnoughFree" if late else "Waiting", seen.room)
    status.phase("Pending", f"waits for room: {seen.room}")
    return _told(seen, status, CAPACITY_S)


def _start_gang(status: _Status, jobs: Sequence[Raw]) -> Plan:
    status.set("Starved", False, STARTING, since=status.seen.now)
    return Plan(start=tuple((each, True) for each in jobs), status=status.fields, again=True)


# The end of the job.


def _verdict(seen: Observed, status: _Status, decision: Finish, ended: datetime) -> Plan:
    """Record how the job ended, before anything is freed."""
    kind = "Succeeded" if decision.succeeded else "Failed"
    status.set(kind, True, decision.reason, decision.message)
    status.fields["completionTime"] = timestamp(ended)
    status.fields["message"] = f"{decision.message}; its resources are being freed"[:4096]
    event = Event(reason=decision.reason, message=f"{kind}: {decision.message}", warning=not decision.succeeded)
    return Plan(status=status.fields, events=(event,), again=True)


def _wind_up(seen: Observed, status: _Status) -> Plan:
    """After success or failure: free everything, report that, save the result, and delete the job after its TTL."""
    kind = "Succeeded" if status.holds("Succeeded") else "Failed"
    verdict = status.condition(kind)
    if seen.jobs or active(seen.pods):
        return _free(seen, status, list(seen.jobs.values()), seen.pods)
    completed = time_of(status.fields.get("completionTime")) or seen.now
    if status.fields.get("phase") != kind:
        seconds = max(0.0, (seen.now - completed).total_seconds())
        _freed(seen, status, verdict["reason"], seconds)
        status.phase(kind, verdict.get("message", ""))
        event = Event(reason="ResourcesFreed", message=f"{seconds:.1f} s after its end")
        return Plan(status=status.fields, events=(event,), again=True)
    if seen.job is None:
        return Plan()
    told: JSON = {}
    if seen.job.spec.save is not None and status.holds("Succeeded"):
        # None of its processes runs any more, so all files that they wrote are closed.
        if "modelVersion" not in status.fields and status.condition("Saved").get("reason") != REFUSED:
            return Plan(save=True, status=status.fields, again=True)
        _saved(seen, status)
        told = status.fields
    if (expires := schedule.expires(seen.job, completed)) is None:
        return Plan(status=told)
    if expires <= seen.now:
        return Plan(delete=({**seen.body, "apiVersion": API_VERSION, "kind": KIND},))
    return Plan(status=told, after_s=(expires - seen.now).total_seconds())


def _saved(seen: Observed, status: _Status) -> None:
    """Report the state of the job's ModelVersion. A ModelVersion that was deleted is not made again."""
    found = (seen.version or {}).get("status") or {}
    if found.get("phase") == "Ready":
        model = (seen.version or {})["spec"]["model"]
        status.set("Saved", True, "Saved", f"it is version {found.get('version')} of Model {model}")
    elif found.get("phase") == "Failed" or (found.get("message") and not status.holds("Saved")):
        reason = "Failed" if found.get("phase") == "Failed" else SAVING
        status.set("Saved", False, reason, str(found.get("message", "")))


def save_begun(body: Raw, status: JSON, now: datetime) -> JSON:
    """Return the status with the name of the new ModelVersion, and Saved=False for now."""
    made = names.version_name(body["metadata"]["name"], body["metadata"]["uid"])
    told = with_saved(status, SAVING, f"ModelVersion {made} saves it", now)
    return {**told, "modelVersion": made}


def with_saved(status: JSON, reason: str, message: str, now: datetime) -> JSON:
    """Return the status with condition Saved=False."""
    before = status.get("conditions") or []
    finding = Finding(type="Saved", status="False", reason=reason, message=message[:4096])
    made = merged(before, [finding], status["observedGeneration"], timestamp(now))
    return {**status, "conditions": [*(each for each in before if each["type"] != "Saved"), *made]}


def _suspended(seen: Observed, status: _Status) -> Plan:
    if seen.jobs or active(seen.pods):
        return _free(seen, status, list(seen.jobs.values()), seen.pods)
    if status.fields["phase"] != "Suspended":
        _freed(seen, status, "Suspended", None)
        status.set("Suspended", True, "Suspended")
        for name in ("startTime", "nextRun"):
            status.fields.pop(name, None)
        status.phase("Suspended", "it is suspended; `datastore job resume` lets it run")
        return Plan(status=status.fields, events=(Event(reason="Suspended", message="it runs nothing"),))
    return Plan()


def _freed(seen: Observed, status: _Status, reason: str, seconds: float | None) -> None:
    status.set("ResourcesFreed", True, reason, "" if seconds is None else f"after {seconds:.1f} s")
    status.set("Running", False, reason)
    if seconds is not None:
        status.fields["freedSeconds"] = round(seconds, 3)
    if "roles" in status.fields:
        status.fields["roles"] = [{**each, "active": 0} for each in status.fields["roles"]]
    if seen.collected:
        status.fields["evidence"] = names.evidence_name(seen.body["metadata"]["name"])


def _free(seen: Observed, status: _Status, jobs: Sequence[Raw], pods: Sequence[Raw]) -> Plan:
    """Keep the evidence of these Jobs, then delete them and their pods. The deletions' events cause the next step."""
    unkept = [each for each in jobs if each["metadata"]["uid"] not in seen.collected]
    if unkept:
        return Plan(collect=frozenset(each["metadata"]["labels"][names.ROLE] for each in unkept), again=True)
    here = [each for each in (*jobs, *active(pods)) if "deletionTimestamp" not in each["metadata"]]
    if seen.collected:
        status.fields["evidence"] = names.evidence_name(seen.body["metadata"]["name"])
    # A pod stays until its processes have ended; an event tells its end.
    return Plan(delete=tuple(here), status=status.fields, again=any(each in here for each in jobs), after_s=1.0)


def _told(seen: Observed, status: _Status, after_s: float | None = None) -> Plan:
    return Plan(status=status.fields, after_s=after_s)


# A schedule.


def _scheduled(seen: Observed, job: TrainingJob, status: _Status) -> Plan:
    """Make a TrainingJob at each time of the schedule; leave a time out while an earlier run has not ended."""
    if status.fields["phase"] == "Suspended":
        status.set("Suspended", False, "Resumed")
    following = timestamp(schedule.next_run(job, seen.now))
    planned = time_of(status.fields.get("nextRun"))
    due = schedule.due(job, planned - timedelta(seconds=1), seen.now) if planned else None
    message, made = status.fields.get("message", "") if status.fields["phase"] == "Scheduled" else "", None
    if due is not None:
        running = [each["metadata"]["name"] for each in seen.runs if not _has_finished(each)]
        run = schedule.run_of(job, due)
        if running and running != [run.name]:
            message = f"{running[0]} still ran at {due:%Y-%m-%d %H:%M} UTC, so that time was skipped"
        else:
            message, made = "", _run(seen, run)
            status.fields["lastRun"] = run.name
    if due is not None or planned is None:
        status.fields["nextRun"] = following
    status.phase("Scheduled", message)
    left_s = ((time_of(status.fields["nextRun"]) or seen.now) - seen.now).total_seconds()
    return Plan(create=(made,) if made else (), status=status.fields, after_s=max(left_s, 0.0) + 0.05)


def _run(seen: Observed, run: TrainingJob) -> JSON:
    about = seen.body["metadata"]
    owner = owner_reference(KIND, about["name"], about["uid"])
    labels = {**(about.get("labels") or {}), names.SCHEDULE: about["name"]}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": run.name, "namespace": run.namespace, "labels": labels, "ownerReferences": [owner]},
        "spec": {name: value for name, value in seen.body["spec"].items() if name not in ("schedule", "timeZone")},
    }


def _has_finished(run: Raw) -> bool:
    return (run.get("status") or {}).get("phase") in ("Succeeded", "Failed")
