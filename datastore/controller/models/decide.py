"""Decides from what is observed what to do next about a ModelVersion. Pure and level-triggered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from datastore.api.datastore import API_VERSION
from datastore.api.model import ModelVersion
from datastore.api.names import DEFAULT_STORE, FINALIZER
from datastore.api.objects import condition, is_true
from datastore.controller.models.job import (
    Role,
    SeenWork,
    ended,
    ended_at,
    job_name,
    reached,
    request_of,
    verb_of,
    wanted_job,
)
from datastore.controller.models.status import model_status
from datastore.controller.models.volume import OWNED_BY, version_volume
from datastore.controller.runtime.conditions import Event, Finding, Truth, merged
from datastore.controller.runtime.mistakes import Mistake, parsed
from datastore.units import format_size

Raw = Mapping[str, Any]

REFUSED = "Refused"
"""The reason when the cluster does not accept a needed object, for example because of a quota."""
SAVED, SAME = "Saved", "SameBytes"
"""Reasons of Ready=True: the ModelVersion's own save made the version, or the store had these bytes already."""
MESSAGE_MAX = 2000
DELETE_AGAIN = timedelta(seconds=60)
"""How long after a failed deletion (for example, an alias names the version) another Job retries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(SeenWork):
    """All that decide() knows. source: a Datastore, with its PersistentVolume.

    in_use: what uses a version that is being deleted, or its claim, for people. classes: StorageClasses that the
    administrator marked for models. namespace_ends: the namespace is being deleted and takes no new Job.
    """

    version: Raw
    model: Raw | None = None
    source: Raw | None = None
    source_volume: Raw | None = None
    claim: Raw | None = None
    in_use: str = ""
    classes: Sequence[str] = ()
    namespace_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in the order of ModelKind._act(). create: unless it exists. soon: decide again within seconds."""

    finalizer: bool | None = None
    create: tuple[Raw, ...] = ()
    apply: tuple[Raw, ...] = ()
    delete: tuple[Raw, ...] = ()
    status: Mapping[str, Any] | None = None
    model_status: Mapping[str, Any] | None = None
    events: tuple[Event, ...] = ()
    soon: bool = False


def store_name(model: Raw | None) -> str:
    """Return the name of the Datastore that holds the versions of a Model."""
    return str((model or {}).get("spec", {}).get("store") or DEFAULT_STORE)


def store_of(body: Raw, model: Raw | None) -> str:
    """Return the name of the Datastore that holds a version. Its Model may be gone, or be another one by now."""
    return str((body.get("status") or {}).get("store") or store_name(model))


def is_saved(body: Raw) -> bool:
    """Return whether condition Saved is True: it is known which version of the store this is."""
    return is_true(body, "Saved")


def saved_it(body: Raw, version: ModelVersion) -> bool:
    """Return whether the object's own save made the version: only then are the bytes deleted with the object."""
    return version.spec.source is not None and condition(body, "Saved").get("reason") != SAME


def decide(seen: Observed) -> Plan:
    """Return the next step of a ModelVersion, also of one that is being deleted."""
    body = seen.version
    try:
        version = parsed(body, ModelVersion)
        if "deletionTimestamp" in body["metadata"]:
            return _going(seen, version)
        if FINALIZER not in (body["metadata"].get("finalizers") or []):
            return Plan(finalizer=True, soon=True)
        if is_saved(body):
            return _shown(seen, version)
        if is_true(body, "Failed"):
            return Plan()
        if seen.refused:
            return _told(seen, "Pending", REFUSED, seen.refused)
        return _made(seen, version)
    except Mistake as mistake:
        if "deletionTimestamp" in body["metadata"]:
            return Plan(finalizer=False)
        return _told(seen, "Pending", mistake.reason, str(mistake))


def _made(seen: Observed, version: ModelVersion) -> Plan:
    """Return the next step towards a saved version: make the Model, the store, then the Job that saves or adopts it."""
    body, namespace = seen.version, seen.version["metadata"]["namespace"]
    if seen.model is None:
        names = {"name": version.spec.model, "namespace": namespace}
        made = {"apiVersion": API_VERSION, "kind": "Model", "metadata": names, "spec": {}}
        return Plan(create=(made,), soon=True)
    if seen.job is not None and ended(seen.job):
        return _ended(seen, version)
    if seen.job is not None:
        if seen.waiting:
            return _told(seen, "Saving", "PodPending", f"the Job's pod does not run yet: {seen.waiting}", soon=True)
        return _told(seen, "Saving", "JobRunning", f"Job {seen.job['metadata']['name']} works on it", soon=True)
    name = store_of(body, seen.model)
    if seen.store is None and name == DEFAULT_STORE and len(seen.classes) == 1:
        store = {
            "apiVersion": API_VERSION,
            "kind": "Datastore",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"storageClassName": seen.classes[0], "reclaimPolicy": "Retain"},
        }
        return Plan(create=(store,), soon=True)
    moved = _moved(seen.model, version)
    written = version.spec.source is not None or bool(moved)
    roles = [Role("store", name, seen.store, seen.store_volume, written=written)]
    if version.spec.source is not None:
        roles.append(Role("source", version.spec.source.datastore, seen.source, seen.source_volume, "if needed"))
    places = reached(roles)
    verb = verb_of(version)
    request = request_of(
        version,
        body["metadata"]["uid"],
        verb,
        places.places["store"],
        places.places.get("source"),
        moved,
    )
    job = wanted_job(body, verb, request, seen.image, places)
    told = _told(seen, "Saving", "JobCreated", f"Job {job['metadata']['name']} was made", {"store": name})
    return Plan(create=(job,), status=told.status, events=told.events, soon=True)


def _moved(model: Raw, version: ModelVersion) -> list[str]:
    """Return the aliases that the Job moves; an alias that the Model lists stays where the Model sets it."""
    listed = {each["name"] for each in model.get("spec", {}).get("aliases") or ()}
    return [alias for alias in version.spec.aliases if alias not in listed]


def _ended(seen: Observed, version: ModelVersion) -> Plan:
    """Report the version that the Job made, or the Job's final failure."""
    assert seen.job is not None, "asked only then"
    said = dict(seen.answer or {})
    if ended(seen.job) == "Complete" and "version" not in said:
        # The Job's pod is gone, and its answer with it. A new Job with the same saveId finds what this one saved.
        return Plan(delete=(seen.job,), soon=True)
    if ended(seen.job) == "Failed":
        reason, why = str(said.get("reason") or "JobFailed"), str(said.get("error") or "the Job's pods failed")
        return _told(seen, "Failed", reason, f"{why}; create another ModelVersion when that is fixed")
    found = {name: said[name] for name in ("version", "digest", "files", "bytes", "saved", "location")}
    reason = SAVED if said.get("new") or version.spec.version is not None else SAME
    text = f"{version.spec.model}:{said['version']}"
    message = f"saved as {text}" if reason == SAVED else f"the store has these bytes already, as {text}"
    if left := [alias for alias in version.spec.aliases if alias not in _moved(seen.model or {}, version)]:
        message += f"; Model {version.spec.model} says what {', '.join(left)} means"
    plan = _told(seen, "Ready", reason, message, {**found, "size": format_size(int(said["bytes"]))})
    assert seen.model is not None, "made before"
    of_model = model_status(seen.model, said, store_of(seen.version, seen.model), seen.now)
    return Plan(status=plan.status, events=plan.events, model_status=of_model, soon=True)


def _shown(seen: Observed, version: ModelVersion) -> Plan:
    """Make the volume and the claim of a saved version, and recreate them when somebody has deleted them."""
    body, metadata = seen.version, seen.version["metadata"]
    if seen.claim is not None and (seen.claim["metadata"].get("labels") or {}).get(OWNED_BY) != metadata["uid"]:
        text = f"a claim {metadata['name']} is there already and not ours, so the version has none"
        return _told(seen, "Ready", condition(body, "Ready")["reason"], text)
    if seen.claim is not None:
        return _told(seen, "Ready", *_ready(body), extra={"claim": metadata["name"]})
    if seen.store is None or seen.store_volume is None:
        return Plan(soon=seen.store is not None)
    try:
        volume, claim = version_volume(
            seen.store,
            seen.store_volume,
            model=version.spec.model,
            number=int(body["status"]["version"]),
            claim=metadata["name"],
            owner=body,
        )
    except Mistake as mistake:
        return _told(seen, "Ready", condition(body, "Ready")["reason"], str(mistake))
    if seen.refused:
        return _told(seen, "Ready", condition(body, "Ready")["reason"], seen.refused)
    return Plan(apply=(volume, claim), soon=True)


def _ready(body: Raw) -> tuple[str, str]:
    found = condition(body, "Ready")
    return str(found["reason"]), str(found["message"])


def _going(seen: Observed, version: ModelVersion) -> Plan:
    """Delete the claim, the bytes (by a Job), then volume and finalizer; but wait while the version is in use."""
    body = seen.version
    if FINALIZER not in (body["metadata"].get("finalizers") or []):
        return Plan()
    ours = (
        seen.claim is not None and (seen.claim["metadata"].get("labels") or {}).get(OWNED_BY) == body["metadata"]["uid"]
    )
    if seen.refused:
        return _told(seen, "Deleting", REFUSED, seen.refused)
    if seen.in_use:
        return _told(seen, "Deleting", "VersionInUse", f"not deleted: in use by {seen.in_use}", soon=True)
    if ours and seen.claim is not None:
        delete = () if "deletionTimestamp" in seen.claim["metadata"] else (seen.claim,)
        return Plan(delete=delete, soon=True)
    job = seen.job
    stored = saved_it(body, version)
    if not stored or seen.namespace_ends or seen.store is None:
        return Plan(finalizer=False)
    if job is None:
        try:
            named = store_of(body, seen.model)
            places = reached([Role("store", named, seen.store, seen.store_volume, written=True)])
            request = request_of(version, body["metadata"]["uid"], "delete", places.places["store"], None)
            return Plan(create=(wanted_job(body, "delete", request, seen.image, places),), soon=True)
        except Mistake as mistake:
            # A save that was not completed may have left bytes, too; the controller's own image is known in a moment.
            unsaved = not is_saved(body) and seen.image is not None
            if mistake.permanent or unsaved or "deletionTimestamp" in seen.store["metadata"]:
                return Plan(finalizer=False)
            way_out = f"kubectl datastore remove-finalizer mv/{body['metadata']['name']} leaves them in the store"
            return _told(seen, "Deleting", mistake.reason, f"the bytes are not deleted: {mistake}; {way_out}")
    if job["metadata"]["name"] != job_name(body, "delete"):
        # A save that still runs is ended first.
        return Plan(delete=() if "deletionTimestamp" in job["metadata"] else (job,), soon=True)
    if ended(job) == "Complete":
        of_model = None
        if seen.model is not None and seen.answer and "versions" in seen.answer:
            of_model = model_status(seen.model, seen.answer, store_of(body, seen.model), seen.now)
        return Plan(finalizer=False, model_status=of_model)
    if ended(job) == "Failed":
        said = dict(seen.answer or {})
        plan = _told(
            seen, "Deleting", str(said.get("reason") or "JobFailed"), str(said.get("error") or "the Job's pods failed")
        )
        if _age(ended_at(job) or seen.now, seen.now) < DELETE_AGAIN:
            return plan
        return Plan(status=plan.status, events=plan.events, delete=(job,), soon=True)
    return Plan(soon=True)


def _age(since: str, now: str) -> timedelta:
    return datetime.fromisoformat(now) - datetime.fromisoformat(since)


def _told(
    seen: Observed, phase: str, reason: str, text: str, extra: Mapping[str, Any] | None = None, *, soon: bool = False
) -> Plan:
    """Return the new status, and an Event when the phase or the reason has changed."""
    body, message = seen.version, text[:MESSAGE_MAX]
    saved = phase == "Ready" or is_saved(body)
    truth: dict[bool, Truth] = {True: "True", False: "False"}
    why = condition(body, "Saved").get("reason", reason) if is_saved(body) else reason
    findings = [
        Finding(type="Ready", status=truth[phase == "Ready"], reason=reason, message=message),
        Finding(type="Saved", status=truth[saved], reason=why, message="" if saved else message),
        Finding(type="Failed", status=truth[phase == "Failed"], reason=reason if phase == "Failed" else "NotFailed"),
    ]
    more = {**(extra or {}), **({"progress": dict(seen.progress)} if seen.progress and phase == "Saving" else {})}
    warning = phase in ("Failed", "Pending", "Deleting") or reason == REFUSED
    return telling(body, phase, findings, seen.now, more, warning=warning, soon=soon)


def telling(
    body: Raw, phase: str, findings: Sequence[Finding], now: str, more: Raw, *, warning: bool, soon: bool
) -> Plan:
    """Return a plan of the new status, with an Event when the phase or the reason of the first condition has changed.

    more: further fields of the status; those that it does not name stay, except for progress.
    """
    before, first = body.get("status") or {}, findings[0]
    generation = int(body["metadata"].get("generation", 1))
    status = {
        **{name: value for name, value in before.items() if name != "progress"},
        **more,
        "observedGeneration": generation,
        "phase": phase,
        "message": first.message,
        "conditions": merged(before.get("conditions") or [], findings, generation, now),
    }
    same = (before.get("phase"), condition(body, first.type).get("reason")) == (phase, first.reason)
    events = () if same else (Event(reason=first.reason, message=first.message, warning=warning),)
    return Plan(status=status, events=events, soon=soon)
