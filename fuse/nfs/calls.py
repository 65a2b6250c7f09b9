"""The calls of NFS version 3 (RFC 1813): each function makes the Request of the procedure of its name.

Any thread may make a Request. Its result is read, into plain values, in libnfs' callback: libnfs frees it after that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ..ops import NOW, FSError, SetAttr
from . import libnfs

T_co = TypeVar("T_co", covariant=True)
SECOND_NS = 1_000_000_000
LATEST_NS = ((1 << 32) - 1) * SECOND_NS
"""The latest time, in 2106: seconds have 32 bits, unsigned. A time out of range becomes the nearest, as on Linux."""
STALE, JUKEBOX = 70, 10008
ERRNO = {
    63: errno.ENAMETOOLONG, 66: errno.ENOTEMPTY, 69: errno.EDQUOT, STALE: errno.ESTALE, 71: errno.EREMOTE,
    10001: errno.ESTALE, 10002: errno.EIO, 10003: errno.EINVAL, 10004: errno.EOPNOTSUPP, 10005: errno.EINVAL,
    10006: errno.EIO, 10007: errno.EPERM, JUKEBOX: errno.EAGAIN,
}  # fmt: skip
"""The errno of each nfsstat3 with a number of its own. BADTYPE (10007): the server can't make what MKNOD asks for."""
SAME = frozenset({1, 2, 5, 6, 13, 17, 18, 19, 20, 21, 22, 27, 28, 30, 31})
"""Each nfsstat3 up to MLINK whose number is also the errno, on Linux and on other systems."""
READ, MODIFY, EXTEND, EXECUTE = 0x01, 0x04, 0x08, 0x20
"""The bits of ACCESS: to read, to change existing bytes, to make the file longer, to execute."""
UNSTABLE, FILE_SYNC = 0, 2
UNCHECKED, GUARDED = 0, 1
TO_SERVER_TIME, TO_THIS_TIME = 1, 2
TYPES = {
    1: stat.S_IFREG, 2: stat.S_IFDIR, 3: stat.S_IFBLK, 4: stat.S_IFCHR, 5: stat.S_IFLNK, 6: stat.S_IFSOCK,
    7: stat.S_IFIFO,
}  # fmt: skip
NUMBERS = {kind: number for number, kind in TYPES.items()}


class NFSError(FSError):
    """The server refused a call. repeated: the same request had been sent before, and its answer was lost."""

    def __init__(self, status: int) -> None:
        number = status if status in SAME else ERRNO.get(status, errno.EIO)
        super().__init__(number, f"the NFS server says: {os.strerror(number)} (status {status})")
        self.status = status
        self.repeated = False


class Attributes(NamedTuple):
    """The attributes of an object (fattr3). mode includes the type bits; times are in nanoseconds."""

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    rdev: int
    fileid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    used: int
    """The bytes of disk that it takes."""


class Found(NamedTuple):
    """An object that a call found or made. If the server did not send them, handle is b'' and attributes is None."""

    handle: bytes
    attributes: Attributes | None


class Read(NamedTuple):
    """The answer to READ: bytes of a file. end: the file ends after them."""

    content: bytes
    end: bool
    attributes: Attributes | None


class Written(NamedTuple):
    """The answer to WRITE. taken: how many bytes. stable: they are on disk. verifier: new with each server start."""

    taken: int
    stable: bool
    verifier: int
    attributes: Attributes | None


class Line(NamedTuple):
    """An entry of a directory. cookie: where READDIRPLUS continues after it. handle: b'' if the server sent none."""

    name: bytes
    fileid: int
    cookie: int
    handle: bytes
    attributes: Attributes | None


class Lines(NamedTuple):
    """Entries of a directory. end: they are the last. verifier: must be sent along with the entries' cookies."""

    lines: list[Line]
    end: bool
    verifier: int


class Space(NamedTuple):
    """The size of a file system and the available part of it, in bytes and in files."""

    bytes: int
    bytes_available: int
    files: int
    files_available: int


class Request(Generic[T_co]):
    """A call of `procedure`. read: makes the result from the answer at an address that is valid only during `read`."""

    __slots__ = ("arguments", "procedure", "read")

    def __init__(self, procedure: str, arguments: ctypes.Structure, read: Callable[[int], T_co]) -> None:
        self.procedure = procedure
        self.arguments = arguments
        self.read = read


def _where(directory: bytes, name: bytes) -> ctypes.Structure:
    return libnfs.Where(libnfs.Handle.of(directory), name)


def _time_ns(time: Any) -> int:
    return int(time.seconds) * SECOND_NS + int(time.nanoseconds)


def _attributes(given: Any) -> Attributes:
    return Attributes(
        mode=TYPES.get(given.type, 0) | given.mode & 0o7777,
        nlink=given.nlink,
        uid=given.uid,
        gid=given.gid,
        size=given.size,
        rdev=os.makedev(given.major, given.minor) & 0xFFFFFFFF,
        fileid=given.fileid,
        atime_ns=_time_ns(given.atime),
        mtime_ns=_time_ns(given.mtime),
        ctime_ns=_time_ns(given.ctime),
        used=given.used,
    )


def _known(given: Any) -> Attributes | None:
    return _attributes(given.attributes) if given.follows else None


def _handle(given: Any) -> bytes:
    return ctypes.string_at(given.address, given.length)


def _changed(address: int) -> Attributes | None:
    return _known(libnfs.ChangedResult.from_address(address).changed.after)


def _nothing(_address: int) -> None:
    return None


def getattr(handle: bytes) -> Request[Attributes]:
    def read(address: int) -> Attributes:
        return _attributes(libnfs.GetAttrResult.from_address(address).attributes)

    return Request("getattr", libnfs.ObjectArgs(libnfs.Handle.of(handle)), read)


def _new(changes: SetAttr) -> ctypes.Structure:
    def number(value: int | None) -> ctypes.Structure:
        return libnfs.SetNumber() if value is None else libnfs.SetNumber(1, value)

    def time(value_ns: int | None) -> ctypes.Structure:
        if value_ns is None:
            return libnfs.SetTime()
        if value_ns == NOW:
            return libnfs.SetTime(TO_SERVER_TIME)
        seconds, nanoseconds = divmod(min(max(value_ns, 0), LATEST_NS), SECOND_NS)
        return libnfs.SetTime(TO_THIS_TIME, libnfs.Time(seconds, nanoseconds))

    return libnfs.NewAttributes(
        number(None if changes.mode is None else changes.mode & 0o7777),
        number(changes.uid),
        number(changes.gid),
        libnfs.SetSize() if changes.size is None else libnfs.SetSize(1, changes.size),
        time(changes.atime_ns),
        time(changes.mtime_ns),
    )


def setattr(handle: bytes, changes: SetAttr) -> Request[Attributes | None]:
    """SETATTR without a guard (a ctime that the object must still have)."""
    return Request("setattr", libnfs.SetAttrArgs(libnfs.Handle.of(handle), _new(changes)), _changed)


def lookup(directory: bytes, name: bytes) -> Request[Found]:
    def read(address: int) -> Found:
        result: Any = libnfs.LookupResult.from_address(address)
        return Found(_handle(result.object), _known(result.known))

    return Request("lookup", libnfs.WhereArgs(_where(directory, name)), read)


def access(handle: bytes, wanted: int) -> Request[tuple[int, Attributes | None]]:
    """ACCESS; the result tells which of the wanted bits are granted."""

    def read(address: int) -> tuple[int, Attributes | None]:
        result: Any = libnfs.AccessResult.from_address(address)
        return result.access, _known(result.known)

    return Request("access", libnfs.AccessArgs(libnfs.Handle.of(handle), wanted), read)


def readlink(handle: bytes) -> Request[bytes]:
    def read(address: int) -> bytes:
        target: bytes = libnfs.ReadLinkResult.from_address(address).target
        return target

    return Request("readlink", libnfs.ObjectArgs(libnfs.Handle.of(handle)), read)


def read(handle: bytes, offset: int, size: int) -> Request[Read]:
    def take(address: int) -> Read:
        result: Any = libnfs.ReadResult.from_address(address)
        content = ctypes.string_at(result.address, result.length) if result.length else b""
        return Read(content, bool(result.eof), _known(result.known))

    return Request("read", libnfs.ReadArgs(libnfs.Handle.of(handle), offset, size), take)


def write(handle: bytes, offset: int, content: bytes) -> Request[Written]:
    """WRITE; the server may answer before the bytes are on its disk."""

    def take(address: int) -> Written:
        result: Any = libnfs.WriteResult.from_address(address)
        after = _known(result.changed.after)
        return Written(result.count, result.committed == FILE_SYNC, result.verifier, after)

    size = len(content)
    arguments = libnfs.WriteArgs(libnfs.Handle.of(handle), offset, size, UNSTABLE, size, content)
    return Request("write", arguments, take)


def commit(handle: bytes) -> Request[int]:
    """COMMIT of the whole file; the result is the server's present verifier."""

    def take(address: int) -> int:
        verifier: int = libnfs.CommitResult.from_address(address).verifier
        return verifier

    return Request("commit", libnfs.CommitArgs(libnfs.Handle.of(handle), 0, 0), take)


def _made(address: int) -> Found:
    """Return the object that a call made; its handle is b'' if the server did not send it."""
    result: Any = libnfs.MadeResult.from_address(address)
    return Found(_handle(result.made.handle) if result.made.follows else b"", _known(result.known))


def create(directory: bytes, name: bytes, changes: SetAttr, *, exclusive: bool = False) -> Request[Found]:
    """CREATE of a file. Unless exclusive, the file may exist already; then only its size is set.

    exclusive uses GUARDED: a file made with EXCLUSIVE lacks permissions until a second call, and this process may die.
    """
    how = GUARDED if exclusive else UNCHECKED
    return Request("create", libnfs.CreateArgs(_where(directory, name), how, _new(changes)), _made)


def mkdir(directory: bytes, name: bytes, changes: SetAttr) -> Request[Found]:
    return Request("mkdir", libnfs.MkdirArgs(_where(directory, name), _new(changes)), _made)


def symlink(directory: bytes, name: bytes, target: bytes) -> Request[Found]:
    return Request("symlink", libnfs.SymlinkArgs(_where(directory, name), _new(SetAttr(mode=0o777)), target), _made)


def mknod(directory: bytes, name: bytes, mode: int, rdev: int, changes: SetAttr) -> Request[Found]:
    """MKNOD of a device, a FIFO or a socket."""
    kind = NUMBERS[stat.S_IFMT(mode)]
    device = (os.major(rdev), os.minor(rdev)) if kind in (3, 4) else (0, 0)
    return Request("mknod", libnfs.MknodArgs(_where(directory, name), kind, _new(changes), *device), _made)


def remove(directory: bytes, name: bytes) -> Request[None]:
    return Request("remove", libnfs.WhereArgs(_where(directory, name)), _nothing)


def rmdir(directory: bytes, name: bytes) -> Request[None]:
    return Request("rmdir", libnfs.WhereArgs(_where(directory, name)), _nothing)


def rename(directory: bytes, name: bytes, new_directory: bytes, new_name: bytes) -> Request[None]:
    arguments = libnfs.RenameArgs(_where(directory, name), _where(new_directory, new_name))
    return Request("rename", arguments, _nothing)


def link(handle: bytes, directory: bytes, name: bytes) -> Request[Attributes | None]:
    def read(address: int) -> Attributes | None:
        return _known(libnfs.LinkResult.from_address(address).known)

    return Request("link", libnfs.LinkArgs(libnfs.Handle.of(handle), _where(directory, name)), read)


def readdir(directory: bytes, cookie: int, verifier: int, size: int) -> Request[Lines]:
    """READDIRPLUS of the entries after `cookie` (0: from the first), in an answer of about `size` bytes."""

    def read(address: int) -> Lines:
        result: Any = libnfs.ReadDirResult.from_address(address)
        lines, at = [], result.first
        while at:
            line: Any = libnfs.Line.from_address(at)
            handle = _handle(line.made.handle) if line.made.follows else b""
            lines.append(Line(line.name, line.fileid, line.cookie, handle, _known(line.known)))
            at = line.next
        return Lines(lines, bool(result.eof), result.verifier)

    return Request("readdirplus", libnfs.ReadDirArgs(libnfs.Handle.of(directory), cookie, verifier, size, size), read)


def fsstat(handle: bytes) -> Request[Space]:
    def read(address: int) -> Space:
        result: Any = libnfs.FsStatResult.from_address(address)
        return Space(result.bytes, result.bytes_available, result.files, result.files_available)

    return Request("fsstat", libnfs.ObjectArgs(libnfs.Handle.of(handle)), read)


def fsinfo(handle: bytes) -> Request[tuple[int, int]]:
    """FSINFO; the result is the most bytes that one READ and one WRITE may have."""

    def read(address: int) -> tuple[int, int]:
        result: Any = libnfs.FsInfoResult.from_address(address)
        return result.read_max, result.write_max

    return Request("fsinfo", libnfs.ObjectArgs(libnfs.Handle.of(handle)), read)
