"""Builds the objects that a Datastore asks for, and compares them with what exists. Pure: mappings in, mappings out.

They contain only fields that we own: the API server's defaults and other managers' fields are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastore.api.datastore import API_VERSION, KIND
from datastore.api.names import MANAGED_BY, MANAGER, OWNER, UID, volume_name
from datastore.api.objects import owner_reference
from datastore.api.source import NFSLocation, Source
from datastore.api.volumecontext import DRIVER, VolumeHandle, settings_of, to_context
from datastore.controller.datastores.effective import EffectiveSpec
from datastore.controller.runtime.comparing import holds
from datastore.units import format_quantity

Raw = Mapping[str, Any]

UNLIMITED = "1Pi"
"""Size of a volume without `capacity`, the same as the mount's statfs shows (S-15)."""
NOMINAL_REQUEST = "1Gi"
"""The request of a claim without `capacity`: small, because quotas on requests.storage count it."""
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_READ_WRITE = ("ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany")
_READ_ONLY = ("ReadOnlyMany",)


def claim(effective: EffectiveSpec) -> dict[str, Any] | None:
    """Return the PersistentVolumeClaim that the Datastore asks for; None where it wraps an existing one."""
    spec = effective.spec
    if spec.claim and spec.claim.name:
        return None
    wanted: dict[str, Any] = {
        "accessModes": ["ReadOnlyMany" if spec.read_only else "ReadWriteMany"],
        "resources": {"requests": {"storage": _request(effective)}},
        "volumeMode": "Filesystem",
    }
    if spec.claim:
        wanted["storageClassName"] = spec.claim.storage_class_name
    else:
        wanted["storageClassName"] = effective.class_name
        wanted["volumeName"] = volume_name(effective.uid)
    metadata = {"name": effective.name, "namespace": effective.namespace, **_marks(effective)}
    if not spec.claim or spec.reclaim_policy == "Delete":
        # Another driver's claim is the data itself: unless the policy is Delete, it outlives the Datastore.
        metadata["ownerReferences"] = [owner_reference(KIND, effective.name, effective.uid)]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": wanted}


def volume(
    effective: EffectiveSpec, claim_uid: str, source: Source | None = None, plain: Raw | None = None
) -> dict[str, Any] | None:
    """Return the PersistentVolume, bound in advance to the claim (with this uid if any); None: another driver makes it.

    source: the location of an NFS export that was made for the Datastore. plain: the plain claim that the Datastore was
    made for; its volume has the claim's access modes, and says what becomes of the data with the claim.
    """
    spec = effective.spec
    if effective.kind.volume == "claim":
        return None
    wanted: dict[str, Any] = {
        "accessModes": list(_READ_ONLY if spec.read_only else _READ_WRITE),
        "capacity": {"storage": format_quantity(spec.capacity) if spec.capacity else UNLIMITED},
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": effective.class_name,
        "volumeMode": "Filesystem",
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": effective.namespace,
            "name": effective.name,
            **({"uid": claim_uid} if claim_uid else {}),
        },
        **({"mountOptions": list(effective.mount_options)} if effective.mount_options else {}),
        **_volume_source(effective, source),
    }
    metadata = {"name": volume_name(effective.uid), **_marks(effective)}
    if plain is not None:
        wanted["accessModes"] = list(plain["spec"].get("accessModes") or ())
        wanted["persistentVolumeReclaimPolicy"] = "Delete" if spec.reclaim_policy == "Delete" else "Retain"
        # Without this, Kubernetes would look for a deleter among its own plugins, and mark the volume as Failed.
        metadata["annotations"] = {**metadata["annotations"], PROVISIONED_BY: DRIVER}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": wanted}


def datastore_for(claim_body: Raw, storage_class: Raw) -> dict[str, Any]:
    """Return the Datastore that provisions a plain claim of our class; it has the claim's name and is owned by it."""
    metadata = claim_body["metadata"]
    request = claim_body["spec"].get("resources", {}).get("requests", {}).get("storage")
    owner = owner_reference(
        "PersistentVolumeClaim", metadata["name"], metadata["uid"], api_version="v1", controller=False
    )
    spec = {
        "storageClassName": storage_class["metadata"]["name"],
        "reclaimPolicy": storage_class.get("reclaimPolicy", "Delete"),
        **({"capacity": request} if request else {}),
        **({"readOnly": True} if claim_body["spec"].get("accessModes") == ["ReadOnlyMany"] else {}),
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {MANAGED_BY: MANAGER},
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def reference(key: tuple[str, str]) -> dict[str, Any]:
    """Return the body of a Datastore with kind, namespace and name only, which is enough to look it up."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"namespace": key[0], "name": key[1]}}


def owner_of(body: Raw) -> tuple[str, str] | None:
    """Return the key of the Datastore that a claim or volume of ours names in its annotation, or None."""
    text = (body["metadata"].get("annotations") or {}).get(OWNER, "")
    namespace, _, name = text.partition("/")
    return (namespace, name) if namespace and name else None


def is_ours(body: Raw, uid: str) -> bool:
    """Whether a claim or volume was made for the Datastore with this uid."""
    labels: Raw = body["metadata"].get("labels") or {}
    return bool(labels.get(UID) == uid and labels.get(MANAGED_BY) == MANAGER)


def volume_holds(observed: Raw, wanted: Raw) -> bool:
    """Whether a volume is as wanted; its mount options have to be exactly ours, even if none are wanted any more."""
    options = wanted["spec"].get("mountOptions") or []
    return (observed["spec"].get("mountOptions") or []) == options and holds(observed, wanted)


def with_source_of(observed: Raw, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the wanted volume with the observed one's source (csi, hostPath), which the API server keeps immutable.

    The source says which data this is, which never changes. Nodes read from status.mount how the data is shown.
    """
    made = {field: observed["spec"][field] for field in ("csi", "hostPath") if field in observed["spec"]}
    return {**wanted, "spec": {**wanted["spec"], **made}}


def mount_settings(effective: EffectiveSpec) -> dict[str, Any]:
    """Return status.mount: the present settings of mounts, for the nodes."""
    settings: dict[str, Any] = {"spec": settings_of(effective.spec)}
    return settings | ({"memory": effective.memory} if effective.memory else {})


def _marks(effective: EffectiveSpec) -> dict[str, Any]:
    return {
        "labels": {MANAGED_BY: MANAGER, UID: effective.uid},
        "annotations": {OWNER: f"{effective.namespace}/{effective.name}"},
    }


def _request(effective: EffectiveSpec) -> str:
    return format_quantity(effective.spec.capacity) if effective.spec.capacity else NOMINAL_REQUEST


def _volume_source(effective: EffectiveSpec, source: Source | None) -> dict[str, Any]:
    if effective.spec.local:
        return {"hostPath": {"path": effective.spec.local.path, "type": "Directory"}}
    handle = VolumeHandle(namespace=effective.namespace, name=effective.name, uid=effective.uid)
    csi: dict[str, Any] = {
        "driver": DRIVER,
        "volumeHandle": str(handle),
        "volumeAttributes": to_context(
            effective.spec, memory=effective.memory, source=_made(effective, source), class_name=effective.class_name
        ),
    }
    if effective.secret and effective.kind.credentials:
        secret = {"name": effective.secret.name, "namespace": effective.secret.namespace}
        csi |= {"nodePublishSecretRef": secret, "nodeStageSecretRef": secret}
    return {"csi": csi}


def has_own_export(effective: EffectiveSpec) -> bool:
    """Whether an NFS export is made for the Datastore, so that only the backend that made it knows where it is."""
    return effective.spec.nfs is not None and effective.spec.nfs.server is None


def _made(effective: EffectiveSpec, source: Source | None) -> NFSLocation | None:
    return source if has_own_export(effective) and isinstance(source, NFSLocation) else None
