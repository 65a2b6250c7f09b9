"""The effect of each operation on the bucket and on a mount's open files: docs/SEMANTICS.md in terms of keys."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.localfs import File
from tests.model.mounts import Mount, objects_of
from tests.model.reference import HIDDEN, Inode, Object, Shown, children, creatable, escape, split, tree

DIRECTORY, REGULAR, LINK = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK
LINK_SUFFIX = ".rclonelink"


@dataclass(eq=False)
class Handle:
    """One open file."""

    file: File
    inode: Inode
    writable: bool
    known: bool = True
    """It was opened at the server that runs now."""


@dataclass(eq=False)
class Side:
    """One mount and what the model knows of its local state."""

    mount: Mount
    inodes: dict[int, Inode] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    foreign_at: float = -1e9
    """When another client last changed the bucket, on the mount's monotonic clock."""
    kept: list[tuple[str, bytes]] = field(default_factory=list)
    """Key and content of each file that lost a conflict here, until a user discards it (S-47)."""

    def handles_of(self, inode: Inode) -> list[Handle]:
        return [handle for handle in self.handles if handle.inode is inode]

    def inode_at(self, key: str, objects: dict[str, Object]) -> Inode | None:
        """Return the open or unsent file that the name of a key shows now."""
        at = [inode for inode in self.inodes.values() if inode.path is not None and inode.key == key]
        return next((i for i in at if i.unsent is not None), next((i for i in at if i.stands(objects)), None))


class World:
    """The expected bucket and all mounts."""

    def __init__(self, sides: list[Side]) -> None:
        self.sides = sides
        self.objects: dict[str, Object] = {}

    def tree(self, side: Side) -> dict[bytes, Shown]:
        return tree(self.objects, side.inodes.values())

    # -- what must be refused

    def refusal(self, shown: dict[bytes, Shown], path: bytes) -> int:
        """Return the errno of walking to the parent of a path, or 0."""
        parent = split(path)[0]
        parts = parent.split(b"/") if parent else []
        for depth in range(1, len(parts) + 1):
            entry = shown.get(b"/".join(parts[:depth]))
            if entry is None:
                return errno.ENOENT
            if entry.kind != DIRECTORY:
                return errno.ENOTDIR
        return 0

    def refuses_new(self, shown: dict[bytes, Shown], path: bytes) -> set[int]:
        refused = self.refusal(shown, path)
        if refused:
            return {refused}
        if path in shown:
            return {errno.EEXIST}
        return set() if creatable(split(path)[1]) else {errno.EINVAL}

    def refuses_rename(self, shown: dict[bytes, Shown], old: bytes, new: bytes) -> set[int]:
        walks = {self.refusal(shown, old), self.refusal(shown, new)} - {0}
        if walks:
            return walks
        if not creatable(split(new)[1]):
            return {errno.EINVAL}
        source, target = shown.get(old), shown.get(new)
        if source is None:
            return {errno.ENOENT}
        if old == new:
            return set()
        refused = set()
        if source.kind == DIRECTORY and new.startswith(old + b"/"):
            refused |= {errno.EINVAL}
        if target is not None:
            refused |= self._refuses_over(shown, source, target, new)
        return refused

    def _refuses_over(self, shown: dict[bytes, Shown], source: Shown, target: Shown, new: bytes) -> set[int]:
        if target.kind != DIRECTORY:
            return {errno.ENOTDIR} if source.kind == DIRECTORY else set()
        if source.kind != DIRECTORY:
            return {errno.EISDIR}
        return {errno.ENOTEMPTY} if children(shown, new) or self.holds_bytes(target.key) else set()

    def holds_bytes(self, key: str) -> bool:
        """Whether another client put bytes into the marker of a directory, which then is not empty (S-04)."""
        return key in self.objects and bool(self.objects[key].body)

    # -- what changes

    def new_key(self, shown: dict[bytes, Shown], path: bytes, *, directory: bool = False) -> str:
        parent, name = split(path)
        return shown[parent].key + escape(name, directory=directory) + ("/" if directory else "")

    def keep_directory(self, shown: dict[bytes, Shown], path: bytes) -> None:
        """S-02: create the marker of a directory that loses an entry."""
        entry = shown[path]
        if path:
            self.objects.setdefault(entry.key, Object(b"", DIRECTORY | entry.permissions))

    def detach(self, side: Side, key: str) -> None:
        """Take the name of a key away: handles of the file keep its content (S-23)."""
        for inode in side.inodes.values():
            if inode.path is None or inode.key != key:
                continue
            if inode.restarted or (inode.unsent is None and not inode.stands(self.objects)):
                inode.dead = True
            else:
                inode.path, inode.unsent = None, Object(inode.body)
        self.tidy(side)

    def tidy(self, side: Side) -> None:
        """Drop the files that are neither open nor unsent."""
        for ino, inode in list(side.inodes.items()):
            if not side.handles_of(inode) and (inode.unsent is None or inode.path is None or inode.dead):
                del side.inodes[ino]

    def send(self, inode: Inode) -> None:
        """Put what the file has into the bucket."""
        if inode.unsent is None or inode.path is None:
            return
        sent = inode.unsent
        if self.objects.get(inode.key) is not inode.seen:
            sent = self.with_attributes(inode.key, sent)
        self.objects[inode.key] = inode.seen = sent
        inode.unsent = None

    def with_attributes(self, key: str, sent: Object) -> Object:
        """After a change by two clients it is open whose attributes a file got: return `sent` with the bucket's."""
        found = objects_of(self.sides[0].mount.bucket).get(key)
        return sent if found is None else sent.but(mode=found.mode, xattrs=found.xattrs, mtime_ns=None)

    def change_unsent(self, inode: Inode, body: bytes) -> None:
        """Give the file new content, which the bucket lacks."""
        if inode.unsent is None:
            present = self.objects.get(inode.key)
            if present is not None and inode.seen is not None and present.body == inode.seen.body:
                inode.seen = present
            base = inode.seen or Object(b"", REGULAR | 0o644)
            kind = REGULAR if base.mode is None else stat.S_IFMT(base.mode)
            mode = kind | (0o644 if base.mode is None else stat.S_IMODE(base.mode))
            inode.unsent = base.but(mode=mode)
        inode.unsent = inode.unsent.but(body=body, mtime_ns=None)

    def move_file(self, side: Side, shown: dict[bytes, Shown], old: bytes, new: bytes) -> None:
        source, target = shown[old], shown.get(new)
        key = self.new_key(shown, new) + (LINK_SUFFIX if source.suffixed else "")
        self.keep_directory(shown, split(old)[0])
        inode = side.inode_at(source.key, self.objects)
        for other in side.inodes.values():
            if other is not inode and other.key == source.key and other.path is not None:
                other.dead = True
        if target is not None:
            self.detach(side, target.key)
            self.objects.pop(target.key, None)
        moved = self.objects.pop(source.key, None)
        if inode is not None:
            inode.key, inode.path = key, new
            if inode.unsent is not None:
                if moved is not inode.seen:
                    inode.unsent = self.with_attributes(key, inode.unsent)
                moved = inode.unsent
                inode.unsent, inode.seen = None, moved
        assert moved is not None
        self.objects[key] = moved
        if inode is not None:
            inode.seen = moved
        self.tidy(side)

    def move_directory(self, side: Side, shown: dict[bytes, Shown], old: bytes, new: bytes) -> None:
        old_key, new_key = shown[old].key, self.new_key(shown, new, directory=True)
        self.keep_directory(shown, split(old)[0])
        self.keep_directory(shown, old)
        if new in shown and shown[new].key != new_key:  # another tool's key, which we would spell in another way
            self.objects.pop(shown[new].key, None)
        for key in [key for key in self.objects if key.startswith(old_key)]:
            self.objects[new_key + key[len(old_key) :]] = self.objects.pop(key)
        for inode in side.inodes.values():
            if inode.path is None or not inode.key.startswith(old_key):
                continue
            inode.key = new_key + inode.key[len(old_key) :]
            inode.path = new + inode.path[len(old) :]
            if inode.unsent is None and not inode.stands(self.objects):
                inode.dead = True

    # -- the bucket

    def check_bucket(self) -> None:
        """Check that the bucket holds what is expected, and nothing else."""
        bucket = self.sides[0].mount.bucket
        real = {key: found for key, found in objects_of(bucket).items() if not key.startswith(HIDDEN)}
        assert sorted(real) == sorted(self.objects), f"keys {sorted(real)}, expected {sorted(self.objects)}"
        for key, expected in self.objects.items():
            found = real[key]
            assert found.body == expected.body, f"{key!r} holds {_brief(found.body)}, expected {_brief(expected.body)}"
            assert found.mode == expected.mode, f"mode of {key!r} is {found.mode}, expected {expected.mode}"
            assert found.xattrs == dict(expected.xattrs), f"xattrs of {key!r}"
            if expected.mtime_ns is not None:
                assert found.mtime_ns == expected.mtime_ns, f"mtime of {key!r}"
        # A file still being written or a dead server may have an upload: if a journal has it, it is ended later (S-46).
        begun = {upload.key for upload in list(bucket.uploads.values())}
        strange = begun - {upload.key for side in self.sides for upload in side.mount.fs.core.db.uploads()}
        assert not strange, f"unfinished uploads that no journal knows: {strange}"


def _brief(body: bytes) -> str:
    return f"{len(body)} bytes {body[:20]!r}"


def outcome(call: Callable[[], object]) -> int:
    """Return the errno of a call, or 0 when it succeeds."""
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def named(numbers: set[int] | int) -> str:
    """Return the names of errnos, for messages."""
    several = numbers if isinstance(numbers, set) else {numbers}
    return " or ".join(errno.errorcode.get(n, "success") for n in sorted(several)) or "success"


def patched(body: bytes, offset: int, piece: bytes) -> bytes:
    """Return a file's bytes after a write."""
    return body[:offset].ljust(offset, b"\0") + piece + body[offset + len(piece) :]


def resized(body: bytes, size: int) -> bytes:
    """Return a file's bytes after a truncate."""
    return body[:size].ljust(size, b"\0")
