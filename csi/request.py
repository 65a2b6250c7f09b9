"""From CSI requests to what we work with: every field is checked here, nothing later looks at a message. Pure.

Source: the CSI specification, "Node Service RPC" and "VolumeCapability". Errors: InvalidManifest (INVALID_ARGUMENT)
unless said otherwise.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from datastore.api import endpoints, volumecontext
from datastore.api.mountspec import MountSpec
from datastore.api.resolve import Place
from datastore.errors import InvalidManifest

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
_NAME_LIMIT = 63
_MAX_UMASK = 0o777
_UNNAMEABLE = re.compile("[^a-z0-9-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a volume is wanted. uid, gid, umask: mount options; group: the pod's fsGroup."""

    read_only: bool = False
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A volume to be staged or published. secrets are never shown."""

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
    """NodeStageVolume."""
    return Wanted(
        volume_id=needed("volume_id", request.volume_id),
        staging_path=path("staging_target_path", request.staging_target_path),
        context=dict(request.volume_context),
        secrets=dict(request.secrets),
        access=access([_present(request)]),
    )


def publish(request: NodePublishVolumeRequest) -> Wanted:
    """NodePublishVolume; an inline volume has no staging path, and is refused one access mode that it may have."""
    wanted = Wanted(
        volume_id=needed("volume_id", request.volume_id),
        target_path=path("target_path", request.target_path),
        context=dict(request.volume_context),
        secrets=dict(request.secrets),
        access=access([_present(request)]),
        read_only=request.readonly,
    )
    if wanted.ephemeral:
        if volumecontext.MEMORY in wanted.context:
            raise InvalidManifest(f"volumeAttributes: {volumecontext.MEMORY} is the administrator's, in a StorageClass")
        return replace(wanted, access=replace(wanted.access, read_only=request.readonly))
    staging = needed("staging_target_path", request.staging_target_path)
    return replace(wanted, staging_path=path("staging_target_path", staging))


def _present(request: NodeStageVolumeRequest | NodePublishVolumeRequest) -> VolumeCapability:
    if not request.HasField("volume_capability"):
        raise InvalidManifest("volume_capability is missing")
    return request.volume_capability


def access(capabilities: Iterable[VolumeCapability]) -> Access:
    """What the capabilities, of which there is at least one, ask for together."""
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
            **_flags(capability.mount.mount_flags),
        )
    if found is None:
        raise InvalidManifest("volume_capabilities are missing")
    return found


def needed(name: str, text: str) -> str:
    """A field that has to be there."""
    if not text:
        raise InvalidManifest(f"{name} is missing")
    return text


def path(name: str, text: str) -> str:
    """An absolute path without detours, as mountinfo spells it."""
    needed(name, text)
    if not text.startswith("/") or ".." in Path(text).parts:
        raise InvalidManifest(f"{name} is not an absolute path: {text!r}")
    return str(Path(text))


def name_of(volume_id: str) -> str:
    """A Datastore's name for people and for the mount table, of any volume id."""
    try:
        return volumecontext.VolumeHandle.parse(volume_id).name
    except InvalidManifest:
        return f"v{_UNNAMEABLE.sub('-', volume_id.lower())}"[:_NAME_LIMIT].rstrip("-")


def key_of(volume_id: str) -> str:
    """A volume's directory name on the node: short, and safe whatever the id is."""
    return hashlib.sha256(volume_id.encode()).hexdigest()[:32]


def mount_spec(wanted: Wanted, mountpoint: str, settings: Settings) -> MountSpec:
    """The contract of the volume's mount on this node."""
    place = Place(
        mountpoint=mountpoint,
        state_dir=str(settings.state_root / key_of(wanted.volume_id)),
        cache_dir=str(settings.cache_dir),
    )
    access = wanted.access
    spec = volumecontext.mount_spec(
        name_of(wanted.volume_id),
        wanted.context,
        wanted.secrets,
        place,
        read_only=access.read_only,
        memory_bytes=settings.memory_bytes,
    )
    return replace(spec, uid=access.uid, gid=access.gid, umask=access.umask, group=access.group)


def check_endpoint(wanted: Wanted, patterns: Sequence[str]) -> None:
    """Whoever writes a pod with an inline volume chooses whom this node asks. patterns: Settings.endpoints.

    Errors: Refused where the administrator does not allow that.
    """
    spec = volumecontext.from_context(wanted.context)
    chosen = "" if isinstance(spec, volumecontext.Reference) or spec.s3 is None else spec.s3.endpoint
    if not endpoints.allowed(chosen, patterns):
        shown = chosen or endpoints.AWS
        raise Refused(
            f"volumeAttributes: the administrator does not allow the endpoint {shown} ({endpoints.ENVIRONMENT})"
        )


def _group(text: str) -> int | None:
    return _number("volume_mount_group", text) if text else None


def _flags(flags: Iterable[str]) -> dict[str, int]:
    """uid, gid and umask of a PersistentVolume's mountOptions; ro and rw are said by other fields."""
    found: dict[str, int] = {}
    for flag in (each for text in flags for each in text.split(",") if each):
        name, equals, text = flag.partition("=")
        if name in {"uid", "gid"} and equals:
            found[name] = _number(f"mount option {name}", text)
        elif name == "umask" and equals:
            found[name] = _octal(text)
        elif flag not in {"ro", "rw"}:
            raise InvalidManifest(f"mount option {flag!r} is unknown; there are uid=, gid= and umask=")
    return found


def _number(what: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 32:
        raise InvalidManifest(f"{what} has to be a number: {text!r}")
    return int(text)


def _octal(text: str) -> int:
    try:
        number = int(text, 8)
    except ValueError:
        number = -1
    if not 0 <= number <= _MAX_UMASK:
        raise InvalidManifest(f"mount option umask has to be octal, as 022: {text!r}")
    return number
