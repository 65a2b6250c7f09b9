"""From a Datastore, the Secrets beside it and a mount point to the MountSpec of one mount. Pure: paths are given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from datastore.api.datastore import S3, Datastore
from datastore.api.explain import similar
from datastore.api.manifest import Manifest
from datastore.api.mountspec import MountSpec, S3Location, StaticCredentials
from datastore.api.secretmanifest import credentials_from
from datastore.errors import InvalidManifest

Transport = Literal["kernel", "libfuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directories:
    """Where local state lives: state_root gets one directory a mount; spec.cache.dir goes before cache_dir."""

    state_root: str
    cache_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """What the person who mounts chooses; read_only can only tighten what the manifest says."""

    read_only: bool = False
    allow_other: bool = False
    transport: Transport = "kernel"
    metrics: str = ""
    memory_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one mount is and keeps its state; absolute paths. spec.cache.dir goes before cache_dir."""

    mountpoint: str
    state_dir: str
    cache_dir: str


def mount_spec(
    manifest: Manifest, datastore: Datastore, mountpoint: str, directories: Directories, options: MountOptions
) -> MountSpec:
    """The whole contract for the mount server; `mountpoint` is absolute. Errors: InvalidManifest."""
    location = s3_location(manifest, datastore)
    where = f"{location.endpoint} {datastore.location}"
    state_dir = PurePosixPath(directories.state_root, state_name(datastore.name, mountpoint, where))
    place = Place(mountpoint=mountpoint, state_dir=str(state_dir), cache_dir=directories.cache_dir)
    return assemble(datastore, location, place, options)


def assemble(datastore: Datastore, location: S3Location, place: Place, options: MountOptions) -> MountSpec:
    """The contract of one mount from its parts, every default applied; laptop and cluster alike."""
    read_only = datastore.spec.read_only or options.read_only
    # --read-only changes the defaults too: what is never written here can be seen a little later.
    seen = datastore.model_copy(update={"spec": datastore.spec.model_copy(update={"read_only": read_only})})
    return MountSpec(
        name=datastore.name,
        mountpoint=place.mountpoint,
        s3=location,
        state_dir=place.state_dir,
        cache_dir=datastore.spec.cache.dir or place.cache_dir,
        cache_size_bytes=datastore.spec.cache.size,
        read_only=read_only,
        capacity_bytes=datastore.spec.capacity or 0,
        attributes=seen.attributes,
        metadata_ttl_s=seen.metadata_ttl_s,
        conflict=datastore.spec.conflict,
        write_back_s=datastore.spec.write_back.max_delay if datastore.spec.write_back else 0.0,
        allow_other=options.allow_other,
        transport=options.transport,
        metrics=options.metrics,
        memory_bytes=options.memory_bytes,
    )


def s3_location(manifest: Manifest, datastore: Datastore) -> S3Location:
    """Where the objects are, with the keys of the Secret. Errors: InvalidManifest, also for other backends."""
    s3 = datastore.spec.s3
    if s3 is None:
        raise InvalidManifest(
            f"{_where(manifest, datastore)}: spec.{datastore.spec.backend} is mounted in the cluster only for now; "
            "on a laptop spec.s3 and spec.local work"
        )
    return location_in(s3, _credentials(manifest, datastore, s3))


def location_in(s3: S3, credentials: StaticCredentials | None) -> S3Location:
    """Where the objects are, with these keys; None asks the default AWS chain."""
    return S3Location(
        bucket=s3.bucket,
        prefix=s3.prefix,
        endpoint=s3.endpoint,
        region=s3.region,
        force_path_style=s3.force_path_style,
        ca_bundle=s3.ca_bundle,
        create=s3.create,
        credentials=credentials,
    )


def uses_default_chain(manifest: Manifest, datastore: Datastore) -> bool:
    """Whether credentialsSecret is set, but the file holds no Secret at all and the default AWS chain is asked."""
    return bool(datastore.spec.s3 and datastore.spec.s3.credentials_secret and not manifest.secrets)


def state_name(name: str, mountpoint: str, location: str) -> str:
    """Name of a mount's state directory: stable for the same data at the same place.

    The location is part of it, so that unsent changes can never reach another bucket after the manifest was edited.
    """
    digest = hashlib.sha256(f"{mountpoint}\0{location}".encode(errors="surrogateescape")).hexdigest()
    return f"{name[:64]}-{digest[:16]}"


def _credentials(manifest: Manifest, datastore: Datastore, s3: S3) -> StaticCredentials | None:
    wanted = s3.credentials_secret
    if wanted is None or uses_default_chain(manifest, datastore):
        return None
    names = [each.name for each in manifest.secrets if each.namespace == datastore.metadata.namespace]
    for secret in manifest.secrets:
        if secret.name == wanted and secret.namespace == datastore.metadata.namespace:
            try:
                return credentials_from(secret)
            except InvalidManifest as error:
                raise InvalidManifest(f"{_where(manifest, datastore)}: spec.s3.credentialsSecret: {error}") from None
    near = similar(wanted, names)
    hint = f"did you mean {near}?" if near else f"add it in namespace {datastore.metadata.namespace}"
    field = f"{_where(manifest, datastore)}: spec.s3.credentialsSecret"
    raise InvalidManifest(f"{field} names Secret {wanted}, which is not in this file; {hint}")


def _where(manifest: Manifest, datastore: Datastore) -> str:
    return f"{manifest.source} (Datastore {datastore.name})"
