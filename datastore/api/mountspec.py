"""The contract between the mount server and its callers (the command, the CSI driver): one JSON document.

It is passed on standard input, never in argv or the environment, because it can hold credentials. A mount server
refuses another version than its own; its error names the command that replaces the server by one of the same release.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from datastore.api.source import Source, document_of, reveal, shown, source_from
from datastore.errors import InvalidManifest

VERSION = 2
"""Version 2 has `source`, of one of several kinds, in place of `s3`."""
_LIVE = (
    "cache_size_bytes", "capacity_bytes", "conflict", "group", "metadata_ttl_s", "upload_limit_bytes", "used_bytes",
    "used_files", "write_back_s",
)  # fmt: skip
"""The fields that can change while a mount stands; so can the credentials of a bucket."""
DEFAULT_CACHE_BYTES = 10 << 30
DEFAULT_MEMORY_BYTES = 512 << 20
LEAST_MEMORY_BYTES = 192 << 20
"""The lowest ceiling of a server's memory; with a lower one the server would only be busy freeing memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSpec:
    """One mount. Sizes are in bytes, times in seconds, and paths are absolute.

    state_dir: the mount's own directory (journal, staging, node ids, control socket). cache_dir: on a laptop all mounts
    of a user share it. capacity_bytes 0: unlimited. attributes: see docs/SEMANTICS.md.
    conflict: whether a close may replace what another client wrote since the open. write_back_s: the longest time from
    a close until the upload begins; 0: close returns when the upload is done.
    upload_limit_bytes: the most bytes a second that are sent to the store; 0: no limit.
    memory_bytes: the ceiling of the server's resident size. used_bytes, used_files: what is stored, for statfs; None:
    this has not been counted. metrics: HOST:PORT of a Prometheus endpoint, or ''.
    uid, gid, umask: for files whose owner and mode are not in the store; None: the mount server's own uid and gid, and
    022. group: all files are shown with this group and give it the owner's permissions (a pod's fsGroup), unless None.
    """

    name: str
    mountpoint: str
    source: Source
    state_dir: str
    cache_dir: str
    cache_size_bytes: int = DEFAULT_CACHE_BYTES
    read_only: bool = False
    capacity_bytes: int = 0
    attributes: Literal["full", "listing"] = "full"
    metadata_ttl_s: float = 1.0
    allow_other: bool = False
    transport: Literal["kernel", "libfuse"] = "kernel"
    conflict: Literal["lastWriterWins", "fail"] = "lastWriterWins"
    write_back_s: float = 0.0
    upload_limit_bytes: int = 0
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    used_bytes: int | None = None
    used_files: int | None = None
    metrics: str = ""
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    group: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def believed_s(self) -> float:
        """For how many seconds the mount trusts an answer of the storage. The kernel is told the rest of that time
        with each reply; libfuse takes one time for all replies, so with it the mount and the kernel get half each."""
        return self.metadata_ttl_s / 2 if self.transport == "libfuse" else self.metadata_ttl_s

    def with_live(self, asked: MountSpec) -> MountSpec:
        """Return this specification with those settings of `asked` that can change while the mount stands."""
        live: dict[str, Any] = {name: getattr(asked, name) for name in _LIVE}
        return replace(self, **live)

    def differences(self, other: MountSpec) -> list[str]:
        """Return the names of the fields that differ."""
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)]

    def to_json(self) -> str:
        """Return the document with its secrets, for a pipe, never for a log or a file.

        Fields with their default value are left out. So a mount daemon that is older than the node plugin (its pods are
        replaced by hand) accepts every mount that uses no field that is newer than the daemon.
        """
        defaults = {each.name: each.default for each in fields(MountSpec)}
        document = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        document |= {"source": document_of(self.source), "version": self.version}
        return json.dumps(document, default=reveal)

    def without_secrets(self) -> dict[str, Any]:
        """Return the specification without secrets, for status files and people."""
        return asdict(self) | {"source": shown(self.source), "location": str(self.source)}


def from_json(text: str) -> MountSpec:
    """Parse a document made by to_json. Errors: InvalidManifest for another version or shape."""
    try:
        raw = json.loads(text)
        version = raw["version"]
        if version != VERSION:
            raise InvalidManifest(
                f"the mount is described in version {version}, and this mount server knows version {VERSION}: replace"
                " it by one of the same release (in a cluster: kubectl -n datastore-system delete pod -l"
                " app.kubernetes.io/component=mount-daemon; on a laptop: datastore umount, and mount again)"
            )
        source = source_from(raw.pop("source"))
        unknown = sorted({*raw} - {each.name for each in fields(MountSpec)})
        if unknown:
            raise InvalidManifest(f"not a mount specification: {', '.join(unknown)} is not known here")
        return MountSpec(source=source, **raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidManifest(f"not a mount specification: {error}") from error
