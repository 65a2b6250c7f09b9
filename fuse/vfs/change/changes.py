"""Making and removing names (S-01 to S-10, S-22, S-23): mkdir, mknod, symlink, create, unlink, rmdir."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from datastore.errors import AlreadyExists, KeyTooLong, NotFound, StoreError

from ...ops import Caller, Entry, FSError, Ino, OpenReply, OpenRequest
from ...store.base import WriteOptions
from ...store.limits import key_bytes
from ..lookup.remote import HIDDEN, UNLINKED, Remote
from ..lookup.resolver import Resolver
from ..opened.files import Files
from ..opened.handles import record_removed
from ..opened.reading import Reading
from ..tree import facts
from ..tree.attrs import DIRECTORY_TYPE, FILE_TYPE, Attributes, stands_for_directory, to_metadata, type_of
from ..tree.core import Core
from ..tree.listing import NO_ETAG, Listed, Listing
from ..tree.names import KEY_MAX, LINK_SUFFIX, NAME_MAX, creatable, segment_of
from ..tree.nodes import Directory, Node
from ..upload.copies import copy_object
from ..upload.uploads import Uploads

SEGMENT_SAFE = 255
"""Bytes of a key's segment that every server takes (those that keep objects as files take no more)."""
TARGET_MAX = 4095
"""Bytes of a link target (PATH_MAX without its NUL)."""


@dataclass(eq=False, repr=False)
class Changes:
    """Each change is in the store when the call returns, but for files that are open for writing."""

    _core: Core
    _remote: Remote
    _resolver: Resolver
    _uploads: Uploads
    files: Files
    _reading: Reading

    # -- making

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        """A directory and its marker. FSError(EEXIST)."""
        directory = await self.parent_of(parent, name)
        attributes = self._attributes(caller, directory, name, stat.S_IFDIR | stat.S_IMODE(mode))
        listed = Listed(stat.S_IFDIR, segment_of(name, directory=True) + "/")
        return self._resolver.entry(await self._make(directory, name, listed, attributes))

    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """A regular file, FIFO, socket or device (every mount is nodev: nobody opens one here). FSError(EEXIST)."""
        directory = await self.parent_of(parent, name)
        attributes = self._attributes(caller, directory, name, mode)
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            attributes = attributes.as_device(rdev)
        listed = Listed(stat.S_IFREG, segment_of(name))
        return self._resolver.entry(await self._make(directory, name, listed, attributes))

    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        """A link as rclone writes it; where the server refuses the longer name, as s3fs does (S-09)."""
        if len(target) > TARGET_MAX:
            raise FSError(errno.ENAMETOOLONG)
        directory = await self.parent_of(parent, name)
        attributes = self._attributes(caller, directory, name, stat.S_IFLNK | 0o777)
        segment, node = segment_of(name), None
        if self._fits(segment + LINK_SUFFIX):
            with suppress(KeyTooLong):
                listed = Listed(stat.S_IFLNK, segment + LINK_SUFFIX)
                node = await self._make(directory, name, listed, attributes, target)
        node = node or await self._make(directory, name, Listed(stat.S_IFREG, segment), attributes, target)
        self._reading.keep_target(node.key, node.etag, target)  # nobody has to ask where it leads
        return self._resolver.entry(node)

    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """open(2) with O_CREAT: with O_EXCL the store decides who makes it; otherwise it appears there at close.

        With writeBack the store decides at the upload: who is second keeps his bytes here (S-48).
        """
        directory, flags = await self.parent_of(parent, name), request.flags
        write_back = self._core.settings.write_back_s > 0
        # Whether the name must be this client's alone before open returns (S-22).
        claims = bool(flags & os.O_EXCL) and not write_back
        found: Node | None = None
        if not claims and self._seems_free(directory, name, flags):
            if not write_back:
                await self._resolver.refuse_hiding(directory, name)
        elif not claims:
            found = await self._resolver.find_now(directory, name)
        if found is None:
            listed = Listed(stat.S_IFREG, segment_of(name))
            attributes = self._attributes(caller, directory, name, stat.S_IFREG | stat.S_IMODE(mode))
            # A server may refuse a long name (S-38): it has to be asked when the file is made, not at close.
            if claims or len(key_bytes(listed.tail)) > SEGMENT_SAFE:
                node = await self._make(directory, name, listed, attributes)
                reply = self.files.opened(node, flags, caller.pid)
                return self._resolver.entry(node), reply
            if name not in directory.children:
                return self._create_local(directory, name, listed, attributes, flags)
            found = directory.children[name]
        if flags & os.O_EXCL:
            raise FSError(errno.EEXIST)
        if isinstance(found, Directory):
            raise FSError(errno.EISDIR)
        if not stat.S_ISREG(found.attributes.mode):
            raise FSError(errno.ESTALE)  # the kernel believes that nothing is there: it has to look
        if flags & os.O_TRUNC:
            async with found.lock:
                await self.files.truncate(found, 0)
        reply = self.files.opened(found, flags, caller.pid)
        return self._resolver.entry(found), reply

    def _seems_free(self, directory: Directory, name: bytes, flags: int) -> bool:
        """Whether a name is believed to be free, and need not be asked for (S-161).

        Nothing of a file that is there would be kept; or, with writeBack, its upload finds out (S-48).
        """
        settings = self._core.settings
        if not (settings.write_back_s or (flags & os.O_TRUNC and not settings.refuse_conflicts)):
            return False
        told = self._remote.believed(directory, name)
        return told is not None and name not in told[0].entries and name not in directory.children

    def _create_local(
        self, directory: Directory, name: bytes, listed: Listed, attributes: Attributes, flags: int
    ) -> tuple[Entry, OpenReply]:
        """A file that the store learns of at close. Nothing in here waits, so nobody sees the node half made."""
        core = self._core
        self.check_key(directory, listed.tail)
        node = core.nodes.add(directory, name, listed, attributes)
        facts.held(node, 0, NO_ETAG, attributes)
        try:
            staged = self._uploads.stage(node)
            staged.dirty = True
            if flags & os.O_EXCL or not flags & os.O_TRUNC:
                staged.expects = NO_ETAG
            entry = self._resolver.entry(node)  # first, so that a new server finds whose bytes the journal names
            self._uploads.record(node)
        except OSError:
            node.nlookup = 0
            core.nodes.detach(node)
            self._uploads.drop_new(node)
            core.nodes.drop_unused(node)
            raise
        self._resolver.appeared(node, directory)
        return entry, self.files.opened(node, flags)

    async def _make(
        self, directory: Directory, name: bytes, listed: Listed, attributes: Attributes, body: bytes = b""
    ) -> Node:
        """Put an object that must not be there yet, and make its node. FSError(EEXIST)."""
        self.check_key(directory, listed.tail)
        if name in directory.children and directory.children[name].dirty:
            raise FSError(errno.EEXIST)
        if listed.kind != stat.S_IFREG and await self._resolver.find(directory, name) is not None:
            raise FSError(errno.EEXIST)
        metadata = to_metadata(attributes)
        options = WriteOptions(metadata=metadata, content_type=attributes.content_type, if_none_match=True)
        async with self._core.tree.shared():
            key = directory.key + listed.tail
            try:
                async with self._uploads.orphans.superseded(key):
                    result = await self._core.store.put(key, body, options)
            except AlreadyExists as error:
                directory.forget_listing()
                raise FSError(errno.EEXIST) from error
            if name in directory.children:
                self._core.nodes.detach(directory.children[name])
            node = self._core.nodes.add(directory, name, listed._replace(size=len(body)), attributes)
            facts.written(self._core, node, result)
            if isinstance(node, Directory):
                node.listing = Listing(self._core.clock.monotonic(), marker=True)
                node.subdirectories, node.marker = 0, True
            self._resolver.appeared(node, directory)
            return node

    def directory_for(self, ino: Ino, name: bytes) -> Directory:
        """The directory in which a name is to be. FSError(ENAMETOOLONG, EINVAL, ENOENT)."""
        if len(name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        if not creatable(name):
            raise FSError(errno.EINVAL)
        directory = self._resolver.directory(ino)
        if directory.gone:
            raise FSError(errno.ENOENT)
        return directory

    async def parent_of(self, ino: Ino, name: bytes) -> Directory:
        """The same, ready for a name to be made there."""
        directory = self.directory_for(ino, name)
        await replace_stand_in(self._core, directory)
        return directory

    def check_key(self, directory: Directory, tail: str) -> None:
        """FSError(ENAMETOOLONG, EEXIST) where nothing can be made, or not be replaced later, under this key."""
        key = directory.key + tail
        if len(key_bytes(key)) > KEY_MAX or not self._fits(tail):
            raise FSError(errno.ENAMETOOLONG)
        if directory is self._core.nodes.root and tail in HIDDEN:
            raise FSError(errno.EEXIST)

    def _fits(self, tail: str) -> bool:
        """Whether the store takes a part of a key of this length, also when it is replaced: at close it is too late."""
        capabilities = self._core.store.capabilities
        longest = min(capabilities.max_key_segment_bytes, capabilities.max_new_segment_bytes)
        return len(key_bytes(tail.removesuffix("/"))) <= longest

    def _attributes(self, caller: Caller, directory: Directory, name: bytes, mode: int) -> Attributes:
        """Attributes of something new: the caller's, but for the group of a setgid directory."""
        now, gid, content_type = self._core.clock.time_ns(), caller.gid, FILE_TYPE
        if directory.attributes.mode & stat.S_ISGID:
            gid = directory.attributes.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        if stat.S_ISREG(mode):
            content_type = type_of(name)
        elif stat.S_ISDIR(mode):
            content_type = DIRECTORY_TYPE
        return Attributes(mode, caller.uid, gid, now, now, now, content_type=content_type)

    # -- removing

    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """Remove a name; who has the file open keeps its content."""
        await self.files.chases.let_pass(parent, name)
        directory = self._resolver.directory(parent)
        node = await self._resolver.existing(directory, name)
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        async with self._core.tree.shared():
            await self.ensure_marker(directory)
            async with node.lock:
                key = node.key
                async with self.removing(node), self._uploads.orphans.superseded(key):
                    if self.may_be_stored(node):
                        await self._core.remove(key)
                self.take_out(node)
                await self.let_go(node)

    def may_be_stored(self, node: Node) -> bool:
        """Whether the store has something of a node's name: ours, or what another client put there before ours."""
        if node.etag or node.parent is None:
            return bool(node.etag)
        told = self._remote.believed(node.parent, node.name)
        return told is None or node.name in told[0].entries

    def take_out(self, node: Node) -> None:
        """The name of a node is gone; let_go() has to follow. node.lock is held."""
        core = self._core
        # Who asked the store after its object went took it for another client's doing: nobody gives it its name back.
        seen_to_be_gone, node.lost = node.lost, False
        if node.parent is not None and (seen_to_be_gone or not node.gone):
            self._resolver.removed(node, node.parent)
        facts.edited(node, node.attributes._replace(ctime_ns=core.clock.time_ns()))
        core.nodes.detach(node)

    async def let_go(self, node: Node) -> None:
        """What was staged of a node without a name is wanted only by those who have it open. node.lock is held."""
        if node.handles == 0:
            await self._uploads.discard(node)
            self._core.nodes.drop_unused(node)
        else:
            await self._uploads.forsake(node)

    @asynccontextmanager
    async def removing(self, node: Node | None) -> AsyncIterator[None]:
        """Meanwhile a node's object goes; those who have the file open keep its bytes (S-23). node.lock is held.

        The bytes may come from another key afterwards. If the object does not go after all they are its own again, and
        the next mount removes the hidden copy.
        """
        etag = node.etag if node is not None else NO_ETAG
        try:
            if node is not None and stat.S_ISREG(node.attributes.mode):
                node.leaving = node.handles == 0
                if not node.leaving:
                    await self._keep_content(node)
            yield
        except (StoreError, OSError):
            if node is not None:
                node.unlinked_key, node.leaving = "", False
                facts.held(node, node.size, etag)
                self._core.removed.forget(node.ino)
            raise

    async def _keep_content(self, node: Node) -> None:
        staged = node.staged
        needed = node.size if staged is None else staged.base_size - staged.present.total
        if needed <= self._core.settings.silly_copy_bytes or staged is not None:
            staged = self._uploads.stage(node)
            await self._uploads.fill(staged, staged.missing(0, staged.size))
        else:
            hidden = self._core.nodes.root.key + UNLINKED + uuid.uuid4().hex
            self._core.db.begin("discard", hidden, "")
            result = await copy_object(self._core, node.version(), hidden)
            node.unlinked_key = hidden
            facts.held(node, node.size, result.etag)
        record_removed(self._core, node)

    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """Remove a directory in which nothing is. FSError(ENOTDIR, ENOTEMPTY)."""
        directory = self._resolver.directory(parent)
        node = await self._resolver.existing(directory, name)
        if not isinstance(node, Directory):
            raise FSError(errno.ENOTDIR)
        await replace_stand_in(self._core, node)
        async with self._core.tree.shared(), node.lock:
            await self.check_empty(node)
            await self.ensure_marker(directory)
            await self._core.remove(node.key)
            self.take_out(node)
            await self.let_go(node)

    async def check_empty(self, node: Directory) -> None:
        """FSError(ENOTEMPTY) if the store or this mount has anything below, or the marker holds bytes."""
        if any(not child.gone for child in node.children.values() if child.dirty):
            raise FSError(errno.ENOTEMPTY)
        page = await self._core.store.list_page(node.key, max_keys=2)
        if any(found.key != node.key or found.size for found in page.objects) or page.common_prefixes:
            facts.doubted(node)
            raise FSError(errno.ENOTEMPTY)

    async def ensure_marker(self, directory: Directory) -> None:
        """Before something is taken out of a directory: it must not go with its last entry (S-02).

        tree lock is held.
        """
        if directory.marker or directory is self._core.nodes.root or directory.gone:
            return
        await _put_marker(self._core, directory)


async def _put_marker(core: Core, directory: Directory) -> None:
    """Give a directory its marker, unless it has one. The tree lock is held."""
    metadata = to_metadata(directory.attributes)
    options = WriteOptions(metadata=metadata, content_type=DIRECTORY_TYPE, if_none_match=True)
    with suppress(AlreadyExists):
        await core.store.put(directory.key, b"", options)
    directory.marker = True


async def replace_stand_in(core: Core, directory: Directory) -> None:
    """Give a directory the marker that every server and tool takes for one. FSError(ESTALE): it is none any more.

    Objects `dir` of other tools that stand for a directory (S-165) become `dir/` before it is changed.
    """
    parent = directory.parent
    if parent is None or not directory.stood_in():
        return
    async with core.tree.shared(), directory.lock:
        key = directory.key[:-1]
        with suppress(NotFound):
            found = await core.store.head(key)
            if not stands_for_directory(found.key, found.size, found.content_type):
                raise FSError(errno.ESTALE)
            # versitygw has no place for both.
            await core.store.delete(key, if_match=found.etag)
            core.known.forget(key)
        await _put_marker(core, directory)
        parent.stand_ins.pop(directory.tail[:-1], None)
