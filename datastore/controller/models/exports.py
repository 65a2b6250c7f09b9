"""Decides what to do next about a ModelExport: make its one Job, then report the result. Pure and level-triggered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datastore.api.model import ModelExport
from datastore.api.objects import is_true
from datastore.controller.models.decide import MESSAGE_MAX, REFUSED, Plan, store_name, telling
from datastore.controller.models.job import Role, SeenWork, ended, reached, wanted_job
from datastore.controller.runtime.conditions import Finding, Truth
from datastore.controller.runtime.mistakes import Mistake, parsed
from datastore.units import format_size

Raw = Mapping[str, Any]

VERB = "export"
_FOUND = ("version", "digest", "files", "bytes", "location")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedExport(SeenWork):
    """All that decide_export() knows. target: the Datastore to export to."""

    export: Raw
    model: Raw | None = None
    target: Raw | None = None
    target_volume: Raw | None = None


def is_over(body: Raw) -> bool:
    """Return whether the export has ended, in success or failure; nothing more is done then."""
    return is_true(body, "Complete") or is_true(body, "Failed")


def decide_export(seen: ObservedExport) -> Plan:
    """Return the next step. A deleted export takes its Job along (owner reference); the exported files stay."""
    if is_over(seen.export) or "deletionTimestamp" in seen.export["metadata"]:
        return Plan()
    try:
        export = parsed(seen.export, ModelExport)
        if seen.refused:
            return _told(seen, "Pending", REFUSED, seen.refused)
        if seen.job is None:
            return _begun(seen, export)
    except Mistake as mistake:
        return _told(seen, "Pending", mistake.reason, str(mistake))
    name, said = seen.job["metadata"]["name"], dict(seen.answer or {})
    if ended(seen.job) == "Failed":
        reason, why = str(said.get("reason") or "JobFailed"), str(said.get("error") or "the Job's pods failed")
        return _told(seen, "Failed", reason, f"{why}; create another ModelExport when that is fixed")
    if ended(seen.job) and "version" not in said:
        # The Job's pod is gone, and its answer with it. A new Job finds what this one exported.
        return Plan(delete=(seen.job,), soon=True)
    if ended(seen.job):
        text = f"{export.spec.model}:{said['version']} is at {said['location']}"
        found = {each: said[each] for each in _FOUND} | {"size": format_size(int(said["bytes"]))}
        return _told(seen, "Complete", "Exported", text, found)
    if seen.waiting:
        return _told(seen, "Exporting", "PodPending", f"the Job's pod does not run yet: {seen.waiting}", soon=True)
    return _told(seen, "Exporting", "JobRunning", f"Job {name} works on it", soon=True)


def _begun(seen: ObservedExport, export: ModelExport) -> Plan:
    """Create the Job. Errors: Mistake when the Model, a Datastore or the image is missing or not ready."""
    spec = export.spec
    if seen.model is None:
        raise Mistake("ModelNotFound", f"there is no Model {spec.model} in this namespace; apply one")
    listed = {each["name"]: each["version"] for each in (seen.model.get("spec") or {}).get("aliases") or ()}
    places = reached(
        [
            Role("store", store_name(seen.model), seen.store, seen.store_volume, "if needed"),
            Role(
                "target",
                spec.to.datastore,
                seen.target,
                seen.target_volume,
                "if needed" if spec.format == "directory" else "always",
                written=True,
            ),
        ]
    )
    request = {
        "do": VERB,
        "model": spec.model,
        # What the Model says of an alias holds before a Job has moved it; the Job asks the store for other aliases.
        "version": spec.version or listed.get(spec.alias or ""),
        "alias": spec.alias,
        "path": spec.to.path,
        "format": spec.format,
        "who": f"ModelExport {export.metadata.namespace}/{export.name}",
        "store": places.places["store"],
        "target": places.places["target"],
    }
    job = wanted_job(seen.export, VERB, request, seen.image, places)
    told = _told(seen, "Exporting", "JobCreated", f"Job {job['metadata']['name']} was made")
    return Plan(create=(job,), status=told.status, events=told.events, soon=True)


def _told(
    seen: ObservedExport,
    phase: str,
    reason: str,
    text: str,
    extra: Mapping[str, Any] | None = None,
    *,
    soon: bool = False,
) -> Plan:
    truth: dict[bool, Truth] = {True: "True", False: "False"}
    findings = [
        Finding(type="Complete", status=truth[phase == "Complete"], reason=reason, message=text[:MESSAGE_MAX]),
        Finding(type="Failed", status=truth[phase == "Failed"], reason=reason if phase == "Failed" else "NotFailed"),
    ]
    more = {**(extra or {}), **({"progress": dict(seen.progress)} if seen.progress and phase == "Exporting" else {})}
    return telling(seen.export, phase, findings, seen.now, more, warning=phase in ("Failed", "Pending"), soon=soon)
