"""The calls to the SSH server about a node, by the node's path, and what the server's vague failures likely mean."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import asyncssh
from asyncssh import SFTPAttrs, SFTPClient

from datastore.errors import StoreError

from ..ops import FSError
from .attributes import Owner, stat_at
from .connection import Connection, SFTPFailed
from .nodes import Node, Nodes

T = TypeVar("T")
READ_ONLY = 1
"""The flag of a read-only disk in the answer to statvfs@openssh.com (PROTOCOL of OpenSSH)."""
PATH_MAX = 4096
"""The length from which Linux takes no path. An SSH server answers then as if the message were wrong."""


class Calls:
    """The calls of one mount. They block; no caller holds the lock of the nodes."""

    def __init__(self, connection: Connection, nodes: Nodes) -> None:
        self.connection = connection
        self._nodes = nodes
        self._owner: Owner | None = None

    def ask(
        self,
        what: str,
        node: Node,
        call: Callable[[SFTPClient, bytes, bool], Awaitable[T]],
        name: bytes | None = None,
    ) -> T:
        """Run call(session, path, repeated) with the path of the node, or of `name` in it. See connection.Call.

        The call is made again if the server answered "no such file" because a directory above was renamed meanwhile.
        """

        async def asked(sftp: SFTPClient, repeated: bool) -> T:
            while True:
                path = self._nodes.path(node, name)
                try:
                    return await call(sftp, path, repeated)
                except asyncssh.SFTPNoSuchFile:
                    if self._nodes.path(node, name) == path:
                        raise
                except asyncssh.SFTPBadMessage:
                    if len(path) < PATH_MAX:
                        raise
                    raise FSError(errno.ENAMETOOLONG) from None

        return self.connection.call(what, asked)

    def lstat(self, node: Node, name: bytes | None = None) -> SFTPAttrs:
        """Return the attributes of the node, or of `name` in it."""
        return self.ask("lstat", node, lambda sftp, path, _: stat_at(sftp, path, node if name is None else None), name)

    def is_there(self, directory: Node, name: bytes) -> bool:
        """Return whether the directory has this name, as far as the server tells."""
        try:
            self.lstat(directory, name)
        except SFTPFailed:
            return False
        return True

    def statvfs(self, node: Node) -> asyncssh.SFTPVFSAttrs:
        """Return the figures of the node's disk. Errors: EOPNOTSUPP without the extension statvfs@openssh.com."""
        return self.ask("statvfs", node, lambda sftp, path, _: sftp.statvfs(path))

    def owner(self) -> Owner:
        """Return whose files are shown as the mounting user's own. Errors: StoreError, SFTPFailed.

        SFTP does not tell the login's uid, so it is taken from the owner of the directory in which a session begins.
        For a login that is confined to a directory (ChrootDirectory) that owner is root, which tells nothing.
        """
        if self._owner is None:
            home = self.connection.call("lstat", lambda sftp, _: sftp.stat(b"."))
            user = self.connection.username()
            known = home.uid or (0 if user == "root" and os.getuid() == 0 else None)
            self._owner = Owner(os.getuid(), os.getgid(), known, home.gid or 0)
        return self._owner

    @contextmanager
    def explained(
        self, node: Node, new: bytes | None = None, *, grows: bool = True, source: Node | None = None
    ) -> Iterator[None]:
        """Raise in place of a vague failure of this change what it likely means, because SFTP has no codes for these:
        EEXIST if the name to be made (new) is taken; EROFS if the server's disk is read-only; EXDEV if the name comes
        from a directory (source) on another disk; ENOSPC if the disk is full and the change needs room on it (grows).
        """
        try:
            yield
        except SFTPFailed as error:
            if not error.vague:
                raise
            if new is not None and self.is_there(node, new):
                raise FSError(errno.EEXIST) from None
            try:
                disk = self.statvfs(node)
                elsewhere = source is not None and self.statvfs(source).fsid != disk.fsid
            except (OSError, StoreError):
                raise error from None
            if disk.flags & READ_ONLY:
                raise FSError(errno.EROFS) from None
            if elsewhere:
                raise FSError(errno.EXDEV) from None
            if grows and (disk.bavail == 0 or (disk.files and disk.favail == 0)):
                raise FSError(errno.ENOSPC) from None
            raise


async def once(change: Awaitable[None], done: type[asyncssh.SFTPError], repeated: bool) -> None:
    """Make a change. repeated: an earlier session may have made it already; then the error `done` is success."""
    try:
        await change
    except done:
        if not repeated:
            raise
