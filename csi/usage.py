"""How full a volume is: what the controller counted last, from its Datastore's status to the mount's statfs.

A bucket does not know its size, and to count it takes a listing of everything: the controller does that once for all
nodes. Nobody waits for this number, and a mount works without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from datastore.api.volumecontext import VolumeHandle
from datastore.errors import DatastoreError, InvalidManifest, Unreachable
from datastore.logs import fields

from .errors import KeeperAway, VolumeBusy
from .volumes import Volumes

log = logging.getLogger(__name__)

AGAIN_S = 300.0
"""The controller counts every 15 minutes."""
NOT_YET_S = 20.0
"""Until the next try, for a volume that has just been made, or when nobody answers."""

Counted = Callable[[VolumeHandle], tuple[int, int] | None]
"""Bytes and objects of a Datastore. Errors: NotFound, AccessDenied, Unreachable."""


class Usage:
    """Asks for each volume of the node in its turn. One thread at a time."""

    def __init__(self, volumes: Volumes, counted: Counted) -> None:
        self._volumes = volumes
        self._counted = counted
        self._next_s: dict[str, float] = {}
        self._away_until_s = 0.0

    def look(self, now_s: float) -> None:
        """Ask for those whose turn it is; ends early when the API server or the keeper's host is away."""
        if now_s < self._away_until_s:
            return
        held = self._volumes.holdings.volumes()
        self._next_s = {volume_id: self._next_s.get(volume_id, 0.0) for volume_id in held}
        for volume_id in held:
            if self._next_s[volume_id] > now_s:
                continue
            self._next_s[volume_id] = now_s + NOT_YET_S
            try:
                known = self._tell(volume_id)
            except (Unreachable, KeeperAway) as error:
                log.info("how full volumes are is not known just now", extra=fields(reason=error))
                self._away_until_s = now_s + NOT_YET_S
                return
            except DatastoreError as error:
                log.info("how full a volume is is not known", extra=fields(volume=volume_id, reason=error))
                known = True
            if known:
                self._next_s[volume_id] = now_s + AGAIN_S

    def _tell(self, volume_id: str) -> bool:
        """Whether the number is known, or never will be. Errors: DatastoreError."""
        try:
            handle = VolumeHandle.parse(volume_id)
        except InvalidManifest:  # no Datastore's
            return True
        counted = self._counted(handle)
        if counted is None:
            return False
        with suppress(VolumeBusy):
            self._volumes.fill(volume_id, *counted)
            return True
        return False
