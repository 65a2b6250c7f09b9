"""Makes the MountSpec of a mount from a Datastore, the Secrets beside it and a mount point. Pure: paths are given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from datastore.api.datastore import Datastore, DatastoreSpec
from datastore.api.explain import similar
from datastore.api.manifest import Manifest
from datastore.api.mountspec import DEFAULT_MEMORY_BYTES, MountSpec
from datastore.api.secretmanifest import SecretManifest, certificate_from, credentials_from, ssh_credentials_from
from datastore.api.source import GlusterFSLocation, LocalLocation, NFSLocation, S3Location, SFTPLocation, Source
from datastore.errors import InvalidManifest

Transport = Literal["kernel", "libfuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directories:
    """Where local state is kept. state_root: has a directory for each mount. cache_dir: used without spec.cache.dir."""

    state_root: str
    cache_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """What the caller chooses. read_only False: the manifest decides. uid, gid, umask: see MountSpec; for a bucket."""

    read_only: bool = False
    allow_other: bool = False
    transport: Transport = "kernel"
    metrics: str = ""
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The absolute paths of one mount. cache_dir: used without spec.cache.dir."""

    mountpoint: str
    state_dir: str
    cache_dir: str


def mount_spec(
    manifest: Manifest, datastore: Datastore, mountpoint: str, directories: Directories, options: MountOptions
) -> MountSpec:
    """Return the MountSpec for the mount server. mountpoint: an absolute path. Errors: InvalidManifest."""
    source = source_in(manifest, datastore)
    endpoint = f"{source.endpoint} " if isinstance(source, S3Location) else ""
    where = f"{endpoint}{datastore.location}"
    state_dir = PurePosixPath(directories.state_root, state_name(datastore.name, mountpoint, where))
    place = Place(mountpoint=mountpoint, state_dir=str(state_dir), cache_dir=directories.cache_dir)
    return assemble(datastore, source, place, options)


def assemble(datastore: Datastore, source: Source, place: Place, options: MountOptions) -> MountSpec:
    """Return the MountSpec of a mount on a laptop or in a cluster, with every default applied."""
    read_only = datastore.spec.read_only or options.read_only
    # --read-only also selects the defaults of a read-only Datastore, such as a longer metadataTTL.
    seen = datastore.model_copy(update={"spec": datastore.spec.model_copy(update={"read_only": read_only})})
    return MountSpec(
        name=datastore.name,
        mountpoint=place.mountpoint,
        source=source,
        state_dir=place.state_dir,
        cache_dir=datastore.spec.cache.dir or place.cache_dir,
        cache_size_bytes=datastore.spec.cache.size,
        read_only=read_only,
        capacity_bytes=datastore.spec.capacity or 0,
        attributes=seen.attributes,
        metadata_ttl_s=seen.metadata_ttl_s,
        conflict=datastore.spec.conflict,
        write_back_s=datastore.spec.write_back.max_delay if datastore.spec.write_back else 0.0,
        upload_limit_bytes=datastore.spec.upload_limit or 0,
        allow_other=options.allow_other,
        transport=options.transport,
        metrics=options.metrics,
        memory_bytes=options.memory_bytes,
        uid=options.uid,
        gid=options.gid,
        umask=options.umask,
    )


def source_in(manifest: Manifest, datastore: Datastore) -> Source:
    """Return where the data is, with the credentials of the Secret in the same file. Errors: InvalidManifest."""
    secret = _secret(manifest, datastore)
    try:
        return source_of(datastore.spec, secret)
    except InvalidManifest as error:
        field = f"spec.{datastore.spec.backend}"
        about = f"{field}.credentialsSecret: " if secret is not None else ""
        raise InvalidManifest(f"{_where(manifest, datastore)}: {about}{error}") from None


def source_of(spec: DatastoreSpec, secret: SecretManifest | None) -> Source:
    """Return where the data is. secret: what credentialsSecret names; None: the mount finds its own credentials.

    Errors: InvalidManifest for a value that the Secret lacks, an export that is not made yet, or storage for pods only.
    """
    if spec.s3:
        s3 = spec.s3
        return S3Location(
            bucket=s3.bucket,
            prefix=s3.prefix,
            endpoint=s3.endpoint,
            region=s3.region,
            force_path_style=s3.force_path_style,
            ca_bundle=s3.ca_bundle or (certificate_from(secret) if secret else ""),
            create=s3.create,
            credentials=credentials_from(secret) if secret else None,
        )
    if spec.nfs and spec.nfs.server and spec.nfs.path:
        return NFSLocation(server=spec.nfs.server, path=spec.nfs.path, options=spec.nfs.mount_options or ())
    if spec.sftp:
        return SFTPLocation(
            host=spec.sftp.host,
            path=spec.sftp.path,
            port=spec.sftp.port,
            known_hosts=spec.sftp.known_hosts or "",
            credentials=ssh_credentials_from(secret) if secret else None,
        )
    if spec.glusterfs:
        return GlusterFSLocation(servers=spec.glusterfs.servers, volume=spec.glusterfs.volume, path=spec.glusterfs.path)
    if spec.local:
        return LocalLocation(path=spec.local.path)
    if spec.nfs:
        raise InvalidManifest("spec.nfs: an export of its own is made in the cluster; here it needs server and path")
    raise InvalidManifest(f"spec.{spec.backend} is storage of a cluster: only pods can mount it")


def uses_own_credentials(manifest: Manifest, datastore: Datastore) -> bool:
    """Return whether credentialsSecret is set but the file has no Secret; then the user's own credentials are used."""
    return bool(datastore.spec.credentials_secret and not manifest.secrets)


def state_name(name: str, mountpoint: str, location: str) -> str:
    """Return the name of a mount's state directory, which is always the same for the same data and mount point.

    The name depends on the location, so that unsent changes never reach another bucket after the manifest was edited.
    """
    digest = hashlib.sha256(f"{mountpoint}\0{location}".encode(errors="surrogateescape")).hexdigest()
    return f"{name[:64]}-{digest[:16]}"


def _secret(manifest: Manifest, datastore: Datastore) -> SecretManifest | None:
    wanted = datastore.spec.credentials_secret
    if wanted is None or uses_own_credentials(manifest, datastore):
        return None
    beside = [each for each in manifest.secrets if each.namespace == datastore.metadata.namespace]
    for secret in beside:
        if secret.name == wanted:
            return secret
    near = similar(wanted, [each.name for each in beside])
    hint = f"did you mean {near}?" if near else f"add it in namespace {datastore.metadata.namespace}"
    field = f"{_where(manifest, datastore)}: spec.{datastore.spec.backend}.credentialsSecret"
    raise InvalidManifest(f"{field} names Secret {wanted}, which is not in this file; {hint}")


def _where(manifest: Manifest, datastore: Datastore) -> str:
    return f"{manifest.source} (Datastore {datastore.name})"
