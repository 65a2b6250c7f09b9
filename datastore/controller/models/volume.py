"""The PersistentVolume and claim with which pods mount one version of a model, read-only. Pure: mappings in and out.

The volume is like the volume of the store's Datastore, with the same Secret, but shows only the version's directory. So
a user of a version sees neither the keys of its store nor another version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from datastore.api.names import GROUP, MANAGED_BY
from datastore.api.objects import owner_reference
from datastore.api.source import NFSLocation, source_from
from datastore.api.volumecontext import (
    CLASS,
    DRIVER,
    MEMORY,
    SOURCE,
    Reference,
    from_context,
    to_context,
    with_settings,
)
from datastore.controller.runtime.mistakes import Mistake
from datastore.errors import InvalidManifest
from datastore.models.place import below_store, version_spec

Raw = Mapping[str, Any]

MANAGER = "datastore-models"
"""The managed-by label of these objects; the controller of Datastores deletes its volumes that have no Datastore."""
VERSION_OF = f"{GROUP}/model-version"
"""Annotation of the volume and of the claim: NAMESPACE/MODEL:NUMBER."""
OWNED_BY = f"{GROUP}/owner-uid"
"""Label of the volume and of the claim: the uid of the object for which they were made."""
NOMINAL_SIZE = "1Gi"
"""The size in the claim, which Kubernetes requires; a quota on requests.storage counts it."""


def version_volume(
    datastore: Raw, volume: Raw, *, model: str, number: int, claim: str, owner: Raw
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the PersistentVolume and the PersistentVolumeClaim that show one version of a store.

    datastore: the store as the API server has it; volume: its PersistentVolume; claim: the claim's name. owner: the
    object for which they are made, in the store's namespace; Kubernetes deletes the claim with it, and its controller
    deletes the volume. Errors: Mistake when the store is another driver's volume.
    """
    metadata = owner["metadata"]
    namespace, uid = metadata["namespace"], metadata["uid"]
    name = volume_name(uid, number)
    marks = {
        "labels": {MANAGED_BY: MANAGER, OWNED_BY: uid},
        "annotations": {VERSION_OF: f"{namespace}/{model}:{number}"},
    }
    made = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, **marks},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "capacity": {"storage": NOMINAL_SIZE},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "volumeMode": "Filesystem",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim},
            **({"mountOptions": volume["spec"]["mountOptions"]} if volume["spec"].get("mountOptions") else {}),
            **_source(datastore, volume, name, model, number),
        },
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": claim,
            "namespace": namespace,
            **marks,
            "ownerReferences": [owner_reference(owner["kind"], metadata["name"], uid)],
        },
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": {"storage": NOMINAL_SIZE}},
            "storageClassName": "",
            "volumeMode": "Filesystem",
            "volumeName": name,
        },
    }
    return made, wanted


def volume_name(owner_uid: str, number: int) -> str:
    """Return the name of the PersistentVolume that shows a version and was made for the object with this uid."""
    return f"model-version-{owner_uid}-{number}"


def volume_spec(datastore: Raw, volume: Raw) -> dict[str, str]:
    """Return a volume's attributes with the settings of status.mount. Errors: Mistake for another driver's volume."""
    csi = volume["spec"].get("csi") or {}
    if csi.get("driver") != DRIVER:
        text = f"Datastore {datastore['metadata']['name']} is another driver's volume, which shows no single version"
        raise Mistake("StoreNotSupported", f"{text}; keep models in s3 or nfs", permanent=True)
    context: dict[str, str] = dict(csi.get("volumeAttributes") or {})
    settings = (datastore.get("status") or {}).get("mount")
    return with_settings(context, settings) if settings else context


def _source(datastore: Raw, volume: Raw, name: str, model: str, number: int) -> dict[str, Any]:
    if "hostPath" in volume["spec"]:
        given = volume["spec"]["hostPath"]
        return {"hostPath": {**given, "path": f"{given['path'].rstrip('/')}/{below_store(model, number)}"}}
    context = volume_spec(datastore, volume)
    spec = from_context(context)
    if isinstance(spec, Reference):
        raise InvalidManifest(f"the volume of Datastore {datastore['metadata']['name']} names another Datastore")
    export = source_from(json.loads(context[SOURCE])) if SOURCE in context else None
    if isinstance(export, NFSLocation):
        spec = spec.model_copy(update={"read_only": True, "attributes": "full", "write_back": None})
        export = replace(export, path=f"{export.path.rstrip('/')}/{below_store(model, number)}")
    else:
        spec = version_spec(spec, model, number)
    attributes = to_context(
        spec,
        memory=context.get(MEMORY, ""),
        source=export if isinstance(export, NFSLocation) else None,
        class_name=context.get(CLASS, ""),
    )
    secrets = {
        field: volume["spec"]["csi"][field]
        for field in ("nodePublishSecretRef", "nodeStageSecretRef")
        if field in volume["spec"]["csi"]
    }
    # The handle differs in form from a Datastore's, so that no node looks for the settings of a Datastore of that name.
    csi = {"driver": DRIVER, "volumeHandle": name, "readOnly": True, "volumeAttributes": attributes, **secrets}
    return {"csi": csi}
