"""Tracks how full the cache directory is, for all processes that share it, and evicts files when it is full.

The file `usage` holds the bytes that all processes have reserved. Its flock(2) also excludes creators and evictors of
cache files from each other; it is held for a few system calls, and never waited for longer than LOCK_WAIT_S. A
reservation comes before its write, so the count is too high rather than too low; each eviction counts the files again
(except what is written at the same time). Files are known by their stem (the name without suffix), not by content.
Safe for threads and processes. Each call may raise OSError, also as CacheBusyError when the lock is not free in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datastore import cacheusage

LOCK_WAIT_S = 2.0
"""Longer than any holder needs the lock, even on a busy machine; a caller that doesn't get it caches nothing."""
DROP_WAIT_S = 0.1
"""How long remove() waits for the lock; short, as the event loop calls it when it finds a broken file."""
_LOCK_POLL_S = 0.001
_COUNT = cacheusage.COUNT
KEEP_FREE_BYTES = 1 << 30
"""The bytes of the disk that stay free for other uses, such as staging files; at most a fiftieth of the disk."""
_KEEP_FREE_SHARE = 50
_LOW_WATER = (7, 8)
"""Eviction goes down to 7/8 of the limit, so that one scan of the directory makes room for many writes."""
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of a 64-bit machine, ioctl_iflags(2)."""
UNRELATED = 0x20000
"""FS_TOPDIR_FL: the subdirectories have nothing to do with each other."""
FLAGS = struct.Struct("=i4x")
"""The argument of both: the kernel copies an int, although their numbers encode the size of a long."""


class CacheBusyError(OSError):
    """Another thread or process has held the lock of the cache directory for too long."""


class CacheFullError(OSError):
    """The cache has no room for the data."""


class _Stored(NamedTuple):
    """One file. The first of a stem in sort order (the sidecar, if any) has the time of the last use as its mtime."""

    path: str
    size_bytes: int
    mtime_ns: int


class CacheSpace:
    """INVARIANT: `usage` counts all bytes that reserve() granted, until an eviction finds them gone."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """limit_bytes: the most that all files together may take; it may be changed at any time."""
        self._directory = directory
        self.limit_bytes = limit_bytes
        self._threads = threading.Lock()
        self.packs = directory / "objects" / "packs"
        """The directory of the packs, files that many small versions share."""

    def place(self, stem: str) -> str:
        """Return the path of a stem's files, without suffix; the files are spread over 256 directories."""
        return f"{self._directory}/objects/{stem[:2]}/{stem}"

    def make_directory(self, path: str) -> None:
        """Make the directory for a file of this path; idempotent. Errors: OSError."""
        directory = Path(path).parent
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                directory.parent.mkdir(mode=0o700, parents=True)
                scatter(directory.parent)
            directory.mkdir(mode=0o700, exist_ok=True)

    def used_bytes(self) -> int:
        """Return the bytes that are taken or reserved. Errors: OSError."""
        with self.exclusive() as fd:
            return self._load(fd)

    def room_bytes(self, used_bytes: int) -> int:
        """Return the most that all files may take now: the limit, or less on an almost full disk. Errors: OSError."""
        disk = os.statvfs(self._directory)
        spare = min(KEEP_FREE_BYTES, disk.f_blocks * disk.f_frsize // _KEEP_FREE_SHARE)
        return min(self.limit_bytes, used_bytes + disk.f_bavail * disk.f_frsize - spare)

    def reserve(self, size_bytes: int) -> bool:
        """Count `size_bytes` as taken (negative: as free); False when there is no room. Errors: OSError."""
        with self.exclusive() as fd:
            used = self._load(fd)
            if size_bytes > 0 and used + size_bytes > self.room_bytes(used):
                return False
            os.pwrite(fd, _COUNT.pack(used + size_bytes), 0)
            return True

    def recount(self) -> None:
        """Recount the files; the count becomes wrong when writes fail while other threads evict. Errors: OSError."""
        with self.exclusive() as fd:
            os.pwrite(fd, _COUNT.pack(_size(self._scan())), 0)

    def evict(self, wanted_bytes: int) -> int:
        """Unlink the files used longest ago until `wanted_bytes` fit; return the bytes freed, 0 while another thread or
        process evicts. Errors: OSError."""
        with open(self._directory / "evicting", "ab") as turn:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            return self._evict(wanted_bytes)

    @contextlib.contextmanager
    def exclusive(self, wait_s: float | None = None) -> Iterator[int]:
        """Exclude other creators and evictors while the `with` block runs; yield the descriptor of `usage`.
        Errors: CacheBusyError after wait_s (None: LOCK_WAIT_S) for other threads, and as much for other processes."""
        wait_s = LOCK_WAIT_S if wait_s is None else wait_s
        if not self._threads.acquire(timeout=wait_s):
            raise CacheBusyError("the cache directory is busy")
        try:
            fd = self._open_usage()
            try:
                self._lock(fd, wait_s)
                yield fd
            finally:
                os.close(fd)
        finally:
            self._threads.release()

    def remove(self, place: str) -> None:
        """Unlink the files of path `place`, which has no suffix; idempotent. They count until the next eviction."""
        with self.exclusive(DROP_WAIT_S):
            for suffix in (".blocks", ".data", ".draft"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place + suffix)

    def _evict(self, wanted_bytes: int) -> int:
        before = self.used_bytes()
        stored = sorted(self._scan(), key=lambda files: files[0].mtime_ns)
        held = _size(stored)
        room = self.room_bytes(held)
        aim = max(0, min(room * _LOW_WATER[0] // _LOW_WATER[1], room - wanted_bytes))
        freed = 0
        for files in stored:
            if held - freed <= aim:
                break
            with self.exclusive():
                for file in files:  # the sidecar first: a reader whose sidecar is still linked has the data that fits
                    Path(file.path).unlink(missing_ok=True)
            freed += _size([files])
        with self.exclusive() as fd:  # bytes reserved since the scan may count twice: too high, never too low
            os.pwrite(fd, _COUNT.pack(held - freed + max(0, self._load(fd) - before)), 0)
        return freed

    def _scan(self) -> list[list[_Stored]]:
        """Return a list of files for each stem."""
        found: defaultdict[str, list[_Stored]] = defaultdict(list)
        with contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self._directory / "objects"):
                for file in os.scandir(folder.path):
                    with contextlib.suppress(FileNotFoundError):
                        facts = file.stat(follow_symlinks=False)
                        stored = _Stored(file.path, facts.st_blocks * 512, facts.st_mtime_ns)
                        found[os.path.splitext(file.path)[0]].append(stored)
        return [sorted(files) for files in found.values()]

    def _open_usage(self) -> int:
        path, flags = self._directory / cacheusage.NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _lock(self, fd: int, wait_s: float) -> None:
        for _ in range(int(wait_s / _LOCK_POLL_S)):
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
        raise CacheBusyError("the cache directory is busy")

    def _load(self, fd: int) -> int:
        """Return the count in `usage`; if it is lost, count the files. Call inside exclusive()."""
        noted = cacheusage.parsed(os.pread(fd, _COUNT.size, 0))
        if noted is not None:
            return noted
        used = _size(self._scan())
        os.pwrite(fd, _COUNT.pack(used), 0)
        return used


def _size(stored: list[list[_Stored]]) -> int:
    return sum(file.size_bytes for files in stored for file in files)


def scatter(directory: Path) -> None:
    """Spread the subdirectories that are made from now on over the disk, if its file system can do that.

    ext4 makes a file in the block group of its directory, and a directory near its parent. It does not reuse an inode
    for some minutes after the removal of its file. So in a group where thousands of files were removed (a full cache
    evicts all the time) it checks all their inodes for each new file: 0.35 to 0.55 ms of CPU time, but 0.07 ms where
    the directories are spread (measured, Linux 6.18).
    Source: ext4_new_inode, recently_deleted and find_group_orlov in Linux; the attribute T of chattr(1).
    """
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            had = bytearray(FLAGS.size)
            fcntl.ioctl(fd, GET_FLAGS, had)
            (flags,) = FLAGS.unpack(had)
            fcntl.ioctl(fd, SET_FLAGS, FLAGS.pack(flags | UNRELATED))
        finally:
            os.close(fd)
