"""Renames (S-25 to S-27): copies on the server, recorded as intents in the journal so that half-done ones are finished.

Renames that an earlier process began and did not end are rolled forward, and hidden copies are removed (S-58). Under a
live mount the kernel sends the interrupted rename again, which then succeeds, even if another client has recreated the
old name; by then the nodes must be where the kernel expects them, and open handles read and write at the new
key.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count

from datastore.errors import AccessDenied, ObjectLocked, PreconditionFailed, StoreError

from ...ops import Caller, FSError, Ino
from ...state.nodelog import NodeRecord
from ...state.rows import Intent, Subject
from ...store.base import ETag, ObjectInfo, ObjectVersion, WriteResult, user_metadata
from ..lookup.resolver import Resolver
from ..opened.handles import record_removed
from ..tree import facts
from ..tree.core import Core
from ..tree.listing import NO_ETAG, Listing
from ..tree.names import LINK_SUFFIX, segment_of
from ..tree.nodes import Directory, Node
from ..upload.copies import Copies, Copy, copy_object
from ..upload.uploads import Uploads
from .changes import Changes, ensure_marker

NOREPLACE = 1
"""RENAME_NOREPLACE of rename(2)."""
_FOLLOWED_AT_ONCE = 256
"""How many nodes below a renamed directory are updated before other tasks may run."""


class Renames:
    """Renames of files (atomic for readers of either name) and of directories (not atomic, but finished or undone)."""

    def __init__(self, core: Core, resolver: Resolver, uploads: Uploads, changes: Changes) -> None:
        self._core = core
        self._resolver = resolver
        self._uploads = uploads
        self._changes = changes
        self._begun: dict[int, Intent | None] = {}
        """Renames that an earlier server began, by the request that the kernel sends again (Caller.request); None: it
        is done. If this server could not end one when it took over, it does so at that request, so that the result is
        reported."""

    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """rename(2). Errors: FSError(EINVAL) for flags other than RENAME_NOREPLACE."""
        if flags & ~NOREPLACE:
            raise FSError(errno.EINVAL)
        source_directory = self._resolver.directory(parent)
        if caller.request in self._begun:
            intent, new = self._begun.pop(caller.request), self._resolver.directory(new_parent)
            if intent is None or await self._goes_on(intent, source_directory, name, new):
                return
            flags &= ~NOREPLACE  # the target may be the copy of the earlier server
        target_directory = self._changes.directory_for(new_parent, new_name)
        await self._changes.files.chases.let_pass(new_parent, new_name)
        source = await self._resolver.existing(source_directory, name)
        target = await self._target(source, target_directory, new_name, flags)
        if target is source:
            return
        if target is not None and flags & NOREPLACE:
            raise FSError(errno.EEXIST)
        if isinstance(target, Directory):
            if not isinstance(source, Directory):
                raise FSError(errno.EISDIR)
            await self._changes.check_empty(target)
        elif target is not None and isinstance(source, Directory):
            raise FSError(errno.ENOTDIR)
        if isinstance(source, Directory):
            async with self._core.tree.exclusive():
                await self._rename_directory(caller, source, target, target_directory, new_name)
        else:
            async with self._core.tree.shared():
                await self._rename_file(caller, source, target, target_directory, new_name)

    async def _target(self, source: Node, directory: Directory, name: bytes, flags: int) -> Node | None:
        """Return the new name's node. A file that a file replaces may be outdated: nothing of it is kept (S-161)."""
        if source.listed_kind != stat.S_IFREG or flags & NOREPLACE:
            return await self._resolver.find_now(directory, name)
        target = await self._resolver.standing(directory, name)
        if not isinstance(target, Directory):
            await self._resolver.refuse_hiding(directory, name)
        return target

    async def _goes_on(self, intent: Intent, old: Directory, name: bytes, new: Directory) -> bool:
        """End what an earlier server began; return False if it must be done again. After an error it is not retried."""
        if intent.kind == "rename-file":  # at most the copy was made
            self._core.db.end(intent)
            return False
        async with self._core.tree.exclusive():
            try:
                return await self._finish(intent)
            finally:
                self._core.db.end(intent)
                self._vacated(old, name)
                new.forget_listing()

    # -- files

    async def _rename_file(
        self, caller: Caller, source: Node, target: Node | None, directory: Directory, name: bytes
    ) -> None:
        core = self._core
        tail = segment_of(name) + (LINK_SUFFIX if source.listed_kind == stat.S_IFLNK else "")
        old_directory, new_key = self._keys(source, directory, tail)
        await ensure_marker(core, old_directory)  # the directory outlives its last entry (S-02)
        async with AsyncExitStack() as locks:
            for node in sorted((n for n in (source, target) if n is not None), key=lambda n: n.ino):
                await locks.enter_async_context(node.lock)
            target_etag = target.etag if target is not None else NO_ETAG
            move = NodeRecord(source.ino, directory.ino, source.listed_kind, tail, name)
            async with self._changes.removing(target):
                old_key, subject = source.key, _subject(source, target, new_key, target_etag)
                old = NodeRecord(source.ino, old_directory.ino, source.listed_kind, source.tail, source.name)
                before = None if source.dirty else source.version()
                intent = core.db.begin("rename-file", old_key, new_key, move, subject, caller.request)
                try:
                    await self._move_content(source, target, new_key, intent)
                except (StoreError, OSError):
                    core.db.end(intent)
                    raise
            try:
                async with self._moved(intent, source, target, directory, move):
                    await core.remove(old_key)
            except (AccessDenied, ObjectLocked):
                if target is None and before is not None:
                    directory.forget_listing()
                    await self._move_back(source, old_directory, old, before)
                raise

    async def _move_back(self, source: Node, directory: Directory, old: NodeRecord, before: ObjectVersion) -> None:
        """Undo the rename of a file whose object may not be removed; its copy goes, if that may be removed."""
        core, copied = self._core, source.version()
        core.nodes.move(source, directory, old.name, old.tail)
        core.log_nodes((source,))
        self._adopt_version(source, before.key, WriteResult(before.etag, source.mtime_ns))
        facts.doubted(source)
        with suppress(StoreError):
            if await core.head(before.key) is not None:
                await core.store.delete(copied.key, if_match=copied.etag)

    async def _move_content(self, source: Node, target: Node | None, new_key: str, intent: Intent) -> None:
        """Make the object at the new key: by an upload if the source has unsent bytes, else by a copy.
        After that a crash leads to the end of the rename, so the journal's row of the target's unsent bytes is removed.
        """
        replaced = [target.staged.name] if target is not None and target.staged is not None else []
        if source.dirty:
            await self._uploads.send(source, key=new_key, rename=intent, replaced=replaced)
            return
        async with self._uploads.orphans.superseded(new_key):
            try:
                result = await copy_object(self._core, source.version(), new_key)
            except PreconditionFailed:
                # Another client wrote the source since we saw it: rename the version that it has now.
                if not await self._resolver.ask(source):
                    raise
                result = await copy_object(self._core, source.version(), new_key)
        old_etag = source.etag
        self._adopt_version(source, new_key, result)
        self._core.db.moved(intent, old_etag, replaced)

    def _vacated(self, directory: Directory, name: bytes, listing: Listing | None = None) -> None:
        """Forget what a lookup or a listing found at an old name before its objects were removed.
        listing: the directory's when the name was taken out of it; it is kept if the directory still has it.
        """
        child = directory.children.get(name)
        if child is not None and not child.dirty:
            facts.doubted(child)
        right = listing is not None and directory.listing is listing and name not in listing.entries
        directory.forget_listing()
        if right and child is None:
            directory.listing = listing

    def _adopt_version(self, node: Node, key: str, result: WriteResult) -> None:
        facts.written(self._core, node, result, attrs_valid=node.attrs_valid)
        if node.staged is not None:
            node.staged.moved(ObjectVersion(key, result.etag, node.size))

    @asynccontextmanager
    async def _moved(
        self, intent: Intent, source: Node, target: Node | None, directory: Directory, move: NodeRecord
    ) -> AsyncIterator[None]:
        """Move the node when the content is at the new key; inside the context the caller removes the old objects.

        After an error the intent is ended, too: the program is told, so the next mount must not continue the rename.
        The caller holds the locks of a file's nodes, or for a directory the tree lock exclusively.
        """
        core, resolver, listing = self._core, self._resolver, None
        old_target_key = target.name_key if target is not None else ""
        old_parent, old_name = source.parent, source.name
        assert old_parent is not None
        try:
            if target is not None:
                self._changes.take_out(target)
            resolver.removed(source, old_parent)
            core.nodes.move(source, directory, move.name, move.tail)
            core.log_nodes((source,))
            resolver.appeared(source, directory)
            without = old_parent.listing
            if target is not None:
                await self._changes.let_go(target)
            self._uploads.record(source)
            if old_target_key and old_target_key != source.key:
                await core.remove(old_target_key)
            listing = without
            yield
        except (StoreError, OSError):
            listing = None  # an old object that was not removed still has its name
            core.db.end(intent)
            raise
        finally:
            self._vacated(old_parent, old_name, listing)
        core.db.end(intent)

    def _keys(self, source: Node, directory: Directory, tail: str) -> tuple[Directory, str]:
        """Return the source's present directory and its new key. Errors: FSError(ENOENT, ENAMETOOLONG, EEXIST)."""
        if source.gone or source.parent is None or directory.gone:
            raise FSError(errno.ENOENT)
        self._changes.check_key(directory, tail)
        return source.parent, directory.key + tail

    # -- directories

    async def _rename_directory(
        self, caller: Caller, source: Directory, target: Node | None, directory: Directory, name: bytes
    ) -> None:
        core, tail = self._core, segment_of(name, directory=True) + "/"
        old_directory, new_prefix = self._keys(source, directory, tail)
        old_prefix = source.key
        if new_prefix.startswith(old_prefix):
            raise FSError(errno.EINVAL)
        if self._uploads.orphans.waits_for(new_prefix, below=True):
            raise FSError(errno.ENOTEMPTY, "unsent files of an earlier run belong there: see `datastore unsent`")
        await ensure_marker(core, old_directory)
        await ensure_marker(core, source)
        move = NodeRecord(source.ino, directory.ino, stat.S_IFDIR, tail, name)
        copies = Copies(core, old_prefix, new_prefix)
        listing = core.loop.spawn(core.store.list_page(old_prefix))
        marker, page = await core.head(old_prefix), await listing
        subject = Subject(began_ns=marker.server_time_ns if marker is not None else 0)
        intent = core.db.begin("rename-directory", old_prefix, new_prefix, move, subject, caller.request)
        try:
            await copies.make(page)
        except (StoreError, OSError):
            await copies.undo(keep_marker=target is not None)
            core.db.end(intent)
            raise
        async with self._moved(intent, source, target, directory, move):
            await self._follow(source, copies.made)
            await self._uploads.orphans.follow(old_prefix, new_prefix, copies.made)
            await copies.remove_originals()

    async def _follow(self, top: Directory, made: dict[str, Copy]) -> None:
        """Update the nodes below a renamed directory: new keys, perhaps new etags. made: the copies by new key."""
        waiting: list[Node] = [top]
        for number in count(1):
            if not waiting:
                return
            if number % _FOLLOWED_AT_ONCE == 0:
                await self._core.loop.pause()
            node = waiting.pop()
            if isinstance(node, Directory):
                node.forget_listing()
                waiting.extend(node.children.values())
                continue
            self._follow_file(node, made.get(node.key))
            self._uploads.record(node)

    def _follow_file(self, node: Node, copy: Copy | None) -> None:
        """Give a file its copy's version; if another client's version was copied, the store will be asked about it."""
        if copy is None:
            return
        staged = node.staged
        if staged is not None and staged.dirty:
            staged.copied(copy.original, node.key, copy.result.etag)
        elif node.etag == copy.original:
            self._adopt_version(node, node.key, copy.result)
        else:
            facts.doubted(node)

    # -- what an earlier process left

    async def finish(self, *, resumed: bool) -> list[str]:
        """End the intents of the journal; return a line for each that failed, which stays in the journal.
        resumed: the mount lives on, and removed files may be open in it, so hidden copies stay.
        """
        core, failures = self._core, []
        for intent in core.db.intents():
            if intent.kind == "discard" and resumed:
                continue
            made = False
            try:
                made = await self._finish(intent)
                core.db.end(intent)
            except (StoreError, OSError) as error:
                failures.append(f"{intent.kind} {os.fsencode(intent.source)!r}: {error}")
                with suppress(OSError):  # the disk is full
                    intent = core.db.put_off(intent, core.clock.time_ns())
            if resumed and intent.request:
                self._begun[intent.request] = None if made else intent
        return failures

    async def _finish(self, intent: Intent) -> bool:
        """Return whether the change is made; if not, it is given up, or left to the kernel's next request."""
        core, orphans = self._core, self._uploads.orphans
        subject, node = intent.subject, core.nodes.by_ino.get(Ino(intent.move.ino))
        if intent.kind == "discard":
            await core.remove(intent.source)
        elif intent.kind == "rename-directory":
            copies = Copies(core, intent.source, intent.target, subject)
            await copies.make(keep_newer=True)
            if isinstance(placed := await self._place(intent.move, node), Directory):
                await self._follow(placed, copies.made)
            await orphans.follow(intent.source, intent.target, copies.made)
            await copies.remove_originals()
        elif intent.kind == "remove":
            await self._place(intent.move, node)
            await _remove(core, intent.source, subject._replace(etag=intent.target))
            await _remove(core, subject.replaced, subject._replace(etag=subject.replaced_etag))
        elif (node is not None and node.dirty and not node.gone) or orphans.waits_for(intent.source):
            # The store has older bytes than those that were meant: these are sent by the rename that is sent again,
            # or to the old name.
            return False
        else:
            return await self._finish_file(intent, node)
        return True

    async def _place(self, move: NodeRecord, node: Node | None) -> Node | None:
        """Move a node to where its rename was to put it, and return it, or None. What it replaces is never sent."""
        core = self._core
        parent = core.nodes.by_ino.get(Ino(move.parent))
        if not isinstance(parent, Directory):
            return None
        there = parent.children.get(move.name)
        if there is not None and there is not node:
            if there.handles:  # they keep its bytes
                record_removed(core, there)
            core.nodes.detach(there)
            await self._changes.let_go(there)
        if node is None or node.gone:
            return None
        if there is not node:
            core.nodes.move(node, parent, move.name, move.tail)
            core.log_nodes((node,))
        return node

    async def _finish_file(self, intent: Intent, node: Node | None) -> bool:
        core, source, subject = self._core, intent.source, intent.subject
        info = await core.head(source)
        if info is None or not subject.includes(info.etag, info.mtime_ns):
            return False
        if await _used_anew(core, intent.target, subject, info):
            return False
        async with self._uploads.orphans.superseded(intent.target, subject.put_off_ns or math.inf):
            result = await copy_object(core, ObjectVersion(source, info.etag, info.size), intent.target)
        placed = await self._place(intent.move, node)
        if placed is not None and placed.etag == info.etag:
            facts.written(core, placed, result, attrs_valid=placed.attrs_valid)
        await core.remove(source)
        await _remove(core, subject.replaced, subject._replace(etag=subject.replaced_etag))
        return True


def _subject(source: Node, target: Node | None, new_key: str, target_etag: ETag) -> Subject:
    """Return what the rename of a file is about: the versions of its source and its target.
    Unsent bytes have no version yet: if the rename is put off, they are sent to the old key and stay there.
    """
    subject = Subject(began_ns=1) if source.dirty else Subject(source.etag)
    if target is not None and target_etag and target.name_key != new_key:  # for example a file replaces a link
        return subject._replace(replaced=target.name_key, replaced_etag=target_etag, over=NO_ETAG)
    return subject._replace(over=target_etag)


async def _used_anew(core: Core, target: str, subject: Subject, source: ObjectInfo) -> bool:
    """Return whether a client wrote the new key since the rename was put off.
    The version there is then neither the old target nor our copy, whose etag is another one if the source is in parts.
    """
    there = await core.head(target) if subject.put_off_ns else None
    if there is None:
        return False
    described = user_metadata(source.metadata)
    copied = bool(described) and there.size == source.size and user_metadata(there.metadata) == described
    return there.etag not in (subject.over, source.etag) and not copied


async def _remove(core: Core, key: str, subject: Subject) -> None:
    """Remove the object of a key, unless the key is '' or the object is of a version that is not the subject's."""
    info = await core.head(key) if key else None
    if info is not None and subject.includes(info.etag, info.mtime_ns):
        await core.remove(key)
