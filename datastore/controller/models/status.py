"""Computes the status of a Model from what a Job found in the store. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastore.controller.runtime.conditions import Finding, merged

Raw = Mapping[str, Any]


def model_status(
    model: Raw,
    said: Mapping[str, Any],
    store: str,
    now: str,
    *,
    findings: Sequence[Finding] = (),
    served: Sequence[Raw] | None = None,
) -> dict[str, Any]:
    """Return the status. said: a Job's answer; findings: conditions besides Ready; served: None keeps the list."""
    ready = Finding(type="Ready", status="True", reason="Stored", message=f"the newest version is {said['latest']}")
    if not said["latest"]:
        ready = Finding(type="Ready", status="False", reason="NoVersion", message="the store has no version of it")
    found = {
        "store": store,
        "location": said["store"],
        "latestVersion": said["latest"],
        "versions": said["versions"],
        "aliases": [{"name": name, "version": number} for name, number in said["aliases"].items()],
    }
    if served is not None:
        found["served"] = list(served)
    return with_conditions(model, [ready, *findings], now, found)


def with_conditions(model: Raw, findings: Sequence[Finding], now: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a Model with these conditions and fields set; all others stay as they are."""
    before = model.get("status") or {}
    generation = int(model["metadata"].get("generation", 1))
    conditions = before.get("conditions") or []
    types = {each.type for each in findings}
    others = [each for each in conditions if each["type"] not in types]
    return {
        **before,
        **more,
        "observedGeneration": generation,
        "conditions": [*merged(conditions, findings, generation, now), *others],
    }
