"""Requests of the kernel, decoded. Pure, and total: any bytes give a typed request or MALFORMED, never an exception.

A decoder gets the whole request (`view`, the 40-byte header included) and where it ends. Frequent requests decode to
plain tuples, because building a named one costs as much as the rest of the decoding. Names are bytes without NUL and
'/'. Layouts: abi.py. What the kernel never sends (a name with '/', '.' or '..', an offset beyond loff_t) is MALFORMED
too, so that a file system is never asked for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from ..ops import NOW, Fh, OpenRequest, SetAttr
from . import abi

SIZE_LIMIT = 16 << 20
"""Bytes one READ or READDIR may ask for; the kernel's own limit is max_pages (1 MiB as we negotiate)."""
OFFSET_LIMIT = 1 << 63  # loff_t is signed
TARGET_LIMIT = 4096  # PATH_MAX, which counts the NUL
SECOND_NS = 1_000_000_000
BODY = abi.HEADER_SIZE
WRITE_BODY = BODY + abi.WRITE_IN.size
UNNAMEABLE = (b"", b".", b"..")
NUL, SLASH = b"\0/"
"""As numbers: looking for one in bytes takes a fifth of the time."""


class Malformed:
    """Not a request that a kernel sends."""

    __slots__ = ()


MALFORMED: Final = Malformed()


class InitRequest(NamedTuple):
    """What the kernel offers: its version, its read-ahead in bytes, and its feature bits."""

    major: int
    minor: int
    max_readahead: int
    flags: int


class RenameRequest(NamedTuple):
    """RENAME and RENAME2."""

    new_parent: int
    flags: int
    name: bytes
    new_name: bytes


class MknodRequest(NamedTuple):
    """MKNOD; the kernel has applied the umask to mode."""

    name: bytes
    mode: int
    rdev: int


class CreateRequest(NamedTuple):
    """CREATE; the kernel has applied the umask to mode."""

    name: bytes
    mode: int
    request: OpenRequest


class FallocateRequest(NamedTuple):
    """FALLOCATE of [offset, offset + length)."""

    fh: int
    offset: int
    length: int
    mode: int


def _name(view: memoryview, start: int, end: int) -> bytes | Malformed:
    if end <= start or view[end - 1]:
        return MALFORMED
    name = bytes(view[start : end - 1])
    return MALFORMED if NUL in name or SLASH in name or name in UNNAMEABLE else name


def _two_strings(view: memoryview, start: int, end: int) -> tuple[bytes, bytes] | Malformed:
    if end <= start or view[end - 1]:
        return MALFORMED
    parts = bytes(view[start : end - 1]).split(b"\0")
    if len(parts) != 2 or parts[0] in UNNAMEABLE or b"/" in parts[0]:
        return MALFORMED
    return parts[0], parts[1]


def nothing(_view: memoryview, _end: int) -> tuple[()]:
    """READLINK, STATFS: the header says it all. OPENDIR too, whose flags we don't need."""
    return ()


def name(view: memoryview, end: int) -> bytes | Malformed:
    """LOOKUP, UNLINK, RMDIR."""
    return _name(view, BODY, end)


def forget(view: memoryview, end: int) -> int | Malformed:
    """FORGET: how many lookups to take back."""
    if end < BODY + 8:
        return MALFORMED
    (nlookup,) = abi.FORGET_IN.unpack_from(view, BODY)
    return int(nlookup)


def batch_forget(view: memoryview, end: int) -> list[tuple[int, int]] | Malformed:
    """BATCH_FORGET: (ino, nlookup) pairs."""
    start = BODY + abi.BATCH_FORGET_IN.size
    if end < start:
        return MALFORMED
    count, _ = abi.BATCH_FORGET_IN.unpack_from(view, BODY)
    stop = start + count * abi.FORGET_ONE.size
    if end < stop:
        return MALFORMED
    return list(abi.FORGET_ONE.iter_unpack(view[start:stop]))


def getattr(view: memoryview, end: int) -> int | Malformed:
    """GETATTR: the file handle, or 0."""
    if end < BODY + 16:
        return MALFORMED
    flags, _, fh = abi.GETATTR_IN.unpack_from(view, BODY)
    return fh if flags & abi.GETATTR_FH else 0


def _time(valid: int, bit: int, now_bit: int, seconds: int, nanoseconds: int) -> int | None:
    if not valid & bit:
        return None
    return NOW if valid & now_bit else seconds * SECOND_NS + nanoseconds


def setattr(view: memoryview, end: int) -> tuple[int, SetAttr] | Malformed:
    """SETATTR: the file handle (or 0) and the changes."""
    if end < BODY + abi.SETATTR_IN.size:
        return MALFORMED
    valid, _, fh, size, _, at, mt, ct, an, mn, cn, mode, _, uid, gid, _ = abi.SETATTR_IN.unpack_from(view, BODY)
    if max(an, mn, cn) >= SECOND_NS or size >= OFFSET_LIMIT:
        return MALFORMED
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
    return (fh if valid & abi.FATTR_FH else 0), changes


def symlink(view: memoryview, end: int) -> tuple[bytes, bytes] | Malformed:
    """SYMLINK: the new name and its target."""
    both = _two_strings(view, BODY, end)
    if isinstance(both, Malformed) or not 0 < len(both[1]) < TARGET_LIMIT:
        return MALFORMED
    return both


def mknod(view: memoryview, end: int) -> MknodRequest | Malformed:
    """MKNOD."""
    start = BODY + abi.MKNOD_IN.size
    new = _name(view, start, end)
    if isinstance(new, Malformed):
        return MALFORMED
    mode, rdev, _, _ = abi.MKNOD_IN.unpack_from(view, BODY)
    return MknodRequest(new, mode, rdev)


def mkdir(view: memoryview, end: int) -> tuple[bytes, int] | Malformed:
    """MKDIR: the name and the mode, to which the kernel has applied the umask."""
    new = _name(view, BODY + abi.MKDIR_IN.size, end)
    if isinstance(new, Malformed):
        return MALFORMED
    mode, _ = abi.MKDIR_IN.unpack_from(view, BODY)
    return new, mode


def _rename(view: memoryview, end: int, start: int, new_parent_flags: tuple[int, int]) -> RenameRequest | Malformed:
    both = _two_strings(view, start, end)
    if isinstance(both, Malformed) or both[1] in UNNAMEABLE or b"/" in both[1]:
        return MALFORMED
    return RenameRequest(*new_parent_flags, *both)


def rename(view: memoryview, end: int) -> RenameRequest | Malformed:
    """RENAME, the form without flags."""
    if end < BODY + 8:
        return MALFORMED
    (new_parent,) = abi.RENAME_IN.unpack_from(view, BODY)
    return _rename(view, end, BODY + 8, (new_parent, 0))


def rename2(view: memoryview, end: int) -> RenameRequest | Malformed:
    """RENAME2."""
    if end < BODY + 16:
        return MALFORMED
    new_parent, flags, _ = abi.RENAME2_IN.unpack_from(view, BODY)
    return _rename(view, end, BODY + 16, (new_parent, flags))


def link(view: memoryview, end: int) -> tuple[int, bytes] | Malformed:
    """LINK: the inode that gets another name, and that name (its parent is the header's node)."""
    new = _name(view, BODY + abi.LINK_IN.size, end)
    if isinstance(new, Malformed):
        return MALFORMED
    (ino,) = abi.LINK_IN.unpack_from(view, BODY)
    return ino, new


@lru_cache(256)
def _open_request(flags: int, open_flags: int) -> OpenRequest:
    return OpenRequest(flags=flags, kill_suidgid=bool(open_flags & abi.OPEN_KILL_SUIDGID))


def open(view: memoryview, end: int) -> OpenRequest | Malformed:
    """OPEN."""
    if end < BODY + abi.OPEN_IN.size:
        return MALFORMED
    return _open_request(*abi.OPEN_IN.unpack_from(view, BODY))


def create(view: memoryview, end: int) -> CreateRequest | Malformed:
    """CREATE."""
    new = _name(view, BODY + abi.CREATE_IN.size, end)
    if isinstance(new, Malformed):
        return MALFORMED
    flags, mode, _, open_flags = abi.CREATE_IN.unpack_from(view, BODY)
    return CreateRequest(new, mode, _open_request(flags, open_flags))


def read(view: memoryview, end: int) -> tuple[Fh, int, int] | Malformed:
    """READ, READDIR and READDIRPLUS: (fh, offset, size)."""
    if end < BODY + abi.READ_IN.size:
        return MALFORMED
    fh, offset, size, _, _, _, _ = abi.READ_IN.unpack_from(view, BODY)
    return MALFORMED if size > SIZE_LIMIT or offset >= OFFSET_LIMIT else (fh, offset, size)


def write(view: memoryview, end: int) -> tuple[Fh, int, memoryview, bool] | Malformed:
    """WRITE: (fh, offset, payload, kill_suidgid). The payload is a part of `view`, not a copy."""
    if end < WRITE_BODY:
        return MALFORMED
    fh, offset, size, flags, _, _, _ = abi.WRITE_IN.unpack_from(view, BODY)
    if WRITE_BODY + size != end or offset + size >= OFFSET_LIMIT:
        return MALFORMED
    return fh, offset, view[WRITE_BODY:end], bool(flags & abi.WRITE_KILL_SUIDGID)


def handle(view: memoryview, end: int) -> Fh | Malformed:
    """RELEASE, RELEASEDIR and FLUSH: the file handle."""
    if end < BODY + abi.RELEASE_IN.size:
        return MALFORMED
    fh: Fh
    fh, _, _, _ = abi.RELEASE_IN.unpack_from(view, BODY)
    return fh


def fsync(view: memoryview, end: int) -> tuple[int, bool] | Malformed:
    """FSYNC: (fh, datasync)."""
    if end < BODY + abi.FSYNC_IN.size:
        return MALFORMED
    fh, flags, _ = abi.FSYNC_IN.unpack_from(view, BODY)
    return fh, bool(flags & abi.FSYNC_FDATASYNC)


def _xattr_name(view: memoryview, start: int, end: int) -> bytes | Malformed:
    """An attribute's name, which may hold a '/'."""
    if end - start < 2 or view[end - 1]:
        return MALFORMED
    found = bytes(view[start : end - 1])
    return MALFORMED if b"\0" in found else found


def setxattr(view: memoryview, end: int) -> tuple[bytes, bytes, int] | Malformed:
    """SETXATTR: (name, content, flags)."""
    start = BODY + abi.SETXATTR_IN.size
    if end < start:
        return MALFORMED
    size, flags = abi.SETXATTR_IN.unpack_from(view, BODY)
    split = end - size
    attribute = _xattr_name(view, start, split)
    return MALFORMED if isinstance(attribute, Malformed) else (attribute, bytes(view[split:end]), flags)


def getxattr(view: memoryview, end: int) -> tuple[int, bytes] | Malformed:
    """GETXATTR: (room, name); room 0 asks how much is needed."""
    start = BODY + abi.GETXATTR_IN.size
    attribute = _xattr_name(view, start, end)
    if isinstance(attribute, Malformed):
        return MALFORMED
    size, _ = abi.GETXATTR_IN.unpack_from(view, BODY)
    return size, attribute


def listxattr(view: memoryview, end: int) -> int | Malformed:
    """LISTXATTR: room; 0 asks how much is needed."""
    if end < BODY + abi.GETXATTR_IN.size:
        return MALFORMED
    size, _ = abi.GETXATTR_IN.unpack_from(view, BODY)
    return int(size)


def removexattr(view: memoryview, end: int) -> bytes | Malformed:
    """REMOVEXATTR: the name."""
    return _xattr_name(view, BODY, end)


def init(view: memoryview, end: int) -> InitRequest | Malformed:
    """INIT, with or without the second word of flags."""
    if end < BODY + abi.INIT_IN.size:
        return MALFORMED
    major, minor, readahead, flags = abi.INIT_IN.unpack_from(view, BODY)
    if flags & abi.INIT_EXT and end >= BODY + abi.INIT_IN.size + 4:
        flags |= abi.INIT_IN_FLAGS2.unpack_from(view, BODY + abi.INIT_IN.size)[0] << 32
    return InitRequest(major, minor, readahead, flags)


def interrupt(view: memoryview, end: int) -> int | Malformed:
    """INTERRUPT: `unique` of the request that is no longer wanted."""
    if end < BODY + abi.INTERRUPT_IN.size:
        return MALFORMED
    (unique,) = abi.INTERRUPT_IN.unpack_from(view, BODY)
    return int(unique)


def fallocate(view: memoryview, end: int) -> FallocateRequest | Malformed:
    """FALLOCATE."""
    if end < BODY + abi.FALLOCATE_IN.size:
        return MALFORMED
    fh, offset, length, mode, _ = abi.FALLOCATE_IN.unpack_from(view, BODY)
    return MALFORMED if offset + length >= OFFSET_LIMIT else FallocateRequest(fh, offset, length, mode)


def lseek(view: memoryview, end: int) -> tuple[int, int, int] | Malformed:
    """LSEEK: (fh, offset, whence)."""
    if end < BODY + abi.LSEEK_IN.size:
        return MALFORMED
    fh, offset, whence, _ = abi.LSEEK_IN.unpack_from(view, BODY)
    return fh, offset, whence
