"""What is observed of a TrainingJob, what is planned for it, and its new status. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from datastore.api.objects import condition, is_true, timestamp
from datastore.api.trainingjob import RoleName, TrainingJob
from datastore.controller.runtime.conditions import Event

Raw = Mapping[str, Any]
JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that decide() knows of a TrainingJob.

    job: None if its spec can't be acted on; invalid says why. datastores: those that it uses, by name. jobs: its Jobs
    by role; pods: all its pods; runs: TrainingJobs that its schedule made. collected: uids of the Jobs whose evidence
    is in the ConfigMap that stays. version: the ModelVersion of its save. board: the Job of its TensorBoard;
    board_refused: the wish whose TensorBoard the cluster refused. room: why a waiting gang does not fit as a whole, or
    why no node ever has room for a replica; '' when there is room; None when the nodes were not looked at.
    """

    body: Raw
    job: TrainingJob | None
    invalid: str = ""
    datastores: Mapping[str, Raw] = field(default_factory=dict)
    jobs: Mapping[str, Raw] = field(default_factory=dict)
    pods: Sequence[Raw] = ()
    runs: Sequence[Raw] = ()
    collected: frozenset[str] = frozenset()
    version: Raw | None = None
    board: Raw | None = None
    board_refused: str | None = None
    room: str | None = None
    now: datetime

    def why_not_ready(self, datastore: str) -> str:
        """Return why a Datastore can't be used yet; '' when it can."""
        found = self.datastores.get(datastore)
        if found is None:
            return f"Datastore {datastore} is not there"
        if is_true(found, "Ready") and found["status"].get("claimName"):
            return ""
        why = condition(found, "Ready").get("message")
        return f"Datastore {datastore} is not Ready" + (f": {why}" if why else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in the order of Reconciler._act(). again: decide again at once, else after after_s or at an event.

    make_roles: roles whose Jobs are to be made, suspended or not, with the claims of the Datastores. create: other
    objects. ranks: pods whose rank is to be written, which lets them start. look: find out whether there is room.
    collect: roles whose evidence is to be kept. start: Jobs to run (True) or to suspend (False). save: make the
    ModelVersion. board: the Job of a TensorBoard to make.
    """

    create: tuple[JSON, ...] = ()
    make_roles: tuple[RoleName, ...] = ()
    claims: Mapping[str, str] = field(default_factory=dict)
    suspended: bool = False
    ranks: tuple[tuple[Raw, int], ...] = ()
    look: bool = False
    collect: frozenset[str] = frozenset()
    start: tuple[tuple[Raw, bool], ...] = ()
    save: bool = False
    board: JSON | None = None
    delete: tuple[Raw, ...] = ()
    status: JSON = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    again: bool = False
    after_s: float | None = None


@dataclass(slots=True)
class Status:
    """The new status, changed step by step from the old one."""

    seen: Observed
    fields: JSON = field(init=False)

    def __post_init__(self) -> None:
        before = self.seen.body.get("status") or {}
        generation = self.seen.body["metadata"].get("generation", 1)
        self.fields = {"phase": "Pending", "restarts": 0, **before, "observedGeneration": generation}

    def condition(self, kind: str) -> Raw:
        """Return a condition as it is now; {} without one."""
        return condition({"status": self.fields}, kind)

    def holds(self, kind: str) -> bool:
        return is_true({"status": self.fields}, kind)

    def set(self, kind: str, holds: bool, reason: str, message: str = "", since: datetime | None = None) -> None:
        """Set a condition; its time becomes now when it changes between true and false, or when `since` is given."""
        before = self.condition(kind)
        status = "True" if holds else "False"
        same = before.get("status") == status
        made = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:4096],
            "lastTransitionTime": before["lastTransitionTime"] if same and not since else timestamp(self.seen.now),
            "observedGeneration": self.fields["observedGeneration"],
        }
        conditions = [made if each["type"] == kind else each for each in self.fields.get("conditions") or []]
        self.fields["conditions"] = conditions if before else [*conditions, made]

    def phase(self, phase: str, message: str) -> None:
        """Set the phase and the message, the summary for people."""
        self.fields |= {"phase": phase, "message": message[:4096]}

    @property
    def restarts(self) -> int:
        """How many restarts there were, of single replicas or of all together, as RunPolicy.restart says."""
        return int(self.fields.get("restarts") or 0)

    def plan(self, after_s: float | None = None) -> Plan:
        """Return a plan that only writes this status."""
        return Plan(status=self.fields, after_s=after_s)
