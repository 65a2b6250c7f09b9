"""The contract between the controller, which writes PersistentVolumes, and the CSI driver, which mounts them. Pure.

docs/decisions/0006-volume-context.md. A volume of ours carries its manifest's spec as one JSON text in
volumeAttributes: everything a mount needs except secrets, which come as the CSI request's own `secrets`, from the
Secret that the PersistentVolume names. An inline volume names a Datastore of the pod's namespace, or has the fields
one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from datastore.api.datastore import API_VERSION, BACKENDS, KIND, S3, Datastore, DatastoreSpec
from datastore.api.explain import explain
from datastore.api.mountspec import LEAST_MEMORY_BYTES, MountSpec, StaticCredentials
from datastore.api.resolve import MountOptions, Place, assemble, location_in
from datastore.api.secretmanifest import SecretManifest, certificate_from, credentials_from
from datastore.errors import InvalidManifest
from datastore.secret import Secret
from datastore.units import format_duration, format_quantity, parse_quantity

DRIVER = "csi.datastore.dev"
SPEC = "datastore.dev/spec"
MEMORY = "datastore.dev/memory"
REFERENCE = "datastore"
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
CACHE_SIZE = "cacheSize"

_KUBELET = "csi.storage.k8s.io/"
_NOT_FOR_MOUNTS = frozenset({"reclaimPolicy", "storageClassName"})
_NOT_FOR_S3 = frozenset({"create", "credentialsSecret"})
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeHandle:
    """Which Datastore a volume is of: `<namespace>/<name>/<uid>`, unique in a cluster and over time."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}/{self.uid}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Errors: InvalidManifest for a handle that is not ours (an inline volume's `csi-<hash>`, say)."""
        parts = text.split("/")
        if len(parts) != 3 or not all(parts):
            raise InvalidManifest(f"volume handle {text!r} is not NAMESPACE/NAME/UID of a Datastore")
        return cls(namespace=parts[0], name=parts[1], uid=parts[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An inline volume that names a Datastore of the pod's own namespace."""

    name: str


def to_context(spec: DatastoreSpec) -> dict[str, str]:
    """volumeAttributes of a PersistentVolume; the same text for the same spec. Only what a mount needs."""
    document = spec.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
    kept = {name: value for name, value in document.items() if name not in _NOT_FOR_MOUNTS}
    if "s3" in kept:
        kept["s3"] = {name: value for name, value in kept["s3"].items() if name not in _NOT_FOR_S3}
    if "metadataTTL" in kept:
        kept["metadataTTL"] = format_duration(kept["metadataTTL"])
    kept.pop("cache", None)
    if spec.cache.size != DatastoreSpec.model_fields["cache"].get_default(call_default_factory=True).size:
        kept["cache"] = {"size": spec.cache.size}
    return {SPEC: json.dumps(kept, sort_keys=True, separators=(",", ":"))}


def from_context(context: Mapping[str, str]) -> DatastoreSpec | Reference:
    """What a volume is, from its volumeAttributes. Errors: InvalidManifest, naming the field; never a host path.

    What the kubelet adds (csi.storage.k8s.io/...) is left out. cache.dir and backends that are no volume of this
    driver are refused: whoever writes a pod chooses no directory of the node.
    """
    given = {name: value for name, value in context.items() if not name.startswith(_KUBELET) and name != MEMORY}
    if REFERENCE in given:
        if len(given) > 1:
            raise InvalidManifest(f"volumeAttributes has {REFERENCE}, so it can have nothing else")
        return Reference(name=given[REFERENCE])
    spec = _parsed(_document(given[SPEC]) if SPEC in given else _spread(given))
    if spec.s3 is None:
        raise InvalidManifest(f"spec.{spec.backend} is not mounted by {DRIVER}; only s3 is")
    if spec.cache.dir is not None:
        raise InvalidManifest("spec.cache.dir is for laptops; in a cluster the administrator chooses it")
    return spec


def memory_of(text: str) -> int:
    """The ceiling of one mount server's memory that an administrator chose, bytes. Errors: InvalidManifest."""
    try:
        size_bytes = parse_quantity(text)
    except ValueError as error:
        raise InvalidManifest(f"memory {error}") from None
    if size_bytes < LEAST_MEMORY_BYTES:
        raise InvalidManifest(f"memory must be at least {format_quantity(LEAST_MEMORY_BYTES)}, not {text}")
    return size_bytes


def mount_spec(
    name: str,
    context: Mapping[str, str],
    secrets: Mapping[str, str],
    place: Place,
    *,
    read_only: bool = False,
    memory_bytes: int = 512 << 20,
) -> MountSpec:
    """The contract of one mount. `context` and `secrets` as in the CSI request; see from_context for a Reference.

    read_only: as the pod or the access mode says; it only tightens. memory_bytes: where the volume has no MEMORY of its
    own. Without secrets the node's own identity is asked, which is the administrator's choice for a PersistentVolume
    and refused for an inline one. Errors: InvalidManifest.
    """
    spec = from_context(context)
    if isinstance(spec, Reference):
        raise InvalidManifest(f"Datastore {spec.name} has not been looked up")
    if not secrets and context.get(EPHEMERAL) == "true":
        raise InvalidManifest("an inline volume needs nodePublishSecretRef, a Secret with the keys of its bucket")
    if MEMORY in context:
        memory_bytes = memory_of(context[MEMORY])
    options = MountOptions(read_only=read_only, allow_other=True, memory_bytes=memory_bytes)
    return assemble(_datastore(name, spec), location_in(*_keyed(spec, secrets)), place, options)


def _keyed(spec: DatastoreSpec, secrets: Mapping[str, str]) -> tuple[S3, StaticCredentials | None]:
    assert spec.s3 is not None, "from_context lets nothing else through"
    if not secrets:
        return spec.s3, None
    secret = SecretManifest(
        name="of the volume", namespace="", values={key: Secret(value) for key, value in secrets.items()}
    )
    s3 = spec.s3 if spec.s3.ca_bundle else spec.s3.model_copy(update={"ca_bundle": certificate_from(secret)})
    return s3, credentials_from(secret)


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidManifest(f"volumeAttributes[{SPEC!r}] is not a JSON object")
    return document


def _spread(given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an inline volume, one by one: those of spec.s3 and of spec have their names, and cacheSize."""
    whole = {field.alias or name for name, field in DatastoreSpec.model_fields.items()} - set(BACKENDS)
    document: dict[str, Any] = {"s3": {}}
    for name, text in given.items():
        value = _TRUTH.get(text, text)
        if name == CACHE_SIZE:
            document["cache"] = {"size": value}
        elif name in whole:
            document[name] = value
        else:
            document["s3"][name] = value
    return document


def _parsed(document: Mapping[str, Any]) -> DatastoreSpec:
    try:
        return _datastore("volume", document).spec
    except ValidationError as error:
        # No `from`: pydantic's text holds the input.
        raise InvalidManifest(explain(error, Datastore)) from None


def _datastore(name: str, spec: object) -> Datastore:
    return Datastore.model_validate({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})
