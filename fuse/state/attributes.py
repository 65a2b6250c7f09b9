"""User metadata by version of an object: what a HEAD said once need not be asked again.

A version is (etag, Last-Modified in seconds), because a change of metadata alone keeps the etag. An answer given
within the second of Last-Modified is not kept: a second change in that second would look the same (as git's racily
clean entries). Some servers keep Last-Modified as well (versitygw): what this mount changes is forgotten, and no answer
to what was asked before is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from ..loop import Loop
from ..store.base import ETag, ObjectInfo
from .statedb import KnownAttributes, StateDb

_BATCH = 256
_CHANGED_MAX = 4096
"""Objects of which is remembered when they were changed here; of what was asked before the oldest nothing is kept."""


def is_racy(info: ObjectInfo) -> bool:
    """Whether the object may still change within the second in which it was last modified."""
    return info.server_time_ns // 1_000_000_000 <= info.mtime_ns // 1_000_000_000


class AttributeMemory:
    """Memory of `entries` objects before the database of the mount. On the loop, but for asking()."""

    def __init__(self, db: StateDb, *, entries: int = 100_000, loop: Loop | None = None) -> None:
        """loop: its lanes write into the database, which who learns something must not wait for; without it he does."""
        self._db = db
        self._loop = loop
        self._entries = entries
        self._recent: OrderedDict[str, KnownAttributes] = OrderedDict()
        self._unsaved: dict[str, KnownAttributes | None] = {}
        """None: the object is no more, or it has others now."""
        self._changes = 0
        """How often an object was changed here."""
        self._changed: OrderedDict[str, int] = OrderedDict()
        """Which of these changes was the last one of each object."""
        self._asked_since = 0
        """What was asked before this change may be older than one that is remembered no more."""
        self._holds_all = db.attributes_at_most == 0
        """What is not in _recent is not in the database either, where looking costs as much as all the rest."""

    def known(self, key: str, etag: ETag, mtime_ns: int) -> tuple[Mapping[str, str], str] | None:
        """Metadata and content type of this version, or None."""
        found = self._recent.get(key)
        forgotten = key in self._unsaved and self._unsaved[key] is None
        if found is None and not self._holds_all and not forgotten:
            found = self._db.attributes(key)
            if found is not None:
                self._keep(key, found)
        if found is None or found.etag != etag or found.mtime_s != mtime_ns // 1_000_000_000:
            return None
        return found.metadata, found.content_type

    def asking(self) -> Callable[[ObjectInfo], None]:
        """To be called before the store is asked; what comes back keeps what it says, unless that is racy."""
        return partial(self._learn, self._changes)

    def _learn(self, changes: int, info: ObjectInfo) -> None:
        if is_racy(info) or changes < max(self._asked_since, self._changed.get(info.key, 0)):
            return
        row = KnownAttributes(info.etag, info.mtime_ns // 1_000_000_000, dict(info.metadata), info.content_type)
        self._keep(info.key, row)
        self._save_later(info.key, row)

    def forget(self, key: str) -> None:
        """The object was removed or changed here; unknown keys are ignored."""
        self._recent.pop(key, None)
        self._changes += 1
        self._changed[key] = self._changes
        self._changed.move_to_end(key)
        if len(self._changed) > _CHANGED_MAX:
            self._asked_since = self._changed.popitem(last=False)[1]
        self._save_later(key, None)

    def save(self) -> None:
        """Write what is not yet in the database."""
        batch, self._unsaved = self._unsaved, {}
        self._write(batch)

    def _write(self, batch: Mapping[str, KnownAttributes | None]) -> None:
        """Perhaps by a lane. Without room on the disk it is asked for again, or trimmed, later."""
        with suppress(OSError):
            self._db.remember_attributes(
                [(key, row) for key, row in batch.items() if row is not None],
                [key for key, row in batch.items() if row is None],
            )

    def _save_later(self, key: str, row: KnownAttributes | None) -> None:
        self._unsaved[key] = row
        if len(self._unsaved) < _BATCH:
            return
        if self._loop is None:
            self.save()
        else:
            self._loop.background(self._write_aside(self._loop, self._unsaved))
            self._unsaved = {}

    async def _write_aside(self, loop: Loop, batch: Mapping[str, KnownAttributes | None]) -> None:
        await loop.on_disk(self._write, batch)

    def _keep(self, key: str, row: KnownAttributes) -> None:
        self._recent[key] = row
        self._recent.move_to_end(key)
        if len(self._recent) > self._entries:
            self._recent.popitem(last=False)
            self._holds_all = False
