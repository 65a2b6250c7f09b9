"""Renames (S-25 to S-27): copies on the server, written down before they begin so that a half-done one is finished."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from datastore.errors import NotFound, PreconditionFailed, StoreError

from ...ops import Caller, FSError, Ino
from ...state.nodelog import NodeRecord
from ...state.rows import Intent, IntentId, Subject
from ...store.base import ETag, ObjectVersion, WriteResult
from ..lookup.resolver import Resolver
from ..tree import facts
from ..tree.core import Core
from ..tree.listing import NO_ETAG, Listing
from ..tree.names import LINK_SUFFIX, NAME_MAX, creatable, segment_of
from ..tree.nodes import Directory, Node
from ..upload.copies import Copies, Copy, copy_object
from ..upload.uploads import Uploads
from .changes import Changes
from .standins import replace_stand_in

NOREPLACE = 1
"""RENAME_NOREPLACE of rename(2)."""
_FOLLOWED_AT_ONCE = 256
"""So many files below a renamed directory are gone through before others may go on."""


class CutOff(NamedTuple):
    """A rename that an earlier server began and this one could not end when it took over."""

    intent: Intent
    move: NodeRecord | None
    finish: Callable[[], Coroutine[Any, Any, None]]


class Renames:
    """Renames of files (atomic for readers of either name) and of directories (not atomic, but finished or undone)."""

    def __init__(self, core: Core, resolver: Resolver, uploads: Uploads, changes: Changes) -> None:
        self._core = core
        self._resolver = resolver
        self._uploads = uploads
        self._changes = changes
        self.begun: set[tuple[str, str]] = set()
        """(old key, new key) of what an earlier server began and the kernel sends again: what is there is theirs."""
        self.cut_off: list[CutOff] = []
        """The kernel sends them again, and what that comes to is reported: nothing is done later behind one's back."""

    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """rename(2) with RENAME_NOREPLACE; FSError(EINVAL) for other flags."""
        if flags & ~NOREPLACE:
            raise FSError(errno.EINVAL)
        if len(new_name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        if not creatable(new_name):
            raise FSError(errno.EINVAL)
        await self._changes.files.chases.let_pass(new_parent, new_name)
        source_directory = self._resolver.directory(parent)
        target_directory = self._resolver.directory(new_parent)
        if await self._goes_on(source_directory, name, target_directory, new_name):
            return
        source = await self._resolver.existing(source_directory, name)
        if isinstance(source, Directory) and not await self._resolver.revalidate(source):
            raise FSError(errno.ENOENT)
        target = await self._target(source, target_directory, new_name, flags)
        if target is source:
            return
        if target is not None:
            again = (source.key, target.key) in self.begun
            await self._check_target(source, target, flags & ~NOREPLACE if again else flags)
        for each in (source, target, target_directory):
            if isinstance(each, Directory):
                await replace_stand_in(self._core, each)
        if isinstance(source, Directory):
            async with self._core.tree.exclusive():
                await self._rename_directory(source, target, target_directory, new_name)
        else:
            async with self._core.tree.shared():
                await self._rename_file(source, target, target_directory, new_name)

    async def _target(self, source: Node, directory: Directory, name: bytes, flags: int) -> Node | None:
        """What has the new name. A file that a file replaces need not be asked for: nothing of it is kept (S-161)."""
        if source.listed_kind != stat.S_IFREG or flags & NOREPLACE:
            return await self._resolver.find_now(directory, name)
        target = await self._resolver.standing(directory, name)
        if not isinstance(target, Directory):
            await self._resolver.refuse_hiding(directory, name)
        return target

    async def _goes_on(self, old: Directory, name: bytes, new: Directory, new_name: bytes) -> bool:
        """Whether an earlier server began this rename, and it is ended now; what fails is reported, and over."""
        file, below = segment_of(name), segment_of(name, directory=True)
        keys = {old.key + tail for tail in (file, file + LINK_SUFFIX, below + "/")}
        for one in self.cut_off:
            intent, move = one.intent, one.move
            if intent.source in keys and move is not None and (move.parent, move.name) == (new.ino, new_name):
                self.cut_off.remove(one)
                break
        else:
            return False
        if intent.kind == "rename-file":  # at the worst it was copied: it is done once more
            self.begun.add((intent.source, intent.target))
            self._core.db.end(intent.id)
            return False
        async with self._core.tree.exclusive():
            try:
                await one.finish()
            finally:
                self._core.db.end(intent.id)
                self._vacated(old, name)
                new.forget_listing()
        return True

    async def _check_target(self, source: Node, target: Node, flags: int) -> None:
        if flags & NOREPLACE:
            raise FSError(errno.EEXIST)
        if isinstance(target, Directory):
            if not isinstance(source, Directory):
                raise FSError(errno.EISDIR)
            await self._changes.check_empty(target)
        elif isinstance(source, Directory):
            raise FSError(errno.ENOTDIR)

    # -- files

    async def _rename_file(self, source: Node, target: Node | None, directory: Directory, name: bytes) -> None:
        core = self._core
        if source.gone or source.parent is None:
            raise FSError(errno.ENOENT)
        tail = segment_of(name) + (LINK_SUFFIX if source.listed_kind == stat.S_IFLNK else "")
        new_key = self._new_key(directory, tail)
        await self._changes.ensure_marker(source.parent)
        async with AsyncExitStack() as locks:
            for node in sorted((n for n in (source, target) if n is not None), key=lambda n: n.ino):
                await locks.enter_async_context(node.lock)
            target_etag = target.etag if target is not None else NO_ETAG
            if target is not None:
                await self._changes.keep_open_content(target)
            old_key, had_object = source.key, self._changes.may_be_stored(source)
            old_parent, old_name = source.parent, source.name
            move = NodeRecord(source.ino, directory.ino, source.listed_kind, tail, name)
            subject = _subject(source, target, new_key, target_etag)
            intent = None
            try:
                intent = core.db.begin("rename-file", old_key, new_key, move, subject)
                await self._move_content(source, target, new_key, intent)
            except (StoreError, OSError):
                if target is not None:
                    self._changes.stayed(target, target_etag)
                if intent is not None:
                    core.db.end(intent)
                raise
            listing = None
            try:
                listing = await self._moved(source, target, directory, name, tail)
                if had_object:
                    await core.remove(old_key)
            except (StoreError, OSError):
                # Reported: nobody expects the next mount to remove what is under the old name then.
                core.db.end(intent)
                raise
            finally:
                self._vacated(old_parent, old_name, listing)
            core.db.end(intent)

    async def _move_content(self, source: Node, target: Node | None, new_key: str, intent: IntentId) -> None:
        """Make the object at the new key: by upload if the store lacks it, else by a copy.

        With that what was unsent of the target is void: from now on a crash finishes the rename, and must not send it.
        """
        replaced = [target.staged.name] if target is not None and target.staged is not None else []
        if source.dirty:
            await self._uploads.send(source, key=new_key, rename=intent, replaced=replaced)
            return
        try:
            async with self._uploads.orphans.superseded(new_key):
                try:
                    result = await copy_object(self._core, source.version(), new_key)
                except PreconditionFailed:
                    # Another client wrote it since it was seen: what has the name now is renamed.
                    if not await self._resolver.ask(source):
                        raise FSError(errno.ESTALE) from None
                    result = await copy_object(self._core, source.version(), new_key)
        except NotFound as error:
            raise FSError(errno.ENOENT) from error
        old_etag = source.etag
        self._adopt_version(source, new_key, result)
        self._core.db.moved(intent, old_etag, replaced)

    def _vacated(self, directory: Directory, name: bytes, listing: Listing | None = None) -> None:
        """The objects of an old name are gone now: forget what a lookup or a listing found there until a moment ago.

        listing: the directory's when the name was taken out; it is right if no other took its place since.
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

    async def _moved(
        self, source: Node, target: Node | None, directory: Directory, name: bytes, tail: str
    ) -> Listing | None:
        """The tree follows; the listing of the old directory, without the name. The nodes' locks are held."""
        core = self._core
        old_target_key = target.name_key if target is not None else ""
        if target is not None:
            self._changes.take_out(target)
        old_parent, old_name = source.parent, source.name
        assert old_parent is not None
        self._resolver.removed(old_parent, old_name)
        self._resolver.touched(old_parent)
        core.nodes.move(source, directory, name, tail)
        core.log_nodes((source,))
        self._resolver.changed(source)
        self._resolver.touched(directory)
        if isinstance(source, Directory):
            self._resolver.counted(old_parent, -1)
            self._resolver.counted(directory, 1)
        listing = old_parent.listing
        if target is not None:
            await self._changes.let_go(target)
        self._uploads.record(source)
        if old_target_key and old_target_key != source.key:
            await core.remove(old_target_key)
        return listing

    def _new_key(self, directory: Directory, tail: str) -> str:
        if directory.gone:
            raise FSError(errno.ENOENT)
        self._changes.check_key(directory, tail)
        return directory.key + tail

    # -- directories

    async def _rename_directory(
        self, source: Directory, target: Node | None, directory: Directory, name: bytes
    ) -> None:
        core = self._core
        if source.gone or source.parent is None:
            raise FSError(errno.ENOENT)
        tail = segment_of(name, directory=True) + "/"
        old_prefix, new_prefix = source.key, self._new_key(directory, tail)
        if new_prefix.startswith(old_prefix):
            raise FSError(errno.EINVAL)
        if self._uploads.orphans.waits_for(new_prefix, below=True):
            raise FSError(errno.ENOTEMPTY, "unsent files of an earlier run belong there: see `datastore unsent`")
        await self._changes.ensure_marker(source.parent)
        await self._changes.ensure_marker(source)
        old_parent, old_name = source.parent, source.name
        move = NodeRecord(source.ino, directory.ino, stat.S_IFDIR, tail, name)
        copies = Copies(core, old_prefix, new_prefix)
        began_ns, page = await core.both(self._server_time_ns(old_prefix), core.store.list_page(old_prefix))
        intent = core.db.begin("rename-directory", old_prefix, new_prefix, move, Subject(began_ns=began_ns))
        try:
            await copies.make(page)
        except (StoreError, OSError):
            await copies.undo(keep_marker=target is not None)
            core.db.end(intent)
            raise
        listing = None
        try:
            listing = await self._moved(source, target, directory, name, tail)
            await self.follow(source, copies.made)
            await copies.remove_originals()
        except (StoreError, OSError):
            # Reported: nobody expects the next mount to move what is under the old name then.
            core.db.end(intent)
            raise
        finally:
            self._vacated(old_parent, old_name, listing)
        core.db.end(intent)

    async def _server_time_ns(self, key: str) -> int:
        """The store's time; 0 when it can't be had from this key. StoreError."""
        try:
            return (await self._core.store.head(key)).server_time_ns
        except NotFound:
            return 0

    async def follow(self, top: Directory, made: dict[str, Copy]) -> None:
        """What is known below a renamed directory is of other keys, and perhaps other etags, now."""
        waiting: list[Node] = [top]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Directory):
                node.forget_listing()
                waiting.extend(node.children.values())
                continue
            self._follow_file(node, made.get(node.key))
            self._uploads.record(node)
            if len(waiting) % _FOLLOWED_AT_ONCE == 0:
                await self._core.loop.pause()

    def _follow_file(self, node: Node, copy: Copy | None) -> None:
        """A copy of another version than ours is another client's: what we know is of a version that is no more."""
        if copy is None:
            return
        staged = node.staged
        if staged is not None and staged.dirty:
            if staged.expects == copy.original:
                staged.expects = copy.etag
            if staged.base is not None and staged.base.etag == copy.original:
                staged.moved(ObjectVersion(node.key, copy.etag, staged.base.size))
        elif node.etag == copy.original:
            self._adopt_version(node, node.key, WriteResult(copy.etag, copy.mtime_ns))
        else:
            facts.doubted(node)


def _subject(source: Node, target: Node | None, new_key: str, target_etag: ETag) -> Subject:
    """What the rename of a file is about.

    What is not sent yet will be another version: put off, it is sent under its old name and stays there.
    """
    subject = Subject(began_ns=1) if source.dirty else Subject(source.etag)
    if target is not None and target_etag and target.name_key != new_key:  # a link by a file, or so
        return subject._replace(replaced=target.name_key, replaced_etag=target_etag, over=NO_ETAG)
    return subject._replace(over=target_etag)
