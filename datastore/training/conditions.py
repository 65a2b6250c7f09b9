"""Sets conditions of a TrainingJob, in the form of meta/v1. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from datastore.api.status import Condition

SAVING = "Saving"
"""Reason of Saved=False while the result of the job is being saved, or is about to be saved again."""


def with_condition(
    before: Sequence[Condition], kind: str, holds: bool, reason: str, message: str, now: datetime
) -> list[Condition]:
    """Return the conditions with this one set; lastTransitionTime changes only when the status does."""
    status = "True" if holds else "False"
    old = next((each for each in before if each.type == kind), None)
    since = old.last_transition_time if old and old.status == status else now
    fields: dict[str, Any] = {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message[:32768],
        "lastTransitionTime": since,
    }
    made = Condition.model_validate(fields)
    return [made if each.type == kind else each for each in before] + ([] if old else [made])
