"""The objects that a Datastore asks for, and how they differ from what is there. Pure: mappings in, mappings out.

Only the fields that we own stand in them: the API server's defaults and other managers' fields are not ours to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastore.api.datastore import API_VERSION, KIND
from datastore.api.names import MANAGED_BY, MANAGER, OWNER, UID, volume_name
from datastore.api.source import NFSLocation, Source
from datastore.api.volumecontext import DRIVER, VolumeHandle, settings_of, to_context
from datastore.controller.datastores.effective import EffectiveSpec
from datastore.controller.runtime.comparing import holds
from datastore.units import format_quantity

Raw = Mapping[str, Any]

UNLIMITED = "1Pi"
"""Size of a volume without `capacity`, the same as the mount's statfs shows (S-15)."""
NOMINAL_REQUEST = "1Gi"
"""What a claim asks for then: quotas on requests.storage count it, so it is small."""
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_READ_WRITE = ("ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany")
_READ_ONLY = ("ReadOnlyMany",)


def claim(effective: EffectiveSpec) -> dict[str, Any] | None:
    """The PersistentVolumeClaim; None where the Datastore wraps one that exists."""
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
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": effective.name,
        "uid": effective.uid,
        "controller": True,
        # Ours waits for pods by itself; `true` would need the right to update finalizers.
        "blockOwnerDeletion": False,
    }
    metadata = {"name": effective.name, "namespace": effective.namespace, **_marks(effective)}
    if not spec.claim or spec.reclaim_policy == "Delete":
        # The claim of another driver is the data itself: with Retain it outlives us.
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": wanted}


def volume(
    effective: EffectiveSpec, claim_uid: str, source: Source | None = None, plain: Raw | None = None
) -> dict[str, Any] | None:
    """The PersistentVolume, bound beforehand to the claim (of this uid if any); None: another driver makes it.

    source: what its mounts show, where the spec alone does not tell. plain: the claim that the Datastore was made for;
    its volume shows what it asked for, and what becomes of the data with it.
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
        # Else Kubernetes would look for a deleter of its own, and call the volume Failed.
        metadata["annotations"] = {**metadata["annotations"], PROVISIONED_BY: DRIVER}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": wanted}


def datastore_for(claim_body: Raw, storage_class: Raw) -> dict[str, Any]:
    """The Datastore that provisions a plain claim of a class of ours: the same name, and gone with the claim."""
    metadata = claim_body["metadata"]
    request = claim_body["spec"].get("resources", {}).get("requests", {}).get("storage")
    owner = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": metadata["name"], "uid": metadata["uid"]}
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
            "ownerReferences": [{**owner, "blockOwnerDeletion": False}],
        },
        "spec": spec,
    }


def reference(key: tuple[str, str]) -> dict[str, Any]:
    """A Datastore by its namespace and name, as far as it takes to ask for it."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"namespace": key[0], "name": key[1]}}


def is_for_claim(datastore: Raw, claim_body: Raw) -> bool:
    """Whether a Datastore was made for this plain claim."""
    owners: Sequence[Raw] = datastore["metadata"].get("ownerReferences") or []
    return any(each.get("uid") == claim_body["metadata"]["uid"] for each in owners)


def owner_of(body: Raw) -> tuple[str, str] | None:
    """The Datastore that a claim or volume of ours says it is of."""
    text = (body["metadata"].get("annotations") or {}).get(OWNER, "")
    namespace, _, name = text.partition("/")
    return (namespace, name) if namespace and name else None


def is_ours(body: Raw, uid: str) -> bool:
    """Whether a claim or volume was made for the Datastore with this uid."""
    labels: Raw = body["metadata"].get("labels") or {}
    return bool(labels.get(UID) == uid and labels.get(MANAGED_BY) == MANAGER)


def volume_holds(observed: Raw, wanted: Raw) -> bool:
    """Whether a volume is as it should be; its mount options are exactly ours, also when there are none any more."""
    options = wanted["spec"].get("mountOptions") or []
    return (observed["spec"].get("mountOptions") or []) == options and holds(observed, wanted)


def with_source_of(observed: Raw, wanted: dict[str, Any]) -> dict[str, Any]:
    """A volume with the source it was made with: the API server lets none change, and none has to.

    It says which data this is, which never changes. How the data is shown stands in the Datastore's status.mount, where
    the nodes read it.
    """
    made = {field: observed["spec"][field] for field in ("csi", "hostPath") if field in observed["spec"]}
    return {**wanted, "spec": {**wanted["spec"], **made}}


def mount_settings(effective: EffectiveSpec) -> dict[str, Any]:
    """How the data is shown as of now, for the nodes: status.mount."""
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
    """Whether an export is made for it, so that only who made it knows where it is."""
    return effective.spec.nfs is not None and effective.spec.nfs.server is None


def _made(effective: EffectiveSpec, source: Source | None) -> NFSLocation | None:
    return source if has_own_export(effective) and isinstance(source, NFSLocation) else None
