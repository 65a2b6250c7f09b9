"""Decides when a TrainingJob with a schedule makes its next run, a TrainingJob of its own (S-352). Pure."""

from __future__ import annotations

from datetime import timedelta

from datastore.api.datastore import API_VERSION
from datastore.api.objects import owner_reference, timestamp
from datastore.api.trainingjob import KIND, TrainingJob
from datastore.controller.trainingjobs.plan import JSON, Observed, Plan, Raw, Status
from datastore.training import schedule
from datastore.training.cluster import names
from datastore.training.cluster.replicas import time_of


def run_due(seen: Observed, job: TrainingJob, status: Status) -> Plan:
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
