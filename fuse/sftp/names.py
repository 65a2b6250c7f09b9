"""Names that go or move: removals and renames, also of and over open files, which get a hidden name (see opened)."""

from __future__ import annotations

import errno
import stat

import asyncssh
from asyncssh import SFTPClient

from datastore.errors import StoreError

from ..fileserver import in_lane
from ..loop import Loop
from ..ops import Caller, FSError, Ino
from .attributes import kind_of
from .calls import Calls, once
from .connection import SFTPFailed
from .nodes import HIDDEN, Node, Nodes
from .opened import OpenFiles


class Names:
    """Serves removals and renames; see ops.Filesystem."""

    def __init__(self, loop: Loop, calls: Calls, nodes: Nodes, files: OpenFiles) -> None:
        self.loop = loop
        self._calls = calls
        self._nodes = nodes
        self._files = files

    @in_lane
    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """An open file gets a hidden name until its last close."""
        directory = self._nodes.get(parent)
        opened = self._files.open_behind(directory, name)
        if opened is not None:
            if opened.hidden == HIDDEN:
                raise FSError(errno.EBUSY)  # the open file keeps this name until its last close
            self._files.begin_open(opened)  # so that no close during the removal is the last one
            try:
                self._hide(opened, directory, name)
            finally:
                self._files.end_open(opened)
            return

        async def remove(sftp: SFTPClient, path: bytes, repeated: bool) -> None:
            await once(sftp.remove(path), asyncssh.SFTPNoSuchFile, repeated)

        node = directory.children.get(name)
        with self._calls.explained(directory, grows=False):
            self._calls.ask("remove", directory, remove, name)
        self._nodes.detach(node)

    @in_lane
    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        directory = self._nodes.get(parent)

        async def remove(sftp: SFTPClient, path: bytes, repeated: bool) -> None:
            try:
                await once(sftp.rmdir(path), asyncssh.SFTPNoSuchFile, repeated)
            except asyncssh.SFTPFailure:
                async for line in sftp.scandir(path):
                    if line.filename not in (b".", b".."):
                        raise FSError(errno.ENOTEMPTY) from None
                raise

        with self._calls.explained(directory, grows=False):
            self._calls.ask("rmdir", directory, remove, name)
        self._nodes.detach(directory.children.get(name))

    @in_lane
    def rename(self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int) -> None:
        """An open file that is replaced gets a hidden name; for a moment the new name does not exist."""
        if flags & ~1:
            raise FSError(errno.EINVAL)
        old, new = self._nodes.get(parent), self._nodes.get(new_parent)
        replaced = None if flags else self._files.open_behind(new, new_name)
        if replaced is None:
            self._move("rename-new" if flags else "rename", old, name, new, new_name)
        else:
            self._replace_open(replaced, old, name, new, new_name)
        self._renamed(old, name, new, new_name)

    @in_lane
    def renamed_before(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes) -> None:
        """See ops.KnowsFilesByName."""
        old, new = self._nodes.get(parent), self._nodes.get(new_parent)
        if name in old.children and self._calls.is_there(new, new_name):
            self._renamed(old, name, new, new_name)

    def _renamed(self, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        with self._nodes.lock:
            node = old.children.get(name)
            if node is not None:
                self._nodes.move(node, new, new_name)
            else:
                self._nodes.detach(new.children.get(new_name))

    def _replace_open(self, replaced: Node, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        if not self._calls.is_there(old, name):
            raise FSError(errno.ENOENT)
        self._files.begin_open(replaced)
        try:
            self._hide(replaced, new, new_name)
            try:
                self._move("rename", old, name, new, new_name)
            except (OSError, StoreError):
                self._move("rename", new, replaced.name, new, new_name)  # it gets its name back
                self._nodes.move(replaced, new, new_name)
                raise
        finally:
            self._files.end_open(replaced)

    def _hide(self, node: Node, directory: Node, name: bytes) -> None:
        """Give an open file its hidden name, until its last close."""
        other = self._nodes.hidden_name(node)
        self._nodes.hide(node)
        try:
            self._move("rename", directory, name, directory, other)
        except FSError as error:
            if error.errno != errno.ENOENT or not self._calls.is_there(directory, other):
                node.hidden = ""
                raise  # otherwise an earlier process of this mount did it
        self._nodes.move(node, directory, other, HIDDEN)

    def _move(self, what: str, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        """Rename. what: "rename" (an extension) replaces a taken name, "rename-new" (version 3's own) gives EEXIST."""

        async def move(sftp: SFTPClient, path: bytes, repeated: bool) -> None:
            to = self._nodes.path(new, new_name)
            moved = sftp.posix_rename(path, to) if what == "rename" else sftp.rename(path, to)
            await once(moved, asyncssh.SFTPNoSuchFile, repeated)

        with self._calls.explained(new, None if what == "rename" else new_name, grows=False, source=old):
            try:
                self._calls.ask(what, old, move, name)
            except SFTPFailed as error:
                if error.vague and what == "rename" and self._calls.is_there(new, new_name):
                    self._check_kinds(old, name, new, new_name)
                raise

    def _check_kinds(self, old: Node, name: bytes, new: Node, new_name: bytes) -> None:
        """Errors: the reason why a name can't replace the other, if directories are the reason."""
        from_directory = kind_of(self._calls.lstat(old, name)) == stat.S_IFDIR
        to_directory = kind_of(self._calls.lstat(new, new_name)) == stat.S_IFDIR
        if from_directory:
            raise FSError(errno.ENOTEMPTY if to_directory else errno.ENOTDIR)
        if to_directory:
            raise FSError(errno.EISDIR)
