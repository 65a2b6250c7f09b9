"""Conditions in the form of meta/v1, and the Events that their transitions make. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Raw = Mapping[str, Any]
Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A condition without the time of its transition."""

    type: str
    status: Truth
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An Event, as `kubectl describe` shows it. warning: whether people have to do something."""

    reason: str
    message: str
    warning: bool = False


def merged(before: Sequence[Raw], found: Sequence[Finding], generation: int, now: str) -> list[dict[str, Any]]:
    """Return the conditions to write; lastTransitionTime changes only when the status does. now: RFC 3339."""
    old = {each.get("type"): each for each in before}
    conditions = []
    for finding in found:
        was = old.get(finding.type, {})
        same = was.get("status") == finding.status and "lastTransitionTime" in was
        conditions.append(
            {
                "type": finding.type,
                "status": finding.status,
                "reason": finding.reason,
                "message": finding.message,
                "lastTransitionTime": was["lastTransitionTime"] if same else now,
                "observedGeneration": generation,
            }
        )
    return conditions


_EXPECTED = {
    ("Degraded", "False"),
    ("CredentialsValid", "Unknown"),
    ("CredentialsValid", "True"),
    ("Provisioned", "True"),
}
"""(type, status) of conditions that make no Event while a Datastore is new, since Ready says enough."""


def transitions(before: Sequence[Raw], found: Sequence[Finding]) -> list[Event]:
    """Return an Event for each condition whose status or reason changed; a new condition makes none if it is usual."""
    old = {each.get("type"): (each.get("status"), each.get("reason")) for each in before}
    events = []
    for finding in found:
        was = old.get(finding.type)
        usual = (finding.type, finding.status) in _EXPECTED or finding.reason in _PASSING
        if was == (finding.status, finding.reason) or (was is None and usual):
            continue
        events.append(Event(reason=finding.reason, message=_told(finding), warning=_is_bad(finding, was)))
    return list(dict.fromkeys(events))


_PASSING = frozenset({"WaitingForBinding", "VolumeReplacing", "WaitingForBackend", "Deleting"})
"""Reasons why something is not true yet, about which nobody has to do anything."""


def _is_bad(finding: Finding, was: tuple[Any, Any] | None) -> bool:
    """Return whether people have to do something. was: status and reason before."""
    if finding.type == "Progressing":
        return False  # Ready and Degraded say what prevents it
    if finding.reason == "Rolling" and (was is None or was[0] != "True"):
        return False  # the first pods start
    return finding.status == ("True" if finding.type == "Degraded" else "False") and finding.reason not in _PASSING


def _told(finding: Finding) -> str:
    return f"{finding.type} is {finding.status}" + (f": {finding.message}" if finding.message else "")
