"""How much of the node's disk the cache of each volume may take.

Every volume has a cache directory of its own, so that none reads or evicts what is another's. What a manifest asks for
has a ceiling (CACHE_SIZE_VOLUME), all volumes together have one (CACHE_SIZE_NODE), and a part of the disk stays free,
since the kubelet ends pods when it runs out. The rest is shared fairly: nobody gets less than an equal share unless he
wants less. Directories of volumes that have left the node stay until the room is wanted: they may come back.

Threads: any; one round at a time.
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
"""Of the disk: the kubelet removes images when less is free, and pods below a tenth."""
_HEADROOM = 50
"""A volume wants what it has and this part of the node's ceiling more, or a quarter of what it has."""
LEAST_BYTES = 32 << 20
"""Of each volume, also on a full disk: a mount without a cache reads each block again and again."""
_GOING = ".going-"


def fair_shares(total: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Max-min fairness: an equal share for each, and what one does not want for the others."""
    shares: dict[str, int] = {}
    left = max(0, total)
    for number, (name, wish) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[name] = min(wish, left // (len(wanted) - number))
        left -= shares[name]
    return shares


@dataclass(frozen=True, slots=True)
class Cache:
    """Of one volume: bytes that it takes, and the most that it may ever take."""

    used: int
    limit: int


def shares_of(total: int, caches: Mapping[str, Cache], node_bytes: int) -> dict[str, int]:
    """What each may take of `total`: first what it is about to use, then what is left."""
    wanted = {
        name: min(each.limit, each.used + max(node_bytes // _HEADROOM, each.used // 4)) for name, each in caches.items()
    }
    first = fair_shares(total, wanted)
    more = fair_shares(total - sum(first.values()), {name: each.limit - first[name] for name, each in caches.items()})
    return {name: first[name] + more[name] for name in caches}


class CacheShares:
    """The caches of the node. limits: by volume that is mounted, as its manifest and the ceiling say."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.cache_dir
        self._node_bytes = settings.cache_node_bytes
        self._volume_bytes = settings.cache_volume_bytes
        self._lock = threading.Lock()
        self._limits: dict[str, int] = {}
        self._shares: dict[str, int] = {}

    def admit(self, volume_id: str, limit: int) -> int:
        """What a volume that is mounted, or mounted already, may take until the next round."""
        with self._lock:
            self._limits[volume_id] = limit
            if volume_id not in self._shares:
                others = {name: Cache(size, size) for name, size in self._shares.items()}
                used = self._used(self._directory(volume_id))
                caches = {**others, volume_id: Cache(used, limit)}
                self._shares[volume_id] = shares_of(self._node_bytes, caches, self._node_bytes)[volume_id]
            return min(limit, self._shares[volume_id])

    def leave(self, volume_id: str, *, for_good: bool) -> None:
        """A volume has left the node. for_good: it never comes back (an inline volume), so its cache goes, too."""
        with self._lock:
            self._limits.pop(volume_id, None)
            self._shares.pop(volume_id, None)
        directory = self._directory(volume_id)
        if for_good:
            _remove(directory)
        else:
            with suppress(OSError):
                os.utime(directory / cacheusage.NAME)  # of those that are left behind the oldest go first

    def give(self, volume_id: str, size: int) -> None:
        """A volume takes this much from now on."""
        with self._lock:
            self._shares[volume_id] = size

    def round(self, mounted: Mapping[str, int]) -> list[tuple[str, int]]:
        """New shares of the mounted volumes that get another one, those that get less first.

        mounted: by volume what it may take now, for those that were mounted before this process began.
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
        """What all caches may take together now."""
        least = min(self._node_bytes, LEAST_BYTES * mounted)
        try:
            disk = os.statvfs(self._root)
        except OSError:
            return self._node_bytes
        size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        return max(least, min(self._node_bytes, used + free - size * _KEEP_FREE[0] // _KEEP_FREE[1]))

    def _left_behind(self, mounted: set[str]) -> dict[Path, int]:
        """Bytes by directory of a volume that is not mounted, those used longest ago first."""
        found: list[tuple[float, Path]] = []
        with suppress(OSError):
            for each in os.scandir(self._root):
                if each.name not in mounted:
                    with suppress(OSError):
                        noted = os.stat(os.path.join(each.path, cacheusage.NAME), follow_symlinks=False)
                        found.append((noted.st_mtime, Path(each.path)))
                        continue
                    _remove(Path(each.path))  # half gone, or nothing of ours
        return {path: self._used(path) for _, path in sorted(found)}

    def _used(self, directory: Path) -> int:
        """As its owner notes it; a mount server that was taken over notes what it likes."""
        return min(cacheusage.noted_bytes(directory), self._volume_bytes)


def _removed_until(left: Mapping[Path, int], room: int) -> int:
    """Remove directories, the first ones first, until the others fit; what these take."""
    kept = sum(left.values())
    for path, size in left.items():
        if kept <= room:
            break
        _remove(path)
        kept -= size
        log.info("the cache of a volume that has left the node made room", extra=fields(bytes=size))
    return kept


def _remove(path: Path) -> None:
    """At once for who comes back meanwhile, who gets a new one."""
    going = path if path.name.startswith(_GOING) else path.with_name(_GOING + path.name)
    with suppress(OSError):
        if going != path:
            path.rename(going)
    remove_tree(going)
