"""The contract between who asks for a mount (the command, the CSI driver) and the mount server: one JSON document.

It is passed on standard input, never in argv or the environment, because it can hold credentials.
Version 1; a server refuses another version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from datastore.errors import InvalidManifest
from datastore.secret import Secret

VERSION = 1
LEAST_MEMORY_BYTES = 192 << 20
"""With a lower ceiling a server would do nothing but let go of things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticCredentials:
    """Keys from a Secret manifest; without it botocore's default chain is asked."""

    access_key_id: str
    secret_access_key: Secret
    session_token: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """Where the objects are. prefix is '' or ends with '/'. endpoint '' is AWS. ca_bundle is PEM text or ''."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    force_path_style: bool = False
    ca_bundle: str = ""
    create: bool = False
    credentials: StaticCredentials | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSpec:
    """One mount. Sizes in bytes, times in seconds, paths absolute.

    state_dir: this mount's own directory (journal, staging, node ids, control socket); cache_dir: shared by the mounts
    of a user; capacity_bytes 0: unlimited. attributes: see docs/SEMANTICS.md. transport: 'kernel' or 'libfuse'.
    conflict: whether a close may replace what another client wrote since the open. write_back_s: how long after its
    close a file may reach the store; 0: before the close returns.
    memory_bytes: ceiling of the server's resident size. used_bytes, used_files: what is stored, as somebody has counted
    it, for statfs; None: nobody has. metrics: HOST:PORT of a Prometheus endpoint, '' for none.
    uid, gid, umask: owner and permissions of what the store has none for; None: who mounts, and 022. group: everything
    is shown as of this group, which may do what the owner may (a pod's fsGroup); None: as it is.
    """

    name: str
    mountpoint: str
    s3: S3Location
    state_dir: str
    cache_dir: str
    cache_size_bytes: int = 10 << 30
    read_only: bool = False
    capacity_bytes: int = 0
    attributes: Literal["full", "listing"] = "full"
    metadata_ttl_s: float = 1.0
    allow_other: bool = False
    transport: Literal["kernel", "libfuse"] = "kernel"
    conflict: Literal["lastWriterWins", "fail"] = "lastWriterWins"
    write_back_s: float = 0.0
    memory_bytes: int = 512 << 20
    used_bytes: int | None = None
    used_files: int | None = None
    metrics: str = ""
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    group: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """The document, secrets included: for a pipe, not for a log or a file.

        It says what differs from the defaults, so that a keeper that is older than the node plugin (its pods are
        replaced by hand) takes every mount that uses nothing newer than itself.
        """
        document = _without_defaults(asdict(self), MountSpec)
        document["s3"] = _without_defaults(document["s3"], S3Location)
        return json.dumps(document | {"version": self.version}, default=reveal)

    def without_secrets(self) -> dict[str, Any]:
        """For status files and people."""
        shown = asdict(self)
        shown["s3"]["credentials"] = "static" if self.s3.credentials else "default chain"
        return shown


def _names(of: type[MountSpec | S3Location]) -> set[str]:
    return {each.name for each in fields(of)}


def _without_defaults(document: dict[str, Any], of: type[MountSpec | S3Location]) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(of)}
    return {name: value for name, value in document.items() if value != defaults[name]}


def reveal(value: object) -> object:
    """For json.dumps: a Secret's text; of nothing else. The result is for a pipe or a private socket."""
    if isinstance(value, Secret):
        return value.reveal()
    raise TypeError(type(value).__name__)


def credentials_from_document(keys: Mapping[str, Any]) -> StaticCredentials:
    """The keys in a document made by json.dumps(asdict(...), default=reveal). Errors: KeyError, TypeError."""
    token = keys["session_token"]
    return StaticCredentials(
        access_key_id=keys["access_key_id"],
        secret_access_key=Secret(keys["secret_access_key"]),
        session_token=None if token is None else Secret(token),
    )


def from_json(text: str) -> MountSpec:
    """Parse a document made by to_json. Errors: InvalidManifest for another version or shape."""
    try:
        raw = json.loads(text)
        if raw["version"] != VERSION:
            raise InvalidManifest(f"mount specification version {raw['version']} is not {VERSION}")
        s3 = dict(raw.pop("s3"))
        unknown = sorted(({*raw} - _names(MountSpec)) | ({*s3} - _names(S3Location)))
        if unknown:
            raise InvalidManifest(f"not a mount specification: {', '.join(unknown)} is not known here")
        keys = s3.pop("credentials", None)
        credentials = None if keys is None else credentials_from_document(keys)
        return MountSpec(s3=S3Location(credentials=credentials, **s3), **raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidManifest(f"not a mount specification: {error}") from error
