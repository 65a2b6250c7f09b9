"""Decides whether a TrainingJob has a TensorBoard now: its own while it runs, or one that a user asked for. Pure."""

from __future__ import annotations

from dataclasses import replace

from datastore.api.objects import condition, is_true
from datastore.api.trainingjob import TrainingJob
from datastore.controller.trainingjobs import desired
from datastore.controller.trainingjobs.plan import Observed, Plan, Raw
from datastore.training.cluster import names


def with_board(seen: Observed, job: TrainingJob, plan: Plan) -> Plan:
    """Return the plan with what is to be done about the TensorBoard and its address in the status."""
    told = dict(plan.status or seen.body.get("status") or {})
    told.pop("tensorboard", None)
    if seen.board is not None:
        told["tensorboard"] = _board_told(seen.board, job.name)
    if told != (plan.status or seen.body.get("status") or {}):
        plan = replace(plan, status=told)
    wanted, there = _wanted_board(seen, job), seen.board
    if there is not None:
        same = wanted is not None and there["metadata"].get("annotations", {}).get(names.BOARD) == wanted.wish
        if same or "deletionTimestamp" in there["metadata"]:
            return plan
        return replace(plan, delete=(*plan.delete, there), again=True)
    if wanted is None or wanted.wish == seen.board_refused:
        return plan
    if seen.why_not_ready(wanted.datastore):
        return plan
    claim = seen.datastores[wanted.datastore]["status"]["claimName"]
    made = desired.board_job(job, seen.body["metadata"]["uid"], wanted, claim)
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
