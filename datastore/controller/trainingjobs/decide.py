"""Decides from a TrainingJob's spec and the observed objects what to do next. Pure and level-triggered.

decide() knows nothing of earlier calls. What must not be forgotten is written into the object before it is acted on:
how the job ended (condition Succeeded or Failed) before anything is freed, and how often all replicas were restarted
(status.restarts) before the old Jobs are deleted. So a controller that is killed at any point continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from datastore.api.datastore import API_VERSION
from datastore.api.objects import condition, is_true, timestamp
from datastore.api.trainingjob import KIND, RoleName, TrainingJob
from datastore.controller.runtime.conditions import Event, Finding, merged
from datastore.controller.trainingjobs import desired
from datastore.controller.trainingjobs.board import with_board
from datastore.controller.trainingjobs.gang import CAPACITY_S, STARTED, STARTING, is_gang, start_together
from datastore.controller.trainingjobs.plan import JSON, Observed, Plan, Raw, Status
from datastore.controller.trainingjobs.scheduled import run_due
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

EVALUATING = "Evaluating"
"""Reason of Running when the training has succeeded and the evaluator continues: no freed Job is made again."""
REFUSED = "Refused"
"""Reason of Saved=False: the cluster will never accept the job's ModelVersion."""


def decide(seen: Observed) -> Plan:
    """Return what to do about a TrainingJob and its TensorBoard."""
    plan = _decided(seen)
    if seen.job is None or "deletionTimestamp" in seen.body["metadata"]:
        return plan
    return with_board(seen, seen.job, plan)


def _decided(seen: Observed) -> Plan:
    if "deletionTimestamp" in seen.body["metadata"]:
        return Plan()  # owner references: the cluster deletes what belongs to the TrainingJob
    status = Status(seen)
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
        return run_due(seen, seen.job, status)
    return _training(seen, seen.job, status)


# While the job runs.


def _training(seen: Observed, job: TrainingJob, status: Status) -> Plan:
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
    starting = is_gang(job) and status.condition("Starved").get("reason") != STARTED
    if starting and (plan := start_together(seen, job, status, replicas)) is not None:
        return plan
    plan = _follow(seen, policy, status, _as_released(replicas, policy, missing) if released else replicas)
    return replace(plan, after_s=min(plan.after_s or CAPACITY_S, CAPACITY_S)) if starting else plan


def _make(seen: Observed, job: TrainingJob, status: Status, missing: tuple[RoleName, ...]) -> Plan:
    waits = [seen.why_not_ready(name) for name in dict.fromkeys(e.name for e in job.spec.datastores)]
    if said := [each for each in waits if each]:
        status.set("DatastoresReady", False, "Waiting", "; ".join(said))
        status.phase("Pending", f"waits: {'; '.join(said)}")
        return status.plan()
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
    if is_gang(job):
        status.set("Starved", False, "Waiting")
    if status.holds("ResourcesFreed"):
        status.set("ResourcesFreed", False, "Started")
    if status.holds("Suspended"):
        status.set("Suspended", False, "Resumed")
    status.fields.pop("freedSeconds", None)
    return Plan(make_roles=missing, claims=claims, suspended=is_gang(job), status=status.fields, again=True)


def _ranks(topology: Topology, replicas: Sequence[Replica]) -> list[tuple[Raw, int]]:
    """Return the pods that wait for their rank, each with the rank."""
    return [
        (pod, topology.first_rank(replica.task.role) + replica.task.index)
        for replica in replicas
        for pod in replica.pods
        if any(gate["name"] == names.RANK for gate in pod["spec"].get("schedulingGates") or [])
    ]


def _follow(seen: Observed, policy: RunPolicy, status: Status, replicas: Sequence[Replica]) -> Plan:
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
            return status.plan(decision.seconds)
    if broken := _given_up(seen.jobs):
        return _verdict(seen, status, broken, seen.now)
    if isinstance(decision, Restart):
        status.phase("Restarting", f"{decision.why}; restart {status.restarts + 1} of {policy.backoff_limit}")
        return status.plan()
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
    return status.plan(decision.seconds)


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


def _release(seen: Observed, status: Status, decision: Release) -> Plan:
    message = "the training has succeeded; the evaluator continues"
    status.set("Running", True, EVALUATING, message)
    status.phase("Running", message)
    if status.fields != seen.body.get("status"):
        return Plan(status=status.fields, again=True)
    roles = {task.role for task in decision.tasks}
    jobs = [each for role, each in seen.jobs.items() if role in roles]
    return _free(seen, status, jobs, [each for each in seen.pods if each["metadata"]["labels"][names.ROLE] in roles])


def _restart_all(
    seen: Observed, status: Status, decision: Restart, replicas: Sequence[Replica], policy: RunPolicy
) -> Plan:
    failed = [each.ended_at or seen.now for each in replicas if each.state.state is State.FAILED]
    number = status.restarts + 1
    status.phase("Restarting", f"{decision.why}; restart {number} of {policy.backoff_limit}")
    left_s = decision.delay_s - (seen.now - min(failed)).total_seconds()
    if left_s > 0 and any(each.ended_at for each in replicas):
        return status.plan(left_s)
    status.fields["restarts"] = number
    event = Event(reason="Restarting", message=status.fields["message"], warning=True)
    return Plan(status=status.fields, events=(event,), again=True)


# The end of the job.


def _verdict(seen: Observed, status: Status, decision: Finish, ended: datetime) -> Plan:
    """Record how the job ended, before anything is freed."""
    kind = "Succeeded" if decision.succeeded else "Failed"
    status.set(kind, True, decision.reason, decision.message)
    status.fields["completionTime"] = timestamp(ended)
    status.fields["message"] = f"{decision.message}; its resources are being freed"[:4096]
    event = Event(reason=decision.reason, message=f"{kind}: {decision.message}", warning=not decision.succeeded)
    return Plan(status=status.fields, events=(event,), again=True)


def _wind_up(seen: Observed, status: Status) -> Plan:
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


def _saved(seen: Observed, status: Status) -> None:
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


def _suspended(seen: Observed, status: Status) -> Plan:
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


def _freed(seen: Observed, status: Status, reason: str, seconds: float | None) -> None:
    status.set("ResourcesFreed", True, reason, "" if seconds is None else f"after {seconds:.1f} s")
    status.set("Running", False, reason)
    if seconds is not None:
        status.fields["freedSeconds"] = round(seconds, 3)
    if "roles" in status.fields:
        status.fields["roles"] = [{**each, "active": 0} for each in status.fields["roles"]]
    if seen.collected:
        status.fields["evidence"] = names.evidence_name(seen.body["metadata"]["name"])


def _free(seen: Observed, status: Status, jobs: Sequence[Raw], pods: Sequence[Raw]) -> Plan:
    """Keep the evidence of these Jobs, then delete them and their pods. The deletions' events cause the next step."""
    unkept = [each for each in jobs if each["metadata"]["uid"] not in seen.collected]
    if unkept:
        return Plan(collect=frozenset(each["metadata"]["labels"][names.ROLE] for each in unkept), again=True)
    here = [each for each in (*jobs, *active(pods)) if "deletionTimestamp" not in each["metadata"]]
    if seen.collected:
        status.fields["evidence"] = names.evidence_name(seen.body["metadata"]["name"])
    # A pod stays until its processes have ended; an event tells its end.
    return Plan(delete=tuple(here), status=status.fields, again=any(each in here for each in jobs), after_s=1.0)
