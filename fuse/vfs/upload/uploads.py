"""Changed files on their way to the store: their staging files, the journal of those, and when they are sent.

Promises S-18 to S-21: when close or fsync returned 0 the bytes are in the store; files that could not be sent are kept
on disk, reported, and retried. delivery.py sends a file; orphans.py handles what a dead process left.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from datastore.errors import DatastoreError, NotFound, PreconditionFailed
from datastore.logs import fields

from ...data import multipart
from ...data.staging import StagedFile
from ...ops import FSError
from ...state.rows import Intent
from ...store.base import ObjectVersion, WriteOptions
from ..lookup.resolver import Resolver
from ..tree import facts
from ..tree.attrs import to_metadata, without_times
from ..tree.core import Core
from ..tree.nodes import Node
from .copies import copy_object
from .delivery import SMALL, Delivered, Delivery, Destination
from .orphans import UNKNOWN, OrphanedUploads, listed, row_of

log = logging.getLogger(__name__)
NO_OBJECT = "none"
"""The etag of a source without an object, in the journal of renames; no server sends this."""


class Uploads:
    """Owns node.staged. Callers hold node.lock where a comment says so, and share the tree lock around uploads."""

    def __init__(self, core: Core, resolver: Resolver) -> None:
        self._core = core
        self._resolver = resolver
        self._delivery = Delivery(core)
        self.fill, self.read = self._delivery.fill, self._delivery.read
        self.orphans = OrphanedUploads(core, self._delivery)
        self._run, self._numbers = uuid.uuid4().hex, itertools.count(1)
        """For the names of staging files. No name is used twice, because the journal may still have a row for it."""

    # -- staging; node.lock is held

    def stage(self, node: Node) -> StagedFile:
        """Return the node's staging file; make one if there is none.

        A node whose name another client took gets that back: the last close wins (S-32). Errors: FSError(ESTALE) when
        this mount has unsent bytes or a directory under the name by now.
        """
        if node.cut_off:
            if not self._core.nodes.reattach(node):
                raise FSError(errno.ESTALE, "another client took the name of this file, and it is in use here")
            if node.parent is not None:
                self._core.notifier.inval_entry(node.parent.ino, node.name)
        staged = node.staged
        if staged is None:
            staged = self._make(node)
        if not staged.base_size and not staged.size:
            staged.stream_at = 2 * multipart.PART_SIZE
        return staged

    def restart(self, node: Node) -> StagedFile:
        """As stage(), for a file that becomes empty: nothing earlier stays in it, so the last close wins (S-32)."""
        staged = self.stage(node)
        if not self._core.settings.refuse_conflicts:
            staged.expects, staged.stuck, staged.error = None, False, ""
        return staged

    def _make(self, node: Node) -> StagedFile:
        core = self._core
        base = ObjectVersion(node.key, node.etag, node.size) if node.etag else None
        staged = StagedFile(f"{core.staging_dir}/{self._run}-{next(self._numbers)}", base, core.clock.time_ns())
        if (base is not None or core.settings.refuse_conflicts) and node.etag != UNKNOWN:
            staged.expects = node.etag
        node.staged = staged
        core.nodes.staged.add(node)
        return staged

    def record(self, node: Node, *, lasting: bool = False) -> None:
        """Update the journal's row of a node. lasting: prepare it for the next db.sync(), to outlive a power cut."""
        staged = node.staged
        if staged is None or node.gone or not staged.dirty:
            return
        staged.journaled = True
        key = node.key
        staged.since_ns = self.orphans.after(key, staged.since_ns)
        self._core.db.record_unsent(row_of(staged, key, _options(node)), lasting=lasting)

    async def persist(self, node: Node) -> None:
        """Sync the staging file, then its journal row, so that both outlive a power cut (S-50). Errors: OSError."""
        staged = node.staged
        if staged is not None:
            await self._core.loop.on_disk(staged.sync)
            self.record(node, lasting=True)
            await self._core.loop.on_disk(self._core.db.sync)

    def grown(self, node: Node, staged: StagedFile) -> None:
        """Send the parts that the writer has finished, when the staging file has reached stream_at."""
        options = _options(node)
        if not staged.times_set:
            options = replace(options, metadata=without_times(options.metadata))
        self._delivery.stream(staged, node.key, options)

    async def forsake(self, node: Node) -> None:
        """Never send the staged bytes of a node without a name: abort its upload, and forget its journal row.
        The bytes stay for as long as it is open.
        """
        staged = node.staged
        if node.handles == 0:
            self.discard(node)
        elif staged is not None:
            await self._delivery.drop_stream(staged)
            self._core.db.forget_unsent(staged.name)

    def discard(self, node: Node) -> None:
        """Drop the staging file: its content is in the store, or nobody wants it.
        Only an open file has parts on their way, as each close sends or aborts them.
        """
        staged, node.staged = node.staged, None
        if staged is not None:
            staged.close(remove=True)
            if staged.journaled:
                self._core.db.forget_unsent(staged.name, removed=True)

    def set_aside(self, node: Node) -> None:
        """Make the unsent file of a node that is not open an orphan, about which a person decides; the name then shows
        what the store has. node.lock is held.
        """
        core = self._core
        destination = self._destination(node)
        staged, node.staged = node.staged, None
        assert staged is not None
        facts.doubted(node, attributes=True)
        node.pages_valid = False
        above = node.parent
        while above is not None:  # a directory that another client removed was shown because of the file
            above.forget_listing()
            facts.doubted(above)
            above = above.parent
        self.orphans.add(staged, destination)
        core.notifier.inval_inode(node.ino)

    async def settle(self, node: Node) -> None:
        """Drop a staging file after the last close and the upload; its content becomes a version in the disk cache.
        Files of up to SMALL bytes are not cached there: their bytes are in memory since they were sent.
        """
        staged = node.staged
        if staged is not None and not node.gone and staged.size > SMALL and staged.complete:
            await self._core.loop.on_disk(self._core.cache.adopt, node.version(), staged.path)
        self.discard(node)

    # -- upload

    def owed(self, node: Node) -> StagedFile | None:
        """Return the staging file if a close has to send it, or to confirm it in the store (see _confirm())."""
        staged = node.staged
        if staged is None or (node.gone and not node.lost):
            return None
        return staged if staged.dirty or staged.published else None

    def waits(self, node: Node) -> bool:
        """Return whether the last close has to leave the upload to a later retry_one(), which drops the staging file.

        That is so if an upload failed and was reported (all readers would wait while it is tried now), or if the file
        is sent after its close (writeBack).
        """
        staged = node.staged
        if staged is None or staged.stuck or node.gone:
            return False
        return staged.dirty and bool(staged.error or staged.due)

    async def flush(self, node: Node, *, unread: bool = False) -> None:
        """Send what is unsent of a node. Errors: StoreError, FSError; what was not sent stays staged.

        unread: no program can read the file through a handle. If it is small, its staging file is dropped before the
        close is answered, so that the journal need not be written for that.
        """
        async with self._core.tree.shared(), node.lock:
            await self._flush(node, unread=unread)

    async def _flush(self, node: Node, *, unread: bool) -> None:
        staged = node.staged
        if staged is not None and staged.published:
            await self._confirm(node, staged)
        goes = unread and staged is not None and staged.size <= SMALL
        await self.send(node, goes=goes)
        if goes:
            self.discard(node)

    async def publish(self, node: Node) -> None:
        """As flush(), but before the close, so that other clients see what was written so far."""
        async with self._core.tree.shared(), node.lock:
            await self.send(node)
            if node.staged is not None and node.handles:
                node.staged.published = True

    async def _confirm(self, node: Node, staged: StagedFile) -> None:
        """Have a published file sent again if another client wrote the file since: the last close wins."""
        staged.published = False
        base = staged.base
        if staged.dirty or base is None or staged.expects is not None:
            return
        info = await self._core.head(base.key)
        if info is not None and info.etag != base.etag and staged.complete:
            self.stage(node).dirty = True

    async def send(
        self,
        node: Node,
        *,
        key: str | None = None,
        rename: Intent | None = None,
        replaced: Sequence[str] = (),
        goes: bool = False,
    ) -> None:
        """As flush(), with the tree lock and node.lock held. key: another key to write, for the rename under way.

        replaced: the staging files of what the rename replaces. goes: the caller discards the staging file, with its
        row in the journal, right after this.
        """
        staged = node.staged
        if staged is None or not staged.dirty or node.gone:
            return
        if staged.stuck:
            raise FSError(errno.ESTALE, staged.error)
        destination = self._destination(node, key)
        if staged.base_size or staged.expects is not None:
            # After a crash between the upload and its answer the next mount recognises the new version by this metadata
            # or, where the disk has no room for the row, by all of its bytes.
            with nullcontext() if staged.base_size else suppress(OSError):
                self.record(node)
        had_etag, times_set = node.etag, staged.times_set
        try:
            async with self.orphans.superseded(destination.key):
                done = await self._delivery.write(staged, destination)
            if done is None:
                self.discard(node)
                await self._resolver.ask(node)
                return
            self._delivered(node, staged, destination, done)
            has, wanted = done.metadata, destination.options.metadata
            # If no program has set the times, LastModified does as well.
            if has != wanted and (times_set or has != without_times(wanted)):
                await self._correct(node, staged, destination)
        except (DatastoreError, OSError) as error:
            staged.error, staged.due = str(error), 0.0
            with suppress(OSError):
                await self.persist(node)
            log.warning("upload failed", extra=fields(path=node.path, error=staged.error))
            raise
        if rename is not None:
            # If there is no object at the old key (NO_OBJECT), one that is there later must not be removed.
            had = had_etag.replace(UNKNOWN, "") if had_etag else NO_OBJECT
            self._core.db.moved(rename, had, [staged.name, *replaced])
        elif staged.journaled and not goes:
            self._core.db.forget_unsent(staged.name)
        staged.journaled = staged.journaled and goes

    def _destination(self, node: Node, key: str | None = None) -> Destination:
        return Destination(key or node.key, _options(node), elsewhere=key is not None)

    def _delivered(self, node: Node, staged: StagedFile, to: Destination, done: Delivered) -> None:
        """Note that the store has the content as a new version. Metadata that is not ours must be requested."""
        attrs_valid = done.metadata == to.options.metadata
        version = ObjectVersion(to.key, done.result.etag, staged.size)
        facts.written(self._core, node, done.result, attrs_valid=attrs_valid)
        staged.uploaded(version)
        if node.parent is not None:
            self._resolver.changed(node)
        if done.body:
            self._core.reader.give(version, done.body)
        if not attrs_valid and node.nlookup:
            self._core.notifier.inval_inode(node.ino, -1)

    async def _correct(self, node: Node, staged: StagedFile, to: Destination) -> None:
        """Set attributes that changed since the upload began, which fixes them, by a copy of the object onto itself."""
        staged.dirty = True
        version = ObjectVersion(to.key, node.etag, staged.size)
        try:
            result = await copy_object(self._core, version, to.key, to.options)
        except (PreconditionFailed, NotFound):
            staged.dirty = False  # another client wrote or removed it since: the last change stays
            return
        self._core.known.forget(to.key)
        self._delivered(node, staged, to, Delivered(result, to.options.metadata))

    # -- unsent files

    async def retry(self, nodes: Iterable[Node]) -> list[str]:
        """Send the files of these nodes, and those that belong to no node; return a line for each that failed."""
        failures = [line for node in nodes if (line := await self.retry_one(node))]
        return failures + await self.orphans.send()

    async def retry_one(self, node: Node) -> str:
        """Send one file, and settle() it if no handle is open; return what failed, or ''."""
        try:
            async with self._core.tree.shared(), node.lock:
                await self._flush(node, unread=not node.handles)
                if node.handles == 0 and not node.dirty:
                    await self.settle(node)
            self._core.nodes.drop_unused(node)
        except (DatastoreError, OSError) as error:
            async with node.lock:
                if node.staged is not None and node.staged.stuck and not node.handles:
                    self.set_aside(node)
            return f"{os.fsdecode(node.path)}: {error}"
        return ""

    async def forget(self, path: str) -> int:
        """Drop unsent files that belong to no node, or failed, by the path that unsent() shows, else by their path in
        this mount; return how many. Errors: DatastoreError for one that is open: its program may still send it.
        """
        core = self._core
        named = set()
        for node in [node for node in core.nodes.unsent() if os.fsdecode(node.path) == path]:
            async with core.tree.shared(), node.lock:
                if node.staged is not None and node.staged.error:
                    if node.handles:
                        raise DatastoreError(f"{path}: a program still has it open; close it there, then discard it")
                    named.add(node.staged.name)
                    self.set_aside(node)
        named.update(name for name, left in self.orphans.files.items() if left.to.key == path)
        if not named:
            key = core.nodes.root.key + path
            named.update(name for name, left in self.orphans.files.items() if left.to.key == key)
        for name in named:
            await self.orphans.drop(name)
        return len(named)

    def unsent(self) -> list[dict[str, object]]:
        """Return the files that are not in the store, for `datastore status`: see orphans.listed()."""
        rows = [listed(node.path, staged) for node, staged in self._core.nodes.unsent().items()]
        return rows + self.orphans.unsent()


def _options(node: Node) -> WriteOptions:
    """Return the metadata and content type of the object that a node is to become."""
    return WriteOptions(metadata=to_metadata(node.attributes), content_type=node.attributes.content_type)
