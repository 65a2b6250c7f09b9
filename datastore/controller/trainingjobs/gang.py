"""Decides when the replicas of a gang start: all together or none (S-351). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from datastore.api.trainingjob import ROLES, TrainingJob
from datastore.controller.runtime.conditions import Event
from datastore.controller.trainingjobs.overlay import template_of
from datastore.controller.trainingjobs.plan import Observed, Plan, Raw, Status
from datastore.training.cluster.replicas import Replica, active, time_of
from datastore.training.policy import State

STARTING, STARTED = "Starting", "Started"
"""Reasons of Starved=False: the gang is starting; all its replicas have started, and are no longer treated as a gang.
Reasons of Running: the pods that had no node have one now; a replica has started."""
CAPACITY_S = 15.0
"""How soon a gang is checked again that waits for room, or whose replicas are starting."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
"""Bounds of the wait after a gang's start failed; the wait is half of the age that its Jobs had then."""
SCHEDULERS = ("kueue.x-k8s.io/queue-name", "scheduling.x-k8s.io/pod-group", "scheduling.k8s.io/group-name")
"""Labels and annotations with which another scheduler starts the replicas of a gang together."""


def is_gang(job: TrainingJob) -> bool:
    """Return whether all replicas start together or none, and no other scheduler ensures that."""
    templates = [template_of(job.spec, role) for role in ROLES]
    named = {name for each in templates for name in (*each.labels, *each.annotations)}
    return job.spec.gang and not any(each.scheduler_name for each in templates) and not named & set(SCHEDULERS)


def start_together(seen: Observed, job: TrainingJob, status: Status, replicas: Sequence[Replica]) -> Plan | None:
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
            return _start(status, ())
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
        return _start(status, waits)
    late = seen.now - made > deadline
    status.set("Starved", late, "NotEnoughFree" if late else "Waiting", seen.room)
    status.phase("Pending", f"waits for room: {seen.room}")
    return status.plan(CAPACITY_S)


def _start(status: Status, jobs: Sequence[Raw]) -> Plan:
    status.set("Starved", False, STARTING, since=status.seen.now)
    return Plan(start=tuple((each, True) for each in jobs), status=status.fields, again=True)
