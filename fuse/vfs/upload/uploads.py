"""Changed files on their way to the store: staging, the journal of what is unsent, and when it is sent.

Promises S-18 to S-21: when close or fsync returned 0 the bytes are in the store; what could not be sent is kept on
disk, reported, and tried again. How a file is sent: delivery.py; what a dead process left: orphans.py.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import uuid
from collections.abc import Sequence
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
"""In the place of an etag; no server's."""


class Uploads:
    """Owns node.staged. Callers hold node.lock where it says so, and the tree lock around uploads."""

    def __init__(self, core: Core, resolver: Resolver) -> None:
        self._core = core
        self._resolver = resolver
        self._delivery = Delivery(core)
        self.fill = self._delivery.fill
        self.orphans = OrphanedUploads(core, self._delivery)
        self._run, self._numbers = uuid.uuid4().hex, itertools.count(1)
        """A name is never used twice: the journal may still have a row for it."""

    # -- staging; node.lock is held

    def stage(self, node: Node) -> StagedFile:
        """The node's staging file; made if need be.

        A file whose name another client took gets it back: the last close wins (S-32). FSError(ESTALE) when this mount
        has unsent bytes under that name already.
        """
        if node.cut_off:
            self._take_back(node)
        staged = node.staged
        if staged is None:
            base = ObjectVersion(node.key, node.etag, node.size) if node.etag else None
            staged = self._make(node, base)
        if not staged.base_size and not staged.size:
            staged.stream_at = 2 * multipart.PART_SIZE
        return staged

    async def restart(self, node: Node) -> StagedFile:
        """The same, but that nothing of the object's present content is kept."""
        if node.cut_off:
            self._take_back(node)
        staged = node.staged
        if staged is None:
            self._make(node, None)
        else:
            await self._delivery.drop_stream(staged)
            staged.truncate(0)
            if not self._core.settings.refuse_conflicts:
                # Nothing of what was there is in it any more: the last close wins (S-32).
                staged.expects, staged.stuck, staged.error = None, False, ""
        return self.stage(node)

    def _make(self, node: Node, base: ObjectVersion | None) -> StagedFile:
        core = self._core
        staged = StagedFile(f"{core.staging_dir}/{self._run}-{next(self._numbers)}", base, core.clock.time_ns())
        if (base is not None or core.settings.refuse_conflicts) and node.etag != UNKNOWN:
            staged.expects = node.etag
        node.staged = staged
        core.nodes.staged.add(node)
        return staged

    def _take_back(self, node: Node) -> None:
        core = self._core
        if not core.nodes.reattach(node):
            raise FSError(errno.ESTALE, "another client took the name of this file, and it is in use here")
        if node.parent is not None:
            core.notifier.inval_entry(node.parent.ino, node.name)

    def record(self, node: Node, *, lasting: bool = False) -> None:
        """Bring the journal's row of a node up to date. lasting: it is to outlive more than our processes."""
        staged = node.staged
        if staged is None or node.gone or not staged.dirty:
            return
        staged.journaled = True
        key = node.key
        staged.since_ns = self.orphans.after(key, staged.since_ns)
        self._core.db.record_unsent(row_of(staged, key, _options(node)), lasting=lasting)

    async def persist(self, node: Node) -> None:
        """Bring the staging file, and then its row, to the disk itself: they outlive a power cut (S-50). OSError."""
        staged = node.staged
        if staged is not None:
            await self._core.loop.on_disk(staged.sync)
            self.record(node, lasting=True)
            await self._core.loop.on_disk(self._core.db.sync)

    def grown(self, node: Node) -> None:
        """The staging file reached stream_at: what lies behind the writer can be sent."""
        staged = node.staged
        if staged is not None and not node.gone:
            options = _options(node)
            if not staged.times_set:
                options = replace(options, metadata=without_times(options.metadata))
            self._delivery.stream(staged, node.key, options)

    async def forsake(self, node: Node) -> None:
        """The file has no name any more, but is open: it is never sent."""
        staged = node.staged
        if staged is not None:
            await self._delivery.drop_stream(staged)
            self._core.db.forget_unsent(staged.name)

    async def discard(self, node: Node) -> None:
        """Drop the staging file: its content is in the store, or nobody wants it."""
        staged = node.staged
        if staged is not None and staged.stream is not None:
            await self._delivery.drop_stream(staged)
        self.drop_new(node)

    def drop_new(self, node: Node) -> None:
        """The same of a node that was staged a moment ago: nothing of it was sent ahead."""
        staged, node.staged = node.staged, None
        if staged is not None:
            staged.close(remove=True)
            if staged.journaled:
                self._core.db.forget_unsent(staged.name, removed=True)

    def set_aside(self, node: Node) -> None:
        """Nobody has it open, and another client was first: the name shows what that wrote, ours waits for a person.

        node.lock is held.
        """
        core = self._core
        destination = self._destination(node)
        staged, node.staged = node.staged, None
        facts.doubted(node, attributes=True)
        node.pages_valid = False
        above = node.parent
        while above is not None:  # a directory that another client removed was shown for the file's sake
            above.forget_listing()
            facts.doubted(above)
            above = above.parent
        if staged is not None:
            self.orphans.add(staged, destination)
            core.notifier.inval_inode(node.ino)

    async def settle(self, node: Node) -> None:
        """The last handle is closed and the content is in the store: it stays here as a cached version.

        A small one does not: it is in memory since it was sent.
        """
        staged, cache = node.staged, self._core.cache
        if staged is not None and cache is not None and not node.gone and staged.size > SMALL and staged.complete:
            await self._core.loop.on_disk(cache.adopt, node.version(), staged.path)
        await self.discard(node)

    # -- upload

    def owes(self, node: Node) -> bool:
        """Whether a close of the node has anything to send, or to make sure of."""
        staged = node.staged
        if staged is None or (node.gone and not node.lost):
            return False
        return staged.dirty or staged.published

    def waits(self, node: Node) -> bool:
        """Whether the last close leaves a node to others, who look for handles when it is sent.

        Its upload failed and said so, and is tried again later: now all who read the file would wait. Or it is on its
        way behind the close (writeBack).
        """
        staged = node.staged
        if staged is None or staged.stuck or node.gone:
            return False
        return staged.dirty and bool(staged.error or staged.due)

    async def flush(self, node: Node, *, unread: bool = False) -> None:
        """Make the store have what the node has. StoreError, FSError; what was not sent stays staged.

        unread: nobody can read the file here, so that of a small one nothing stays. Its staging file goes before the
        close is answered: the journal need not be written for that.
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
            await self.discard(node)

    async def publish(self, node: Node) -> None:
        """As flush, before the close: others see what was written so far."""
        async with self._core.tree.shared(), node.lock:
            await self.send(node)
            if node.staged is not None and node.handles:
                node.staged.published = True

    async def _confirm(self, node: Node, staged: StagedFile) -> None:
        """The last close wins: what was published goes out again if another client wrote the file since."""
        staged.published = False
        base = staged.base
        if staged.dirty or base is None or staged.expects is not None:
            return
        try:
            replaced = (await self._core.store.head(base.key)).etag != base.etag
        except NotFound:
            return
        if replaced and staged.complete:
            if node.lost:
                self._take_back(node)
            staged.dirty = True

    async def send(
        self,
        node: Node,
        *,
        key: str | None = None,
        rename: Intent | None = None,
        replaced: Sequence[str] = (),
        goes: bool = False,
    ) -> None:
        """As flush, with the tree lock and node.lock held; key: to write elsewhere, for a rename under way.

        replaced: staging files of what it replaces there. goes: the caller discards the staging file before anybody is
        told, and the journal's row with it.
        """
        staged = node.staged
        if staged is None or not staged.dirty or node.gone:
            return
        if staged.stuck:
            raise FSError(errno.ESTALE, staged.error)
        destination = self._destination(node, key)
        if staged.base_size or staged.expects is not None:
            # A crash between the upload and its answer: the next mount knows the new version by this metadata, or,
            # where there is no room for that, by all of its bytes.
            with nullcontext() if staged.base_size else suppress(OSError):
                self.record(node)
        had_etag, times_set = node.etag, staged.times_set
        try:
            async with self.orphans.superseded(destination.key):
                done = await self._delivery.write(staged, destination)
            if done is None:
                await self.discard(node)
                await self._resolver.ask(node)
                return
            self._delivered(node, destination, done)
            has, wanted = done.metadata, destination.options.metadata
            # Where nobody chose the times, LastModified is as good.
            if has != wanted and (times_set or has != without_times(wanted)):
                await self._correct(node, destination)
        except (DatastoreError, OSError) as error:
            staged.error, staged.due = str(error), 0.0
            with suppress(OSError):
                await self.persist(node)
            log.warning("upload failed", extra=fields(path=node.path, error=staged.error))
            raise
        if rename is not None:
            # There may be none under the old name: then nothing that is there later is to be removed.
            had = had_etag.replace(UNKNOWN, "") if had_etag else NO_OBJECT
            self._core.db.moved(rename, had, [staged.name, *replaced])
        elif staged.journaled and not goes:
            self._core.db.forget_unsent(staged.name)
        staged.journaled = staged.journaled and goes

    def _destination(self, node: Node, key: str | None = None) -> Destination:
        return Destination(key or node.key, _options(node), elsewhere=key is not None)

    def _delivered(self, node: Node, to: Destination, done: Delivered) -> None:
        """The store has the content as this version. Where it has not our attributes it is asked for them."""
        staged, attrs_valid = node.staged, done.metadata == to.options.metadata
        assert staged is not None
        version = ObjectVersion(to.key, done.result.etag, staged.size)
        facts.written(self._core, node, done.result, attrs_valid=attrs_valid)
        staged.uploaded(version)
        if node.parent is not None:
            self._resolver.changed(node)
        if done.body:
            self._core.reader.give(version, done.body)
        if not attrs_valid and node.nlookup:
            self._core.notifier.inval_inode(node.ino, -1)

    async def _correct(self, node: Node, to: Destination) -> None:
        """The attributes changed after an upload had begun, which fixes them: set them by a copy onto itself."""
        staged = node.staged
        assert staged is not None
        staged.dirty = True
        version = ObjectVersion(to.key, node.etag, staged.size)
        try:
            result = await copy_object(self._core, version, to.key, to.options)
        except (PreconditionFailed, NotFound):
            staged.dirty = False  # another client wrote or removed it since: that is the last word
            return
        self._core.known.forget(to.key)
        self._delivered(node, to, Delivered(result, to.options.metadata))

    # -- what is left

    async def retry(self, nodes: list[Node]) -> list[str]:
        """Send again what failed: files of this process and of earlier ones.

        Returns a line for each that failed again.
        """
        failures = [line for node in nodes if (line := await self.retry_one(node))]
        return failures + await self.orphans.send()

    async def retry_one(self, node: Node) -> str:
        """Send one file; what failed, or ''. When nobody has it open it is settled."""
        try:
            async with self._core.tree.shared(), node.lock:
                await self._flush(node, unread=not (node.handles or node.gone))
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
        """Drop unsent bytes that a person does not want: files of no open node, by key or path; how many there were."""
        core = self._core
        nodes = [node for node in core.nodes.by_ino.values() if node.dirty and os.fsdecode(node.path) == path]
        dropped = 0
        for node in nodes:
            async with core.tree.shared(), node.lock:
                if node.staged is not None and node.staged.error and not node.handles:
                    self.set_aside(node)
        for name, left in list(self.orphans.files.items()):
            if path in (left.to.key, left.to.key.removeprefix(core.nodes.root.key)):
                await self.orphans.drop(name)
                dropped += 1
        return dropped

    def unsent(self) -> list[dict[str, object]]:
        """What is not in the store, for `datastore status`: see orphans.listed."""
        rows = [listed(node.path, node.staged) for node in self._core.nodes.unsent() if node.staged is not None]
        return rows + self.orphans.unsent()


def _options(node: Node) -> WriteOptions:
    """With what the object of a node is to be written."""
    return WriteOptions(metadata=to_metadata(node.attributes), content_type=node.attributes.content_type)
