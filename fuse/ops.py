"""The neutral vocabulary between a file system and whoever serves it (our kernel session, mfusepy, tests).

Knows nothing of the wire. The methods of a `Filesystem` are coroutines of its loop: one that memory can answer ends
without awaiting anything. They raise `FSError` and DatastoreError. A caller may give up waiting (EINTR); then the
coroutine runs to its end all the same. Names and link targets are bytes. Times are nanoseconds since the epoch; `mode`
has the type bits; sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol, runtime_checkable

from .loop import Loop

Ino = NewType("Ino", int)
Fh = NewType("Fh", int)
ROOT_INO = Ino(1)


class FSError(OSError):
    """An errno for the application; `FSError(errno.ENOENT)`."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(number, message)


class Caller(NamedTuple):
    """Who asks."""

    uid: int
    gid: int
    pid: int


class Attr(NamedTuple):
    """What stat shows."""

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


class AttrReply(NamedTuple):
    """Attributes and how long the kernel may keep them, seconds."""

    attr: Attr
    ttl_s: float


class Entry(NamedTuple):
    """A name that was found; `attr` None is a negative answer, kept for entry_ttl_s.

    Every positive Entry that reaches the kernel adds one to the inode's lookup count.
    """

    attr: Attr | None
    entry_ttl_s: float
    attr_ttl_s: float = 0.0


class OpenReply(NamedTuple):
    """An open file. keep_cache: the kernel's pages of this inode are still right.

    direct_io: past the kernel's pages. uncached: the same, where the kernel keeps what others read right all the same.
    passthrough_fd: a local file that the kernel may read and write by itself, or -1.
    """

    fh: Fh
    keep_cache: bool = False
    direct_io: bool = False
    passthrough_fd: int = -1
    uncached: bool = False


class OpenDirReply(NamedTuple):
    """An open directory. cache: the kernel may keep what it reads, so that cursors must be of one listing only, and go
    by what it kept. keep: it need not drop that before.
    """

    fh: Fh
    cache: bool = False
    keep: bool = False


class SetAttr(NamedTuple):
    """The attributes to change; None leaves one as it is. NOW asks for the present time."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    kill_suidgid: bool = False


NOW = -1
"""SetAttr time: the file system's present time (UTIME_NOW)."""


class DirEntry(NamedTuple):
    """One line of a directory. offset: the cursor that continues after it. entry: only for readdirplus."""

    name: bytes
    ino: Ino
    mode: int
    """Only the type bits matter."""
    offset: int
    entry: Entry | None = None


class DirBudget(Protocol):
    """How much of a listing fits the caller's buffer."""

    def take(self, name_length: int) -> bool:
        """Reserve room for one entry; False when it does not fit (stop there)."""


class StatFs(NamedTuple):
    """What statfs shows, in blocks of `block_size` bytes."""

    blocks: int
    blocks_free: int
    files: int
    files_free: int
    block_size: int = 4096
    name_max: int = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """flags: open(2)'s. kill_suidgid: drop setuid and setgid (O_TRUNC by one who may not keep them)."""

    flags: int
    kill_suidgid: bool = False


class Held(NamedTuple):
    """A node that the kernel has and need not have. name: b'' of a directory, which must not be detached."""

    ino: Ino
    parent: Ino
    name: bytes


class Notifier:
    """Tells the kernel that another client changed something. Never blocks: a thread of the adapter delivers.

    This one has nobody to tell: before the session starts, and for libfuse, where times to live do the work.
    """

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        """Forget this name."""

    def inval_inode(self, ino: Ino, offset: int = 0) -> None:
        """Drop cached attributes and pages; offset -1: attributes only."""

    def is_local(self, ino: Ino) -> bool | None:
        """Whether the kernel reads this inode, which is open, from a local file by itself; None: it never does here."""

    def release(self, held: Sequence[Held]) -> None:
        """Give up these nodes, those that are in use excepted: forget() follows for each that is given up."""


@runtime_checkable
class KnowsFilesByName(Protocol):
    """A Filesystem whose storage tells no file from another but by its name."""

    async def renamed_before(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes) -> None:
        """A server that died has carried out this rename: what is known of the old name is of the new one."""


class Filesystem(Protocol):
    """What is served. fh 0 means 'no handle': go by the inode. An fh this process did not hand out (it was restarted)
    is answered by the inode as well. Modes have the umask applied. Errors not listed are the usual ones of the system
    call; EOPNOTSUPP of what is not supported."""

    @property
    def loop(self) -> Loop:
        """On which its coroutines run. Whoever serves it turns that."""

    def start(self, notifier: Notifier) -> None: ...  # once before the first request, on the loop
    async def stop(self) -> None: ...  # once after the last request: finish uploads, bounded; idempotent

    # -- names; each positive Entry that is answered adds one to the lookup count

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry: ...  # negative rather than ENOENT
    def forget(self, ino: Ino, nlookup: int) -> None: ...  # so much less of the lookup count; unknown inodes: ignored
    async def readlink(self, ino: Ino) -> bytes: ...
    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """A regular file, FIFO, socket or device; FSError(EPERM) for what the storage cannot hold."""

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry: ...
    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None: ...  # not of a directory
    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None: ...
    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry: ...
    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """flags: RENAME_NOREPLACE (1); others EINVAL."""

    async def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Entry: ...

    # -- attributes

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply: ...  # stat, or fstat with fh
    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply: ...
    async def getxattr(self, ino: Ino, name: bytes) -> bytes: ...  # ENODATA when absent
    async def setxattr(self, caller: Caller, ino: Ino, name: bytes, content: bytes, flags: int) -> None:
        """XATTR_CREATE (1) EEXIST, XATTR_REPLACE (2) ENODATA; ENOSPC when it does not fit."""

    async def listxattr(self, ino: Ino) -> Sequence[bytes]: ...
    async def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None: ...  # ENODATA when absent
    async def statfs(self, ino: Ino) -> StatFs: ...  # sizes of the whole

    # -- files

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply: ...  # O_TRUNC is honoured here
    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """Create (O_EXCL honoured) and open."""

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Up to size bytes; shorter only at the end of the file."""

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """Bytes written. `payload` stays valid until the answer (the adapter gives the buffer to the request)."""

    async def flush(self, ino: Ino, fh: Fh) -> None: ...  # each close(2)
    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None: ...  # make the bytes durable
    async def release(self, ino: Ino, fh: Fh) -> None: ...  # the last close
    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        """mode 0, FALLOC_FL_KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE; others EOPNOTSUPP."""

    async def lseek(self, ino: Ino, fh: Fh, offset: int, whence: int) -> int: ...  # SEEK_DATA and SEEK_HOLE

    # -- directories

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply: ...
    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        """Entries from cursor `offset` (0: the first) as far as the budget goes; `.` and `..` included, without an
        `entry`. plus: with `entry`, each of which adds one to the lookup count."""

    def releasedir(self, ino: Ino, fh: Fh) -> None: ...
