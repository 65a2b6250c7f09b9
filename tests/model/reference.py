"""What a mount must show, computed from the bucket's objects and from what the mount has not sent yet.

Nothing here is updated step by step with the file system: the tree is computed anew from keys each time, by the rules
of docs/SEMANTICS.md (S-03, S-06, S-34 to S-37) alone. Paths are names joined by '/'; b"" is the root.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

LINK = ".rclonelink"
BESIDE = "\uf000".encode()
RESERVED = {"": "\uf02f".encode(), ".": "\uf02e".encode(), "..": "\uf02e\uf02e".encode()}
HIDDEN = ".datastore.unlinked/"


@dataclass(frozen=True, eq=False)
class Object:
    """One object of the bucket. mode None: it has no metadata. mtime_ns None: the time is not compared."""

    body: bytes
    mode: int | None = None
    mtime_ns: int | None = None
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)

    def but(self, **changes: object) -> Object:
        """Return a copy with changes."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(eq=False)
class Inode:
    """A file that a mount has open or has not sent.

    seen: the version that it is based on, None when it is new. unsent: its content, if the bucket lacks it. path None:
    the name was removed, and unsent is what its handles still show.
    """

    key: str
    path: bytes | None
    seen: Object | None
    unsent: Object | None = None
    dead: bool = False
    """Its content is lost, as when another client replaced its version and the name moved on: it is only closed."""

    restarted: bool = False
    """It was opened at a server that died; the new server finds it by its name alone."""

    anew: bool = False
    """Its content was written from scratch (O_TRUNC, truncate): it replaces whatever is in the bucket (S-32)."""

    pinned: bool = False
    """Bytes of it were read, or a handle may write; until then it may become another version (S-147)."""

    def stands(self, objects: Mapping[str, Object]) -> bool:
        """Whether the bucket still has the version that the file is based on."""
        present = objects.get(self.key)
        return self.seen is None or (present is not None and present.body == self.seen.body)

    @property
    def body(self) -> bytes:
        """The content that its handles show."""
        shown = self.unsent or self.seen
        return shown.body if shown is not None else b""


@dataclass(frozen=True)
class Shown:
    """What a path must show. key: for a directory, the prefix of its entries."""

    kind: int
    key: str
    object: Object | None
    inode: Inode | None = None
    suffixed: bool = False
    """The key's suffix (LINK) makes it a symbolic link."""

    @property
    def permissions(self) -> int:
        """Permission bits."""
        if self.object is not None and self.object.mode is not None:
            return stat.S_IMODE(self.object.mode)
        return {stat.S_IFDIR: 0o755, stat.S_IFLNK: 0o777}.get(self.kind, 0o644)

    @property
    def body(self) -> bytes:
        """The content of a file, or the target of a link."""
        return b"" if self.object is None or self.kind == stat.S_IFDIR else self.object.body


def escape(name: bytes, *, directory: bool = False) -> str:
    """Return the key segment for a name that is created (S-34, S-37)."""
    for segment, shown in RESERVED.items():
        if name == shown:
            return segment
    text = ""
    for character in name.decode("utf-8", "surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:
            text += chr(0xF000 + code - 0xDC00)
        elif 0xF000 <= code <= 0xF0FF:
            text += "".join(chr(0xF000 + byte) for byte in character.encode())
        else:
            text += character
    return text[: -len(LINK)] + "\uf02e" + LINK[1:] if text.endswith(LINK) and not directory else text


def show(segment: str, *, directory: bool = False) -> bytes:
    """Return the name as which a key segment is shown (S-34, S-36)."""
    if segment in RESERVED:
        return RESERVED[segment]
    raw = segment.encode("utf-8", "surrogateescape")
    plain = b"".join(
        bytes([ord(c) - 0xF000]) if 0xF000 <= ord(c) <= 0xF0FF else c.encode("utf-8", "surrogateescape")
        for c in segment
    )
    spoken = b"\0" not in plain and b"/" not in plain and plain not in (b"", b".", b"..")
    return plain if spoken and escape(plain, directory=directory) == segment else raw


def creatable(name: bytes) -> bool:
    """Whether a name may be created (S-36, S-37)."""
    return name not in RESERVED.values() and not name.endswith(BESIDE)


def tree(objects: Mapping[str, Object], inodes: Iterable[Inode] = ()) -> dict[bytes, Shown]:
    """Return all paths of a mount; the root is b""."""
    unsent = {inode.key: inode for inode in inodes if inode.unsent is not None and inode.path is not None}
    keys = sorted({*objects, *unsent}, key=lambda key: key.encode("utf-8", "surrogateescape"))
    return dict(_Tree(objects, unsent).level(b"", "", keys))


class _Tree:
    def __init__(self, objects: Mapping[str, Object], unsent: Mapping[str, Inode]) -> None:
        self._objects = objects
        self._unsent = unsent

    def level(self, path: bytes, prefix: str, keys: list[str]) -> Iterator[tuple[bytes, Shown]]:
        """Yield a directory and all below it. Unsent files get their names first, then directories, files and links."""
        yield path, Shown(stat.S_IFDIR, prefix, self._objects.get(prefix) if prefix else None)
        files = [key for key in keys if key != prefix and "/" not in key[len(prefix) :]]
        names = {_name(self._unsent[key]): self._unsent_file(key) for key in files if key in self._unsent}
        yield from self._directories(path, prefix, keys, names)
        stored = [key for key in files if key not in self._unsent]
        for key in stored:
            if not _is_link(key, prefix):
                _claim(names, show(key[len(prefix) :]), _file(key, self._objects[key]))
        for key in stored:
            if _is_link(key, prefix):
                self._link(names, key, prefix)
        for name, entry in names.items():
            if entry.kind != stat.S_IFDIR:
                yield _join(path, name), entry

    def _directories(
        self, path: bytes, prefix: str, keys: list[str], names: dict[bytes, Shown]
    ) -> Iterator[tuple[bytes, Shown]]:
        unsent_names = set(names)
        below: dict[str, list[str]] = {}
        for key in keys:
            head, slash, _ = key[len(prefix) :].partition("/")
            if slash and (prefix or head + "/" != HIDDEN):
                below.setdefault(head, []).append(key)
        for head, inside in below.items():
            name = show(head, directory=True)
            if name not in unsent_names:
                name = _claim(names, name, Shown(stat.S_IFDIR, f"{prefix}{head}/", None))
                yield from self.level(_join(path, name), f"{prefix}{head}/", inside)

    def _link(self, names: dict[bytes, Shown], key: str, prefix: str) -> None:
        name = show(key[len(prefix) : -len(LINK)])
        if name not in names:
            names[name] = Shown(stat.S_IFLNK, key, self._objects[key], suffixed=True)
        else:
            raw = key[len(prefix) :].encode("utf-8", "surrogateescape")
            _claim(names, raw, _file(key, self._objects[key]))

    def _unsent_file(self, key: str) -> Shown:
        inode = self._unsent[key]
        return _file(key, inode.unsent, inode)


def _name(inode: Inode) -> bytes:
    assert inode.path is not None
    return split(inode.path)[1]


def _claim(names: dict[bytes, Shown], name: bytes, entry: Shown) -> bytes:
    while name in names:
        name += BESIDE
    names[name] = entry
    return name


def _is_link(key: str, prefix: str) -> bool:
    return key.endswith(LINK) and len(key) - len(prefix) > len(LINK)


def _file(key: str, found: Object | None, inode: Inode | None = None) -> Shown:
    kind = stat.S_IFMT(found.mode) if found is not None and found.mode is not None else stat.S_IFREG
    return Shown(kind if kind in (stat.S_IFIFO, stat.S_IFLNK) else stat.S_IFREG, key, found, inode)


def _join(path: bytes, name: bytes) -> bytes:
    return path + b"/" + name if path else name


def split(path: bytes) -> tuple[bytes, bytes]:
    """Return the parent and the name of a path."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


def children(shown: Mapping[bytes, Shown], path: bytes) -> dict[bytes, Shown]:
    """The entries of one directory, by name."""
    return {split(other)[1]: entry for other, entry in shown.items() if other and split(other)[0] == path}
