"""Plain mappings that are objects of the cluster: their conditions, owners and times, pods and their claims. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from datastore.api.datastore import API_VERSION

Raw = Mapping[str, Any]

CONFINED: Raw = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""The securityContext of the containers that the controller makes: no rights, and writes to volumes only."""


def condition(body: Raw, kind: str) -> Raw:
    """Return the condition of this type in an object's status; {} without one."""
    found = (body.get("status") or {}).get("conditions") or []
    return next((each for each in found if each.get("type") == kind), {})


def is_true(body: Raw, kind: str) -> bool:
    """Return whether an object's condition of this type is True."""
    return bool(condition(body, kind).get("status") == "True")


def owner_reference(
    kind: str, name: str, uid: str, *, api_version: str = API_VERSION, controller: bool = True
) -> dict[str, Any]:
    """Return the owner reference with which Kubernetes deletes an object together with its owner."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        **({"controller": True} if controller else {}),
        "blockOwnerDeletion": False,  # True would need the right to update the owner's finalizers
    }


def is_owned(body: Raw, uid: str) -> bool:
    """Return whether the owner with this uid is one of an object's owners."""
    return any(each.get("uid") == uid for each in body["metadata"].get("ownerReferences") or [])


def claims_of(pod: Raw) -> frozenset[str]:
    """Return the names of the claims that a pod uses; a pod that has ended uses none."""
    claims = (each["persistentVolumeClaim"] for each in volumes_of(pod) if "persistentVolumeClaim" in each)
    return frozenset(each["claimName"] for each in claims)


def volumes_of(pod: Raw) -> list[Raw]:
    """Return the volumes that a pod uses; a pod that has ended uses none."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return []
    return pod.get("spec", {}).get("volumes") or []


def timestamp(time: datetime | None = None) -> str:
    """Return a time, by default now, in the format of the API server."""
    return (time or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
