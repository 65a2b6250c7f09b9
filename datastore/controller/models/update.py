"""Decides how to update a Model's store: aliases as the spec has them, and a note of each version that a Serving names.

A Job writes both. The note keeps a laptop from deleting a version that a cluster serves by its number; a version that
is served by an alias is kept by the alias. Pure and level-triggered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datastore.api.objects import condition
from datastore.controller.models.decide import MESSAGE_MAX, REFUSED, Plan, store_name
from datastore.controller.models.job import Role, SeenWork, ended, reached, request_in, wanted_job
from datastore.controller.models.status import model_status, with_conditions
from datastore.controller.runtime.conditions import Event, Finding
from datastore.controller.runtime.mistakes import Mistake

Raw = Mapping[str, Any]

VERB = "update"
CONDITION = "StoreUpdated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedModel(SeenWork):
    """All that decide_model() knows. servings: all of the namespace."""

    model: Raw
    servings: Sequence[Raw] = ()


def decide_model(seen: ObservedModel) -> Plan:
    """Return the next step. A deleted Model takes its Job along (owner reference); the store stays as it is."""
    model, job = seen.model, seen.job
    if "deletionTimestamp" in model["metadata"]:
        return Plan()
    if seen.refused:
        return _told(seen, REFUSED, seen.refused)
    wanted = wanted_of(model, seen.servings)
    if job is not None and "deletionTimestamp" in job["metadata"]:
        return Plan(soon=True)
    if job is not None and not ended(job):
        why = f": {seen.waiting}" if seen.waiting else ""
        return _told(seen, "JobRunning", f"Job {job['metadata']['name']} works on it{why}", soon=True)
    if job is not None and ended(job) == "Complete" and "versions" in (seen.answer or {}):
        assert seen.answer is not None, "just looked at"
        done = Finding(type=CONDITION, status="True", reason="Updated")
        served = _served(model, request_in(job).get("pins") or {})
        status = model_status(model, seen.answer, store_name(model), seen.now, findings=[done], served=served)
        return Plan(delete=(job,), status=status, events=(Event(reason="Updated", message=_said(job)),), soon=True)
    if job is not None:
        if ended(job) == "Complete" or not _is_for(job, wanted, model):
            return Plan(delete=(job,), soon=True)
        said = seen.answer or {}
        return _told(seen, str(said.get("reason") or "JobFailed"), str(said.get("error") or "the Job's pods failed"))
    if not wanted["moves"] and not wanted["pins"]:
        is_told = condition(model, CONDITION).get("status") in (None, "True")
        return Plan() if is_told else _told(seen, "Updated", "", as_wanted=True)
    try:
        places = reached([Role("store", store_name(model), seen.store, seen.store_volume, written=True)])
        who = f"Model {model['metadata']['namespace']}/{model['metadata']['name']}"
        request = {
            "do": VERB,
            "model": model["metadata"]["name"],
            "store": places.places["store"],
            "who": who,
            "newest": _newest(model),
            **wanted,
        }
        made = wanted_job(model, VERB, request, seen.image, places)
    except Mistake as mistake:
        return _told(seen, mistake.reason, str(mistake))
    told = _told(seen, "JobCreated", f"Job {made['metadata']['name']} was made")
    return Plan(create=(made,), status=told.status, soon=True)


def wanted_of(model: Raw, servings: Sequence[Raw]) -> dict[str, dict[str, Any]]:
    """Return what the store lacks: moves (alias to number) and pins (see models/jobs.py); both may be empty."""
    status = model.get("status") or {}
    aliases = {each["name"]: each["version"] for each in status.get("aliases") or ()}
    listed = {each["name"]: each["version"] for each in model.get("spec", {}).get("aliases") or ()}
    moves = {name: number for name, number in listed.items() if aliases.get(name) != number}
    known = {each["uid"]: each["version"] for each in status.get("served") or ()}
    pins: dict[str, Any] = {uid: {"was": number} for uid, number in known.items()}
    for each in servings:
        metadata, number = each["metadata"], each["spec"].get("version")
        if each["spec"]["model"] != model["metadata"]["name"] or "deletionTimestamp" in metadata:
            continue
        if not number or number > _newest(model):
            continue
        who = f"Serving {metadata['namespace']}/{metadata['name']}"
        pins.setdefault(metadata["uid"], {}).update({"version": number, "who": who, "serving": metadata["name"]})
    return {"moves": moves, "pins": {uid: pin for uid, pin in pins.items() if pin.get("was") != pin.get("version")}}


def _newest(model: Raw) -> int:
    return int((model.get("status") or {}).get("latestVersion") or 0)


def _is_for(job: Raw, wanted: Mapping[str, Any], model: Raw) -> bool:
    """Return whether a new Job would get the failed Job's request, also for a Model with the same newest version."""
    asked = request_in(job)
    return {**wanted, "newest": _newest(model)} == {name: asked.get(name) for name in ("moves", "pins", "newest")}


def _served(model: Raw, pins: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return status.served after a Job with these pins."""
    left = [each for each in (model.get("status") or {}).get("served") or () if each["uid"] not in pins]
    added = [
        {"version": pin["version"], "serving": pin["serving"], "uid": uid}
        for uid, pin in pins.items()
        if pin.get("version")
    ]
    return [*left, *added]


def _said(job: Raw) -> str:
    """Say what a Job has done, for people."""
    asked = request_in(job)
    moved = [f"{name} means version {number}" for name, number in dict(asked.get("moves") or {}).items()]
    return "; ".join(moved) or "the store knows which versions are served"


def _told(seen: ObservedModel, reason: str, text: str, *, as_wanted: bool = False, soon: bool = False) -> Plan:
    """Return the condition, with a warning Event when the store is not up to date for a new reason."""
    before = condition(seen.model, CONDITION)
    found = Finding(type=CONDITION, status="True" if as_wanted else "False", reason=reason, message=text[:MESSAGE_MAX])
    passing = as_wanted or soon or reason in ("JobCreated", before.get("reason"))
    events = () if passing else (Event(reason=reason, message=found.message, warning=True),)
    return Plan(status=with_conditions(seen.model, [found], seen.now, {}), events=events, soon=soon)
