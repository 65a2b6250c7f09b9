"""The contract between the controller, which writes PersistentVolumes, and the CSI driver, which mounts them. Pure.

See docs/decisions/0006-volume-context.md. The volumeAttributes of our volumes have the Datastore's spec, as it was when
the volume was made, as one JSON text: all that a mount needs except secrets. The CSI request has the secrets, from the
Secret that the PersistentVolume names. The present settings are in the Datastore's `status.mount`, in the same form. An
inline volume names a Datastore of the pod's namespace, or has the fields of spec.s3 one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import ValidationError

from datastore.api.datastore import API_VERSION, BACKENDS, KIND, Datastore, DatastoreSpec
from datastore.api.endpoints import EndpointPolicy
from datastore.api.explain import explain
from datastore.api.fields import DNS_NAME_PATTERN, matches
from datastore.api.mountspec import DEFAULT_MEMORY_BYTES, LEAST_MEMORY_BYTES, MountSpec
from datastore.api.resolve import MountOptions, Place, assemble, source_of
from datastore.api.secretmanifest import SecretManifest
from datastore.api.source import NFSLocation, S3Location, document_of, source_from
from datastore.errors import InvalidManifest
from datastore.secret import Secret
from datastore.units import format_duration, format_quantity, parse_quantity

DRIVER = "csi.datastore.dev"
SPEC = "datastore.dev/spec"
MEMORY = "datastore.dev/memory"
"""The ceiling of the mount server's memory that the StorageClass chose, e.g. 1Gi."""
SOURCE = "datastore.dev/source"
"""The NFS export that was made for a Datastore with `nfs: {}`, as JSON of its NFSLocation (api/source.py)."""
CLASS = "datastore.dev/class"
"""The StorageClass in which an administrator chose server and bucket; no EndpointPolicy applies to its volumes."""
ADMINISTRATORS = (MEMORY, SOURCE, CLASS)
"""Attributes of PersistentVolumes, which only administrators make; they are refused in a pod's inline volume."""
REFERENCE = "datastore"
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
CACHE_SIZE = "cacheSize"

_KUBELET = "csi.storage.k8s.io/"
_NOT_FOR_MOUNTS = frozenset({"reclaimPolicy", "storageClassName"})
_NOT_FOR_BACKENDS = frozenset({"create", "credentialsSecret"})
_IDENTITY = {
    "s3": frozenset({"bucket", "prefix", "endpoint"}),
    "nfs": frozenset({"server", "path"}),
    "sftp": frozenset({"host", "path", "port"}),
    "glusterfs": frozenset({"volume", "path"}),
}
"""The backends that the driver mounts, and those of their fields that locate the data, which never change."""
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeHandle:
    """The handle of a Datastore's volume: `<namespace>/<name>/<uid>`, unique in a cluster and over time."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}/{self.uid}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a handle. Errors: InvalidManifest for one of another form, such as an inline volume's `csi-<hash>`."""
        parts = text.split("/")
        if len(parts) != 3 or not all(parts):
            raise InvalidManifest(f"volume handle {text!r} is not NAMESPACE/NAME/UID of a Datastore")
        return cls(namespace=parts[0], name=parts[1], uid=parts[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An inline volume that names a Datastore of the pod's own namespace."""

    name: str


def settings_of(spec: DatastoreSpec) -> dict[str, Any]:
    """Return what a mount needs of a spec, as JSON types, for SPEC and `status.mount.spec`; equal for equal specs."""
    document = spec.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
    settings = {name: value for name, value in document.items() if name not in _NOT_FOR_MOUNTS}
    for backend in _IDENTITY.keys() & settings.keys():
        given = settings[backend]
        settings[backend] = {name: value for name, value in given.items() if name not in _NOT_FOR_BACKENDS}
    if "metadataTTL" in settings:
        settings["metadataTTL"] = format_duration(settings["metadataTTL"])
    settings.pop("cache", None)
    if spec.cache.size != DatastoreSpec.model_fields["cache"].get_default(call_default_factory=True).size:
        settings["cache"] = {"size": spec.cache.size}
    return settings


def to_context(
    spec: DatastoreSpec, *, memory: str = "", source: NFSLocation | None = None, class_name: str = ""
) -> dict[str, str]:
    """Return the volumeAttributes of a PersistentVolume: the spec and, if any, MEMORY, SOURCE and CLASS."""
    context = {SPEC: _json(settings_of(spec))}
    if class_name:
        context[CLASS] = class_name
    if memory:
        context[MEMORY] = memory
    if source is not None:
        context[SOURCE] = _json(document_of(source))
    return context


def identity_of(context: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a volume's context that the controller wrote when the volume was made; it never changes."""
    return {name: context[name] for name in (SPEC, *ADMINISTRATORS) if name in context}


def with_settings(context: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a volume's context with the settings in its Datastore's `status.mount`: {"spec": ..., "memory": ...}.

    The location of the data stays the volume's own, so that data written to the volume never reaches another place.
    Errors: InvalidManifest when the settings are of another backend, or have another form.
    """
    own, spec, memory = _document(context.get(SPEC, "")), settings.get("spec"), settings.get("memory")
    backend = next(iter(_IDENTITY.keys() & own.keys()), "")
    if not backend or not isinstance(spec, Mapping) or not isinstance(spec.get(backend), Mapping):
        raise InvalidManifest(f"status.mount of the Datastore is not one of a volume with spec.{backend or '?'}")
    fixed = _IDENTITY[backend]
    place = {name: value for name, value in own[backend].items() if name in fixed}
    shown = {name: value for name, value in spec[backend].items() if name not in fixed}
    rest = {name: text for name, text in context.items() if name != MEMORY}
    chosen = {MEMORY: str(memory)} if memory else {}
    return {**rest, **chosen, SPEC: _json({**spec, backend: {**shown, **place}})}


def from_context(context: Mapping[str, str]) -> DatastoreSpec | Reference:
    """Return what a volume's volumeAttributes describe. Errors: InvalidManifest, which names the field.

    Attributes of the kubelet (csi.storage.k8s.io/...) and ADMINISTRATORS are left out. cache.dir and backends that this
    driver does not mount are refused, so that the author of a pod can't choose a directory of the node.
    """
    given = {
        name: value for name, value in context.items() if not name.startswith(_KUBELET) and name not in ADMINISTRATORS
    }
    if REFERENCE in given:
        if len(given) > 1:
            raise InvalidManifest(f"volumeAttributes has {REFERENCE}, so it can have nothing else")
        name = given[REFERENCE]
        if not matches(DNS_NAME_PATTERN, name) or len(name) > 253:
            raise InvalidManifest(f"volumeAttributes.{REFERENCE}: {name[:64]!r} is no name of a Datastore")
        return Reference(name=name)
    spec = _parsed(_document(given[SPEC]) if SPEC in given else _spread(given))
    if spec.backend not in _IDENTITY:
        raise InvalidManifest(f"spec.{spec.backend} is not mounted by {DRIVER}")
    if spec.cache.dir is not None:
        raise InvalidManifest("spec.cache.dir is for laptops; in a cluster the administrator chooses it")
    return spec


def memory_of(text: str) -> int:
    """Return the ceiling of a mount server's memory that an administrator chose, in bytes. Errors: InvalidManifest."""
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
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    policy: EndpointPolicy | None = None,
) -> MountSpec:
    """Return the MountSpec of a volume. context, secrets: of the CSI request; a Reference has been looked up before.

    read_only: whether the pod or the access mode demands it; the spec may demand it too. memory_bytes, policy: used if
    the context has no MEMORY, or no CLASS. Without secrets the node's own identity is used, which an administrator may
    choose for a PersistentVolume, but is refused for an inline volume. Errors: InvalidManifest.
    """
    spec = from_context(context)
    if isinstance(spec, Reference):
        raise InvalidManifest(f"Datastore {spec.name} has not been looked up")
    if context.get(EPHEMERAL) == "true" and not secrets and (spec.s3 or spec.sftp):
        raise InvalidManifest("an inline volume needs nodePublishSecretRef, a Secret with the keys of its storage")
    if MEMORY in context:
        memory_bytes = memory_of(context[MEMORY])
    options = MountOptions(read_only=read_only, allow_other=True, memory_bytes=memory_bytes)
    values = {key: Secret(value) for key, value in secrets.items()}
    secret = SecretManifest(name="of the volume", namespace="", values=values) if secrets else None
    source = _export(spec, context[SOURCE]) if SOURCE in context else source_of(spec, secret)
    if isinstance(source, S3Location) and CLASS not in context:
        source = replace(source, policy=policy)
    return assemble(_datastore(name, spec), source, place, options)


def _export(spec: DatastoreSpec, text: str) -> NFSLocation:
    try:
        source = source_from(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidManifest(f"volumeAttributes[{SOURCE!r}] is no source of a mount: {error}") from None
    if not isinstance(source, NFSLocation) or spec.nfs is None:
        raise InvalidManifest(f"volumeAttributes[{SOURCE!r}] is only for an NFS export of a spec with nfs")
    return source


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidManifest(f"volumeAttributes[{SPEC!r}] is not a JSON object")
    return document


def _spread(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec of an inline volume, whose attributes are fields of spec.s3 and of spec, and cacheSize."""
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
        # `from None`: pydantic's text holds the input.
        raise InvalidManifest(explain(error, Datastore)) from None


def _datastore(name: str, spec: object) -> Datastore:
    return Datastore.model_validate({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})
