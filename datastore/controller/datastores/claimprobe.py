"""Finds out the capabilities of a `claim` Datastore's volume, with a pod that mounts the volume for a moment.

The user requests this with `spec.claim.probe`, and the administrator must allow it with --probe-claims and the RBAC
rules of manifests/claim-probe. Each volume is probed by one pod, once: the result stays in the Datastore's status. The
pod runs on the node of a pod that uses the claim, if any, is owned by the Datastore, ends within a minute, and is
deleted. Where root is refused (Pod Security "restricted", or another policy), it runs as the user of that other pod.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from datastore.api.datastore import KIND
from datastore.api.names import MANAGED_BY, MANAGER, PROBE
from datastore.api.objects import CONFINED, claims_of, owner_reference
from datastore.api.resources import PODS
from datastore.api.status import Capabilities
from datastore.backends.base import Measured
from datastore.controller.datastores.effective import EffectiveSpec
from datastore.controller.datastores.pods import NOT_ENDED
from datastore.controller.datastores.settings import Settings
from datastore.controller.runtime.client import ApiError, Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.ownimage import Image, OwnImage
from datastore.logs import fields

log = logging.getLogger(__name__)
Raw = Mapping[str, Any]

DIRECTORY = "/volume"
COMMAND = ("python3", "-m", "datastore.backends.volumeprobe", DIRECTORY)
RUN_S = 60
"""The pod's activeDeadlineSeconds: the kubelet ends the pod after this time."""
WAIT_S = 120.0
"""Age in seconds at which a pod that has not ended is deleted, for example one that no node takes."""
AGAIN_S = 900.0
POLL_S = 1.0
REFUSED_MAX = 4096
NOBODY = 65532
"""The image's own user: the pod without root runs as this user when no pod that uses the claim names a user."""
_ROOT: Raw = {"runAsUser": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of a step. wait_s: seconds until the next step is due; event: the Event for the Datastore."""

    capabilities: Capabilities | None = None
    measured: Measured | None = None
    wait_s: float | None = None
    event: Event | None = None


class ClaimProbe:
    """Probes volumes step by step. Level-triggered: each step uses the present state. clock: monotonic seconds."""

    def __init__(self, client: Client, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._again_at: dict[str, float] = {}
        self._image = OwnImage(client, settings, settings.probe_image)

    async def step(self, effective: EffectiveSpec, claim: Raw | None, status: Raw) -> Tried:
        """Take the next step, if the volume is to be probed and has not been yet. Errors: ApiError, Unavailable."""
        asked = effective.spec.claim is not None and effective.spec.claim.probe and not status.get("capabilities")
        if not asked or claim is None or not _bound(claim) or self._clock() < self._again_at.get(effective.uid, 0.0):
            return Tried()
        if not self._settings.probe_claims:
            return self._failed(effective, "the administrator does not allow pods that probe volumes (--probe-claims)")
        pod = await self._pod(effective)
        if pod is None:
            return await self._start(effective, claim)
        done = _answer(pod)
        if done is None and _age_s(pod) < WAIT_S:
            return Tried(wait_s=POLL_S)
        metadata = pod["metadata"]
        await self._client.delete(PODS, metadata["namespace"], metadata["name"], metadata["uid"])
        return self._found(effective, done if done is not None else {"error": "no node ran the pod in time"})

    def _found(self, effective: EffectiveSpec, answer: Raw) -> Tried:
        if "error" in answer:
            return self._failed(effective, str(answer["error"])[:512])
        try:
            capabilities = Capabilities.model_validate(answer.get("capabilities"))
            measured = (
                Measured(objects=int(answer["objects"]), size_bytes=int(answer["bytes"])) if "bytes" in answer else None
            )
        except (ValidationError, ValueError, TypeError, KeyError):
            return self._failed(effective, "the pod's answer could not be read")
        self._again_at.pop(effective.uid, None)
        return Tried(capabilities=capabilities, measured=measured)

    def _failed(self, effective: EffectiveSpec, why: str) -> Tried:
        if len(self._again_at) >= REFUSED_MAX:
            self._again_at.clear()
        known = effective.uid in self._again_at
        self._again_at[effective.uid] = self._clock() + AGAIN_S
        text = f"the volume's capabilities are unknown: {why}"
        return Tried(event=None if known else Event(reason="ProbeFailed", message=text, warning=True))

    async def _pod(self, effective: EffectiveSpec) -> Raw | None:
        found = await self._client.list(PODS, effective.namespace, f"metadata.name={_name(effective)}")
        return next((each for each in found if "deletionTimestamp" not in each["metadata"]), None)

    async def _start(self, effective: EffectiveSpec, claim: Raw) -> Tried:
        image = await self._image.get()
        if image is None:
            return self._failed(effective, "the controller does not find its own pod, whose image it would use")
        name = claim["metadata"]["name"]
        users = await self._client.list(PODS, effective.namespace, NOT_ENDED)
        user: Raw = next((each["spec"] for each in users if name in claims_of(each)), {})
        node, refusal = user.get("nodeName", ""), ""
        for who in (_ROOT, unprivileged(user)):
            try:
                await self._client.create(PODS, effective.namespace, pod_for(effective, name, image, node, who))
            except ApiError as error:
                if error.status == 409:
                    # The pod of the probe before is still being deleted.
                    return Tried(wait_s=POLL_S)
                if error.status not in (403, 422):
                    raise
                refusal = str(error)
                continue
            where = f"{effective.namespace}/{effective.name}"
            log.info("trying a volume", extra=fields(datastore=where, claim=name, node=node, user=who["runAsUser"]))
            return Tried(wait_s=POLL_S)
        return self._failed(effective, refusal)


def unprivileged(user: Raw) -> dict[str, Any]:
    """Return a securityContext without root, for the user and groups in the spec of a pod with the claim, or NOBODY."""
    given: Raw = user.get("securityContext") or {}
    others = ((each.get("securityContext") or {}).get("runAsUser") for each in user.get("containers") or [])
    found = next((each for each in (given.get("runAsUser"), *others) if each), NOBODY)
    same = {name: given[name] for name in ("runAsGroup", "fsGroup", "supplementalGroups") if name in given}
    # The kubelet need not change the owner of every file again: it did so for the pod that uses the claim.
    change = {"fsGroupChangePolicy": "OnRootMismatch"} if "fsGroup" in same else {}
    return {"runAsNonRoot": True, "runAsUser": found, **same, **change}


def pod_for(effective: EffectiveSpec, claim: str, image: Image, node: str, who: Raw = _ROOT) -> dict[str, Any]:
    """Return the body of the pod. By default it runs as root, because a new volume's directory belongs to root.

    It has no rights, no token, and no fsGroup, by which the kubelet would change the owner of every file.
    manifests/claim-probe allows only this shape. With a `who` from unprivileged() it is as Pod Security "restricted"
    asks.
    """
    container = {
        "name": "probe",
        "image": image.name,
        "imagePullPolicy": image.pull_policy,
        "command": list(COMMAND),
        "securityContext": CONFINED,
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "volumeMounts": [{"name": "volume", "mountPath": DIRECTORY}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": _name(effective),
            "namespace": effective.namespace,
            "labels": {MANAGED_BY: MANAGER, PROBE: "true"},
            "ownerReferences": [owner_reference(KIND, effective.name, effective.uid, controller=False)],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": RUN_S,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **who},
            **({"nodeName": node} if node else {}),
            "containers": [container],
            "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


def _name(effective: EffectiveSpec) -> str:
    return f"datastore-probe-{effective.uid}"


def _bound(claim: Raw) -> bool:
    return bool(claim.get("status", {}).get("phase") == "Bound")


def _answer(pod: Raw) -> Raw | None:
    """Return the answer in the pod's termination message, or an error; None while the pod has not ended."""
    if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
        return None
    for each in pod["status"].get("containerStatuses") or []:
        said = (each.get("state", {}).get("terminated") or {}).get("message", "")
        try:
            document = json.loads(said)
        except ValueError:
            continue
        if isinstance(document, dict):
            return document
    return {"error": f"the pod ended without an answer: {pod['status'].get('reason') or pod['status']['phase']}"}


def _age_s(pod: Raw) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])).total_seconds()
