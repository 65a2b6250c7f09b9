"""Handles what an earlier process left: unsent files, and incomplete multipart uploads (S-20, S-46).

Also handles files that cannot be sent because another client was first: a person has to save or discard them (S-47).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import NamedTuple

from datastore.errors import DatastoreError, StoreError
from datastore.logs import fields

from ...data.staging import StagedFile
from ...loop import Lock
from ...ops import FSError
from ...state.rows import NotedUpload, Unsent
from ...store.base import ETag, ObjectVersion, WriteOptions
from ..tree import facts
from ..tree.attrs import from_metadata
from ..tree.core import Core
from ..tree.nodes import Node
from .copies import Copy
from .delivery import Delivery, Destination

log = logging.getLogger(__name__)
UNKNOWN = ETag("unknown")
"""The etag of a node whose object may or may not exist; no server sends this."""
CUT = "the machine went down before this was on its disk, and the store has what was written since; it is kept on disk"
_SKEW_NS = 900 * 1_000_000_000
"""How far the store's time of a request may be from ours, in nanoseconds: clock difference and duration."""


class OrphanedUpload(NamedTuple):
    """An unsent file without a node. lock: held while the file, or newer content of its key, is sent.
    unsynced: the machine went down since the file was written: it may lack bytes, or may have been sent before.
    """

    staged: StagedFile
    to: Destination
    lock: Lock
    unsynced: bool = False


_NOTHING_LEFT = nullcontext()


class OrphanedUploads:
    """Unsent files that belong to no node, by the name of their staging file."""

    def __init__(self, core: Core, delivery: Delivery) -> None:
        self._core = core
        self._delivery = delivery
        self.files: dict[str, OrphanedUpload] = {}
        self.arriving = False
        """Whether the files left from before the mount are being sent for the first time."""
        self._uploads: list[NotedUpload] = []
        self._dead = 0
        """The highest note (row id) of the multipart uploads that earlier processes began."""

    def recover(self) -> None:
        """Read the journal. Its files are sent by send(), or with their node if the kernel still knows that (after a
        restart of the server under a live mount). Staging files without a row are removed.
        """
        core = self._core
        by_key = {node.key: node for node in core.nodes.by_ino.values() if not node.gone}
        moved = [(i.source, i.target) for i in core.db.intents() if i.kind == "rename-directory"]
        self._uploads = core.db.uploads()
        self._dead = max((one.note for one in self._uploads), default=0)
        rows = {row.staging: row for row in core.db.unsent()}
        for path in core.staging_dir.iterdir():
            if path.name not in rows:
                path.unlink()
        for name, row in rows.items():
            path = core.staging_dir / name
            if not path.exists():
                core.db.forget_unsent(name)
                continue
            base = ObjectVersion(row.base_key, ETag(row.base_etag), row.base_length) if row.base_key else None
            staged = StagedFile.recovered(path, base, row.base_size, row.since_ns)
            staged.error, staged.attempt, staged.stuck = row.error, row.metadata, row.stuck
            staged.journaled = True
            staged.expects = None if row.expects is None else ETag(row.expects)
            # The row may still have the key from before the rename of a directory.
            keys = [row.key, *(new + row.key[len(old) :] for old, new in moved if row.key.startswith(old))]
            node = next((by_key[key] for key in keys if key in by_key), None)
            if node is not None and not row.stuck and not row.unsynced:
                self._reattach(node, staged, row)
                continue
            to = Destination(row.key, WriteOptions(metadata=row.metadata, content_type=row.content_type))
            self.add(staged, to, unsynced=row.unsynced)

    def _reattach(self, node: Node, staged: StagedFile, row: Unsent) -> None:
        """Give the file to its node in place of an older one: programs saw the newest one, and will close that."""
        if node.staged is not None:
            self._core.db.forget_unsent(node.staged.name)
            node.staged.close(remove=True)
        defaults = self._core.settings.defaults.of(stat.S_IFREG, row.since_ns)
        attributes = from_metadata(row.metadata, stat.S_IFREG, defaults, row.content_type)
        # Without a base the row does not tell whether there is an object: a removal has to try to remove one.
        facts.held(node, staged.size, ETag(row.base_etag) or UNKNOWN, attributes)
        node.staged = staged
        self._core.nodes.staged.add(node)

    def add(self, staged: StagedFile, to: Destination, *, unsynced: bool = False) -> None:
        """Take over a staging file that no node has any more."""
        self.files[staged.name] = OrphanedUpload(staged, to, Lock(), unsynced)

    async def send_first(self) -> list[str]:
        """As send(), when the mount begins. Programs that already run wait for a file that they access."""
        self.arriving = True
        try:
            return await self.send()
        finally:
            self.arriving = False

    async def send(self) -> list[str]:
        """Send the files and abort the multipart uploads; return a line for each file that failed.
        Of several files of one key the newest is sent; then the others are dropped, as they were written before.
        """
        await self._abort_uploads()
        failures = []
        for left in sorted(self.files.values(), key=_age):
            async with self._held(left.to.key) as same:
                newer = any(_age(one) > _age(left) for one in same if not one.staged.stuck)
                if newer or left.staged.name not in self.files:
                    continue
                if not await self._send(left):
                    failures.append(f"{left.to.key}: {left.staged.error}")
                    continue
                await self._drop_sent(same)
        return failures

    async def arrived(self, key: str) -> bool:
        """Wait until the files left for a key are in the store, and send them now if need be; return whether they have
        arrived. For a caller that sees that `arriving` is true.
        """
        async with self._held(key) as same:
            if not same:
                return False
            if same[-1].staged.name in self.files:
                if not await self._send(same[-1]):
                    return False
                await self._drop_sent(same)
        return True

    async def _send(self, left: OrphanedUpload) -> bool:
        staged = left.staged
        if staged.stuck:
            return False
        try:
            if left.unsynced and await self._has_newer(left):
                staged.stuck = True
                raise FSError(errno.ESTALE, CUT)
            await self._delivery.write(staged, left.to)
        except (DatastoreError, OSError) as error:
            staged.error = str(error)
            self._core.db.failed_unsent(staged.name, staged.error, stuck=staged.stuck)
            return False
        return True

    async def _has_newer(self, left: OrphanedUpload) -> bool:
        """Return whether the store has content that was written since the file was begun, by its writer's clock."""
        info = await self._core.head(left.to.key)
        if info is None:
            return False
        defaults = self._core.settings.defaults.of(stat.S_IFREG, info.mtime_ns)
        written = from_metadata(info.metadata, stat.S_IFREG, defaults, info.content_type)
        return written.ctime_ns >= left.staged.since_ns

    def superseded(self, key: str, before_ns: float = math.inf) -> AbstractAsyncContextManager[None]:
        """A context to send newer content of a key: files left for that key wait for its end, and are dropped then.

        After an error they stay, and so does a file that was begun after before_ns. node.lock may be held. A row of the
        newer content in the journal is removed after the context, so that a kill in between brings no older file back.
        """
        return self._superseded(key, before_ns) if self.files else _NOTHING_LEFT

    @asynccontextmanager
    async def _superseded(self, key: str, before_ns: float) -> AsyncIterator[None]:
        async with self._held(key) as same:
            yield
            await self._drop_sent([one for one in same if one.staged.since_ns <= before_ns])

    @asynccontextmanager
    async def _held(self, key: str) -> AsyncIterator[list[OrphanedUpload]]:
        """A context with the files left for a key, the oldest first; no other task sends or drops them."""
        async with AsyncExitStack() as locks:
            same = [left for _, left in sorted(self.files.items()) if left.to.key == key]
            for left in same:
                await locks.enter_async_context(left.lock)
            yield sorted(same, key=_age)

    async def _drop_sent(self, same: list[OrphanedUpload]) -> None:
        """Drop files whose key has newer content. The database is synced, as a power cut could bring their rows back
        when the newer content has no row any more.
        """
        for left in same:
            if not left.staged.stuck:
                await self.drop(left.staged.name)
        if same:
            with suppress(OSError):
                await self._core.loop.on_disk(self._core.db.sync)

    def after(self, key: str, since_ns: int) -> int:
        """Return since_ns, or more if needed to be newer than every file left for the key, whatever the clock says."""
        left = [one.staged.since_ns for one in self.files.values() if one.to.key == key]
        return max(since_ns, max(left, default=-1) + 1)

    def waits_for(self, key: str, *, below: bool = False) -> bool:
        """Return whether a file is still to be sent to this key; below: or to a key that begins with it."""
        keys = [left.to.key for left in self.files.values() if not left.staged.stuck]
        return any(one.startswith(key) if below else one == key for one in keys)

    async def follow(self, old: str, new: str, made: Mapping[str, Copy]) -> None:
        """Have files below a renamed directory sent to their new keys. made: copies by new key. Errors: OSError."""
        below = [(name, left) for name, left in self.files.items() if left.to.key.startswith(old)]
        for name, left in below:
            staged, key = left.staged, new + left.to.key[len(old) :]
            copy = made.get(key)
            async with left.lock:
                if name not in self.files:
                    continue
                if copy is not None:
                    staged.copied(copy.original, key, copy.result.etag)
                self._core.db.record_unsent(row_of(staged, key, left.to.options)._replace(unsynced=left.unsynced))
                self.files[name] = left._replace(to=left.to._replace(key=key))

    async def drop(self, name: str) -> None:
        """Forget a file and remove its bytes."""
        left = self.files.get(name)
        if left is None:
            return
        async with left.lock:
            self.files.pop(name, None)
            self._core.db.forget_unsent(name)
            left.staged.close(remove=True)

    def unsent(self) -> list[dict[str, object]]:
        """Return the unsent files, for `datastore status`: see listed()."""
        return [listed(os.fsencode(left.to.key), left.staged) for left in self.files.values()]

    # -- multipart uploads of a dead process

    async def _abort_uploads(self) -> None:
        """Abort the uploads. Those that the store does not let us abort stay in the journal and are tried again."""
        waiting, self._uploads = self._uploads, []
        for noted in waiting:
            try:
                if await self._abort(noted):
                    self._core.db.upload_ended(noted.note)
                    continue
            except StoreError as error:
                log.warning("an unfinished upload stays behind", extra=fields(key=noted.key, error=str(error)))
            self._uploads.append(noted)

    async def _abort(self, noted: NotedUpload) -> bool:
        """Abort an upload; return whether it is certainly gone."""
        core, store = self._core, self._core.store
        if noted.upload_id:
            await store.abort_upload(noted.key, noted.upload_id)
            return True
        # We never learned its id: it is an upload of the same key that began when the request was made.
        pending = await store.pending_uploads(noted.key)
        ours = {one.upload_id for one in core.db.uploads() if one.key == noted.key and one.note > self._dead}
        if "" in ours:
            return False  # this process is creating an upload of the key: it may be among `pending`
        for one in pending:
            near = one.key == noted.key and abs(one.initiated_ns - noted.since_ns) < _SKEW_NS
            if near and one.upload_id not in ours:
                await store.abort_upload(one.key, one.upload_id)
        return True


def _age(left: OrphanedUpload) -> tuple[int, str]:
    return left.staged.since_ns, left.staged.name


def row_of(staged: StagedFile, key: str, options: WriteOptions) -> Unsent:
    """The journal's row of a staging file that is to become the object of this key."""
    base = staged.base or ObjectVersion("", ETag(""), 0)
    metadata, since_ns, expects = dict(options.metadata), staged.since_ns, staged.expects
    row = Unsent(staged.name, key, *base, staged.base_size, metadata, options.content_type, since_ns)
    return row._replace(error=staged.error, expects=expects, stuck=staged.stuck)


def listed(path: bytes, staged: StagedFile) -> dict[str, object]:
    """A line of `datastore status`: path, bytes, since (seconds since the epoch), error or None, stuck, staging."""
    return {
        "path": os.fsdecode(path),
        "bytes": staged.size,
        "since": staged.since_ns / 1e9,
        "error": staged.error or None,
        "stuck": staged.stuck,
        "staging": staged.name,
    }
