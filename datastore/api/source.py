"""Where the data of a mount is: one class for each kind of source, with all that a mount needs to reach it.

As JSON a source is `{"kind": "s3", ...}`. It can hold credentials, so its JSON is for a pipe or a private socket only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

from datastore.api.endpoints import EndpointPolicy
from datastore.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticCredentials:
    """S3 keys from a Secret manifest; without them botocore's default chain finds the keys."""

    access_key_id: str
    secret_access_key: Secret
    session_token: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHCredentials:
    """An SSH login from a Secret manifest; without it the user's own SSH agent, keys and configuration are used."""

    username: str = ""
    private_key: Secret | None = None
    password: Secret | None = None


Credentials = StaticCredentials | SSHCredentials


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """Objects of a bucket. prefix is '' or ends with '/'. endpoint '' is AWS. ca_bundle is PEM text or ''.

    policy: to which servers the author of this location may make a mount connect; None: to all.
    """

    kind: ClassVar[Literal["s3"]] = "s3"

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    force_path_style: bool = False
    ca_bundle: str = ""
    create: bool = False
    credentials: StaticCredentials | None = None
    policy: EndpointPolicy | None = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NFSLocation:
    """An exported directory, or one below it. version '': the newest that client and server know, as in mount.nfs(8).

    port: 0 is 2049, or what the server's portmapper says; mount_port: likewise, for version 3's mount protocol.
    options: for the kernel's mount, as in mount.nfs(8) ("softerr", "timeo=150"); libnfs knows none of them.
    """

    kind: ClassVar[Literal["nfs"]] = "nfs"

    server: str
    path: str
    version: Literal["", "3", "4", "4.0", "4.1", "4.2"] = ""
    port: int = 0
    mount_port: int = 0
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"nfs://{self.server}{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTPLocation:
    """A directory that an SSH server shows. known_hosts: lines in the format of sshd(8); '': the user's own file."""

    kind: ClassVar[Literal["sftp"]] = "sftp"

    host: str
    path: str
    port: int = 22
    known_hosts: str = ""
    credentials: SSHCredentials | None = None

    def __str__(self) -> str:
        if self.port == 22:
            return f"sftp://{self.host}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"sftp://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GlusterFSLocation:
    """A directory of a GlusterFS volume. servers: any of them tells the client where the bricks are."""

    kind: ClassVar[Literal["glusterfs"]] = "glusterfs"

    servers: tuple[str, ...]
    volume: str
    path: str = "/"

    def __str__(self) -> str:
        return f"glusterfs://{self.servers[0]}/{self.volume}{self.path.rstrip('/')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLocation:
    """A directory of this machine."""

    kind: ClassVar[Literal["local"]] = "local"

    path: str

    def __str__(self) -> str:
        return f"local:{self.path}"


Source = S3Location | NFSLocation | SFTPLocation | GlusterFSLocation | LocalLocation

KINDS: Mapping[str, type[Source]] = {
    each.kind: each for each in (S3Location, NFSLocation, SFTPLocation, GlusterFSLocation, LocalLocation)
}
_CREDENTIALS: Mapping[str, type[Credentials]] = {"s3": StaticCredentials, "sftp": SSHCredentials}


def credentials_of(source: Source) -> Credentials | None:
    """Return the credentials in a source; None if there are none, so that the mount finds its own if need be."""
    return source.credentials if isinstance(source, S3Location | SFTPLocation) else None


def with_credentials(source: Source, credentials: Credentials | None) -> Source:
    """Return the source with other credentials, or without any (None); unchanged if it takes none of this kind."""
    if isinstance(source, S3Location) and not isinstance(credentials, SSHCredentials):
        return replace(source, credentials=credentials)
    if isinstance(source, SFTPLocation) and not isinstance(credentials, StaticCredentials):
        return replace(source, credentials=credentials)
    return source


def document_of(source: Source) -> dict[str, Any]:
    """Return the source as JSON types and Secrets (see reveal), without the fields that have their default value."""
    given = asdict(source)
    defaults = {each.name: each.default for each in fields(source) if each.default is not MISSING}
    return {"kind": source.kind, **{name: given[name] for name in given if given[name] != defaults.get(name, MISSING)}}


def shown(source: Source) -> dict[str, Any]:
    """Return the source without secrets, for status files and people."""
    document = {"kind": source.kind, **asdict(source)}
    if "credentials" in document:
        document["credentials"] = "static" if document["credentials"] else "default chain"
    return document


def source_from(document: Mapping[str, Any]) -> Source:
    """Return the source of a document that document_of() made. Errors: KeyError, TypeError, ValueError for another."""
    given: dict[str, Any] = dict(document)
    kind = str(given.pop("kind"))
    if kind not in KINDS:
        raise ValueError(f"source {kind} is not known here")
    made = KINDS[kind]
    known = {each.name for each in fields(made)}
    unknown = sorted({*given} - known)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} of source {kind} is not known here")
    if given.get("credentials") is not None:
        given["credentials"] = _credentials_from(_CREDENTIALS[kind], given["credentials"])
    if given.get("policy") is not None:
        given["policy"] = EndpointPolicy(**{name: tuple(items) for name, items in given["policy"].items()})
    # JSON has no tuples.
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    return made(**values)


def reveal(value: object) -> object:
    """Return a Secret's text, as `default` of json.dumps, whose result is for a pipe or a private socket."""
    if isinstance(value, Secret):
        return value.reveal()
    raise TypeError(type(value).__name__)


def _credentials_from(kind: type[Credentials], given: Mapping[str, Any]) -> Credentials:
    plain = {"access_key_id", "username"}
    values: dict[str, Any] = {
        name: text if name in plain or text is None else Secret(text) for name, text in given.items()
    }
    return kind(**values)
