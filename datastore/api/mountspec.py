"""The contract between who asks for a mount (the command, the CSI driver) and the mount server: one JSON document.

It is passed on standard input, never in argv or the environment, because it can hold credentials. A process refuses a
version that is not its own, with the command that replaces it by one that is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from datastore.api.source import Source, document_of, reveal, shown, source_from
from datastore.errors import InvalidManifest

VERSION = 2
"""2: `source`, one of several kinds, in place of `s3`."""
LEAST_MEMORY_BYTES = 192 << 20
"""With a lower ceiling a server would do nothing but let go of things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSpec:
    """One mount. Sizes in bytes, times in seconds, paths absolute.

    state_dir: this mount's own directory (journal, staging, node ids, control socket); cache_dir: on a laptop shared by
    the mounts of a user; capacity_bytes 0: unlimited. attributes: see docs/SEMANTICS.md. transport: 'kernel' or
    'libfuse'.
    conflict: whether a close may replace what another client wrote since the open. write_back_s: how long after its
    close a file may reach the store; 0: before the close returns.
    upload_limit_bytes: most bytes a second that are sent to the store; 0: no limit.
    memory_bytes: ceiling of the server's resident size. used_bytes, used_files: what is stored, as somebody has counted
    it, for statfs; None: nobody has. metrics: HOST:PORT of a Prometheus endpoint, '' for none.
    uid, gid, umask: owner and permissions of what the store has none for; None: who mounts, and 022. group: everything
    is shown as of this group, which may do what the owner may (a pod's fsGroup); None: as it is.
    """

    name: str
    mountpoint: str
    source: Source
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
    upload_limit_bytes: int = 0
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

        It says what differs from the defaults, so that a mount daemon that is older than the node plugin (its pods are
        replaced by hand) takes every mount that uses nothing newer than itself.
        """
        defaults = {each.name: each.default for each in fields(MountSpec)}
        document = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        document |= {"source": document_of(self.source), "version": self.version}
        return json.dumps(document, default=reveal)

    def without_secrets(self) -> dict[str, Any]:
        """For status files and people."""
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
