"""The objects that a Datastore asks for, and how they differ from what is there. Pure: mappings in, mappings out.

Only the fields that we own stand in them: the API server's defaults and other managers' fields are not ours to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datastore.api.datastore import API_VERSION, KIND
from datastore.api.names import MANAGED_BY, MANAGER, OWNER, UID, volume_name
from datastore.api.volumecontext import DRIVER, MEMORY, VolumeHandle, to_context
from datastore.controller.classes import Meant
from datastore.units import format_quantity, parse_quantity

Raw = Mapping[str, Any]

UNLIMITED = "1Pi"
"""Size of a volume without `capacity`, the same as the mount's statfs shows (S-15)."""
NOMINAL_REQUEST = "1Gi"
"""What a claim asks for then: quotas on requests.storage count it, so it is small."""
_READ_WRITE = ("ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany")
_READ_ONLY = ("ReadOnlyMany",)


def claim(meant: Meant) -> dict[str, Any] | None:
    """The PersistentVolumeClaim; None where the Datastore wraps one that exists."""
    spec = meant.spec
    if spec.claim and spec.claim.name:
        return None
    wanted: dict[str, Any] = {
        "accessModes": ["ReadOnlyMany" if spec.read_only else "ReadWriteMany"],
        "resources": {"requests": {"storage": _request(meant)}},
        "volumeMode": "Filesystem",
    }
    if spec.claim:
        wanted["storageClassName"] = spec.claim.storage_class_name
    else:
        wanted["storageClassName"] = meant.class_name
        wanted["volumeName"] = volume_name(meant.uid)
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": meant.name,
        "uid": meant.uid,
        "controller": True,
        # Ours waits for pods by itself; `true` would need the right to update finalizers.
        "blockOwnerDeletion": False,
    }
    metadata = {"name": meant.name, "namespace": meant.namespace, **_marks(meant)}
    if not spec.claim or spec.reclaim_policy == "Delete":
        # The claim of another driver is the data itself: with Retain it outlives us.
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": wanted}


def volume(meant: Meant, claim_uid: str) -> dict[str, Any] | None:
    """The PersistentVolume, bound beforehand to the claim (of this uid if any); None: another driver makes it."""
    spec = meant.spec
    if spec.claim:
        return None
    wanted: dict[str, Any] = {
        "accessModes": list(_READ_ONLY if spec.read_only else _READ_WRITE),
        "capacity": {"storage": format_quantity(spec.capacity) if spec.capacity else UNLIMITED},
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": meant.class_name,
        "volumeMode": "Filesystem",
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": meant.namespace,
            "name": meant.name,
            **({"uid": claim_uid} if claim_uid else {}),
        },
        **({"mountOptions": list(meant.mount_options)} if meant.mount_options else {}),
        **_source(meant),
    }
    metadata = {"name": volume_name(meant.uid), **_marks(meant)}
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


def holds(observed: Any, wanted: Any) -> bool:
    """Whether everything wanted is there; what else is there does not matter. Quantities are compared as amounts."""
    if wanted == "":
        # The API server leaves empty text out.
        return observed in (None, "")
    if isinstance(wanted, Mapping):
        return isinstance(observed, Mapping) and all(_field_holds(observed, name, wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        if not isinstance(observed, list) or len(observed) < len(wanted):
            return False
        return all(any(holds(each, one) for each in observed) for one in wanted)
    return bool(observed == wanted)


def volume_holds(observed: Raw, wanted: Raw) -> bool:
    """Whether a volume is as it should be; its mount options are exactly ours, also when there are none any more."""
    options = wanted["spec"].get("mountOptions") or []
    return (observed["spec"].get("mountOptions") or []) == options and holds(observed, wanted)


def source_differs(observed: Raw, wanted: Raw) -> bool:
    """Whether a volume's source is another: the API server lets none change, so the volume is replaced."""
    return any(
        field in wanted["spec"] and observed["spec"].get(field) != wanted["spec"][field]
        for field in ("csi", "hostPath")
    )


def _field_holds(observed: Raw, name: str, wanted: Any) -> bool:
    if name == "storage" and isinstance(wanted, str):
        return isinstance(observed.get(name), str | int) and parse_quantity(observed[name]) == parse_quantity(wanted)
    return holds(observed.get(name), wanted)


def _marks(meant: Meant) -> dict[str, Any]:
    return {
        "labels": {MANAGED_BY: MANAGER, UID: meant.uid},
        "annotations": {OWNER: f"{meant.namespace}/{meant.name}"},
    }


def _request(meant: Meant) -> str:
    return format_quantity(meant.spec.capacity) if meant.spec.capacity else NOMINAL_REQUEST


def _source(meant: Meant) -> dict[str, Any]:
    if meant.spec.local:
        return {"hostPath": {"path": meant.spec.local.path, "type": "Directory"}}
    handle = VolumeHandle(namespace=meant.namespace, name=meant.name, uid=meant.uid)
    source: dict[str, Any] = {
        "driver": DRIVER,
        "volumeHandle": str(handle),
        "volumeAttributes": {**to_context(meant.spec), **({MEMORY: meant.memory} if meant.memory else {})},
        **({"readOnly": True} if meant.spec.read_only else {}),
    }
    if meant.secret:
        secret = {"name": meant.secret.name, "namespace": meant.secret.namespace}
        source |= {"nodePublishSecretRef": secret, "nodeStageSecretRef": secret}
    return {"csi": source}
