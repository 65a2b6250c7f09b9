"""The Datastores of this node's volumes: how they are mounted and how full they are, as the API server said last.

A PersistentVolume says which data it is, and how that was shown when it was made. How it is shown now stands in the
Datastore's status.mount. That is asked for when a volume is staged, when it is published and now and then in between,
at most every FRESH_S; one answer serves settings and use. The newest settings are kept on the node's disk, without
secrets, so that a volume is mounted with them while the API server is away. Threads: any.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datastore.api.volumecontext import VolumeHandle, identity_of, with_settings
from datastore.errors import DatastoreError, InvalidManifest, Unreachable
from datastore.logs import fields

from .cluster import Cluster, Seen
from .errors import NotAnswering, VolumeBusy
from .request import key_of

log = logging.getLogger(__name__)

FRESH_S = 30.0
"""What was asked for so short a time ago is not asked for again, unless the volume is staged."""
AGAIN_S = 300.0
"""The controller counts every 15 minutes."""
NOT_YET_S = 20.0
"""Until the next try, for a volume that has just been made, or when nobody answers."""
REMEMBERED = 1000
"""Volumes that are no longer here whose settings are kept."""

Context = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Current:
    """A volume as it is to be mounted now. usage: bytes and objects; None: nobody has counted."""

    context: Context
    usage: tuple[int, int] | None = None


class Datastores:
    """Asks, and remembers. cluster: None outside of one."""

    def __init__(self, cluster: Cluster | None, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, Seen]] = {}
        self._away_until_s = 0.0

    def current(self, volume_id: str, context: Context, *, fresh: bool = False) -> Current:
        """The volume's context with the settings that count now. fresh: ask, whenever it was asked for last."""
        if not _is_ours(volume_id):
            return Current(context)
        seen = self.seen(volume_id, 0.0 if fresh else FRESH_S)
        base, known = identity_of(context), self._read(volume_id)
        # A volume that was made anew since has newer settings than what is on the disk.
        settings = known["settings"] if known.get("context") == base else None
        if seen is not None and seen.settings is not None:
            settings = dict(seen.settings)
        self._write(volume_id, {"volume": volume_id, "context": base, "settings": settings})
        usage = seen.usage if seen is not None else None
        if settings is None:
            return Current(context, usage)
        try:
            return Current(with_settings(context, settings), usage)
        except InvalidManifest as error:  # of a later release, perhaps: the volume's own do
            log.warning("settings that are not understood are left out", extra=fields(volume=volume_id, error=error))
            return Current(context, usage)

    def again(self, volume_id: str) -> Current | None:
        """The same of a volume that was asked for before; None for another one."""
        context = self._read(volume_id).get("context")
        return None if context is None else self.current(volume_id, context)

    def seen(self, volume_id: str, younger_s: float) -> Seen | None:
        """What the API server says of the volume's Datastore; None: it has none, or does not answer."""
        if not _is_ours(volume_id):
            return None
        now = self._clock()
        with self._lock:
            asked_s, known = self._seen.get(volume_id, (-float("inf"), None))
        if now - asked_s < younger_s or self._cluster is None or now < self._away_until_s:
            return known
        try:
            found = self._cluster.seen(VolumeHandle.parse(volume_id))
        except Unreachable as error:
            log.info("the API server does not say how volumes are mounted", extra=fields(reason=error))
            self._away_until_s = self._clock() + NOT_YET_S
            return known
        except DatastoreError as error:
            log.info("a Datastore can't be looked at", extra=fields(volume=volume_id, reason=error))
            return known
        with self._lock:
            self._seen[volume_id] = (self._clock(), found)
        return found

    def forget(self, volume_id: str) -> None:
        """The volume is no longer here. What is on the disk stays: it may come again while the API server is away."""
        with self._lock:
            self._seen.pop(volume_id, None)
        with suppress(OSError):
            old = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-REMEMBERED]
            for path in old:
                path.unlink(missing_ok=True)

    def _read(self, volume_id: str) -> dict[str, Any]:
        try:
            written = json.loads(self._path(volume_id).read_text())
            return {"context": dict(written["context"]), "settings": written["settings"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write(self, volume_id: str, document: Mapping[str, Any]) -> None:
        text, path = json.dumps(document, sort_keys=True), self._path(volume_id)
        with suppress(OSError, ValueError):
            if path.read_text() == text:
                return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = path.with_suffix(".new")
            written.write_text(text)
            written.replace(path)
        except OSError as error:  # a full disk: the API server has them too
            log.warning("settings are not kept on the disk", extra=fields(volume=volume_id, error=error))

    def _path(self, volume_id: str) -> Path:
        return self._directory / f"{key_of(volume_id)}.json"


def _is_ours(volume_id: str) -> bool:
    """Whether it is a Datastore's; inline volumes and those of other provisioners are not."""
    try:
        VolumeHandle.parse(volume_id)
    except InvalidManifest:
        return False
    return True


class Refresher:
    """Brings what is mounted to what the API server says, each volume in its turn. One thread at a time."""

    def __init__(self, volumes: Callable[[], list[str]], refresh: Callable[[str], bool]) -> None:
        """refresh: asks for a volume and applies the answer; whether that is known by now.

        Errors: VolumeBusy, NotAnswering: it is asked again soon.
        """
        self._volumes = volumes
        self._refresh = refresh
        self._next_s: dict[str, float] = {}
        self._away_until_s = 0.0

    def look(self, now_s: float) -> None:
        """Those whose turn it is; ends early when the mount daemon is away."""
        if now_s < self._away_until_s:
            return
        mounted = self._volumes()
        self._next_s = {volume_id: self._next_s.get(volume_id, 0.0) for volume_id in mounted}
        for volume_id in mounted:
            if self._next_s[volume_id] > now_s:
                continue
            self._next_s[volume_id] = now_s + NOT_YET_S
            try:
                known = self._refresh(volume_id)
            except VolumeBusy:
                known = False
            except NotAnswering as error:
                log.info("volumes are not brought up to date just now", extra=fields(reason=error))
                self._away_until_s = now_s + NOT_YET_S
                return
            except DatastoreError as error:
                log.info("a volume is not brought up to date", extra=fields(volume=volume_id, reason=error))
                known = True
            if known:
                self._next_s[volume_id] = now_s + AGAIN_S
