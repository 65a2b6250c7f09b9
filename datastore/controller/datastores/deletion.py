"""Decides the steps of a deletion: claim, volume, data, finalizer, in this order. Pure and level-triggered.

Kubernetes keeps the claim while a pod uses it: so the data waits for the pods without a race. The deletion also waits
for pods with inline volumes that name the Datastore: nodes mount no such volume for a new pod once the Datastore is
being deleted (csi/volumes.py), so a list of pods made after that is complete. The data goes only if the backend's
ownership marker names this Datastore. A failing removal is retried until it works or the user removes the finalizer. It
is given up, with an Event, if the backend was never reached, or after some time in a namespace that is being deleted.
Without its StorageClass, what was made for it can't be found; the deletion then waits as for a failing removal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datastore.api.names import FINALIZER, MANAGED_BY, MANAGER, UID
from datastore.api.objects import is_owned
from datastore.backends.base import Policy
from datastore.controller.datastores import desired
from datastore.controller.datastores.effective import EffectiveSpec
from datastore.controller.runtime.conditions import Event, Finding, merged, transitions
from datastore.controller.runtime.mistakes import message_of, reason_of
from datastore.errors import DatastoreError

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionState:
    """All that is known of a Datastore that is being deleted.

    pods: names of the pods that use the claim or name the Datastore inline, None before they are listed; progress: what
    an unfinished release has done; released: the backend's message when all was removed or left; failure: the error of
    the last release, or why there is no effective spec; abandoned: there is a failure for long enough in a namespace
    that is being deleted. now: RFC 3339.
    """

    datastore: Raw
    effective: EffectiveSpec | None
    claim: Raw | None
    volume: Raw | None
    pods: tuple[str, ...] | None = None
    progress: str = ""
    released: str | None = None
    failure: DatastoreError | None = None
    abandoned: bool = False
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """What to do next. list_pods: list them and plan again; finish: remove the finalizer; again: plan again at once."""

    delete: tuple[Raw, ...] = ()
    list_pods: bool = False
    release: Policy | None = None
    status: dict[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    finish: bool = False
    again: bool = False


def plan_deletion(going: DeletionState) -> DeletionPlan:
    """Plan the next step of a deletion."""
    if FINALIZER not in (going.datastore["metadata"].get("finalizers") or []):
        return DeletionPlan()
    if going.claim is not None and _goes(going, going.claim):
        return _unused(going, going.claim)
    if _may_be_inline(going):
        if going.pods is None:
            return DeletionPlan(list_pods=True)
        if going.pods:
            return _waiting(going, f"in use by: {_named(going.pods)}", pods=True)
    if going.volume is None:
        return _data(going)
    if "deletionTimestamp" not in going.volume["metadata"]:
        # The volume goes after the claim: the other way round, the claim would be Lost under a running pod.
        return DeletionPlan(delete=(going.volume,), again=True)
    return _waiting(going, f"waiting for the volume {going.volume['metadata']['name']} to go")


def _unused(going: DeletionState, claim: Raw) -> DeletionPlan:
    """Plan the deletion of the claim, or the wait for it."""
    if "deletionTimestamp" not in claim["metadata"]:
        return DeletionPlan(delete=(claim,), again=True)
    if going.pods:
        return _waiting(going, f"in use by: {_named(going.pods)}", pods=True)
    return _waiting(going, f"waiting for pods that use the claim {claim['metadata']['name']}", pods=True)


def _named(pods: Sequence[str]) -> str:
    return ", ".join(pods[:5]) + (f" and {len(pods) - 5} more" if len(pods) > 5 else "")


def _may_be_inline(going: DeletionState) -> bool:
    """Whether pods with inline volumes have to be waited for: if there is a CSI volume, or data to remove or undo."""
    if going.volume is not None:
        return "csi" in going.volume["spec"]
    return going.released is None and _releases(going.effective)


def _goes(going: DeletionState, claim: Raw) -> bool:
    """Whether the claim is deleted too: a plain claim that the Datastore was made for, or one of ours that it owns."""
    uid = going.datastore["metadata"]["uid"]
    made_for = is_owned(going.datastore, claim["metadata"]["uid"])
    return made_for or (desired.is_ours(claim, uid) and is_owned(claim, uid))


def _data(going: DeletionState) -> DeletionPlan:
    if going.released is not None:
        return DeletionPlan(events=(Event(reason="Released", message=going.released),), finish=True)
    if going.effective is None and not _needs_class(going.datastore):
        text = "the spec can't be acted on, so whatever data there is stays as it is"
        return DeletionPlan(events=(Event(reason="DataLeft", message=text, warning=True),), finish=True)
    policy = Policy(going.effective.spec.reclaim_policy) if going.effective is not None else None
    if going.effective is not None and not _releases(going.effective):
        return DeletionPlan(events=(Event(reason="Released", message="the data stays as it is"),), finish=True)
    if going.failure is None:
        status = _status(going, "Releasing", going.progress)[0] if going.progress else {}
        return DeletionPlan(release=policy, again=True, status=status)
    if going.abandoned or not _worked(going.datastore):
        text = f"the data was left behind: {message_of(going.failure)}"
        return DeletionPlan(events=(Event(reason="DataLeft", message=text, warning=True),), finish=True)
    name = going.datastore["metadata"]["name"]
    way_out = f"`kubectl datastore remove-finalizer {name}` gives the Datastore up and leaves the data"
    text = f"{message_of(going.failure)}; {way_out}"
    status, events = _status(going, reason_of(going.failure), text)
    return DeletionPlan(status=status, events=events, release=policy)


def _releases(effective: EffectiveSpec | None) -> bool:
    """Whether something of the storage is to be removed or undone."""
    if effective is None or not effective.kind.removable:
        return False
    return Policy(effective.spec.reclaim_policy) is not Policy.RETAIN or desired.has_own_export(effective)


def _needs_class(datastore: Raw) -> bool:
    """As _releases(), without an effective spec: whether only the StorageClass says what to remove or undo."""
    status: Raw = datastore.get("status") or {}
    removes = datastore["spec"].get("reclaimPolicy", Policy.RETAIN.value) != Policy.RETAIN.value
    touched = status.get("backend") == "nfs" or (removes and status.get("owned") is not False)
    return bool(status.get("provisionedBy")) and touched


def _worked(datastore: Raw) -> bool:
    """Whether the backend was ever reached; if not, nothing can have been made for the Datastore."""
    status: Raw = datastore.get("status") or {}
    return "capabilities" in status or "volumeName" in status


def _waiting(going: DeletionState, text: str, *, pods: bool = False) -> DeletionPlan:
    status, events = _status(going, "Deleting", text)
    return DeletionPlan(status=status, events=events, list_pods=pods)


def _status(going: DeletionState, reason: str, text: str) -> tuple[dict[str, Any], tuple[Event, ...]]:
    before: Raw = going.datastore.get("status") or {}
    was: Sequence[Raw] = before.get("conditions") or []
    ready = Finding(type="Ready", status="False", reason=reason, message=text)
    others = [
        Finding(
            type=each["type"], status=each["status"], reason=each.get("reason", ""), message=each.get("message", "")
        )
        for each in was
        if each.get("type") != "Ready"
    ]
    generation = going.datastore["metadata"].get("generation", 1)
    findings = [ready, *others]
    conditions = merged(was, findings, generation, going.now)
    status = {**before, "phase": "Deleting", "observedGeneration": generation, "conditions": conditions}
    return status, tuple(transitions(was, findings))


def orphans(volume: Raw, datastore: Raw | None) -> bool:
    """Whether a volume of ours has outlived its Datastore, whose finalizer was removed by hand."""
    labels: Raw = volume["metadata"].get("labels") or {}
    if labels.get(MANAGED_BY) != MANAGER or "deletionTimestamp" in volume["metadata"]:
        return False
    return datastore is None or datastore["metadata"]["uid"] != labels.get(UID)
