"""Decides what to do next about a Datastore, by its spec and what is observed. Pure and level-triggered.

decide() has no memory: the same observation gives the same answer, whatever anybody or a crash changed in between. The
loop in reconciler.py observes, calls decide(), acts, and repeats this until nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from datastore.api.datastore import Claim, location_of
from datastore.api.names import FINALIZER, NUDGED, volume_name
from datastore.api.objects import is_owned
from datastore.api.source import Source
from datastore.api.status import Capabilities
from datastore.backends.base import Measured, Owner
from datastore.controller.datastores import desired
from datastore.controller.datastores.effective import EffectiveSpec
from datastore.controller.runtime.comparing import holds
from datastore.controller.runtime.conditions import Event, Finding, merged, transitions
from datastore.controller.runtime.mistakes import ABOUT_CREDENTIALS, PAST_CREDENTIALS, message_of, reason_of
from datastore.errors import DatastoreError, DeadlineExceeded, ServerStarting, Throttled
from datastore.units import format_quantity, format_size, parse_quantity

Raw = Mapping[str, Any]
JSON = dict[str, Any]


LATE_LOOKS = 3
YOUNG_S = 5.0
NUDGE = timedelta(seconds=1)
RESYNC = timedelta(seconds=15)
"""The period in which Kubernetes checks every claim and volume by itself."""
SAMPLE_S = 3600.0
RESIZE_PENDING = "FileSystemResizePending"
RESIZE = timedelta(seconds=20)
"""How long a kubelet has to take note of a grown volume, before the controller completes the claim's status itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The result of a backend check. error: None when it works; source: what a mount shows, without credentials."""

    error: DatastoreError | None = None
    source: Source | None = None
    owner: Owner = Owner.NOBODY
    capabilities: Capabilities | None = None
    measured: Measured | None = None
    measured_at: str = ""


def believed(before: Facts | None, found: Facts, failures: int, *, exported: bool) -> Facts:
    """Return the facts to use after a check: `found`, or `before` if an NFS server is late, busy or starting.

    `before` stays only if it has no error and fewer than LATE_LOOKS checks in a row failed. failures: those before this
    check.
    """
    worked = before is not None and before.error is None
    late = exported and isinstance(found.error, DeadlineExceeded | ServerStarting | Throttled)
    return before if before is not None and worked and late and failures + 1 < LATE_LOOKS else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that decide() knows. claim, volume: what exists under the names of the Datastore's claim and volume, or None.

    effective: None when the spec can't be acted on; facts.error then says why. now: RFC 3339.
    """

    datastore: Raw
    effective: EffectiveSpec | None
    facts: Facts | None
    claim: Raw | None
    volume: Raw | None
    storage_class: Raw | None = None
    """The claim's StorageClass; None when the claim names none or no class has this name."""
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in the order of the fields. again: observe and decide again at once, as the rest depends on this."""

    finalizer: bool | None = None
    """True: put the controller's finalizer on the Datastore."""
    look: bool = False
    """Check the backend first, then decide again."""
    unless_claimed: JSON | None = None
    """If the API server turns out to have this claim, do nothing more of this plan, and decide again."""
    claim_status: JSON = field(default_factory=dict)
    """What to merge into the status of the claim."""
    apply: tuple[JSON, ...] = ()
    replace: JSON | None = None
    """A PersistentVolume to delete and recreate under the same name."""
    status: JSON = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    again: bool = False
    soon: bool = False
    """Kubernetes is working on something: its watch event, or else a short timer, brings the next step."""
    ready: bool = False


def decide(observed: Observed) -> Plan:
    """Decide what to do about a Datastore that is not being deleted; deletion.py has the other case."""
    if observed.effective is None:
        return _told(observed, _unprovisioned(observed))
    if FINALIZER not in (observed.datastore["metadata"].get("finalizers") or []):
        # The finalizer comes before anything, in the bucket too, that would have to be removed again.
        return Plan(finalizer=True, again=True)
    before: Raw = observed.datastore.get("status") or {}
    noted = {"provisionedBy": observed.effective.provisioned_by} if observed.effective.provisioned_by else {}
    if observed.effective.by_default:
        noted["storageClassName"] = observed.effective.class_name
    if not noted.items() <= before.items():
        # The status names these before anything is made: a later default class, or another place of it, does not count.
        return Plan(status={**before, **noted}, again=True)
    if observed.facts is None:
        return Plan(look=True, again=True)
    nowhere = desired.has_own_export(observed.effective) and observed.volume is None
    if observed.facts.error is not None and (observed.claim is None or nowhere):
        return _told(observed, _unprovisioned(observed))
    return _provision(observed, observed.effective)


def claim_refused(observed: Observed, why: Exception) -> Plan:
    """Plan the status of a Datastore whose new claim the API server does not accept, such as because of a quota."""
    name = observed.datastore["metadata"]["name"]
    text = f"the cluster does not accept PersistentVolumeClaim {name}, which is tried again: {message_of(why)}"
    return _told(observed, Finding(type="Provisioned", status="False", reason="ClaimRefused", message=text))


def _provision(observed: Observed, effective: EffectiveSpec) -> Plan:
    claim = desired.claim(effective)
    if claim is None:
        return _told(observed, _existing_claim(observed, effective))
    here = observed.claim
    if here is None:
        return _new_claim(observed, claim, desired.volume(effective, "", _source(observed)))
    plain = is_owned(observed.datastore, here["metadata"]["uid"])
    if not plain and not desired.is_ours(here, effective.uid):
        text = f"PersistentVolumeClaim {effective.name} exists and was not made for this Datastore; rename one of them"
        return _told(observed, Finding(type="Provisioned", status="False", reason="NameTaken", message=text))
    if "deletionTimestamp" in here["metadata"]:
        text = f"PersistentVolumeClaim {effective.name} was deleted by hand; a new one follows when no pod uses it: "
        text += f"`kubectl describe pvc {effective.name}` names those that do (Used By)"
        return _told(observed, Finding(type="Provisioned", status="False", reason="ClaimDeleted", message=text))
    larger = _larger_claim(observed, here, effective)
    applies = [] if plain or (_claim_holds(here, claim) and not larger) else [_claim_patch(here, claim, larger)]
    there = observed.volume
    # Kubernetes writes the claim's uid when it binds; we write it to a new volume, or where a uid stands already.
    unbound = there is not None and "uid" not in there["spec"].get("claimRef", {})
    claim_uid = "" if unbound else here["metadata"]["uid"]
    volume = desired.volume(effective, claim_uid, _source(observed), here if plain else None)
    if volume is not None:
        if there is not None and "deletionTimestamp" in there["metadata"]:
            return Plan(replace=volume, again=True)
        if there is not None:
            volume = desired.with_source_of(there, volume)
        if there is None or not desired.volume_holds(there, volume):
            applies.append(volume)
    if applies:
        # The kubelet compares volume and claim all the time: the claim's status tells of the growth beforehand.
        larger_by_now = {} if there is None or volume is None else _resizing(here, volume, observed.now)
        return Plan(claim_status=larger_by_now, apply=tuple(applies), again=True)
    plan = _binding(observed, claim, here, _bound(observed, here, effective))
    growth = _growth(here, there, observed.now)
    if growth is None:
        return plan
    return replace(plan, claim_status=growth.claim_status, soon=growth.soon, again=growth.again)


def _source(observed: Observed) -> Source | None:
    return observed.facts.source if observed.facts is not None else None


def _larger_claim(observed: Observed, claim: Raw, effective: EffectiveSpec) -> str:
    """Return what storage another driver's claim has to request to reach spec.capacity; '' if it does or can't grow."""
    wrapped, capacity = effective.spec.claim, effective.spec.capacity
    if not wrapped or not capacity or capacity <= _storage(claim["spec"]["resources"]["requests"]):
        return ""
    allowed = observed.storage_class is not None and observed.storage_class.get("allowVolumeExpansion") is True
    return format_quantity(capacity) if allowed else ""


def _growth(claim: Raw, volume: Raw | None, now: str) -> Plan | None:
    """Plan the claim's status for a volume of ours whose size differs; None if nothing has to change.

    The volume's capacity is what its backend has by now. The kubelet of a node with a pod that uses the claim sees the
    difference, tells the node's driver and updates the claim's status; without such a pod the controller does, after
    RESIZE.
    Source: pkg/volume/util/operationexecutor (node expansion), KEP-284, and KEP-1790 for the amounts allocated.
    """
    status = claim.get("status") or {}
    if volume is None or status.get("phase") != "Bound" or "storage" not in status.get("capacity", {}):
        return None
    size = {"storage": volume["spec"]["capacity"]["storage"]}
    have, wanted = _storage(status["capacity"]), _storage(size)
    if have == wanted:
        return None
    resized: JSON = {"capacity": size, "allocatedResources": size, "allocatedResourceStatuses": None, "conditions": []}
    if have > wanted:
        # The capacity was set later; until then the volume had UNLIMITED.
        return Plan(claim_status=resized, again=True)
    pending = next((each for each in status.get("conditions") or [] if each["type"] == RESIZE_PENDING), None)
    if pending is None:
        return Plan(claim_status=_resizing(claim, volume, now), soon=True)
    if _age(pending["lastTransitionTime"], now) < RESIZE:
        return Plan(soon=True)
    return Plan(claim_status=resized, again=True)


def _resizing(claim: Raw, volume: Raw, now: str) -> JSON:
    """Return the status of a bound claim whose volume is larger, before its node knows it; {} if it is not larger."""
    size = volume["spec"]["capacity"]["storage"]
    have = (claim.get("status") or {}).get("capacity", {}).get("storage")
    if have is None or parse_quantity(have) >= parse_quantity(size):
        return {}
    text = "waiting for the node of a pod that uses it"
    pending = {"type": RESIZE_PENDING, "status": "True", "lastTransitionTime": now, "message": text}
    return {
        "allocatedResources": {"storage": size},
        "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        "conditions": [pending],
    }


def _storage(amounts: Raw) -> int:
    return parse_quantity(amounts.get("storage", "0"))


def _binding(observed: Observed, wanted: JSON, here: Raw, found: Finding) -> Plan:
    """Plan for when all objects are as they should be, and only Kubernetes' work on them may be missing."""
    now = observed.now
    if found.reason == "VolumeReplacing":
        nudge = (_nudge(here, wanted, now),) if _may_nudge(here, now) else ()
        return replace(_told(observed, found), apply=nudge, soon=True)
    if found.reason == "WaitingForBinding":
        return _half_bound(here, observed.volume, wanted, now) or _told_late(observed, here, found)
    return _told(observed, found)


def _told_late(observed: Observed, claim: Raw, found: Finding) -> Plan:
    """Plan the status, but not yet for a claim younger than YOUNG_S, which may well be bound in a moment."""
    young = _age(claim["metadata"]["creationTimestamp"], observed.now) < timedelta(seconds=YOUNG_S)
    return Plan(soon=True) if young else _told(observed, found)


def _new_claim(observed: Observed, claim: JSON, volume: JSON | None) -> Plan:
    """Plan the volume, and the claim once Kubernetes has seen the volume: else it would be bound only after 15 s."""
    there = observed.volume
    if volume is not None and there is None:
        return Plan(apply=(volume,), unless_claimed=claim, again=True)
    if there is not None and there.get("status", {}).get("phase", "Pending") == "Pending":
        return Plan(soon=True)
    return Plan(apply=(claim,), unless_claimed=claim, again=True)


def _half_bound(here: Raw, volume: Raw | None, claim: JSON, now: str) -> Plan | None:
    """Plan a change of the claim that makes Kubernetes continue when it has bound only the volume so far; or None.

    Two workers of Kubernetes race for the volume's status: when the one that binds loses, it tries again after RESYNC,
    or when the claim changes (kubernetes, pkg/controller/volume/persistentvolume). So change the claim, at most once in
    NUDGE.
    """
    created = here["metadata"]["creationTimestamp"]
    if not _holds_on(volume, here) or _age(created, now) >= RESYNC or not _may_nudge(here, now, created):
        return None
    return Plan(apply=(_nudge(here, claim, now),), soon=True)


def _remade(claim: Raw, volume: Raw | None, now: str) -> bool:
    """Whether a claim is Lost only until Kubernetes checks it again, because its volume was just recreated."""
    if volume is None or "creationTimestamp" not in volume["metadata"]:
        return False
    return _holds_on(volume, claim) and _age(volume["metadata"]["creationTimestamp"], now) < RESYNC


def _holds_on(volume: Raw | None, claim: Raw) -> bool:
    """Whether the volume is bound to this claim, whatever the claim's own status says."""
    return volume is not None and volume["spec"].get("claimRef", {}).get("uid") == claim["metadata"]["uid"]


def _may_nudge(claim: Raw, now: str, otherwise: str = "") -> bool:
    """Whether the NUDGED annotation may be written again: NUDGE after its time (without one: after `otherwise`)."""
    nudged = (claim["metadata"].get("annotations") or {}).get(NUDGED, otherwise)
    return not nudged or _age(nudged, now) >= NUDGE


def _nudge(here: Raw, wanted: JSON, now: str) -> JSON:
    patch = _claim_patch(here, wanted)
    metadata = patch["metadata"]
    return {**patch, "metadata": {**metadata, "annotations": {**metadata["annotations"], NUDGED: now}}}


def _claim_holds(here: Raw, wanted: Raw) -> bool:
    """Whether the claim's metadata is as wanted. A claim's spec is immutable, but for a request that grows."""
    return holds(here["metadata"], wanted["metadata"])


def _claim_patch(here: Raw, wanted: JSON, larger: str = "") -> JSON:
    """Return what can be applied to an existing claim: the wanted metadata, its present spec or a larger request."""
    kept = {name: here["spec"][name] for name in wanted["spec"] if name in here["spec"]}
    if larger:
        kept["resources"] = {"requests": {"storage": larger}}
    return {**wanted, "spec": kept}


def _existing_claim(observed: Observed, effective: EffectiveSpec) -> Finding:
    assert effective.spec.claim is not None, "only its Datastores have no claim of their own"
    name = effective.spec.claim.name
    if observed.claim is None:
        text = f"spec.claim.name: there is no PersistentVolumeClaim {name} in namespace {effective.namespace}"
        return Finding(type="Provisioned", status="False", reason="ClaimNotFound", message=text)
    return _bound(observed, observed.claim, effective)


def _bound(observed: Observed, claim: Raw, effective: EffectiveSpec) -> Finding:
    phase = claim.get("status", {}).get("phase", "Pending")
    name = claim["metadata"]["name"]
    if phase == "Bound":
        return Finding(type="Provisioned", status="True", reason="Bound", message=f"pods mount the claim {name}")
    if phase == "Lost" and not effective.spec.claim and _remade(claim, observed.volume, observed.now):
        text = f"the volume of PersistentVolumeClaim {name} was recreated and is being bound to it; no data is touched"
        return Finding(type="Provisioned", status="False", reason="VolumeReplacing", message=text)
    if phase == "Lost":
        text = f"PersistentVolumeClaim {name} has lost its volume"
        return Finding(type="Provisioned", status="False", reason="ClaimLost", message=text)
    if effective.spec.claim and not claim["spec"].get("volumeName"):
        return _by_class(claim, effective.spec.claim, observed.storage_class)
    text = f"waiting for the cluster to bind PersistentVolumeClaim {name}"
    return Finding(type="Provisioned", status="False", reason="WaitingForBinding", message=text)


def _by_class(claim: Raw, asked: Claim, storage_class: Raw | None) -> Finding:
    """Say what another driver's claim waits for. With the class '' it waits for a volume that someone makes by hand."""
    name, named = claim["metadata"]["name"], claim["spec"].get("storageClassName")
    if storage_class is not None and storage_class.get("volumeBindingMode") == "WaitForFirstConsumer":
        # The volume comes only with the first pod, so waiting for it before that would never end.
        text = f"the claim {name} gets its volume from StorageClass {named} with the first pod"
        return Finding(type="Provisioned", status="True", reason="WaitingForFirstPod", message=text)
    if storage_class is None and named != "":
        first = (
            f"there is no StorageClass {named}: make it"
            if named
            else "no StorageClass is named and the cluster has no default: make one the default"
        )
        again = "the claim" if asked.name else "the Datastore and its claim"
        text = f"{first}, or {again} anew with one that `kubectl get storageclass` shows (PersistentVolumeClaim {name})"
        return Finding(type="Provisioned", status="False", reason="StorageClassNotFound", message=text)
    driver = f" from StorageClass {named}" if named else ""
    text = f"PersistentVolumeClaim {name} waits for its volume{driver}: `kubectl describe pvc {name}` says why"
    return Finding(type="Provisioned", status="False", reason="WaitingForBinding", message=text)


def _unprovisioned(observed: Observed) -> Finding:
    if observed.claim is not None:
        return Finding(type="Provisioned", status="True", reason="Bound", message="made before; nothing was changed")
    return Finding(type="Provisioned", status="False", reason="WaitingForBackend", message="nothing was made yet")


def _told(observed: Observed, provisioned: Finding) -> Plan:
    """Plan the Datastore's status, and an Event for each condition that changed."""
    before: Raw = observed.datastore.get("status") or {}
    was: Sequence[Raw] = before.get("conditions") or []
    findings = _findings(observed, provisioned, was)
    generation = observed.datastore["metadata"].get("generation", 1)
    ready = findings[0].status == "True"
    status: JSON = {
        "observedGeneration": generation,
        "phase": "Ready" if ready else ("Pending" if findings[0].reason in _WAITING else "Failed"),
        "conditions": merged(was, findings, generation, observed.now),
        **_described(observed, before),
    }
    return Plan(status=status, events=tuple(transitions(was, findings)), ready=ready)


_WAITING = frozenset(
    {
        "Checking",
        "ClaimDeleted",
        "ClaimRefused",
        "ServerStarting",
        "VolumeReplacing",
        "WaitingForBackend",
        "WaitingForBinding",
    }
)


def _findings(observed: Observed, provisioned: Finding, was: Sequence[Raw]) -> list[Finding]:
    error = observed.facts.error if observed.facts else None
    credentials = _credentials(observed, was)
    if error is not None:
        reason, message = reason_of(error), message_of(error)
        # A Datastore that worked before and does not now is degraded; one that never worked is just not ready.
        worked = any(each.get("type") == "Provisioned" and each.get("status") == "True" for each in was)
        ready = Finding(type="Ready", status="False", reason=reason, message=message)
        if worked:
            degraded = Finding(type="Degraded", status="True", reason=reason, message=message)
        else:
            degraded = Finding(type="Degraded", status="False", reason="NotProvisioned")
    elif provisioned.status != "True":
        ready = Finding(type="Ready", status="False", reason=provisioned.reason, message=provisioned.message)
        degraded = Finding(type="Degraded", status="False", reason="AsExpected")
    else:
        ready = Finding(type="Ready", status="True", reason="Ready", message=provisioned.message)
        degraded = Finding(type="Degraded", status="False", reason="AsExpected")
    return [ready, provisioned, credentials, degraded]


def _credentials(observed: Observed, was: Sequence[Raw]) -> Finding:
    facts, effective = observed.facts, observed.effective
    if effective is not None and effective.secret is None and not effective.kind.credentials:
        return Finding(type="CredentialsValid", status="True", reason="NotNeeded")
    if facts is None or (
        facts.error is not None and reason_of(facts.error) not in ABOUT_CREDENTIALS | PAST_CREDENTIALS
    ):
        before = next((each for each in was if each.get("type") == "CredentialsValid"), None)
        if before is not None and before.get("status") == "True":
            return Finding(type="CredentialsValid", status="True", reason="Accepted")
        return Finding(type="CredentialsValid", status="Unknown", reason="NotChecked")
    if facts.error is not None and reason_of(facts.error) in ABOUT_CREDENTIALS:
        reason, message = reason_of(facts.error), message_of(facts.error)
        return Finding(type="CredentialsValid", status="False", reason=reason, message=message)
    return Finding(type="CredentialsValid", status="True", reason="Accepted")


_JUDGED = ("observedGeneration", "phase", "conditions")
"""The fields of a status that are told anew each time."""


def _described(observed: Observed, before: Raw) -> JSON:
    """Return the status without phase, generation and conditions; what was not found out this time stays as it was."""
    effective, facts = observed.effective, observed.facts
    if effective is None:
        return {name: value for name, value in before.items() if name not in _JUDGED}
    theirs = _volume_of_another_driver(observed)
    # What was found out about another driver's volume does not hold for a volume that replaces it.
    names = ("capabilities", "usage") if not theirs or before.get("volumeName") in (None, theirs) else ()
    kept: JSON = {name: before[name] for name in (*names, "storageClassName", "provisionedBy") if name in before}
    existing = effective.spec.claim.name if effective.spec.claim else None
    if facts is not None and facts.error is None:
        owner = facts.owner
        kept |= {"owned": owner is Owner.THIS} if effective.kind.removable else {}
    else:
        # An error says nothing about the owner, so the one found last still counts.
        owner = Owner.THIS if before.get("owned") else Owner.NOBODY
        kept |= {"owned": before["owned"]} if "owned" in before else {}
    described: JSON = {
        **kept,
        "backend": effective.spec.backend,
        "location": _where(observed, effective),
        "mount": desired.mount_settings(effective),
        "onDeletion": on_deletion(effective, owner, _where(observed, effective)),
    }
    if observed.claim is not None or existing:
        described["claimName"] = existing or effective.name
    if observed.volume is not None or theirs:
        described["volumeName"] = theirs or volume_name(effective.uid)
    if facts and facts.capabilities is not None:
        # Read-only data is not probed and gives no capabilities; those found out before still hold.
        described |= {"capabilities": found} if (found := _shown(facts.capabilities)) else {}
    if facts and facts.measured is not None:
        described["usage"] = _usage(facts.measured, facts.measured_at, kept.get("usage") or {})
    return described


def _where(observed: Observed, effective: EffectiveSpec) -> str:
    """Return the data's location, for people; of an export made for the Datastore the one found, now or last time."""
    source = _source(observed)
    if not desired.has_own_export(effective):
        return location_of(effective.spec)
    before: Raw = observed.datastore.get("status") or {}
    return str(source) if source is not None else str(before.get("location") or location_of(effective.spec))


def _shown(capabilities: Capabilities) -> JSON:
    return capabilities.model_dump(by_alias=True, exclude_none=True)


def _volume_of_another_driver(observed: Observed) -> str:
    """The name of another driver's volume that the Datastore's claim is bound to, or ''."""
    if observed.effective is None or observed.effective.spec.claim is None or observed.claim is None:
        return ""
    return str(observed.claim["spec"].get("volumeName") or "")


def _usage(measured: Measured, at: str, before: Raw) -> JSON:
    """Return status.usage. An equal count keeps the former time for SAMPLE_S: each write of a status wakes watchers."""
    usage = {
        "bytes": measured.size_bytes,
        "objects": measured.objects,
        "size": format_size(measured.size_bytes),
        "sampledAt": at,
    }
    same = {**before, "sampledAt": at} == usage
    if same and _age(before["sampledAt"], at) < timedelta(seconds=SAMPLE_S):
        return {**before}
    return usage


def _age(since: str, now: str) -> timedelta:
    return datetime.fromisoformat(now) - datetime.fromisoformat(since)


def on_deletion(effective: EffectiveSpec, owner: Owner, where: str) -> str:
    """Say what a deletion of the Datastore would do with its data. where: the data's location, for people."""
    spec = effective.spec
    if spec.claim:
        if spec.claim.name:
            return f"PersistentVolumeClaim {spec.claim.name} stays: it was there before"
        if spec.reclaim_policy == "Delete":
            return f"PersistentVolumeClaim {effective.name} is removed, and its data as its StorageClass says"
        return f"PersistentVolumeClaim {effective.name} stays ({spec.reclaim_policy})"
    if claim := effective.kind.claim(effective.parameters, effective.uid):
        fate = {"Delete": "is removed, and its data as its StorageClass says", "Archive": "stays, marked as archived"}
        becomes = fate.get(spec.reclaim_policy, "stays")
        return f"PersistentVolumeClaim {'/'.join(claim)} {becomes}; nothing serves it any more"
    if spec.reclaim_policy == "Retain" and desired.has_own_export(effective):
        return f"{where} stays, and is not exported any more"
    if spec.reclaim_policy == "Retain" or not effective.kind.removable:
        return f"{where} stays as it is"
    if owner is not Owner.THIS:
        return f"{where} stays as it is: it was made for {owner.value}"
    verb = "is removed" if spec.reclaim_policy == "Delete" else "is renamed"
    return f"all of {where} {verb} ({spec.reclaim_policy})"
