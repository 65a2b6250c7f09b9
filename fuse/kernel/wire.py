"""Decodes the kernel's requests. Pure: for any bytes, a decoder returns arguments or raises one of NOT_A_REQUEST.

A decoder gets what follows the header. Where possible it returns what the method of ops.Filesystem takes after the
caller and the inode, mostly as a plain tuple, because building a named one costs as much as the rest of the decoding.
Names are bytes without NUL and '/'. The layouts are in abi.py. What the kernel never sends (a name with '/', the names
'.' and '..', an offset beyond loff_t) is refused too, so that no file system ever gets it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from ..ops import NOW, Fh, Ino, OpenRequest, SetAttr
from . import abi
from .abi import SECOND_NS

SIZE_LIMIT = 16 << 20
"""The most bytes that a READ or READDIR may ask for; the kernel's own limit is max_pages (1 MiB as we negotiate)."""
OFFSET_LIMIT = 1 << 63  # loff_t is signed
TARGET_LIMIT = 4096  # PATH_MAX, which counts the NUL
UNNAMEABLE = (b"", b".", b"..")
SLASH = ord("/")
"""A number, because searching bytes for a number takes a fifth of the time of searching for b"/"."""
NOT_A_REQUEST = (ValueError, struct.error)
"""What a decoder raises for bytes that no kernel sends; struct.error if they are too few."""


class InitRequest(NamedTuple):
    """What the kernel offers: its minor version, its read-ahead in bytes, and its feature bits."""

    minor: int
    max_readahead: int
    flags: int


class RenameRequest(NamedTuple):
    """A decoded RENAME or RENAME2; RENAME has no flags, which is 0 here."""

    name: bytes
    new_parent: Ino
    new_name: bytes
    flags: int


class CreateRequest(NamedTuple):
    """A decoded CREATE; the kernel has applied the umask to mode."""

    name: bytes
    mode: int
    request: OpenRequest


def _strings(body: memoryview, count: int) -> list[bytes]:
    *strings, rest = bytes(body).split(b"\0")
    if rest or len(strings) != count:
        raise ValueError("not so many strings, each with a NUL behind it")
    return strings


def _checked(name: bytes) -> bytes:
    if SLASH in name or name in UNNAMEABLE:
        raise ValueError("no name")
    return name


def nothing(_body: memoryview) -> tuple[()]:
    """Decode READLINK and STATFS, which have no body, and OPENDIR, whose flags we don't need."""
    return ()


def name(body: memoryview) -> tuple[bytes]:
    """Decode LOOKUP, UNLINK and RMDIR: the name."""
    found, rest = bytes(body).split(b"\0")
    if rest or SLASH in found or found in UNNAMEABLE:
        raise ValueError("no name")
    return (found,)


def forget(body: memoryview) -> int:
    """Decode FORGET: how much to subtract from the inode's lookup count."""
    (nlookup,) = abi.FORGET_IN.unpack_from(body)
    return int(nlookup)


def batch_forget(body: memoryview) -> list[tuple[int, int]]:
    """Decode BATCH_FORGET: (ino, nlookup) pairs."""
    count, _ = abi.BATCH_FORGET_IN.unpack_from(body)
    start = abi.BATCH_FORGET_IN.size
    pairs = list(abi.FORGET_ONE.iter_unpack(body[start : start + count * abi.FORGET_ONE.size]))
    if len(pairs) < count:
        raise ValueError("too few pairs")
    return pairs


def getattr(body: memoryview) -> tuple[Fh]:
    """Decode GETATTR: the file handle, or 0."""
    flags, _, fh = abi.GETATTR_IN.unpack_from(body)
    return (fh if flags & abi.GETATTR_FH else Fh(0),)


def _time(valid: int, bit: int, now_bit: int, seconds: int, nanoseconds: int) -> int | None:
    if not valid & bit:
        return None
    return NOW if valid & now_bit else seconds * SECOND_NS + nanoseconds


def setattr(body: memoryview) -> tuple[Fh, SetAttr]:
    """Decode SETATTR: the file handle (or 0) and the changes."""
    valid, _, fh, size, _, at, mt, ct, an, mn, cn, mode, _, uid, gid, _ = abi.SETATTR_IN.unpack_from(body)
    if max(an, mn, cn) >= SECOND_NS or size >= OFFSET_LIMIT:
        raise ValueError("no time or size")
    changes = SetAttr(
        mode=mode if valid & abi.FATTR_MODE else None,
        uid=uid if valid & abi.FATTR_UID else None,
        gid=gid if valid & abi.FATTR_GID else None,
        size=size if valid & abi.FATTR_SIZE else None,
        atime_ns=_time(valid, abi.FATTR_ATIME, abi.FATTR_ATIME_NOW, at, an),
        mtime_ns=_time(valid, abi.FATTR_MTIME, abi.FATTR_MTIME_NOW, mt, mn),
        ctime_ns=_time(valid, abi.FATTR_CTIME, 0, ct, cn),
        kill_suidgid=bool(valid & abi.FATTR_KILL_SUIDGID),
    )
    return (fh if valid & abi.FATTR_FH else Fh(0)), changes


def symlink(body: memoryview) -> tuple[bytes, bytes]:
    """Decode SYMLINK: the new name and its target."""
    new, target = _strings(body, 2)
    if not 0 < len(target) < TARGET_LIMIT:
        raise ValueError("no target")
    return _checked(new), target


def mknod(body: memoryview) -> tuple[bytes, int, int]:
    """Decode MKNOD: the name, the mode, to which the kernel has applied the umask, and rdev."""
    mode, rdev, _, _ = abi.MKNOD_IN.unpack_from(body)
    return *name(body[abi.MKNOD_IN.size :]), mode, rdev


def mkdir(body: memoryview) -> tuple[bytes, int]:
    """Decode MKDIR: the name and the mode, to which the kernel has applied the umask."""
    mode, _ = abi.MKDIR_IN.unpack_from(body)
    return *name(body[abi.MKDIR_IN.size :]), mode


def rename(body: memoryview) -> RenameRequest:
    """Decode RENAME, the form without flags."""
    (new_parent,) = abi.RENAME_IN.unpack_from(body)
    old, new = _strings(body[abi.RENAME_IN.size :], 2)
    return RenameRequest(_checked(old), new_parent, _checked(new), 0)


def rename2(body: memoryview) -> RenameRequest:
    """Decode RENAME2, the form with flags."""
    new_parent, flags, _ = abi.RENAME2_IN.unpack_from(body)
    old, new = _strings(body[abi.RENAME2_IN.size :], 2)
    return RenameRequest(_checked(old), new_parent, _checked(new), flags)


def link(body: memoryview) -> tuple[Ino, bytes]:
    """Decode LINK: the inode that gets another name, and that name (its parent is the header's node)."""
    (ino,) = abi.LINK_IN.unpack_from(body)
    return ino, *name(body[abi.LINK_IN.size :])


@lru_cache(256)
def _open_request(flags: int, open_flags: int) -> OpenRequest:
    return OpenRequest(flags=flags, kill_suidgid=bool(open_flags & abi.OPEN_KILL_SUIDGID))


def open(body: memoryview) -> tuple[OpenRequest]:
    return (_open_request(*abi.OPEN_IN.unpack_from(body)),)


def create(body: memoryview) -> CreateRequest:
    flags, mode, _, open_flags = abi.CREATE_IN.unpack_from(body)
    return CreateRequest(*name(body[abi.CREATE_IN.size :]), mode, _open_request(flags, open_flags))


def read(body: memoryview) -> tuple[Fh, int, int]:
    """Decode READ, READDIR and READDIRPLUS: (fh, offset, size)."""
    fh, offset, size, _, _, _, _ = abi.READ_IN.unpack_from(body)
    if size > SIZE_LIMIT or offset >= OFFSET_LIMIT:
        raise ValueError("too much, or too far")
    return fh, offset, size


def write(body: memoryview) -> tuple[Fh, int, memoryview, bool]:
    """Decode WRITE: (fh, offset, payload, kill_suidgid). The payload is a part of `body`, not a copy."""
    fh, offset, size, flags, _, _, _ = abi.WRITE_IN.unpack_from(body)
    payload = body[abi.WRITE_IN.size :]
    if size != len(payload) or offset + size >= OFFSET_LIMIT:
        raise ValueError("another size, or too far")
    return fh, offset, payload, bool(flags & abi.WRITE_KILL_SUIDGID)


def handle(body: memoryview) -> tuple[Fh]:
    """Decode RELEASE, RELEASEDIR and FLUSH: the file handle."""
    fh, _, _, _ = abi.RELEASE_IN.unpack_from(body)
    return (fh,)


def fsync(body: memoryview) -> tuple[Fh, bool]:
    """Decode FSYNC: (fh, datasync)."""
    fh, flags, _ = abi.FSYNC_IN.unpack_from(body)
    return fh, bool(flags & abi.FSYNC_FDATASYNC)


def _xattr_name(body: memoryview) -> bytes:
    """Decode the name of an extended attribute, which may hold a '/'."""
    (found,) = _strings(body, 1)
    if not found:
        raise ValueError("no name")
    return found


def setxattr(body: memoryview) -> tuple[bytes, bytes, int]:
    """Decode SETXATTR: (name, content, flags)."""
    size, flags = abi.SETXATTR_IN.unpack_from(body)
    split = max(0, len(body) - size)
    return _xattr_name(body[abi.SETXATTR_IN.size : split]), bytes(body[split:]), flags


def getxattr(body: memoryview) -> tuple[int, bytes]:
    """Decode GETXATTR: (room in bytes, name); room 0 asks how much room is needed."""
    size, _ = abi.GETXATTR_IN.unpack_from(body)
    return size, _xattr_name(body[abi.GETXATTR_IN.size :])


def listxattr(body: memoryview) -> tuple[int]:
    """Decode LISTXATTR: the room in bytes; 0 asks how much room is needed."""
    size, _ = abi.GETXATTR_IN.unpack_from(body)
    return (size,)


def removexattr(body: memoryview) -> tuple[bytes]:
    """Decode REMOVEXATTR: the name."""
    return (_xattr_name(body),)


def init(body: memoryview) -> InitRequest:
    """Decode INIT, with or without the second word of flags."""
    _, minor, readahead, flags = abi.INIT_IN.unpack_from(body)
    if flags & abi.INIT_EXT and len(body) >= abi.INIT_IN.size + 4:
        flags |= abi.INIT_IN_FLAGS2.unpack_from(body, abi.INIT_IN.size)[0] << 32
    return InitRequest(minor, readahead, flags)


def interrupt(body: memoryview) -> int:
    """Decode INTERRUPT: `unique` of the request that is no longer wanted."""
    (unique,) = abi.INTERRUPT_IN.unpack_from(body)
    return int(unique)


def fallocate(body: memoryview) -> tuple[Fh, int, int, int]:
    """Decode FALLOCATE: (fh, offset, length, mode)."""
    fh, offset, length, mode, _ = abi.FALLOCATE_IN.unpack_from(body)
    if offset + length >= OFFSET_LIMIT:
        raise ValueError("too far")
    return fh, offset, length, mode
