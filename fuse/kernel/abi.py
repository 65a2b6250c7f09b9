"""The FUSE kernel protocol: numbers and structure layouts of linux/fuse.h, up to minor 7.45.

Pure. A comment at each layout names its structure and the fields in order; "= 40" is the size in bytes, as the header
has it. All integers are little-endian, which is native on every machine we support (x86-64, arm64).
"""

from __future__ import annotations

from struct import Struct

# -- opcodes (enum fuse_opcode); 7 and 19 are not in use
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = range(1, 7)
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = range(8, 19)
FSYNC, SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = range(20, 30)
ACCESS, CREATE, INTERRUPT = range(34, 37)
DESTROY, IOCTL = 38, 39
NOTIFY_REPLY, BATCH_FORGET, FALLOCATE, READDIRPLUS, RENAME2, LSEEK, COPY_FILE_RANGE = range(41, 48)
SYNCFS, TMPFILE, STATX = range(50, 53)
_NAMES = (
    "0 LOOKUP FORGET GETATTR SETATTR READLINK SYMLINK 7 MKNOD MKDIR UNLINK RMDIR RENAME LINK OPEN READ WRITE STATFS"
    " RELEASE 19 FSYNC SETXATTR GETXATTR LISTXATTR REMOVEXATTR FLUSH INIT OPENDIR READDIR RELEASEDIR FSYNCDIR GETLK"
    " SETLK SETLKW ACCESS CREATE INTERRUPT BMAP DESTROY IOCTL POLL NOTIFY_REPLY BATCH_FORGET FALLOCATE READDIRPLUS"
    " RENAME2 LSEEK COPY_FILE_RANGE SETUPMAPPING REMOVEMAPPING SYNCFS TMPFILE STATX"
)
NAMES = _NAMES.split()
"""The names of the opcodes, indexed by opcode."""
UNANSWERED = {FORGET, BATCH_FORGET, INTERRUPT, NOTIFY_REPLY}
OPCODE_LIMIT = 64
"""Opcodes from this number on are unknown to us, and the tables that are indexed by opcode end before it."""


def opcode_name(opcode: int) -> str:
    """Return an opcode's name for people to read, or its number if it has no name."""
    return NAMES[opcode] if opcode < len(NAMES) else str(opcode)


MAJOR = 7
MINOR = 45
MINOR_DROPS_PAGES = 45  # for OpenModes.drops_pages: Linux 6.18, where that was tested; some earlier kernels do it, too
PAGE_SIZE = 4096
SECOND_NS = 1_000_000_000

# -- INIT flags (bits 32 and up travel in flags2)
ASYNC_READ = 1 << 0
ATOMIC_O_TRUNC = 1 << 3
BIG_WRITES = 1 << 5
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
ASYNC_DIO = 1 << 15
PARALLEL_DIROPS = 1 << 18
ABORT_ERROR = 1 << 21
MAX_PAGES = 1 << 22
HANDLE_KILLPRIV_V2 = 1 << 28
INIT_EXT = 1 << 30
HAS_EXPIRE_ONLY = 1 << 35
PASSTHROUGH = 1 << 37
HAS_RESEND = 1 << 39

# -- flags of single requests and replies
FATTR_MODE = 1 << 0
FATTR_UID = 1 << 1
FATTR_GID = 1 << 2
FATTR_SIZE = 1 << 3
FATTR_ATIME = 1 << 4
FATTR_MTIME = 1 << 5
FATTR_FH = 1 << 6
FATTR_ATIME_NOW = 1 << 7
FATTR_MTIME_NOW = 1 << 8
FATTR_CTIME = 1 << 10
FATTR_KILL_SUIDGID = 1 << 11
GETATTR_FH = 1 << 0
WRITE_KILL_SUIDGID = 1 << 2
OPEN_KILL_SUIDGID = 1 << 0
FSYNC_FDATASYNC = 1 << 0
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_CACHE_DIR = 1 << 3
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7
EXPIRE_ONLY = 1 << 0

NOTIFY_INVAL_INODE = 2
NOTIFY_INVAL_ENTRY = 3
NOTIFY_RESEND = 7
NOTIFY_PRUNE = 9
UNIQUE_RESEND = 1 << 63
"""Set in `unique` of a request sent a second time; the reply has to carry it too (measured: else the caller hangs)."""

# -- ioctls of /dev/fuse: _IOR(229, 0, u32), _IOW(229, 1, fuse_backing_map = 16 bytes), _IOW(229, 2, u32)
IOC_CLONE = 0x8004E500
DEVICE_FD = Struct("<I")
IOC_BACKING_OPEN = 0x4010E501
IOC_BACKING_CLOSE = 0x4004E502
BACKING_MAP = Struct("<iIQ")  # fuse_backing_map: fd flags padding
BACKING_ID = Struct("<I")

# -- headers
IN_HEADER = Struct("<IIQQIIIHH")  # fuse_in_header: len opcode unique nodeid uid gid pid total_extlen padding = 40
OUT_HEADER = Struct("<IiQ")  # fuse_out_header: len error unique = 16

# -- request bodies
INIT_IN = Struct("<4I")  # fuse_init_in: major minor max_readahead flags [flags2 unused[11]] = 16 or 64
INIT_IN_FLAGS2 = Struct("<I")
FORGET_IN = Struct("<Q")  # fuse_forget_in: nlookup
BATCH_FORGET_IN = Struct("<II")  # fuse_batch_forget_in: count dummy
FORGET_ONE = Struct("<QQ")  # fuse_forget_one: nodeid nlookup
GETATTR_IN = Struct("<IIQ")  # fuse_getattr_in: getattr_flags dummy fh
SETATTR_IN = Struct("<IIQQQqqqIIIIIIII")
# ^ fuse_setattr_in: valid padding fh size lock_owner atime mtime ctime atimensec mtimensec ctimensec mode unused4 uid
#   gid unused5 = 88. Times are u64 in the header but hold negative numbers before 1970.
MKNOD_IN = Struct("<4I")  # fuse_mknod_in: mode rdev umask padding
MKDIR_IN = Struct("<2I")  # fuse_mkdir_in: mode umask
RENAME_IN = Struct("<Q")  # fuse_rename_in: newdir
RENAME2_IN = Struct("<QII")  # fuse_rename2_in: newdir flags padding
LINK_IN = Struct("<Q")  # fuse_link_in: oldnodeid
OPEN_IN = Struct("<II")  # fuse_open_in: flags open_flags
CREATE_IN = Struct("<4I")  # fuse_create_in: flags mode umask open_flags
READ_IN = Struct("<QQIIQII")  # fuse_read_in: fh offset size read_flags lock_owner flags padding = 40
WRITE_IN = Struct("<QQIIQII")  # fuse_write_in: fh offset size write_flags lock_owner flags padding = 40
RELEASE_IN = Struct("<QIIQ")  # fuse_release_in: fh flags release_flags lock_owner
FSYNC_IN = Struct("<QII")  # fuse_fsync_in: fh fsync_flags padding
SETXATTR_IN = Struct("<II")  # fuse_setxattr_in, the form before SETXATTR_EXT: size flags = 8
GETXATTR_IN = Struct("<II")  # fuse_getxattr_in: size padding
INTERRUPT_IN = Struct("<Q")  # fuse_interrupt_in: unique
FALLOCATE_IN = Struct("<QQQII")  # fuse_fallocate_in: fh offset length mode padding

# -- reply bodies. The two formats are the fields of fuse_entry_out (nodeid generation entry_valid attr_valid
#    entry_valid_nsec attr_valid_nsec, 40 bytes) and those of fuse_attr (ino size blocks atime mtime ctime atimensec
#    mtimensec ctimensec mode nlink uid gid rdev blksize flags, 88 bytes).
ENTRY_FORMAT = "QQQQII"
ATTR_FORMAT = "QQQqqqIIIIIIIIII"
ENTRY_OUT = Struct("<" + ENTRY_FORMAT + ATTR_FORMAT)  # fuse_entry_out = 128
ENTRY_REPLY = Struct("<IiQ" + ENTRY_FORMAT + ATTR_FORMAT)  # out header and fuse_entry_out = 144
ATTR_REPLY = Struct("<IiQ" + "QII" + ATTR_FORMAT)  # out header, fuse_attr_out: attr_valid attr_valid_nsec dummy attr
OPEN_REPLY = Struct("<IiQ" + "QIi")  # out header and fuse_open_out: fh open_flags backing_id = 32
CREATE_REPLY = Struct("<IiQ" + ENTRY_FORMAT + ATTR_FORMAT + "QIi")  # fuse_entry_out and fuse_open_out behind it = 160
WRITE_REPLY = Struct("<IiQ" + "II")  # out header and fuse_write_out: size padding = 24
STATFS_REPLY = Struct("<IiQ" + "5Q4I24x")
# ^ out header and fuse_kstatfs: blocks bfree bavail files ffree bsize namelen frsize padding spare[6]
GETXATTR_REPLY = Struct("<IiQ" + "II")  # out header and fuse_getxattr_out: size padding
INIT_REPLY = Struct("<IiQ" + "4IHHIIHHIIH22x")
# ^ out header and fuse_init_out: major minor max_readahead flags max_background congestion_threshold max_write
#   time_gran max_pages map_alignment flags2 max_stack_depth request_timeout unused[11] = 16 + 64
DIRENT = Struct("<QQII")  # fuse_dirent: ino off namelen type, then the name, padded to 8
INVAL_INODE = Struct("<IiQ" + "Qqq")  # notify header and fuse_notify_inval_inode_out: ino off len
INVAL_ENTRY = Struct("<IiQ" + "QII")
# ^ notify header and fuse_notify_inval_entry_out: parent namelen flags, then name and NUL
PRUNE = Struct("<IiQ" + "IIQ")  # notify header and fuse_notify_prune_out: count padding spare, then u64 node ids

HEADER_SIZE = IN_HEADER.size
