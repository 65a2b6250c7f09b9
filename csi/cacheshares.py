"""Divides the node's disk among the caches of the volumes.

Every volume has a cache directory of its own, so that no volume reads or evicts another one's blocks. There is a limit
for the size in a manifest (CACHE_SIZE_VOLUME) and for all volumes together (CACHE_SIZE_NODE), and a part of the disk
stays free, because the kubelet evicts pods when the disk is full. The rest is shared fairly: a volume gets less than an
equal share only if it wants less. The cache of a volume that has left the node stays until its space is needed, because
the volume may return. Any thread may call, but only one round() may run at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datastore import cacheusage
from datastore.logs import fields

from .commands import remove_tree
from .request import key_of
from .settings import Settings

log = logging.getLogger(__name__)

_KEEP_FREE = (15, 100)
"""The part of the disk that stays free, 15 %: with less the kubelet removes images, and with less than 10 % pods."""
_HEADROOM = 50
"""A volume wants what it uses now, and in addition 1/_HEADROOM of the node's limit or a quarter of its use, if more."""
LEAST_BYTES = 32 << 20
"""Each volume's share even on a full disk, because a mount without a cache would fetch each block again and again."""
_GOING = ".going-"


def fair_shares(total: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide `total` by max-min fairness: equal shares, and what a volume does not want is divided among the others."""
    shares: dict[str, int] = {}
    left = max(0, total)
    for number, (name, wish) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[name] = min(wish, left // (len(wanted) - number))
        left -= shares[name]
    return shares


@dataclass(frozen=True, slots=True)
class Cache:
    """A volume's cache. used: the bytes that it takes up; limit: the most that it may ever take up."""

    used: int
    limit: int


def shares_of(total: int, caches: Mapping[str, Cache], node_bytes: int) -> dict[str, int]:
    """Divide `total` among the caches: first by what each is likely to use soon, then the rest by their limits."""
    wanted = {
        name: min(each.limit, each.used + max(node_bytes // _HEADROOM, each.used // 4)) for name, each in caches.items()
    }
    first = fair_shares(total, wanted)
    more = fair_shares(total - sum(first.values()), {name: each.limit - first[name] for name, each in caches.items()})
    return {name: first[name] + more[name] for name in caches}


class CacheShares:
    """The shares of all volumes on the node."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.cache_dir
        self._node_bytes = settings.cache_node_bytes
        self._volume_bytes = settings.cache_volume_bytes
        self._lock = threading.Lock()
        self._limits: dict[str, int] = {}
        self._shares: dict[str, int] = {}

    def admit(self, volume_id: str, limit: int) -> int:
        """Return the share, until the next round, of a volume that is being mounted. limit: its largest share."""
        with self._lock:
            self._limits[volume_id] = limit
            if volume_id not in self._shares:
                others = {name: Cache(size, size) for name, size in self._shares.items()}
                used = self._used(self._directory(volume_id))
                caches = {**others, volume_id: Cache(used, limit)}
                self._shares[volume_id] = shares_of(self._node_bytes, caches, self._node_bytes)[volume_id]
            return min(limit, self._shares[volume_id])

    def leave(self, volume_id: str, *, for_good: bool) -> None:
        """Note that a volume has left the node. for_good: it never returns (an inline volume), so remove its cache."""
        with self._lock:
            self._limits.pop(volume_id, None)
            self._shares.pop(volume_id, None)
        directory = self._directory(volume_id)
        if for_good:
            _remove(directory)
        else:
            with suppress(OSError):
                os.utime(directory / cacheusage.NAME)  # caches that were left longest ago are removed first

    def give(self, volume_id: str, size: int) -> None:
        """Note that a volume has this share from now on."""
        with self._lock:
            self._shares[volume_id] = size

    def round(self, mounted: Mapping[str, int]) -> list[tuple[str, int]]:
        """Compute new shares; return the mounted volumes whose share changes, those that get less first.

        mounted: the present shares of the mounted volumes; they are used for volumes mounted before this process began.
        """
        with self._lock:
            for volume_id, size in mounted.items():
                self._shares.setdefault(volume_id, size)
            here = {volume_id: self._directory(volume_id) for volume_id in mounted}
            caches = {
                volume_id: Cache(self._used(directory), self._limits.get(volume_id, mounted[volume_id]))
                for volume_id, directory in here.items()
            }
            used_by = {*here.values(), *(self._directory(volume_id) for volume_id in self._limits)}
            left = self._left_behind({directory.name for directory in used_by})
            total = self._total(sum(each.used for each in caches.values()) + sum(left.values()), len(caches))
            wanted = sum(min(each.limit, each.used + self._node_bytes // _HEADROOM) for each in caches.values())
            kept = _removed_until(left, max(0, total - wanted))
            shares = shares_of(total - kept, caches, self._node_bytes)
            changed = [(name, size) for name, size in shares.items() if size != self._shares[name]]
            return sorted(changed, key=lambda item: item[1] - self._shares[item[0]])

    def _directory(self, volume_id: str) -> Path:
        return self._root / key_of(volume_id)

    def _total(self, used: int, mounted: int) -> int:
        """Return how many bytes all caches together may take up now; `used` is what they take up."""
        least = min(self._node_bytes, LEAST_BYTES * mounted)
        try:
            disk = os.statvfs(self._root)
        except OSError:
            return self._node_bytes
        size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        return max(least, min(self._node_bytes, used + free - size * _KEEP_FREE[0] // _KEEP_FREE[1]))

    def _left_behind(self, mounted: set[str]) -> dict[Path, int]:
        """Return the bytes of each directory of a volume that is not mounted, the one left longest ago first."""
        found: list[tuple[float, Path]] = []
        with suppress(OSError):
            for each in os.scandir(self._root):
                if each.name not in mounted:
                    with suppress(OSError):
                        noted = os.stat(os.path.join(each.path, cacheusage.NAME), follow_symlinks=False)
                        found.append((noted.st_mtime, Path(each.path)))
                        continue
                    _remove(Path(each.path))  # partly removed, or not a cache
        return {path: self._used(path) for _, path in sorted(found)}

    def _used(self, directory: Path) -> int:
        """Return the use that the mount server has noted, limited because a hacked server may note any number."""
        return min(cacheusage.noted_bytes(directory), self._volume_bytes)


def _removed_until(left: Mapping[Path, int], room: int) -> int:
    """Remove directories from the first on until the others fit in `room`; return the bytes of those that are left."""
    kept = sum(left.values())
    for path, size in left.items():
        if kept <= room:
            break
        _remove(path)
        kept -= size
        log.info("the cache of a volume that has left the node made room", extra=fields(bytes=size))
    return kept


def _remove(path: Path) -> None:
    """Remove a directory; it is renamed first, so that a volume that returns at this moment gets a new one."""
    going = path if path.name.startswith(_GOING) else path.with_name(_GOING + path.name)
    with suppress(OSError):
        if going != path:
            path.rename(going)
    remove_tree(going)
