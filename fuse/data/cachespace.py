"""How full the cache directory is, for all processes that share it, and what goes when it is full.

The file `usage` holds the bytes taken, as reserved by all processes; its flock(2) is also what excludes creators and
evictors of cache files from each other (short: a few system calls; never waited for longer than LOCK_WAIT_S).
Reservations come before writes, so the figure is too high rather than too low, and each eviction counts afresh (to
within what is being written meanwhile). Knows files by their stem, nothing of what they hold. Safe for threads and
processes; raises OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datastore import cacheusage

from .scattering import scatter

LOCK_WAIT_S = 2.0
"""Longer than any holder needs, even on a busy machine; without the lock something is just not cached."""
DROP_WAIT_S = 0.1
"""What the loop may wait, which finds a broken file now and then."""
_LOCK_POLL_S = 0.001
_COUNT = cacheusage.COUNT
KEEP_FREE_BYTES = 1 << 30
"""Left on the disk for everything else, the bytes among it that are not uploaded yet; of a small disk a fiftieth."""
_KEEP_FREE_SHARE = 50
_LOW_WATER = (7, 8)
"""Eviction goes down to 7/8 of the limit, so that a scan of the directory pays for many writes."""


class CacheBusyError(OSError):
    """Another process holds the lock of the cache directory too long."""


class CacheFullError(OSError):
    """What is to be kept finds no room."""


@dataclass(slots=True)
class _Stored:
    """The files of one stem. used_ns: mtime of the sidecar, or of the data when that is all there is."""

    directory: str
    size_bytes: int = 0
    used_ns: int = 0
    names: list[str] = field(default_factory=list)


class CacheSpace:
    """INVARIANT: what reserve() granted and eviction did not find gone is counted in `usage`."""

    def __init__(self, directory: Path, limit_bytes: int, sleep: Callable[[float], None] = time.sleep) -> None:
        """limit_bytes: the most that all files together may take; it may be changed at any time."""
        self._directory = directory
        self.limit_bytes = limit_bytes
        self._sleep = sleep
        self._threads = threading.Lock()
        self.packs = directory / "objects" / "packs"
        """The directory of files that many small versions share."""

    def place(self, stem: str) -> str:
        """The path of a stem's files, without suffix; spread over 256 directories."""
        return f"{self._directory}/objects/{stem[:2]}/{stem}"

    def make_directory(self, path: str) -> None:
        """Make the directory that a file of this path is to be in; idempotent. OSError."""
        directory = Path(path).parent
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                directory.parent.mkdir(mode=0o700, parents=True)
                scatter(directory.parent)
            directory.mkdir(mode=0o700, exist_ok=True)

    def used_bytes(self) -> int:
        """Bytes taken or reserved."""
        with self.exclusive() as fd:
            return self._load(fd)

    def room_bytes(self, used_bytes: int) -> int:
        """The most that all files may take now: the limit, or less where the disk has little left. OSError."""
        disk = os.statvfs(self._directory)
        spare = min(KEEP_FREE_BYTES, disk.f_blocks * disk.f_frsize // _KEEP_FREE_SHARE)
        return min(self.limit_bytes, used_bytes + disk.f_bavail * disk.f_frsize - spare)

    def reserve(self, size_bytes: int) -> bool:
        """Count `size_bytes` as taken; False when there is no room. CacheBusyError, OSError."""
        with self.exclusive() as fd:
            used = self._load(fd)
            if size_bytes > 0 and used + size_bytes > self.room_bytes(used):
                return False
            os.pwrite(fd, _COUNT.pack(used + size_bytes), 0)
            return True

    def recount(self) -> None:
        """Count the files anew: threads whose writes failed while others evicted leave the count wrong. OSError."""
        with self.exclusive() as fd:
            os.pwrite(fd, _COUNT.pack(sum(one.size_bytes for one in self._scan().values())), 0)

    def evict(self, wanted_bytes: int) -> int:
        """Unlink what was used longest ago until `wanted_bytes` fit; bytes freed, 0 while another process is at it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._directory / "evicting", "ab") as turn:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            return self._evict(wanted_bytes)

    @contextlib.contextmanager
    def exclusive(self, wait_s: float | None = None) -> Iterator[int]:
        """Exclude other creators and evictors; gives the descriptor of `usage`.

        CacheBusyError after wait_s (None: LOCK_WAIT_S) for the other threads, and as much for the other processes.
        """
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
        """Unlink the files of a stem; idempotent. They stay counted until the next eviction."""
        with self.exclusive(DROP_WAIT_S):
            for suffix in (".blocks", ".data", ".draft"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place + suffix)

    def _evict(self, wanted_bytes: int) -> int:
        before = self.used_bytes()
        stored = sorted(self._scan().values(), key=lambda one: one.used_ns)
        held = sum(one.size_bytes for one in stored)
        room = self.room_bytes(held)
        aim = max(0, min(room * _LOW_WATER[0] // _LOW_WATER[1], room - wanted_bytes))
        freed = 0
        for one in stored:
            if held - freed <= aim:
                break
            with self.exclusive():
                _unlink(one)
            freed += one.size_bytes
        with self.exclusive() as fd:  # what was reserved meanwhile may be counted twice: too high, never too low
            os.pwrite(fd, _COUNT.pack(held - freed + max(0, self._load(fd) - before)), 0)
        return freed

    def _scan(self) -> dict[str, _Stored]:
        found: dict[str, _Stored] = {}
        with contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self._directory / "objects"):
                for file in os.scandir(folder.path):
                    with contextlib.suppress(FileNotFoundError):
                        _count(found, folder.path, file)
        return found

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
                self._sleep(_LOCK_POLL_S)
        raise CacheBusyError("the cache directory is busy")

    def _load(self, fd: int) -> int:
        """The figure; counted from the files when it was lost. Call inside exclusive()."""
        noted = cacheusage.parsed(os.pread(fd, _COUNT.size, 0))
        if noted is not None:
            return noted
        used = sum(one.size_bytes for one in self._scan().values())
        os.pwrite(fd, _COUNT.pack(used), 0)
        return used


def _count(found: dict[str, _Stored], directory: str, file: os.DirEntry[str]) -> None:
    stem, suffix = os.path.splitext(file.name)
    facts = file.stat(follow_symlinks=False)
    one = found.setdefault(stem, _Stored(directory))
    one.size_bytes += facts.st_blocks * 512
    one.names.append(file.name)
    if suffix == ".blocks" or one.used_ns == 0:
        one.used_ns = facts.st_mtime_ns


def _unlink(one: _Stored) -> None:
    """The sidecar first: whoever finds a sidecar that is still linked has the data that belongs to it."""
    for name in sorted(one.names):
        Path(one.directory, name).unlink(missing_ok=True)
