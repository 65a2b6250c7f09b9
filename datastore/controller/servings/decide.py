"""Decides from a Serving's spec and the observed objects what to do next. Pure and level-triggered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datastore.api.model import Serving, ServingSpec
from datastore.api.names import DEFAULT_STORE, MODEL_VERSION
from datastore.api.objects import condition, is_owned, is_true
from datastore.controller.runtime.comparing import holds
from datastore.controller.runtime.conditions import Event, Finding, merged, transitions
from datastore.controller.runtime.mistakes import Mistake, message_of, parsed
from datastore.controller.runtime.ownimage import Image
from datastore.controller.servings import desired
from datastore.controller.servings.desired import SERVE, VERIFY, Target
from datastore.models.served import DAMAGED

Raw = Mapping[str, Any]
JSON = dict[str, Any]
_STUCK = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons of waiting containers that need a person. Source: kubernetes, pkg/kubelet/images, pkg/kubelet/container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that decide() knows. None: no such object. image: the init container's, for verifying; now: RFC 3339."""

    serving: Raw
    model: Raw | None
    store: Raw | None
    """The Datastore that holds the Model's versions."""
    deployment: Raw | None
    service: Raw | None
    autoscaler: Raw | None
    pods: Sequence[Raw]
    image: Image
    now: str
    refused: str = ""
    """What to tell of the API server's refusal of what the last plan would have made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in this order. No object is changed while it is unknown what is to be served, or a name is taken."""

    apply: tuple[JSON, ...] = ()
    delete: tuple[Raw, ...] = ()
    status: JSON = field(default_factory=dict)
    events: tuple[Event, ...] = ()


class Pods(NamedTuple):
    """The pods' state. listed: for the status; answering: how many are Ready, whatever their version and spec are."""

    listed: list[JSON]
    answering: int
    trouble: Finding | None


def decide(observed: Observed) -> Plan:
    """Return what to do about a Serving. On its deletion, Kubernetes deletes its objects too (owner references)."""
    pods = _looked_at(observed.pods)
    try:
        spec = _spec(observed.serving)
        target = _target(observed, spec)
    except Mistake as mistake:
        finding = Finding(type="Ready", status="False", reason=mistake.reason, message=message_of(mistake))
        return _told(observed, None, None, pods, finding)
    wanted = [
        desired.deployment(observed.serving, spec, target, observed.image, observed.deployment),
        desired.service(observed.serving, spec),
    ]
    scaling = desired.autoscaler(observed.serving, spec)
    there: list[Raw | None] = [observed.deployment, observed.service]
    if scaling is not None:
        wanted.append(scaling)
        there.append(observed.autoscaler)
    for present, each in zip(there, wanted, strict=True):
        if present is not None and not is_owned(present, observed.serving["metadata"]["uid"]):
            text = f"{each['kind']} {each['metadata']['name']} exists and was not made for this Serving; rename one"
            return _told(
                observed, spec, target, pods, Finding(type="Ready", status="False", reason="NameTaken", message=text)
            )
    if observed.refused:
        finding = Finding(type="Ready", status="False", reason="Refused", message=observed.refused)
        return _told(observed, spec, target, pods, finding)
    plan = _told(observed, spec, target, pods, None)
    obsolete = observed.autoscaler if scaling is None else None
    return Plan(
        apply=tuple(each for present, each in zip(there, wanted, strict=True) if not _as_wanted(present, each)),
        delete=(obsolete,) if obsolete is not None and is_owned(obsolete, observed.serving["metadata"]["uid"]) else (),
        status=plan.status,
        events=plan.events,
    )


def _spec(serving: Raw) -> ServingSpec:
    """Return the validated spec. Errors: Mistake, also for a template that asks for more rights."""
    spec = parsed(serving, Serving).spec
    template = spec.template
    if template is not None:
        refused = {
            "serviceAccountName": template.service_account_name is not None,
            "hostNetwork": template.host_network,
            **{f"securityContext.{name}": True for name in template.more_rights},
            "volumes with hostPath": any("hostPath" in each for each in template.volumes),
        }
        for name, given in refused.items():
            if given:
                text = f"spec.template: {name} is refused, for it gives the pods more rights than a Serving needs"
                raise Mistake("TemplateRefused", text, permanent=True)
    if spec.autoscaling is not None and (spec.resources is None or "cpu" not in spec.resources.requests):
        text = "spec.autoscaling needs spec.resources.requests.cpu, of which it counts a share"
        raise Mistake("InvalidSpec", text, permanent=True)
    return spec


def _target(observed: Observed, spec: ServingSpec) -> Target:
    """Return the version to serve, with its claim. Errors: Mistake while they are not known."""
    model, name = observed.model, spec.model
    if model is None:
        raise Mistake("ModelNotFound", f"there is no Model {name} in this namespace; apply one")
    status = model.get("status") or {}
    if "versions" not in status:
        raise Mistake("WaitingForModel", f"what Model {name} holds is not known yet: {_unknown(model)}")
    store = store_of(model)
    if observed.store is None:
        raise Mistake("StoreNotFound", f"there is no Datastore {store}, in which Model {name} is")
    claim = (observed.store.get("status") or {}).get("claimName", "")
    if not claim:
        raise Mistake("WaitingForStore", f"Datastore {store} can't be mounted yet: {_ready_message(observed.store)}")
    if spec.version is not None:
        if spec.version > (status.get("latestVersion") or 0):
            raise Mistake("VersionNotFound", f"Model {name} has no version {spec.version} yet")
        return Target(spec.version, claim)
    aliases = {each["name"]: each["version"] for each in status.get("aliases") or []}
    if spec.alias not in aliases:
        known = ", ".join(aliases) or "none"
        raise Mistake("AliasNotFound", f"Model {name} has no alias {spec.alias}; it has {known}")
    return Target(aliases[spec.alias], claim)


def store_of(model: Raw) -> str:
    """Return the name of the Datastore that holds a Model's versions."""
    return str((model.get("status") or {}).get("store") or model.get("spec", {}).get("store") or DEFAULT_STORE)


def _unknown(model: Raw) -> str:
    """Say why it is not known what a Model holds: only a Job looks into its store, and it may be hindered."""
    conditions = (model.get("status") or {}).get("conditions") or []
    hindered = next((each for each in conditions if each["status"] == "False"), None)
    if hindered is not None:
        return str(hindered.get("message") or hindered["reason"])
    return "no Job has looked into its store; one does for a ModelVersion of it, and for spec.aliases of the Model"


def _ready_message(body: Raw) -> str:
    ready = condition(body, "Ready")
    return str(ready.get("message") or ready.get("reason") or "its controller has not looked at it yet")


def _as_wanted(present: Raw | None, wanted: JSON) -> bool:
    """Return whether an object is as wanted; the annotation APPLIED shows a field that is no longer wanted."""
    if present is None or not holds(present["metadata"], wanted["metadata"]):
        return False
    spec = wanted["spec"]
    if wanted["kind"] != "Deployment":
        return holds(present["spec"], spec)
    # The API server rewrites quantities of resources, so they are not compared; the annotation shows their changes.
    pod = spec["template"]["spec"]
    plain = {
        name: [{key: value for key, value in each.items() if key != "resources"} for each in pod[name]]
        for name in ("initContainers", "containers")
    }
    return holds(present["spec"], {**spec, "template": {**spec["template"], "spec": {**pod, **plain}}})


def _looked_at(pods: Sequence[Raw]) -> Pods:
    """Return what each pod has verified and serves, and the first trouble of a pod, if any has one."""
    listed: list[JSON] = []
    trouble: Finding | None = None
    for pod in sorted(pods, key=lambda each: str(each["metadata"]["name"])):
        metadata, status = pod["metadata"], pod.get("status") or {}
        if "deletionTimestamp" in metadata or status.get("phase") in ("Failed", "Succeeded"):
            continue
        verified = _verified(status)
        ready = is_true(pod, "Ready")
        number = str((metadata.get("labels") or {}).get(MODEL_VERSION, ""))
        found: JSON = {"name": metadata["name"], "ready": ready}
        if number.isdigit():
            found["version"] = int(number)
        if verified is not None and "digest" in verified:
            found["digest"] = str(verified["digest"])
        listed.append(found)
        trouble = trouble or _trouble(pod)
    return Pods(listed, sum(each["ready"] for each in listed), trouble)


def _verified(status: Raw) -> JSON | None:
    """Return what the verifying container has reported at its end; None before its success."""
    for each in status.get("initContainerStatuses") or []:
        ended = (each.get("state") or {}).get("terminated")
        if each["name"] == VERIFY and ended and ended["exitCode"] == 0:
            try:
                found = json.loads(ended.get("message", ""))
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def _trouble(pod: Raw) -> Finding | None:
    """Return what keeps a pod from answering and does not pass by itself; None without such a cause."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}

    def told(reason: str, text: str) -> Finding:
        return Finding(type="Degraded", status="True", reason=reason, message=f"pod {name}: {text}"[:1000])

    for each in status.get("initContainerStatuses") or []:
        for state in (each.get("state") or {}, each.get("lastState") or {}):
            ended = state.get("terminated")
            if each["name"] == VERIFY and ended and ended["exitCode"] != 0:
                reason = "VersionDamaged" if ended["exitCode"] == DAMAGED else "VersionNotVerified"
                return told(
                    reason, str(ended.get("message") or ended.get("reason") or f"exit code {ended['exitCode']}")
                )
            if ended:
                break
    for each in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _STUCK:
            ended = (each.get("lastState") or {}).get("terminated") or {}
            last = f"; it ended with exit code {ended['exitCode']}" if each["name"] == SERVE and ended else ""
            return told(waiting["reason"], f"{waiting.get('message') or waiting['reason']}{last}")
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return told("Unschedulable", str(scheduled.get("message") or scheduled.get("reason", "")))
    return None


def _told(
    observed: Observed, spec: ServingSpec | None, target: Target | None, pods: Pods, mistake: Finding | None
) -> Plan:
    """Return a plan of the status and its Events. mistake: why no object is changed, if so."""
    serving = observed.serving
    before = serving.get("status") or {}
    wanted = desired.replicas(spec, observed.deployment) if spec is not None else 0
    complete = target is not None and _complete(observed.deployment, pods, target, wanted)
    trouble = mistake or (None if complete else pods.trouble or _late(observed.deployment))
    version = f"version {target.version}" if target else "what is to be served"
    if trouble is not None:
        text = trouble.message
    elif complete:
        text = f"{version} is served by {_counted(wanted)}" if wanted else "there are no pods, as spec.replicas says"
    else:
        text = f"{version} is being rolled out: {pods.answering} of {_counted(wanted)} answer"
    reason = trouble.reason if trouble else "Serving" if complete else "Rolling"
    if pods.answering:
        answers = Finding(type="Ready", status="True", reason="Serving", message=text)
    else:
        answers = Finding(type="Ready", status="False", reason="NoReplicas" if complete else reason, message=text)
    found = [
        answers,
        Finding(
            type="Progressing",
            status="False" if complete or mistake else "True",
            reason="Complete" if complete else reason,
            message=text,
        ),
        Finding(
            type="Degraded",
            status="True" if trouble else "False",
            reason=reason if trouble else "AsWanted",
            message=text if trouble else "",
        ),
    ]
    generation = int(serving["metadata"].get("generation", 0))
    status: JSON = {
        "observedGeneration": generation,
        "phase": _phase(pods, complete=complete, trouble=trouble is not None),
        "message": text,
        "replicas": len(pods.listed),
        "readyReplicas": pods.answering,
        "pods": pods.listed,
        "conditions": merged(before.get("conditions") or [], found, generation, observed.now),
    }
    if target is not None:
        status["version"] = target.version
        digests = {each["digest"] for each in pods.listed if each.get("version") == target.version and "digest" in each}
        status |= {"digest": min(digests)} if digests else {}
    if spec is not None:
        status["endpoint"] = desired.endpoint(serving, spec)
    return Plan(status=status, events=tuple(transitions(before.get("conditions") or [], found)))


def _complete(deployment: Raw | None, pods: Pods, target: Target, wanted: int) -> bool:
    """Return whether exactly the wanted number of pods is there, all with the wanted version and Ready."""
    if deployment is None:
        return False
    status, metadata = deployment.get("status") or {}, deployment["metadata"]
    current = [each for each in pods.listed if each.get("version") == target.version and each["ready"]]
    return (
        status.get("observedGeneration", 0) >= metadata.get("generation", 0)
        and status.get("updatedReplicas", 0) == status.get("replicas", 0) == wanted
        and len(current) == len(pods.listed) == wanted
    )


def _late(deployment: Raw | None) -> Finding | None:
    """Return the trouble that the Deployment reports: its rollout takes too long, or its pods are refused."""
    for each in ((deployment or {}).get("status") or {}).get("conditions") or []:
        if each["type"] == "Progressing" and each["status"] == "False":
            return Finding(
                type="Degraded", status="True", reason="NotAnswering", message=str(each.get("message", "")) or "late"
            )
        if each["type"] == "ReplicaFailure" and each["status"] == "True":
            return Finding(type="Degraded", status="True", reason="PodRefused", message=str(each.get("message", "")))
    return None


def _counted(pods: int) -> str:
    return f"{pods} pod" if pods == 1 else f"{pods} pods"


def _phase(pods: Pods, *, complete: bool, trouble: bool) -> str:
    if trouble:
        return "Degraded" if pods.answering else "Failed"
    if complete:
        return "Ready"
    return "Rolling" if pods.answering else "Pending"
