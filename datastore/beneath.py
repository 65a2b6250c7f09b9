"""Makes the directory beneath a mount unwritable while it is mounted, and after a crash (S-60).

The directory's mode loses the write bits. For root, whom modes don't restrict, the directory also becomes immutable
where the file system supports that (ext4, XFS, Btrfs, tmpfs: chattr(1), ioctl_iflags(2)). The mode is noted in a file,
so that an orderly unmount, or the next mount after a crash, restores it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from struct import Struct

NOTE_FILE = "beneath.json"
UNWRITABLE = 0o555
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_IMMUTABLE = 0x10
_FLAGS = Struct("<i4x")


def protect(directory_fd: int, note: Path, *, immutable: bool = True) -> None:
    """Note the mode of an open directory, remove its write bits, and make it immutable if `immutable` is set and we are
    root. If the system refuses a step, the rest is skipped silently. An immutable directory is left unchanged. A note
    that is there already stays: restore() could not restore the mode in it yet."""
    with suppress(OSError):
        if _is_immutable(directory_fd):
            return
        mode = os.fstat(directory_fd).st_mode & 0o7777
        if not note.exists():
            note.write_text(json.dumps({"mode": mode}))
        os.fchmod(directory_fd, mode & UNWRITABLE | 0o500)
        if immutable and os.geteuid() == 0:
            _set_immutable(directory_fd, on=True)


def restore(mountpoint: str, note: Path) -> None:
    """Undo protect(): restore the mode that is noted, and remove the note. Nothing may be mounted there. Idempotent.
    If the system refuses that, the note stays, so that the next mount there tries it again."""
    try:
        mode = int(json.loads(note.read_text())["mode"])
        directory_fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        note.unlink(missing_ok=True)
        return
    except OSError:
        return
    try:
        with suppress(OSError):
            _set_immutable(directory_fd, on=False)
        with suppress(OSError):
            if os.fstat(directory_fd).st_mode & 0o7777 != mode:
                os.fchmod(directory_fd, mode)
            note.unlink(missing_ok=True)
    finally:
        os.close(directory_fd)


def free(mountpoint: str) -> bool:
    """Let the owner write to an immutable directory whose note is lost; return False if nothing was changed."""
    try:
        directory_fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        was_immutable = _is_immutable(directory_fd)
        if was_immutable:
            _set_immutable(directory_fd, on=False)
            os.fchmod(directory_fd, os.fstat(directory_fd).st_mode & 0o7777 | 0o200)
        return was_immutable
    except OSError:
        return False
    finally:
        os.close(directory_fd)


def _is_immutable(directory_fd: int) -> bool:
    """Return whether a directory is immutable; False where the file system has no such flag."""
    try:
        return bool(_flags(directory_fd) & _IMMUTABLE)
    except OSError:
        return False


def _flags(directory_fd: int) -> int:
    """Return the inode flags (ioctl_iflags(2)). Errors: OSError where the file system has none."""
    if sys.platform != "linux":
        return 0
    held = bytearray(_FLAGS.size)
    fcntl.ioctl(directory_fd, _FS_IOC_GETFLAGS, held)
    (flags,) = _FLAGS.unpack(held)
    return int(flags)


def _set_immutable(directory_fd: int, *, on: bool) -> None:
    """Errors: OSError where the file system has no such flag, or the process lacks CAP_LINUX_IMMUTABLE."""
    if sys.platform != "linux":
        return
    flags = _flags(directory_fd)
    wanted = flags | _IMMUTABLE if on else flags & ~_IMMUTABLE
    if wanted != flags:
        fcntl.ioctl(directory_fd, _FS_IOC_SETFLAGS, bytearray(_FLAGS.pack(wanted)))
