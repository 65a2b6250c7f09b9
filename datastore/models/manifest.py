"""The manifest of a version, which is the file NAME/7.json. The same content always gives the same text. Pure.

The file is JSON, for any tool to read. Its first line holds everything but the entries, then each path below the
version has a line, and the last line holds `check`, the SHA-256 of all bytes before that line. `digest` is the SHA-256
of the entries' lines, each without its comma and with a line feed, so that the same files have the same digest under
any version. A number that will never be a version (deleted, or never finished) has `removed` in place of the entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from datastore.models.errors import FormatUnknown, VersionDamaged

FORMAT = "datastore.dev/model-version/v1"
HEAD_BYTES = 64 << 10
"""The first line has fewer bytes than this, because lineage and labels are limited."""
MAX_ENTRIES = 1_000_000
MAX_PATH_BYTES = 4095
MAX_NAME_BYTES = 255

_OPEN = '"entries":[\n'
_CLOSE = "\n],\n"
_CLOSE_EMPTY = "],\n"
_WAY_OUT = "delete the version, or bring this file back from a copy"

Kind = Literal["file", "directory", "symlink"]


class Entry(NamedTuple):
    """One path of a version. The path is relative, with '/' between names, none of which is '.', '..' or empty."""

    path: str
    kind: Kind
    mode: int = 0
    """Permission bits (at most 0o7777) of a file or directory."""
    size: int = 0
    """The size of a file, in bytes."""
    sha256: str = ""
    """The SHA-256 of a file's content, in hexadecimal digits."""
    target: str = ""
    """The target of a symlink, exactly as the link holds it."""

    def line(self) -> str:
        """Return the entry's line of the manifest, without a comma."""
        said: dict[str, Any] = {"path": self.path, "type": self.kind}
        if self.kind == "symlink":
            said["target"] = self.target
        else:
            said["mode"] = f"{self.mode:04o}"
        if self.kind == "file":
            said |= {"size": self.size, "sha256": self.sha256}
        return _json(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a version comes from; what is not known is empty."""

    datastore: str = ""
    path: str = ""
    location: str = ""
    """The URL of the data: s3://bucket/prefix/path, ..."""
    by: str = ""
    training_job: str = ""
    training_job_uid: str = ""
    image_digest: str = ""
    command: tuple[str, ...] = ()
    imported_from: str = ""
    """For an import: the file or directory, and the version that it says it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Why a number is not a version and never will be."""

    at: str
    by: str
    why: Literal["deleted", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    """A version and everything in it. entries: sorted by path, so a directory comes before what is in it."""

    model: str
    version: int
    digest: str
    """'sha256:' and 64 hexadecimal digits."""
    files: int
    size_bytes: int
    saved: str
    """When the version was saved, as RFC 3339 in UTC."""
    save_id: str = ""
    """The id of the save that made the version; a save that is repeated under the same id finds it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    lineage: Lineage = Lineage()
    entries: Sequence[Entry] = ()
    """Empty when only the head was read."""
    removed: Removed | None = None
    damage: VersionDamaged | None = None
    """Why the manifest can't be read; then only model and version are known. Only Models.versions() gives such ones."""

    def text(self) -> str:
        """Return the whole document."""
        head = _json(self._head())
        if self.removed is not None:
            body = head[:-1] + ",\n"
        else:
            lines = ",\n".join(entry.line() for entry in self.entries)
            body = f"{head[:-1]},\n{_OPEN}{lines}{_CLOSE if self.entries else _CLOSE_EMPTY}"
        return f'{body}"check":"sha256:{hashlib.sha256(body.encode()).hexdigest()}"}}\n'

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = {"format": FORMAT, "model": self.model, "version": self.version}
        if self.removed is not None:
            return head | {"removed": {"at": self.removed.at, "by": self.removed.by, "why": self.removed.why}}
        lineage = {
            _camel(each.name): list(value) if isinstance(value, tuple) else value
            for each in fields(Lineage)
            if (value := getattr(self.lineage, each.name))
        }
        return head | {
            "digest": self.digest,
            "files": self.files,
            "bytes": self.size_bytes,
            "saved": self.saved,
            **({"save": self.save_id} if self.save_id else {}),
            "labels": dict(sorted(self.labels.items())),
            "lineage": lineage,
        }


def of_entries(
    model: str,
    version: int,
    entries: Iterable[Entry],
    *,
    saved: str,
    save_id: str = "",
    labels: Mapping[str, str] | None = None,
    lineage: Lineage | None = None,
) -> VersionManifest:
    """Return a new version's manifest. Errors: ValueError, whose text completes "the version ..."."""
    ordered = sorted(entries)
    check_entries(ordered)
    made = VersionManifest(
        model=model,
        version=version,
        digest=digest_of(ordered),
        files=sum(entry.kind == "file" for entry in ordered),
        size_bytes=sum(entry.size for entry in ordered),
        saved=saved,
        save_id=save_id,
        labels=labels or {},
        lineage=lineage or Lineage(),
        entries=tuple(ordered),
    )
    if len(_json(made._head())) >= HEAD_BYTES:
        raise ValueError(f"has labels, a command and an origin of more than {HEAD_BYTES >> 10} KiB together")
    return made


def digest_of(ordered: Sequence[Entry]) -> str:
    """Return the digest of entries that are in the order of a manifest."""
    sha256 = hashlib.sha256()
    for entry in ordered:
        sha256.update(f"{entry.line()}\n".encode())
    return f"sha256:{sha256.hexdigest()}"


def parse(raw: bytes, where: str) -> VersionManifest:
    """Parse a whole document, which errors call `where`. Errors: VersionDamaged, saying what does not agree."""
    body, _, last = raw.removesuffix(b"\n").rpartition(b"\n")
    body += b"\n"
    try:
        document = json.loads(raw)
        recorded = document["check"]
    except (ValueError, KeyError, TypeError):
        raise VersionDamaged(f"{where}: is not a whole manifest of a version; {_WAY_OUT}") from None
    found = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if recorded != found or json.loads(b"{" + last) != {"check": recorded}:
        raise VersionDamaged(
            f"{where}: was changed after it was written: it says {recorded}, its bytes are {found}; {_WAY_OUT}"
        )
    head = _parse_head(document, where)
    if head.removed is not None:
        return head
    try:
        entries = tuple(_entry(each) for each in document["entries"])
        check_entries(entries)
    except (ValueError, KeyError, TypeError) as error:
        raise VersionDamaged(f"{where}: {error}; {_WAY_OUT}") from None
    if (digest := digest_of(entries)) != head.digest:
        raise VersionDamaged(f"{where}: says the digest {head.digest}, and its entries have {digest}; {_WAY_OUT}")
    values = {each.name: getattr(head, each.name) for each in fields(VersionManifest)}
    return VersionManifest(**{**values, "entries": entries})


def parse_head(raw: bytes, where: str) -> VersionManifest:
    """Parse only the first line of a document. raw: the first HEAD_BYTES are enough. Errors: VersionDamaged."""
    first = raw.partition(b"\n")[0]
    try:
        return _parse_head(json.loads(first.removesuffix(b",") + b"}"), where)
    except (ValueError, TypeError):
        raise VersionDamaged(f"{where}: is not a manifest of a version; {_WAY_OUT}") from None


def check_entries(ordered: Sequence[Entry]) -> None:
    """Errors: ValueError unless the entries form one tree: parents are directories, and no path occurs twice."""
    if len(ordered) > MAX_ENTRIES:
        raise ValueError(f"has {len(ordered):,} files, directories and links; {MAX_ENTRIES:,} is the most")
    for before, after in pairwise(ordered):
        if before.path >= after.path:
            raise ValueError(f"has the path {after.path!r} twice or out of order")
    directories = {""}
    for entry in ordered:
        check_path(entry.path)
        if entry.path.rpartition("/")[0] not in directories:
            raise ValueError(f"has {entry.path!r} in what is no directory of it")
        if entry.kind == "directory":
            directories.add(entry.path)
        elif entry.kind == "symlink" and (not entry.target or "\0" in entry.target):
            raise ValueError(f"has the symbolic link {entry.path!r} without a target")


def check_path(path: str) -> None:
    """Errors: ValueError when the path is not a plain relative path in UTF-8."""
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has a name that is not UTF-8: {path!r}; rename it") from None
    names = path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise ValueError(f"has {path!r}, which is no plain relative path")
    if len(raw) > MAX_PATH_BYTES or max(len(name.encode()) for name in names) > MAX_NAME_BYTES:
        raise ValueError(f"has a path or name that is too long: {path[:60]!r}...")


def _parse_head(document: Mapping[str, Any], where: str) -> VersionManifest:
    try:
        if (found := document["format"]) != FORMAT:
            raise FormatUnknown(
                f"{where}: has the format {str(found)[:80]!r}, and this release reads {FORMAT}; use the release that "
                "wrote it"
            )
        model, version = str(document["model"]), int(document["version"])
        if (gone := document.get("removed")) is not None:
            removed = Removed(at=str(gone["at"]), by=str(gone["by"]), why=gone["why"])
            return VersionManifest(
                model=model, version=version, digest="", files=0, size_bytes=0, saved="", removed=removed
            )
        return VersionManifest(
            model=model,
            version=version,
            digest=str(document["digest"]),
            files=int(document["files"]),
            size_bytes=int(document["bytes"]),
            saved=str(document["saved"]),
            save_id=str(document.get("save", "")),
            labels={str(name): str(value) for name, value in document["labels"].items()},
            lineage=_lineage(document["lineage"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VersionDamaged(f"{where}: is not a manifest of a version: {error}; {_WAY_OUT}") from None


def _lineage(said: Mapping[str, Any]) -> Lineage:
    known = {each.name: said[_camel(each.name)] for each in fields(Lineage) if _camel(each.name) in said}
    if "command" in known:
        known["command"] = tuple(str(word) for word in known["command"])
    return Lineage(**known)


def _entry(said: Mapping[str, Any]) -> Entry:
    kind = said["type"]
    if kind == "symlink":
        return Entry(str(said["path"]), "symlink", target=str(said["target"]))
    mode = int(said["mode"], 8)
    if kind not in ("file", "directory") or not 0 <= mode <= 0o7777:
        raise ValueError(f"has {said['path']!r} of type {kind!r} and mode {said['mode']!r}")
    if kind == "directory":
        return Entry(str(said["path"]), "directory", mode)
    size, sha256 = int(said["size"]), str(said["sha256"])
    if size < 0 or len(sha256) != 64:
        raise ValueError(f"has {said['path']!r} without a size and a digest")
    return Entry(str(said["path"]), "file", mode, size, sha256)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join("UID" if word == "uid" else word.capitalize() for word in others)


def _json(value: object) -> str:
    """Return compact JSON in ASCII, so that every reader gets the same text."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)
