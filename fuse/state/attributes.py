"""Remembers the user metadata of object versions, so that a second HEAD is not needed.

A version is (etag, Last-Modified in seconds), because a change of metadata alone keeps the etag. An answer given
within the second of Last-Modified is not kept, because another change in that second would look the same (as with git's
racily clean entries). On some servers (versitygw) such a change keeps Last-Modified too. So when this mount changes an
object, its entry is dropped, and answers to requests that were sent before the change are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from ..loop import Loop, Task
from ..store.base import ETag, ObjectInfo
from .statedb import KnownAttributes, StateDb

_BATCH = 256
_CHANGED_MAX = 4096
"""For how many objects the last change here is remembered; no answer to a request from before the oldest is kept."""


def is_racy(info: ObjectInfo) -> bool:
    """Whether the object may still change within the second in which it was last modified."""
    return info.server_time_ns // 1_000_000_000 <= info.mtime_ns // 1_000_000_000


class AttributeMemory:
    """Keeps `entries` objects in memory, before the mount's database. Only for the loop's thread, except asking()."""

    def __init__(self, db: StateDb, loop: Loop, *, entries: int = 100_000) -> None:
        """loop: its pool threads ("lanes") write to the database, so the loop never waits."""
        self._db = db
        self._loop = loop
        self._entries = entries
        self._recent: OrderedDict[str, KnownAttributes] = OrderedDict()
        self._unsaved: dict[str, KnownAttributes | None] = {}
        """What the database does not have yet, by key; None: the object was removed or changed: delete its row."""
        self._saving: Task[None] | None = None
        """The last task to write rows of _unsaved; only one is at work at a time, so that no older row comes last."""
        self._changes = 0
        """How many changes of objects forget() was told of; the number of a change is this count after it."""
        self._changed: OrderedDict[str, int] = OrderedDict()
        """The number of the last change of each object, for the _CHANGED_MAX objects changed last."""
        self._asked_since = 0
        """The number of the last change dropped from _changed; an answer to a request from before it is not kept."""
        self._holds_all = db.attributes_at_most == 0
        """Whether _recent has all that the database has; a lookup there costs as much as all the rest of known()."""

    def known(self, key: str, etag: ETag, mtime_ns: int) -> tuple[Mapping[str, str], str] | None:
        """Return the metadata and content type of this version, None if they are not known."""
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
        """Call this before the store is asked. The function that it returns takes an answer, and keeps it unless it is
        racy or the object was changed here since this call."""
        return partial(self._learn, self._changes)

    def _learn(self, changes: int, info: ObjectInfo) -> None:
        if is_racy(info) or changes < max(self._asked_since, self._changed.get(info.key, 0)):
            return
        row = KnownAttributes(info.etag, info.mtime_ns // 1_000_000_000, dict(info.metadata), info.content_type)
        self._keep(info.key, row)
        self._save_later(info.key, row)

    def forget(self, key: str) -> None:
        """Drop the entry of an object that this mount removed or changed; unknown keys are ignored."""
        self._recent.pop(key, None)
        self._changes += 1
        self._changed[key] = self._changes
        self._changed.move_to_end(key)
        if len(self._changed) > _CHANGED_MAX:
            self._asked_since = self._changed.popitem(last=False)[1]
        self._save_later(key, None)

    async def save(self) -> None:
        """Write to the database what it does not have yet."""
        if self._saving is not None:
            await self._saving
        await self._save(dict(self._unsaved))

    def _save_later(self, key: str, row: KnownAttributes | None) -> None:
        self._unsaved[key] = row
        if len(self._unsaved) >= _BATCH and (self._saving is None or self._saving.done):
            self._saving = self._loop.background(self._save(dict(self._unsaved)))

    async def _save(self, batch: Mapping[str, KnownAttributes | None]) -> None:
        await self._loop.on_disk(self._write, batch)
        self._unsaved = {key: row for key, row in self._unsaved.items() if batch.get(key, batch) is not row}

    def _write(self, batch: Mapping[str, KnownAttributes | None]) -> None:
        """Write a batch, in a pool thread. On a full disk it is lost: the store is asked again, and rows of removed
        objects stay until they are trimmed."""
        with suppress(OSError):
            self._db.remember_attributes(
                [(key, row) for key, row in batch.items() if row is not None],
                [key for key, row in batch.items() if row is None],
            )

    def _keep(self, key: str, row: KnownAttributes) -> None:
        self._recent[key] = row
        self._recent.move_to_end(key)
        if len(self._recent) > self._entries:
            self._recent.popitem(last=False)
            self._holds_all = False
