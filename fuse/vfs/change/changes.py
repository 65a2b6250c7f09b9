"""Making and removing names (S-01 to S-10, S-22, S-23): mkdir, mknod, symlink, create, unlink, rmdir."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from datastore.errors import AlreadyExists, InvalidKey, KeyTooLong, NotFound, PreconditionFailed, StoreError

from ...ops import Caller, Entry, FSError, Ino, OpenReply, OpenRequest
from ...store.base import WriteOptions
from ...store.limits import MAX_KEY_BYTES, key_bytes
from ..lookup.remote import HIDDEN, UNLINKED, Remote
from ..lookup.resolver import Resolver
from ..opened.files import Files
from ..opened.handles import record_removed
from ..opened.reading import Reading
from ..tree import facts
from ..tree.attrs import DIRECTORY_TYPE, FILE_TYPE, Attributes, to_metadata, type_of
from ..tree.core import Core
from ..tree.listing import NO_ETAG, Listed, Listing
from ..tree.names import LINK_SUFFIX, NAME_MAX, creatable, segment_of
from ..tree.nodes import Directory, Node
from ..upload.copies import copy_object
from ..upload.uploads import Uploads

SEGMENT_SAFE = 255
"""The longest key segment, in bytes, that every server takes; servers that keep objects as files take no more."""
TARGET_MAX = 4095
"""The most bytes of a link's target: PATH_MAX without its NUL."""


@dataclass(eq=False, repr=False)
class Changes:
    """Creates and removes names: in the store before the call returns, unless the file is open for writing."""

    _core: Core
    _remote: Remote
    _resolver: Resolver
    _uploads: Uploads
    files: Files
    _reading: Reading

    # -- making

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        """Make a directory and its marker object. Errors: FSError(EEXIST)."""
        directory = self.directory_for(parent, name)
        attributes = self._attributes(caller, directory, name, stat.S_IFDIR | stat.S_IMODE(mode))
        listed = Listed(stat.S_IFDIR, segment_of(name, directory=True) + "/")
        return self._resolver.entry(await self._make(directory, name, listed, attributes))

    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """Make a file, FIFO, socket or device (mounts are nodev: nobody opens a device). Errors: FSError(EEXIST)."""
        directory = self.directory_for(parent, name)
        attributes = self._attributes(caller, directory, name, mode)
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            attributes = attributes.as_device(rdev)
        listed = Listed(stat.S_IFREG, segment_of(name))
        return self._resolver.entry(await self._make(directory, name, listed, attributes))

    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        """Make a link as rclone writes it or, where the server refuses rclone's longer key, as s3fs does (S-09)."""
        if len(target) > TARGET_MAX:
            raise FSError(errno.ENAMETOOLONG)
        directory = self.directory_for(parent, name)
        attributes = self._attributes(caller, directory, name, stat.S_IFLNK | 0o777)
        segment, node = segment_of(name), None
        if self._fits(segment + LINK_SUFFIX):
            with suppress(KeyTooLong):
                listed = Listed(stat.S_IFLNK, segment + LINK_SUFFIX)
                node = await self._make(directory, name, listed, attributes, target)
        node = node or await self._make(directory, name, Listed(stat.S_IFREG, segment), attributes, target)
        self._reading.keep_target(node.key, node.etag, target)  # so that readlink() need not ask the store
        return self._resolver.entry(node)

    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """open(2) with O_CREAT. With O_EXCL the store decides which client makes the file; else it appears at close.
        With writeBack the store decides at the upload; the bytes of a client that comes second stay on its disk (S-48).
        """
        directory, flags = self.directory_for(parent, name), request.flags
        write_back = self._core.settings.write_back_s > 0
        # Whether the store must have given the name to this client alone before open returns (S-22).
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
            # A server may refuse a long name (S-38): ask it when the file is made, as close would be too late.
            if claims or len(key_bytes(listed.tail)) > SEGMENT_SAFE:
                node = await self._make(directory, name, listed, attributes)
                reply = self.files.opened(node, flags, caller)
                return self._resolver.entry(node), reply
            if name not in directory.children:
                return self._create_local(directory, name, listed, attributes, flags, caller)
            found = directory.children[name]
        if flags & os.O_EXCL:
            raise FSError(errno.EEXIST)
        if not stat.S_ISREG(found.attributes.mode):
            raise FSError(errno.ESTALE)  # the kernel takes the name for free; a lookup will find this node
        if flags & os.O_TRUNC:
            async with found.lock:
                await self.files.truncate(found, 0)
        reply = self.files.opened(found, flags, caller)
        return self._resolver.entry(found), reply

    def _seems_free(self, directory: Directory, name: bytes, flags: int) -> bool:
        """Return whether a name is believed free and the store need not be asked (S-161).
        With O_TRUNC nothing of an existing file would be kept anyway; with writeBack the upload finds out (S-48).
        """
        settings = self._core.settings
        if not (settings.write_back_s or (flags & os.O_TRUNC and not settings.refuse_conflicts)):
            return False
        told = self._remote.believed(directory, name)
        return told is not None and name not in told[0].entries and name not in directory.children

    def _create_local(
        self, directory: Directory, name: bytes, listed: Listed, attributes: Attributes, flags: int, caller: Caller
    ) -> tuple[Entry, OpenReply]:
        """Make a file that the store learns of at close. Nothing here waits, so no task sees a half-made node."""
        core = self._core
        self.check_key(directory, listed.tail)
        node = core.nodes.add(directory, name, listed, attributes)
        facts.held(node, 0, NO_ETAG, attributes)
        try:
            staged = self._uploads.stage(node)
            staged.dirty = True
            if flags & os.O_EXCL or not flags & os.O_TRUNC:
                staged.expects = NO_ETAG
            entry = self._resolver.entry(node)  # logs the node first: a new server must find it for the journal's row
            self._uploads.record(node)
        except OSError:
            node.nlookup = 0
            self._uploads.discard(node)
            core.nodes.drop_unused(node)
            raise
        self._resolver.appeared(node, directory)
        return entry, self.files.opened(node, flags, caller)

    async def _make(
        self, directory: Directory, name: bytes, listed: Listed, attributes: Attributes, body: bytes = b""
    ) -> Node:
        """Put an object whose key must be free, and make its node. Errors: FSError(EEXIST)."""
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
            node = self._core.nodes.add(directory, name, listed._replace(size=len(body)), attributes)
            facts.written(self._core, node, result)
            if isinstance(node, Directory):
                node.listing = Listing(self._core.clock.monotonic(), marker=True)
                node.subdirectories, node.marker = 0, True
            self._resolver.appeared(node, directory)
            return node

    def directory_for(self, ino: Ino, name: bytes) -> Directory:
        """Return the directory for a new name. Errors: FSError(ENAMETOOLONG, EINVAL, ENOENT when it was removed)."""
        if len(name) > NAME_MAX:
            raise FSError(errno.ENAMETOOLONG)
        if not creatable(name):
            raise FSError(errno.EINVAL)
        directory = self._resolver.directory(ino)
        if directory.gone:
            raise FSError(errno.ENOENT)
        return directory

    def check_key(self, directory: Directory, tail: str) -> None:
        """Refuse a key that cannot be made or replaced later. Errors: FSError(ENAMETOOLONG, EEXIST if hidden here)."""
        key = directory.key + tail
        if len(key_bytes(key)) > MAX_KEY_BYTES or not self._fits(tail):
            raise FSError(errno.ENAMETOOLONG)
        if directory is self._core.nodes.root and tail in HIDDEN:
            raise FSError(errno.EEXIST)
        if tail.rstrip("/") == self._core.store.capabilities.unlisted_segment:
            raise FSError(errno.EEXIST)

    def _fits(self, tail: str) -> bool:
        """Return whether the store takes a key segment of this length, also when a close replaces the object later."""
        return len(key_bytes(tail.removesuffix("/"))) <= self._core.store.capabilities.max_new_segment_bytes

    def _attributes(self, caller: Caller, directory: Directory, name: bytes, mode: int) -> Attributes:
        """Return the attributes of a new node: the caller's uid and gid, or the gid of a setgid directory."""
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
        """Remove a file's name. Open handles keep its content."""
        await self.files.chases.let_pass(parent, name)
        directory = self._resolver.directory(parent)
        node = await self._resolver.existing(directory, name)
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        async with self._core.tree.shared():
            await ensure_marker(self._core, directory)
            async with node.lock:
                key = node.key
                async with self.removing(node), self._uploads.orphans.superseded(key):
                    with suppress(InvalidKey):  # the store refuses the name, and so has no such object
                        await self._core.remove(key)
                self.take_out(node)
                await self.let_go(node)

    def take_out(self, node: Node) -> None:
        """Take a node out of the tree when its object is removed; for a file let_go() follows. node.lock is held."""
        core = self._core
        # A task that missed the object in the store set `lost`, which would let a write give the node its name back.
        seen_to_be_gone, node.lost = node.lost, False
        if node.parent is not None and (seen_to_be_gone or not node.gone):
            self._resolver.removed(node, node.parent)
        facts.edited(node, node.attributes._replace(ctime_ns=core.clock.time_ns()))
        core.nodes.detach(node)

    async def let_go(self, node: Node) -> None:
        """Drop a nameless node's staged bytes; open handles keep them, but they are never sent. node.lock is held."""
        await self._uploads.forsake(node)
        self._core.nodes.drop_unused(node)

    @asynccontextmanager
    async def removing(self, node: Node | None) -> AsyncIterator[None]:
        """A context in which the node's object is removed; open handles keep its bytes (S-23). node.lock is held.

        Afterwards the node's bytes may be at a hidden key. If the removal fails, the node has its own key and version
        again, and the next mount removes the hidden copy.
        """
        if node is None:
            yield
            return
        etag = node.etag
        try:
            if stat.S_ISREG(node.attributes.mode):
                node.leaving = node.handles == 0
                if not node.leaving:
                    await self._keep_content(node)
            yield
        except (StoreError, OSError):
            node.unlinked_key = ""
            facts.held(node, node.size, etag)
            self._core.removed.forget(node.ino)
            raise

    async def _keep_content(self, node: Node) -> None:
        """Keep the bytes of the node's version, unless another client has replaced it: then they can't be had any more,
        and reads are ESTALE (S-30)."""
        staged = node.staged
        version = staged.base if staged is not None and staged.base is not None else node.version()
        try:
            if staged is not None or node.size <= self._core.settings.silly_copy_bytes:
                kept = self._uploads.stage(node)
                await self._uploads.fill(kept, kept.missing(0, kept.size))
            else:
                await self._keep_hidden(node)
        except (PreconditionFailed, NotFound, FSError):
            info = await self._core.head(version.key)
            if info is not None and info.etag == version.etag:
                raise
            return
        record_removed(self._core, node)

    async def _keep_hidden(self, node: Node) -> None:
        hidden = self._core.nodes.root.key + UNLINKED + uuid.uuid4().hex
        self._core.db.begin("discard", hidden, "")
        result = await copy_object(self._core, node.version(), hidden)
        node.unlinked_key = hidden
        facts.held(node, node.size, result.etag)

    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """Remove an empty directory. Errors: FSError(ENOTDIR, ENOTEMPTY)."""
        directory = self._resolver.directory(parent)
        node = await self._resolver.existing(directory, name)
        if not isinstance(node, Directory):
            raise FSError(errno.ENOTDIR)
        async with self._core.tree.shared(), node.lock:
            await self.check_empty(node)
            await ensure_marker(self._core, directory)
            await self._core.remove(node.key)
            self.take_out(node)

    async def check_empty(self, node: Directory) -> None:
        """Raise FSError(ENOTEMPTY) if the store or this mount has anything below, or the marker contains bytes."""
        if node.holds_unsent():
            raise FSError(errno.ENOTEMPTY)
        page = await self._core.store.list_page(node.key, max_keys=2)
        if any(found.key != node.key or found.size for found in page.objects) or page.common_prefixes:
            node.forget_listing()
            raise FSError(errno.ENOTEMPTY)


async def ensure_marker(core: Core, directory: Directory) -> None:
    """Put the marker of a directory, which must outlive its last entry (S-02). The tree lock is held."""
    if directory.marker or directory is core.nodes.root or directory.gone:
        return
    metadata = to_metadata(directory.attributes)
    options = WriteOptions(metadata=metadata, content_type=DIRECTORY_TYPE, if_none_match=True)
    with suppress(AlreadyExists):
        await core.store.put(directory.key, b"", options)
    directory.marker = True
