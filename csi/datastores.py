"""The Datastores of this node's volumes: their mount settings and used space, as last reported by the API server.

A PersistentVolume has the location of the data, and the settings of the time when the volume was made. The present
settings are in the Datastore's status.mount. They are requested when a volume is staged or published, and now and then
in between, at most every FRESH_S; one answer has settings and usage. The newest settings are kept on the node's disk,
without secrets, for mounts while the API server is away. Threads: any.
"""

from __future__ import annotations

import json
import logging
import os
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
from datastore.privatefile import write_text

from .cluster import Cluster, Seen
from .errors import NotAnswering, VolumeBusy
from .request import key_of

log = logging.getLogger(__name__)

FRESH_S = 30.0
"""How long an answer of the API server is used before it is requested again, unless the volume is staged."""
AGAIN_S = 300.0
"""Between two refreshes of a volume. The controller counts a Datastore's bytes and objects every 15 minutes."""
NOT_YET_S = 20.0
"""Until the next try, when a volume's usage is not known yet, or when the API server or the mount daemon is away."""
REMEMBERED = 1000
"""How many volumes' settings are kept on the disk, with those of volumes that have left the node."""

Context = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Current:
    """A volume as it is to be mounted now. usage: bytes and objects; None: they have not been counted."""

    context: Context
    usage: tuple[int, int] | None = None


class Datastores:
    """Requests the settings and usage of Datastores, and caches them. cluster: None outside a cluster."""

    def __init__(self, cluster: Cluster | None, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, Seen]] = {}
        self._away_until_s = 0.0

    def current(self, volume_id: str, context: Context, *, fresh: bool = False) -> Current:
        """Return the volume's context with its present settings. fresh: request them, even if the last ones are new."""
        if not _is_ours(volume_id):
            return Current(context)
        seen = self.seen(volume_id, 0.0 if fresh else FRESH_S)
        base, known = identity_of(context), self._read(volume_id)
        # Settings on the disk are ignored when the volume has been recreated since.
        settings = known["settings"] if known.get("context") == base else None
        if seen is not None and seen.settings is not None:
            settings = dict(seen.settings)
        self._write(volume_id, {"volume": volume_id, "context": base, "settings": settings})
        usage = seen.usage if seen is not None else None
        if settings is None:
            return Current(context, usage)
        try:
            return Current(with_settings(context, settings), usage)
        except InvalidManifest as error:  # perhaps of a later release; the volume's own settings are used
            log.warning("settings that are not understood are left out", extra=fields(volume=volume_id, error=error))
            return Current(context, usage)

    def again(self, volume_id: str) -> Current | None:
        """Return current() of a volume that it was called for before, from the context on the disk; else None."""
        context = self._read(volume_id).get("context")
        return None if context is None else self.current(volume_id, context)

    def seen(self, volume_id: str, younger_s: float) -> Seen | None:
        """Return the status of the volume's Datastore, None if unknown. A status older than younger_s is requested."""
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
            log.info("a Datastore can't be read", extra=fields(volume=volume_id, reason=error))
            return known
        with self._lock:
            self._seen[volume_id] = (self._clock(), found)
        return found

    def forget(self, volume_id: str) -> None:
        """Forget a volume that has left the node. For its return, its settings stay on the disk, among the REMEMBERED
        that were used last; those of mounted volumes are used every few minutes."""
        with self._lock:
            self._seen.pop(volume_id, None)
        with suppress(OSError):
            old = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-REMEMBERED]
            for path in old:
                path.unlink(missing_ok=True)

    def volume_of(self, key: str) -> str:
        """Return the id of the volume whose directories have this name (key_of), or '' if it is not known."""
        try:
            return str(json.loads((self._directory / f"{key}.json").read_text())["volume"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

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
                os.utime(path)  # forget() deletes the files that were written or used the longest ago
                return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(path, text)
        except OSError as error:  # e.g. a full disk; the API server has the settings too
            log.warning("settings are not kept on the disk", extra=fields(volume=volume_id, error=error))

    def _path(self, volume_id: str) -> Path:
        return self._directory / f"{key_of(volume_id)}.json"


def _is_ours(volume_id: str) -> bool:
    """Return whether it is a Datastore's volume; inline volumes and those of other provisioners are not."""
    try:
        VolumeHandle.parse(volume_id)
    except InvalidManifest:
        return False
    return True


class Refresher:
    """Applies Datastores' present settings to the mounted volumes, one volume at a time. Not thread-safe."""

    def __init__(self, volumes: Callable[[], list[str]], refresh: Callable[[str], bool]) -> None:
        """refresh: requests a volume's settings and applies them; returns whether its usage is known. Its errors:
        VolumeBusy, NotAnswering; then it is called again soon."""
        self._volumes = volumes
        self._refresh = refresh
        self._next_s: dict[str, float] = {}
        self._away_until_s = 0.0

    def look(self, now_s: float) -> None:
        """Refresh the volumes whose time has come; stop early when the mount daemon is away. now_s: monotonic time."""
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
                log.info("volumes can't be updated now", extra=fields(reason=error))
                self._away_until_s = now_s + NOT_YET_S
                return
            except DatastoreError as error:
                log.info("a volume was not updated", extra=fields(volume=volume_id, reason=error))
                known = True
            if known:
                self._next_s[volume_id] = now_s + AGAIN_S
