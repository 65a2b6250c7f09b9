"""Encodes replies and notifications to the kernel. Pure.

Each function returns one frame: `bytes` for write(2), or a list for writev(2), so that file contents are not copied.
The layouts are in abi.py. Values that don't fit raise struct.error; the session answers EIO then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..ops import Attr, AttrReply, DirEntry, Entry, OpenDirReply, StatFs
from . import abi
from .abi import SECOND_NS

Body = bytes | bytearray | memoryview
Frame = bytes | list[Body]

TTL_LIMIT_S = 1e9
"""The longest time to live: about 30 years. The kernel takes longer ones for 'forever', and this fits each field."""
_DIRENTPLUS = struct.Struct(abi.ENTRY_OUT.format + abi.DIRENT.format[1:])
_NO_ATTR = (0,) * 16
_NO_ENTRY = (0,) * 6 + _NO_ATTR
_PADDING = [bytes(count) for count in range(8)]


def error(unique: int, number: int) -> bytes:
    """Encode a failure; number: a positive errno."""
    return abi.OUT_HEADER.pack(16, -number, unique)


def empty(unique: int, _result: None = None) -> bytes:
    """Encode success without any content."""
    return abi.OUT_HEADER.pack(16, 0, unique)


def body(unique: int, content: Body) -> list[Body]:
    """Encode file contents, a link target, a directory listing or an extended attribute."""
    return [abi.OUT_HEADER.pack(16 + len(content), 0, unique), content]


def _ttl(seconds: float) -> tuple[int, int]:
    if not 0.0 <= seconds <= TTL_LIMIT_S:
        seconds = 0.0 if seconds < 0.0 else TTL_LIMIT_S
    return divmod(int(seconds * SECOND_NS), SECOND_NS)


def _attr_fields(attr: Attr) -> tuple[int, ...]:
    ino, mode, size, nlink, uid, gid, atime_ns, mtime_ns, ctime_ns, rdev, blksize, _ = attr
    at, an = divmod(atime_ns, SECOND_NS)
    mt, mn = divmod(mtime_ns, SECOND_NS)
    ct, cn = divmod(ctime_ns, SECOND_NS)
    return (ino, size, attr.blocks(), at, mt, ct, an, mn, cn, mode, nlink, uid, gid, rdev, blksize, 0)


def entry(unique: int, found: Entry) -> bytes:
    """Encode the answer to LOOKUP, MKNOD, MKDIR, SYMLINK or LINK; a negative one has node id 0."""
    return abi.ENTRY_REPLY.pack(144, 0, unique, *_entry_fields(found))


def _entry_fields(found: Entry) -> tuple[int, ...]:
    attr, entry_ttl_s, attr_ttl_s = found
    es, en = _ttl(entry_ttl_s)
    if attr is None:
        return (0, 0, es, 0, en, 0, *_NO_ATTR)
    seconds, ns = (es, en) if attr_ttl_s == entry_ttl_s else _ttl(attr_ttl_s)
    return (attr[0], 0, es, seconds, en, ns, *_attr_fields(attr))


def attributes(unique: int, answer: AttrReply) -> bytes:
    """Encode the answer to GETATTR or SETATTR."""
    seconds, ns = _ttl(answer[1])
    return abi.ATTR_REPLY.pack(120, 0, unique, seconds, ns, 0, *_attr_fields(answer[0]))


def opened(unique: int, fh: int, flags: int, backing_id: int) -> bytes:
    return abi.OPEN_REPLY.pack(32, 0, unique, fh, flags, backing_id)


def opened_directory(unique: int, result: OpenDirReply) -> bytes:
    """Encode the answer to OPENDIR."""
    flags = (abi.FOPEN_CACHE_DIR if result.cache else 0) | (abi.FOPEN_KEEP_CACHE if result.keep else 0)
    return opened(unique, result.fh, flags, 0)


def created(unique: int, found: Entry, fh: int, flags: int, backing_id: int) -> bytes:
    return abi.CREATE_REPLY.pack(160, 0, unique, *_entry_fields(found), fh, flags, backing_id)


def written(unique: int, count: int) -> bytes:
    return abi.WRITE_REPLY.pack(24, 0, unique, count, 0)


def statfs(unique: int, s: StatFs) -> bytes:
    """Encode the answer to STATFS; every free block is available to every user."""
    blocks, free, files, files_free, size, name_max = s
    return abi.STATFS_REPLY.pack(96, 0, unique, blocks, free, free, files, files_free, size, name_max, size, 0)


def xattr_size(unique: int, size: int) -> bytes:
    """Encode the answer to a GETXATTR or LISTXATTR with room 0, which asks how much room is needed."""
    return abi.GETXATTR_REPLY.pack(24, 0, unique, size, 0)


class Budget:
    """The room that is left for directory entries in an answer of `size` bytes (an ops.DirBudget)."""

    __slots__ = ("_fixed", "_left")

    def __init__(self, size: int, *, plus: bool) -> None:
        self._left = size
        self._fixed = _DIRENTPLUS.size if plus else abi.DIRENT.size

    def take(self, name_length: int) -> bool:
        """Reserve room for one entry, padded to 8 bytes; return False when it does not fit."""
        need = (self._fixed + name_length + 7) & ~7
        if need > self._left:
            return False
        self._left -= need
        return True


def directory(unique: int, lines: Sequence[DirEntry]) -> list[Body]:
    """Encode the answer to READDIR."""
    parts: list[bytes] = []
    for name, ino, mode, cursor, _ in lines:
        parts += (abi.DIRENT.pack(ino, cursor, len(name), mode >> 12 & 15), name, _PADDING[-len(name) & 7])
    return body(unique, b"".join(parts))


def directory_plus(unique: int, lines: Sequence[DirEntry]) -> list[Body]:
    """Encode the answer to READDIRPLUS. A line without an entry has node id 0; the kernel looks that up if needed."""
    parts: list[bytes] = []
    for name, ino, mode, cursor, found in lines:
        fields = _NO_ENTRY if found is None else _entry_fields(found)
        packed = _DIRENTPLUS.pack(*fields, ino, cursor, len(name), mode >> 12 & 15)
        parts += (packed, name, _PADDING[-len(name) & 7])
    return body(unique, b"".join(parts))


def inval_inode(ino: int, offset: int) -> bytes:
    """Encode a notification: drop attributes, and the pages unless offset is -1 (fuse_notify_inval_inode_out)."""
    return abi.INVAL_INODE.pack(40, abi.NOTIFY_INVAL_INODE, 0, ino, offset, 0)


def inval_entry(parent: int, name: bytes, *, expire_only: bool) -> bytes:
    """Encode a notification: forget a name. expire_only: look it up at its next use, but don't detach what is below."""
    head = abi.INVAL_ENTRY.pack(
        32 + len(name) + 1, abi.NOTIFY_INVAL_ENTRY, 0, parent, len(name), abi.EXPIRE_ONLY if expire_only else 0
    )
    return head + name + b"\0"


def prune(inos: Sequence[int]) -> bytes:
    """Encode a notification: give up these inodes' dentries, and so the nodes, where nobody uses them (Linux 6.18)."""
    count = len(inos)
    return abi.PRUNE.pack(32 + 8 * count, abi.NOTIFY_PRUNE, 0, count, 0, 0) + struct.pack(f"<{count}Q", *inos)


def is_prune(frame: bytes) -> bool:
    """Return whether a frame is one of prune()."""
    return int.from_bytes(frame[4:8], "little", signed=True) == abi.NOTIFY_PRUNE


def resend() -> bytes:
    """Encode a notification: send again every request that has been read but not answered."""
    return abi.OUT_HEADER.pack(16, abi.NOTIFY_RESEND, 0)
