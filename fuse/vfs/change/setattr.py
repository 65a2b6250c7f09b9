"""chmod, chown, utimensat, truncate and xattrs (S-11 to S-17). Attributes are metadata, set by a copy onto itself."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from datastore.errors import NotFound, PreconditionFailed

from ...ops import NOW, AttrReply, Caller, Fh, FSError, Ino, SetAttr
from ...store.base import WriteOptions, WriteResult
from ...store.limits import check_metadata
from ..lookup.resolver import Resolver
from ..opened.files import Files
from ..opened.handles import Handles
from ..tree import facts
from ..tree.attrs import DIRECTORY_TYPE, Attributes, changed, to_metadata
from ..tree.core import Core
from ..tree.nodes import Directory, Node
from ..upload.copies import copy_object
from ..upload.uploads import Uploads

XATTR_CREATE = 1
XATTR_REPLACE = 2
_USER = b"user."
_Change = Callable[[Attributes], Attributes]


@dataclass(eq=False, repr=False)
class SetAttrs:
    """Changes attributes: in the store before the call returns, or together with the unsent bytes of the file."""

    _core: Core
    _resolver: Resolver
    _uploads: Uploads
    _handles: Handles
    _files: Files

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply:
        """stat and fstat. Errors: FSError(ESTALE) when the name is gone; the kernel then looks it up again."""
        node = self._resolver.node(ino)
        left = self._resolver.left(node)
        if left is not None:
            return AttrReply(node.attr(), left)
        if not await self._resolver.revalidate(node) and node.handles == 0:
            raise FSError(errno.ESTALE)
        return self._resolver.attr_reply(node)

    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply:
        """Change any attributes, the size among them. Errors: FSError(ESTALE, EFBIG), MetadataTooLarge."""
        node = self._handles.node_of(ino, fh)
        await self._ask(node, fh)
        if changes.size is not None:
            await self._resize(node, changes.size, kill_suidgid=changes.kill_suidgid)
        if changes.size is None or changes._replace(size=None, kill_suidgid=False) != SetAttr():
            await self._change(node, lambda old: changed(old, changes, self._core.clock.time_ns()))
            staged = node.staged
            if staged is not None and {changes.mtime_ns, changes.atime_ns} - {None, NOW}:
                staged.times_set = True
        return self._resolver.attr_reply(node)

    async def _ask(self, node: Node, fh: int = 0) -> None:
        """Confirm the version in the store, from which a change starts (S-161); an open for writing has asked already.
        Errors: FSError(ESTALE) when the node is gone; the kernel then looks the name up again.
        """
        if fh or node.writers:
            lives = await self._resolver.revalidate(node) or node.handles > 0
        else:
            lives = node.gone or await self._resolver.ask(node)
        if not lives:
            raise FSError(errno.ESTALE)

    async def _resize(self, node: Node, size: int, *, kill_suidgid: bool) -> None:
        await self._resolver.make_exact([node])
        async with self._core.tree.shared(), node.lock:
            await self._files.truncate(node, size, kill_suidgid=kill_suidgid)
            if not node.writers:
                await self._uploads.send(node)
                if node.handles == 0:
                    await self._uploads.settle(node)

    async def _change(self, node: Node, change: _Change) -> None:
        """Compute new attributes from the present ones; write them to the store or, with unsent bytes, the journal."""
        if not node.gone:
            await self._resolver.make_exact([node])
        async with self._core.tree.shared(), node.lock:
            new = change(node.attributes)
            check_metadata(node.key, to_metadata(new))
            if node.dirty or node.gone:
                facts.edited(node, new)
                self._uploads.record(node)
            else:
                await self._save(node, change, new)

    async def _save(self, node: Node, change: _Change, new: Attributes) -> None:
        """Write attributes to the store. The tree lock and node.lock are held."""
        try:
            result = await self._write(node, new)
        except (PreconditionFailed, NotFound):
            # Another client wrote the object: change the attributes that it has now. No earlier listing shows those.
            facts.doubted(node, attributes=True)
            if node.parent is not None:
                node.parent.forget_listing()
            if not await self._resolver.revalidate(node):
                raise FSError(errno.ESTALE) from None
            new = change(node.attributes)
            result = await self._write(node, new)
        self._core.known.forget(node.key)
        facts.edited(node, new)
        facts.written(self._core, node, result)
        self._resolver.changed(node)
        if node.staged is not None:
            node.staged.moved(node.version())

    async def _write(self, node: Node, new: Attributes) -> WriteResult:
        if not isinstance(node, Directory):
            options = WriteOptions(metadata=to_metadata(new), content_type=new.content_type)
            return await copy_object(self._core, node.version(), node.key, options)
        if not node.key:  # the root of a whole bucket: its attributes last as long as the mount
            return WriteResult(node.etag, 0)
        options = WriteOptions(metadata=to_metadata(new), content_type=DIRECTORY_TYPE)
        return await self._core.store.put(node.key, b"", options)

    # -- extended attributes

    async def getxattr(self, ino: Ino, name: bytes) -> bytes:
        """Get an attribute. Errors: FSError(ENODATA); EOPNOTSUPP for all but user.* and with `attributes: listing`."""
        self._check_xattr(name)
        node = self._resolver.node(ino)
        await self._resolver.make_exact([node])
        content = node.attributes.xattrs.get(name)
        if content is None:
            raise FSError(errno.ENODATA)
        return content

    async def listxattr(self, ino: Ino) -> list[bytes]:
        """Return the names of the attributes that getxattr() can get."""
        node = self._resolver.node(ino)
        if not self._core.settings.full_attributes:
            return []
        await self._resolver.make_exact([node])
        return [name for name in node.attributes.xattrs if name.startswith(_USER)]

    async def setxattr(self, caller: Caller, ino: Ino, name: bytes, content: bytes, flags: int) -> None:
        """Set an attribute. Errors: FSError(EEXIST, ENODATA) by flags; ENOSPC when the metadata would exceed 2 KiB."""

        def put(xattrs: dict[bytes, bytes]) -> None:
            if flags & XATTR_CREATE and name in xattrs:
                raise FSError(errno.EEXIST)
            if flags & XATTR_REPLACE and name not in xattrs:
                raise FSError(errno.ENODATA)
            xattrs[name] = content

        await self._change_xattrs(ino, name, put)

    async def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        """Remove an attribute. Errors: FSError(ENODATA) when there is none of this name."""

        def drop(xattrs: dict[bytes, bytes]) -> None:
            if xattrs.pop(name, None) is None:
                raise FSError(errno.ENODATA)

        await self._change_xattrs(ino, name, drop)

    async def _change_xattrs(self, ino: Ino, name: bytes, change: Callable[[dict[bytes, bytes]], None]) -> None:
        self._check_xattr(name)

        def change_all(old: Attributes) -> Attributes:
            xattrs = dict(old.xattrs)
            change(xattrs)
            return old._replace(xattrs=xattrs, ctime_ns=self._core.clock.time_ns())

        node = self._resolver.node(ino)
        await self._ask(node)
        await self._change(node, change_all)

    def _check_xattr(self, name: bytes) -> None:
        if not name.startswith(_USER) or not self._core.settings.full_attributes:
            raise FSError(errno.EOPNOTSUPP)
