"""Converts CSI requests to the driver's own types and checks every field; no later code sees a CSI message. Pure.

Source: the CSI specification, "Node Service RPC" and "VolumeCapability". Errors of all functions, unless stated
otherwise: InvalidManifest (INVALID_ARGUMENT).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from datastore.api import volumecontext
from datastore.api.endpoints import AWS, EndpointPolicy
from datastore.api.mountspec import MountSpec
from datastore.api.resolve import Place
from datastore.api.source import NFSLocation
from datastore.errors import InvalidManifest
from datastore.units import parse_umask

from .errors import Refused
from .settings import Settings
from .spec.csi_pb2 import (
    NodePublishVolumeRequest,
    NodeStageVolumeRequest,
    VolumeCapability,
)

MODES = VolumeCapability.AccessMode
READ_ONLY_MODES = frozenset({MODES.SINGLE_NODE_READER_ONLY, MODES.MULTI_NODE_READER_ONLY})
POD_NAMESPACE = "csi.storage.k8s.io/pod.namespace"
_NUMBERS = ("uid=", "gid=", "umask=")
_NAME_LIMIT = 63
_UNNAMEABLE = re.compile("[^a-z0-9-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a volume is to be mounted. uid, gid, umask: mount options; options: all others; group: the pod's fsGroup."""

    read_only: bool = False
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    group: int | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request to stage or publish a volume. secrets: never to be logged."""

    volume_id: str
    context: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    access: Access
    staging_path: str = ""
    target_path: str = ""
    read_only: bool = False

    @property
    def ephemeral(self) -> bool:
        """Whether it is an inline volume of a pod."""
        return self.context.get(volumecontext.EPHEMERAL) == "true"


def stage(request: NodeStageVolumeRequest) -> Wanted:
    """Parse a NodeStageVolume request."""
    return Wanted(
        volume_id=needed("volume_id", request.volume_id),
        staging_path=path("staging_target_path", request.staging_target_path),
        context=dict(request.volume_context),
        secrets=dict(request.secrets),
        access=access([_present(request)]),
    )


def publish(request: NodePublishVolumeRequest) -> Wanted:
    """Parse a NodePublishVolume request. An inline volume has no staging path; `readonly` counts for it, not its access
    mode, and attributes that only an administrator may set are refused."""
    wanted = Wanted(
        volume_id=needed("volume_id", request.volume_id),
        target_path=path("target_path", request.target_path),
        context=dict(request.volume_context),
        secrets=dict(request.secrets),
        access=access([_present(request)]),
        read_only=request.readonly,
    )
    if wanted.ephemeral:
        for ours in volumecontext.ADMINISTRATORS:
            if ours in wanted.context:
                raise InvalidManifest(f"volumeAttributes: {ours} is the administrator's, in a PersistentVolume")
        return replace(wanted, access=replace(wanted.access, read_only=request.readonly))
    staging = needed("staging_target_path", request.staging_target_path)
    return replace(wanted, staging_path=path("staging_target_path", staging))


def _present(request: NodeStageVolumeRequest | NodePublishVolumeRequest) -> VolumeCapability:
    if not request.HasField("volume_capability"):
        raise InvalidManifest("volume_capability is missing")
    return request.volume_capability


def access(capabilities: Iterable[VolumeCapability]) -> Access:
    """Return what all capabilities ask for: read-only if each is so, all else of the last. At least one is needed."""
    found: Access | None = None
    for capability in capabilities:
        if capability.WhichOneof("access_type") != "mount":
            raise InvalidManifest("volume_capability has to be of type mount: a Datastore is a directory, not a disk")
        if capability.access_mode.mode == MODES.UNKNOWN:
            raise InvalidManifest("volume_capability has no access mode")
        read_only = capability.access_mode.mode in READ_ONLY_MODES
        found = Access(
            read_only=read_only and (found is None or found.read_only),
            group=_group(capability.mount.volume_mount_group),
            options=_others(capability.mount.mount_flags),
            **_numbers(capability.mount.mount_flags),
        )
    if found is None:
        raise InvalidManifest("volume_capabilities are missing")
    return found


def access_of_bucket(capabilities: Iterable[VolumeCapability]) -> Access:
    """Do the same as access() for a volume of a bucket; mount options other than ours are refused."""
    found = access(capabilities)
    _check_options(found)
    return found


def needed(name: str, text: str) -> str:
    """Return a field that must not be empty."""
    if not text:
        raise InvalidManifest(f"{name} is missing")
    return text


def path(name: str, text: str) -> str:
    """Return an absolute path in normal form, as mountinfo spells it; `..` is refused."""
    needed(name, text)
    if not text.startswith("/") or ".." in Path(text).parts:
        raise InvalidManifest(f"{name} is not an absolute path: {text!r}")
    return str(Path(text))


def name_of(volume_id: str) -> str:
    """Return a readable name for a volume, for messages and the mount table: its Datastore's, else one from its id."""
    try:
        return volumecontext.VolumeHandle.parse(volume_id).name
    except InvalidManifest:
        return f"v{_UNNAMEABLE.sub('-', volume_id.lower())}"[:_NAME_LIMIT].rstrip("-")


def key_of(volume_id: str) -> str:
    """Return the name of a volume's directories on the node; it is short and safe for any id."""
    return hashlib.sha256(volume_id.encode()).hexdigest()[:32]


def mount_spec(wanted: Wanted, mountpoint: str, settings: Settings) -> MountSpec:
    """Return the specification of a volume's mount on this node."""
    place = Place(
        mountpoint=mountpoint,
        state_dir=str(settings.state_root / key_of(wanted.volume_id)),
        cache_dir=str(settings.cache_dir / key_of(wanted.volume_id)),
    )
    access = wanted.access
    spec = volumecontext.mount_spec(
        name_of(wanted.volume_id),
        wanted.context,
        wanted.secrets,
        place,
        read_only=access.read_only,
        memory_bytes=settings.memory_bytes,
        policy=settings.policy,
    )
    source = spec.source
    if isinstance(source, NFSLocation):
        if (access.uid, access.gid, access.umask) != (None, None, None):
            raise InvalidManifest("mount options uid=, gid= and umask= are not for NFS: its server says who owns what")
        # The PersistentVolume's mountOptions, which any NFS volume may have, come after the export's options.
        spec = replace(spec, source=replace(source, options=(*source.options, *access.options)))
    else:
        _check_options(access)
    return replace(
        spec,
        cache_size_bytes=min(spec.cache_size_bytes, settings.cache_volume_bytes),
        uid=access.uid,
        gid=access.gid,
        umask=access.umask,
        group=access.group,
    )


def check_endpoint(wanted: Wanted, policy: EndpointPolicy) -> None:
    """Check the endpoint of an inline volume, because the pod's author chooses to which server this node connects.

    Errors: Refused when the administrator does not allow the endpoint; InvalidManifest for a volume of no bucket.
    """
    spec = volumecontext.from_context(wanted.context)
    if isinstance(spec, volumecontext.Reference) or spec.s3 is None:
        raise InvalidManifest(
            "an inline volume is a bucket's, or names a Datastore (volumeAttributes: {datastore: NAME})"
        )
    chosen = spec.s3.endpoint
    if not policy.allows(chosen):
        raise Refused(f"volumeAttributes: the administrator does not allow {chosen or AWS} (ALLOW_ENDPOINTS)")


def _check_options(access: Access) -> None:
    if access.options:
        raise InvalidManifest(f"mount option {access.options[0]!r} is unknown; there are uid=, gid= and umask=")


def _group(text: str) -> int | None:
    return _number("volume_mount_group", text) if text else None


def _numbers(flags: Iterable[str]) -> dict[str, int]:
    """Return uid, gid and umask from a PersistentVolume's mountOptions."""
    found: dict[str, int] = {}
    for name, text in (each.split("=", 1) for each in _each(flags) if "=" in each):
        if name in {"uid", "gid"}:
            found[name] = _number(f"mount option {name}", text)
        elif name == "umask":
            found[name] = _umask(text)
    return found


def _others(flags: Iterable[str]) -> tuple[str, ...]:
    """Return all other mount options but ro and rw, for which CSI has fields of its own."""
    return tuple(each for each in _each(flags) if each not in {"ro", "rw"} and not each.startswith(_NUMBERS))


def _each(flags: Iterable[str]) -> Iterator[str]:
    return (each for text in flags for each in text.split(",") if each)


def _number(what: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 32:
        raise InvalidManifest(f"{what} has to be a number: {text!r}")
    return int(text)


def _umask(text: str) -> int:
    try:
        return parse_umask(text)
    except ValueError as error:
        raise InvalidManifest(f"mount option umask {error}") from None
