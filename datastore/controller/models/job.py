"""The Job that works on the store for a Model, a ModelVersion or a ModelExport, and its answer. Pure: mappings.

The Job runs in its owner's namespace with no more than it needs: no service account token; the Secrets of its buckets
as files, or the claims that it mounts. It reaches a store in a bucket directly when it changes the store, because
numbers and aliases need conditional requests; so the Secret of that bucket has to be in this namespace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from datastore.api.datastore import DatastoreSpec, location_of
from datastore.api.model import ModelVersion
from datastore.api.names import DEFAULT_STORE, GROUP, MANAGED_BY
from datastore.api.objects import CONFINED, condition, is_true, owner_reference
from datastore.api.volumecontext import DRIVER, Reference, from_context, settings_of
from datastore.controller.models.volume import MANAGER, volume_spec
from datastore.controller.runtime.mistakes import Mistake
from datastore.controller.runtime.ownimage import Image
from datastore.models.jobcontract import EXIT_FINAL, REQUEST, SECRETS

Raw = Mapping[str, Any]

FOR = f"{GROUP}/model-job-for"
"""Label of a Job: the kind of its owner, the object for which it works."""
CONTAINER = "work"
RETRIES = 6
REMEMBERED_S = 3600
"""How long a Job stays after its end, and its log with it."""
REMEMBERED_WITH_CLAIM_S = 60
"""The same for a Job with a claim: the claim and its Datastore can't be deleted while even an ended pod names it."""
USER = 65532
_NAME_CHARS = 45


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWork:
    """What every decision about such an owner knows; None: no such object. store_volume: the store's PersistentVolume.

    job: the Job that matters now; answer, progress, waiting: what it and its pods say. image: for a new Job. refused:
    what to tell of the API server's refusal of what the last plan would have made.
    """

    now: str
    store: Raw | None = None
    store_volume: Raw | None = None
    job: Raw | None = None
    answer: Mapping[str, Any] | None = None
    progress: Mapping[str, Any] | None = None
    waiting: str = ""
    image: Image | None = None
    refused: str = ""


def verb_of(version: ModelVersion) -> str:
    """Return the verb of the version's Job: "save", or "adopt" for a version that the store has already."""
    return "save" if version.spec.source is not None else "adopt"


def job_name(owner: Raw, verb: str) -> str:
    """Return the Job's name, of at most 63 characters."""
    metadata = owner["metadata"]
    return f"{metadata['name'][:_NAME_CHARS]}-{verb}-{metadata['uid'][:8]}"


def request_of(
    version: ModelVersion, uid: str, verb: str, store: Raw, source: Raw | None, aliases: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the Job's request (datastore/models/jobs.py). store, source: see Places; aliases: those it shall move."""
    spec = version.spec
    request: dict[str, Any] = {
        "do": verb,
        "model": spec.model,
        "saveId": uid,
        "store": dict(store),
        "who": f"ModelVersion {version.metadata.namespace}/{version.name}",
    }
    if verb == "adopt":
        request |= {"number": spec.version, "aliases": list(aliases)}
    if verb == "save" and spec.source is not None and source is not None:
        origin = spec.origin
        lineage: dict[str, Any] = {"datastore": spec.source.datastore}
        if origin is not None:
            lineage |= {
                "training_job": origin.training_job,
                "training_job_uid": origin.training_job_uid,
                "image_digest": origin.image_digest,
                "command": list(origin.command),
            }
        request |= {
            "source": dict(source),
            "path": spec.source.path.strip("/"),
            "force": spec.force,
            "labels": dict(spec.labels),
            "aliases": list(aliases),
            "lineage": lineage,
        }
    return request


Mounted = Literal["never", "if needed", "always"]
"""Whether a Job reaches a bucket by a mount of its Datastore; if needed: when the Secret is in another namespace."""


class Role(NamedTuple):
    """A Datastore that a Job uses. role: store, source or target; named: its name; volume: its PersistentVolume.
    written: whether the Job writes there."""

    role: str
    named: str
    datastore: Raw | None
    volume: Raw | None
    mounted: Mounted = "never"
    written: bool = False


class Inline(NamedTuple):
    """A Datastore that a Job mounts as an inline CSI volume of its own, with the Secret of its bucket."""

    datastore: str
    secret: str


class Places(NamedTuple):
    """How a Job reaches its Datastores, all by role: places for its request; claims, Secrets and inline to mount."""

    places: dict[str, dict[str, Any]]
    claims: dict[str, str]
    secrets: dict[str, str]
    inline: dict[str, Inline]


def reached(roles: Sequence[Role]) -> Places:
    """Return how a Job reaches Datastores.

    Errors: Mistake when one is missing, not Ready, read-only where the Job writes, or its Secret elsewhere.
    """
    found = Places({}, {}, {}, {})
    for each in roles:
        named, datastore = each.named, each.datastore
        if datastore is None:
            text = f"there is no Datastore {named} in this namespace"
            if each.role == "store" and named == DEFAULT_STORE:
                text += ", nor one StorageClass that the administrator marked for models; "
                text += "make one, or name another in the Model"
            raise Mistake("DatastoreNotFound", text)
        claim = (datastore.get("status") or {}).get("claimName")
        if each.volume is None or not claim or not is_true(datastore, "Ready"):
            why = condition(datastore, "Ready").get("message") or "it is new"
            raise Mistake("DatastoreNotReady", f"Datastore {named} is not Ready: {why}")
        spec = _spec(datastore, each.volume)
        if each.written and (datastore["spec"].get("readOnly") or (spec is not None and spec.read_only)):
            text = f"Datastore {named} has readOnly: true, so nothing is written there; name another, or change that"
            raise Mistake("DatastoreReadOnly", text)
        place, secret = _place(datastore, each.volume, spec, each.role, each.mounted)
        found.places[each.role] = place
        if "directory" in place and not secret:
            found.claims[each.role] = str(claim)
        elif "directory" in place:
            found.inline[each.role] = Inline(named, secret)
        elif secret:
            found.secrets[each.role] = secret
    return found


def _place(
    datastore: Raw, volume: Raw, spec: DatastoreSpec | None, role: str, mounted: Mounted
) -> tuple[dict[str, Any], str]:
    """Return how a Job reaches a Datastore, and the bucket's Secret ('': none in this namespace). Errors: Mistake.

    A bucket that is always mounted is mounted by an inline volume if its Secret is in this namespace. There the Job's
    fsGroup lets it write like the owner and concerns no other pod; pods that share a claim's mount need the same one.
    """
    namespace = datastore["metadata"]["namespace"]
    location = str((datastore.get("status") or {}).get("location", ""))
    if spec is None or spec.s3 is None:
        return {"directory": f"/{role}", "location": location}, ""
    secret = volume["spec"]["csi"].get("nodePublishSecretRef") or {}
    is_own = secret.get("namespace") == namespace
    if mounted == "always":
        return {"directory": f"/{role}", "location": location}, str(secret["name"]) if is_own else ""
    if secret and not is_own:
        if mounted == "if needed":
            return {"directory": f"/{role}", "location": location}, ""
        text = (
            f"the keys of Datastore {datastore['metadata']['name']} are in namespace {secret.get('namespace')}, which "
            "no Job of yours may read; use a Datastore with a Secret of this namespace, or one on NFS, or ask the "
            "administrator for a StorageClass with secretNamespace: ${pvc.namespace}"
        )
        raise Mistake("SecretElsewhere", text, permanent=True)
    return {"spec": settings_of(spec), "location": location_of(spec)}, str(secret.get("name", ""))


def _spec(datastore: Raw, volume: Raw) -> DatastoreSpec | None:
    if (volume["spec"].get("csi") or {}) == {}:
        return None
    try:
        spec = from_context(volume_spec(datastore, volume))
    except Mistake:  # another driver's volume: the Job mounts its claim
        return None
    return None if isinstance(spec, Reference) else spec


def wanted_job(owner: Raw, verb: str, request: Raw, image: Image | None, places: Places) -> dict[str, Any]:
    """Return the Job for an object. Errors: Mistake without an image."""
    if image is None:
        raise Mistake("ImageUnknown", "the controller does not find its own pod, whose image the Job would have")
    metadata = owner["metadata"]
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108  (the pod's own)
    for name, claim in places.claims.items():
        read_only = name == "source" or (name, verb) == ("store", "export")
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": read_only}})
        mounts.append({"name": name, "mountPath": f"/{name}", "readOnly": read_only})
    for name, (datastore, secret) in places.inline.items():
        attributes = {"volumeAttributes": {"datastore": datastore}, "nodePublishSecretRef": {"name": secret}}
        volumes.append({"name": name, "csi": {"driver": DRIVER, **attributes}})
        mounts.append({"name": name, "mountPath": f"/{name}"})
    for name, secret in places.secrets.items():
        volumes.append({"name": f"{name}-keys", "secret": {"secretName": secret, "defaultMode": 0o444}})
        mounts.append({"name": f"{name}-keys", "mountPath": f"{SECRETS}/{name}", "readOnly": True})
    labels = {MANAGED_BY: MANAGER, FOR: owner["kind"]}
    # Only the Job tells that an update of the store failed (update.py); without it, the update is repeated at once.
    remembered_s = REMEMBERED_WITH_CLAIM_S if places.claims and verb != "update" else REMEMBERED_S
    group = {"fsGroup": USER} if places.inline and not places.claims else {}
    user = {"runAsNonRoot": True, "runAsUser": USER, **group, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": CONTAINER,
        "image": image.name,
        "imagePullPolicy": image.pull_policy,
        "command": ["python3", "-m", "datastore.models.jobs"],
        "env": [{"name": REQUEST, "value": json.dumps(request, sort_keys=True)}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": CONFINED,
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": user,
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(owner, verb),
            "namespace": metadata["namespace"],
            "labels": labels,
            "ownerReferences": [owner_reference(owner["kind"], metadata["name"], metadata["uid"])],
        },
        "spec": {
            "backoffLimit": RETRIES,
            "ttlSecondsAfterFinished": remembered_s,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_FINAL]},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def request_in(job: Raw) -> dict[str, Any]:
    """Return the request of a Job; {} for a Job that is not ours."""
    containers: Sequence[Raw] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "") for each in containers[0].get("env") or []}
    return _object(variables.get(REQUEST, ""))


def ended(job: Raw) -> str:
    """Return how a Job ended, 'Complete' or 'Failed'; '' before its end."""
    return next((kind for kind in ("Complete", "Failed") if is_true(job, kind)), "")


def ended_at(job: Raw) -> str:
    """Return when a Job ended, as the API server writes times; '' if that is not known."""
    return str(condition(job, ended(job)).get("lastTransitionTime", ""))


def answer_of(pods: Sequence[Raw]) -> dict[str, Any]:
    """Return the answer of the newest of a Job's pods that have ended; {} before any has."""
    for pod in sorted(pods, key=lambda each: str(each["metadata"]["creationTimestamp"]), reverse=True):
        for each in (pod.get("status") or {}).get("containerStatuses") or []:
            found = (each.get("state") or {}).get("terminated")
            said = _object((found or {}).get("message", ""))
            if said:
                return said
            if found:
                return {"reason": "PodFailed", "error": f"its pod ended: {found.get('reason', '')} {found['exitCode']}"}
    return {}


def waiting_for(job: Raw, pods: Sequence[Raw]) -> str:
    """Return why a Job's newest pod does not run yet; '' when it runs, has ended, or gives no reason."""
    said = job.get("status") or {}
    if not pods and "startTime" in said and not said.get("active") and not ended(job):
        return f"the cluster has not taken one; `kubectl describe job {job['metadata']['name']}` says why"
    newest = max(pods, key=lambda each: str(each["metadata"]["creationTimestamp"]), default=None)
    status = (newest or {}).get("status") or {}
    if newest is None or status.get("phase") != "Pending":
        return ""
    for each in status.get("containerStatuses") or []:
        if waiting := (each.get("state") or {}).get("waiting"):
            return f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
    scheduled = condition(newest, "PodScheduled")
    return str(scheduled.get("message", "")) if scheduled.get("status") == "False" else ""


def running(pods: Sequence[Raw]) -> str:
    """Return the name of the pod that runs; '' for none."""
    return next((each["metadata"]["name"] for each in pods if (each.get("status") or {}).get("phase") == "Running"), "")


def progress_of(log: str) -> dict[str, Any] | None:
    """Return status.progress from the last line of a pod's log; None if that is no report of progress."""
    said = _object(log.strip().rpartition("\n")[2])
    if "phase" not in said:
        return None
    try:
        total, done = int(said["bytes_total"]), int(said["bytes"])
        progress: dict[str, Any] = {
            "phase": str(said["phase"])[:63],
            "files": int(said["files"]),
            "filesTotal": int(said["files_total"]),
            "bytes": done,
            "bytesTotal": total,
            "percent": 100 * done // total if total else 0,
        }
        if said.get("eta_s") is not None:
            progress["etaSeconds"] = int(said["eta_s"])
    except (KeyError, TypeError, ValueError):
        return None
    return progress


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
