"""The interface between a file system and the adapter that serves it (our kernel session, mfusepy, tests).

It is independent of the FUSE protocol's wire format. The methods of a `Filesystem` are coroutines of its loop; one that
can be answered from memory ends without an await. They raise `FSError` and DatastoreError. A caller may give up waiting
(EINTR); the coroutine still runs to its end. Names and link targets are bytes. Times are nanoseconds since the
epoch; `mode` includes the type bits; sizes and offsets are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol, runtime_checkable

from .loop import Loop

Ino = NewType("Ino", int)
Fh = NewType("Fh", int)
ROOT_INO = Ino(1)


class FSError(OSError):
    """An errno for the application, as in `FSError(errno.ENOENT)`."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(number, message or os.strerror(number))

    def __str__(self) -> str:
        return str(self.strerror)


class Caller(NamedTuple):
    """The process that made the request.

    request: a number that the kernel gives to no other request of the mount. It is the same when the kernel sends the
    request again to the next server, which then is to have the effect only once; 0: the number is not known.
    """

    uid: int
    gid: int
    pid: int
    request: int = 0


class Attr(NamedTuple):
    """The attributes that stat(2) shows. used: how many bytes of disk it takes; None: not known, then it is `size`."""

    ino: Ino
    mode: int
    size: int
    nlink: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    rdev: int = 0
    blksize: int = 4096
    used: int | None = None

    def blocks(self) -> int:
        """Return st_blocks, in units of 512 bytes."""
        return ((self.size if self.used is None else self.used) + 511) >> 9


class AttrReply(NamedTuple):
    """Attributes, and how long the kernel may cache them, in seconds."""

    attr: Attr
    ttl_s: float


class Entry(NamedTuple):
    """The answer to a lookup; with `attr` None the name does not exist, and the kernel caches that for entry_ttl_s.

    Every positive Entry that reaches the kernel adds one to the inode's lookup count.
    """

    attr: Attr | None
    entry_ttl_s: float
    attr_ttl_s: float = 0.0


class OpenReply(NamedTuple):
    """An open file. keep_cache: the pages of this inode in the kernel's page cache are still valid.

    direct_io: this open bypasses the page cache. uncached: the same, but only with a kernel that drops the pages which
    a direct write makes stale. passthrough_fd: a local file that the kernel may read and write by itself, or -1.
    """

    fh: Fh
    keep_cache: bool = False
    direct_io: bool = False
    passthrough_fd: int = -1
    uncached: bool = False


class OpenDirReply(NamedTuple):
    """An open directory. cache: the kernel may keep the entries that it reads, and answer later readdirs from them, so
    that all cursors of the handle must be of one listing. keep: the entries that it kept before are still valid.
    """

    fh: Fh
    cache: bool = False
    keep: bool = False


class SetAttr(NamedTuple):
    """The attributes to change; None leaves an attribute as it is. The time NOW stands for the present time."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    kill_suidgid: bool = False


NOW = -1
"""A time in SetAttr: the file system's present time (UTIME_NOW)."""


class DirEntry(NamedTuple):
    """One entry of a directory. offset: the cursor to continue after this entry. entry: only for readdirplus."""

    name: bytes
    ino: Ino
    mode: int
    """Only the type bits are used."""
    offset: int
    entry: Entry | None = None


class DirBudget(Protocol):
    """How much of a listing fits the caller's buffer."""

    def take(self, name_length: int) -> bool:
        """Reserve room for an entry with a name of this length; False when it does not fit: the listing has to stop."""


class StatFs(NamedTuple):
    """What statfs(2) shows; sizes are in blocks of `block_size` bytes."""

    blocks: int
    blocks_free: int
    files: int
    files_free: int
    block_size: int = 4096
    name_max: int = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """flags: those of open(2). kill_suidgid: drop setuid and setgid (O_TRUNC by a caller who may not keep them)."""

    flags: int
    kill_suidgid: bool = False


class Held(NamedTuple):
    """A node that the kernel is to forget. name: b'' when its dentry must not be invalidated, as for a directory."""

    ino: Ino
    parent: Ino
    name: bytes


class Notifier:
    """Tells the kernel what another client changed. No method blocks: a thread of the adapter sends the notifications.

    This base class sends nothing: it serves before the session starts, and for libfuse, where TTLs have to do.
    """

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        """Invalidate the dentry of this name."""

    def inval_inode(self, ino: Ino, offset: int = 0) -> None:
        """Invalidate the inode's cached attributes, and its pages from `offset` on; offset -1: attributes only."""

    def is_local(self, ino: Ino) -> bool | None:
        """Whether the kernel reads this open inode from a local file (FUSE passthrough); None: it never does that."""

    def release(self, held: Sequence[Held]) -> None:
        """Ask the kernel to forget these nodes, unless they are in use; forget() follows for each that it forgets."""


@runtime_checkable
class KnowsFilesByName(Protocol):
    """A Filesystem whose storage identifies a file only by its name (no inode number that survives a rename)."""

    async def renamed_before(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes) -> None:
        """A mount server that died has carried out this rename: move what is known of the old name to the new one."""


class Filesystem(Protocol):
    """The file system of a mount. fh 0 means 'no handle': use the inode. For an fh that this process did not hand out
    (the server was restarted) the inode is used as well. The umask is already applied to a mode. Errors that are not
    listed are the usual ones of the system call; EOPNOTSUPP for what is not supported."""

    @property
    def loop(self) -> Loop:
        """The loop on which the coroutines run; the adapter that serves the file system turns it."""

    def start(self, notifier: Notifier) -> None: ...  # once before the first request, on the loop
    async def stop(self) -> None: ...  # once after the last request: finish uploads, within limits; idempotent

    # -- names; each positive Entry that is answered adds one to the lookup count

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry: ...  # negative rather than ENOENT
    def forget(self, ino: Ino, nlookup: int) -> None: ...  # subtract from the lookup count; ignore unknown inodes
    async def readlink(self, ino: Ino) -> bytes: ...
    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """Create a regular file, FIFO, socket or device; FSError(EPERM) for a type that the storage cannot hold."""

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry: ...
    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None: ...  # not of a directory
    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None: ...
    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry: ...
    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """flags: RENAME_NOREPLACE (1); EINVAL for others."""

    async def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Entry: ...

    # -- attributes

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply: ...  # stat, or fstat with fh
    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply: ...
    async def getxattr(self, ino: Ino, name: bytes) -> bytes: ...  # ENODATA when absent
    async def setxattr(self, caller: Caller, ino: Ino, name: bytes, content: bytes, flags: int) -> None:
        """flags: XATTR_CREATE (1), which may give EEXIST; XATTR_REPLACE (2), ENODATA. ENOSPC when it does not fit."""

    async def listxattr(self, ino: Ino) -> Sequence[bytes]: ...
    async def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None: ...  # ENODATA when absent
    async def statfs(self, ino: Ino) -> StatFs: ...  # of the whole file system

    # -- files

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply: ...  # O_TRUNC is honoured here
    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """Create (O_EXCL honoured) and open."""

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Return `size` bytes, or fewer at the end of the file."""

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """Return the number of bytes written. `payload` is valid until then: the adapter reserves the buffer."""

    async def flush(self, ino: Ino, fh: Fh) -> None: ...  # for each close(2)
    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None: ...  # make the bytes durable
    async def release(self, ino: Ino, fh: Fh) -> None: ...  # after the last close
    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        """mode: 0, FALLOC_FL_KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE; EOPNOTSUPP for others."""

    # -- directories

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply: ...
    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        """Return entries from cursor `offset` (0: the first) until the budget is spent; `.` and `..` too, without an
        `entry`. plus: the others have an `entry`, which adds one to the inode's lookup count."""

    def releasedir(self, ino: Ino, fh: Fh) -> None: ...
