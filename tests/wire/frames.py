"""Requests as the kernel writes them, built field by field."""

from __future__ import annotations

import struct

from datastore.fuse.kernel import abi

HEADER = struct.Struct("<IIQQIIIHH")


def request(opcode: int, body: bytes = b"", *, ino: int = 1, unique: int = 42, pid: int = 0) -> bytes:
    """One request by root; pid 0 stands for a caller in another pid namespace."""
    return HEADER.pack(40 + len(body), opcode, unique, ino, 0, 0, pid, 0, 0) + body


def init(flags: int = 0xFFFF_FFFF_FFFF) -> bytes:
    """The INIT of Linux 6.18 with every flag offered."""
    low, high = flags & 0xFFFFFFFF | abi.INIT_EXT, flags >> 32
    return request(abi.INIT, struct.pack("<5I44x", 7, 45, 131072, low, high), unique=2)


def rw(fh: int, offset: int, size: int, flags: int = 0) -> bytes:
    """fuse_read_in and fuse_write_in."""
    return struct.pack("<QQIIQII", fh, offset, size, flags, 0, 0, 0)


VALID: dict[str, bytes] = {
    "lookup": request(abi.LOOKUP, b"name\0"),
    "forget": request(abi.FORGET, struct.pack("<Q", 3), unique=0),
    "getattr": request(abi.GETATTR, struct.pack("<IIQ", 1, 0, 7)),
    "setattr": request(
        abi.SETATTR, struct.pack("<IIQQQqqqIIIIIIII", 0x9, 0, 0, 100, 0, 1, -2, 3, 4, 5, 6, 0o644, 0, 1, 2, 0)
    ),
    "readlink": request(abi.READLINK),
    "symlink": request(abi.SYMLINK, b"new\0../a target\0"),
    "mknod": request(abi.MKNOD, struct.pack("<4I", 0o100644, 0, 0o22, 0) + b"node\0"),
    "mkdir": request(abi.MKDIR, struct.pack("<2I", 0o755, 0o22) + b"dir\0"),
    "unlink": request(abi.UNLINK, b"gone\0"),
    "rmdir": request(abi.RMDIR, b"gone\0"),
    "rename": request(abi.RENAME, struct.pack("<Q", 1) + b"a\0b\0"),
    "rename2": request(abi.RENAME2, struct.pack("<QII", 1, 1, 0) + b"a\0b\0"),
    "link": request(abi.LINK, struct.pack("<Q", 1000) + b"other\0"),
    "open": request(abi.OPEN, struct.pack("<II", 0o100000, 0), ino=1000),
    "create": request(abi.CREATE, struct.pack("<4I", 0o102, 0o100644, 0o22, 0) + b"file\0"),
    "read": request(abi.READ, rw(0, 0, 4096), ino=1000),
    "write": request(abi.WRITE, rw(0, 5, 3) + b"xyz", ino=1000),
    "statfs": request(abi.STATFS),
    "release": request(abi.RELEASE, struct.pack("<QIIQ", 9, 0, 0, 0), ino=1000),
    "fsync": request(abi.FSYNC, struct.pack("<QII", 9, 1, 0), ino=1000),
    "setxattr": request(abi.SETXATTR, struct.pack("<II", 2, 0) + b"user.a\0vv", ino=1000),
    "getxattr": request(abi.GETXATTR, struct.pack("<II", 64, 0) + b"user.a\0", ino=1000),
    "listxattr": request(abi.LISTXATTR, struct.pack("<II", 0, 0), ino=1000),
    "removexattr": request(abi.REMOVEXATTR, b"user.a\0", ino=1000),
    "flush": request(abi.FLUSH, struct.pack("<QIIQ", 9, 0, 0, 0), ino=1000),
    "init": init(),
    "opendir": request(abi.OPENDIR, struct.pack("<II", 0, 0)),
    "readdir": request(abi.READDIR, rw(0, 0, 4096)),
    "releasedir": request(abi.RELEASEDIR, struct.pack("<QIIQ", 9, 0, 0, 0)),
    "access": request(abi.ACCESS, struct.pack("<II", 4, 0)),
    "interrupt": request(abi.INTERRUPT, struct.pack("<Q", 40), unique=41),
    "destroy": request(abi.DESTROY),
    "ioctl": request(abi.IOCTL, bytes(32)),
    "batch_forget": request(abi.BATCH_FORGET, struct.pack("<IIQQQQ", 2, 0, 5, 1, 6, 2), unique=0),
    "fallocate": request(abi.FALLOCATE, struct.pack("<QQQII", 0, 0, 10, 0, 0), ino=1000),
    "readdirplus": request(abi.READDIRPLUS, rw(0, 0, 4096)),
    "lseek": request(abi.LSEEK, struct.pack("<QQII", 0, 0, 3, 0), ino=1000),
    "copy_file_range": request(abi.COPY_FILE_RANGE, bytes(56), ino=1000),
    "syncfs": request(abi.SYNCFS, bytes(8)),
    "tmpfile": request(abi.TMPFILE, struct.pack("<4I", 2, 0o100644, 0, 0) + b"/\0"),
    "statx": request(abi.STATX, bytes(32)),
    "unknown": request(63),
    "unheard of": request(4096, b"x" * 16),
}
"""One of each kind."""
