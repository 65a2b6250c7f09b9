"""Opening files and their last close (S-17 to S-24)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from datastore.errors import DatastoreError

from ...ops import Fh, FSError, Ino, OpenReply, OpenRequest
from ..lookup.prefetcher import Prefetcher
from ..lookup.resolver import Resolver
from ..tree.chases import Chases
from ..tree.core import Core
from ..tree.nodes import Directory, Node
from ..tree.passthrough import MIN_BYTES
from ..upload.uploads import Uploads
from .handles import Handles
from .writing import Writing


@dataclass(eq=False, repr=False)
class Files:
    """What open and the last close do."""

    _core: Core
    _resolver: Resolver
    _uploads: Uploads
    _handles: Handles
    _writing: Writing
    _prefetcher: Prefetcher

    def __post_init__(self) -> None:
        self.chases = Chases(self._core.loop)

    async def open(self, ino: Ino, request: OpenRequest, thread: int = 0) -> OpenReply:
        """open(2) without O_CREAT, by a thread. FSError(ESTALE) sends the kernel to look the name up again."""
        node, flags = self._resolver.node(ino), request.flags
        reads = not flags & (os.O_ACCMODE | os.O_TRUNC)
        fresh = self._resolver.current(node) if reads else self._resolver.own(node)
        if fresh and not node.leaving and not flags & os.O_TRUNC:
            return self.opened(node, flags, thread)
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        if node.leaving:
            async with node.lock:  # the removal or the rename holds it to its end
                node.leaving = False
        await self._confirm(node, flags, thread)
        if flags & os.O_TRUNC:
            self._part_from_readers(node, flags)
            async with node.lock:
                await self._writing.truncate(node, 0, kill_suidgid=request.kill_suidgid)
        return self.opened(node, flags, thread)

    async def _confirm(self, node: Node, flags: int, thread: int) -> None:
        """Who opens to write sees what was closed before, whatever the kernel still believes (S-161). FSError(ESTALE).

        Of another version the kernel has to learn the size first, so it looks the name up again; that open has asked.
        """
        writes = flags & (os.O_ACCMODE | os.O_TRUNC)
        if writes and not self.chases.comes_back(node, thread):
            before = node.version()
            lives = await self._resolver.ask(node)
            lives = lives and (node.version() == before or bool(flags & os.O_TRUNC))
        else:
            lives = node.gone or await self._resolver.revalidate(node)
            if writes and lives:
                # The upload writes the attributes too, so whoever writes must know them, also where stat does not ask.
                await self._resolver.make_exact([node])
        if not lives:
            self.chases.lost(node, thread)
            raise FSError(errno.ESTALE)

    def opened(self, node: Node, flags: int, thread: int = 0) -> OpenReply:
        """A handle for a node.

        FSError(ESTALE) of one whose bytes nobody has kept, or whose name another client's file has by now (S-30).
        """
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        if node.gone and (node.lost or not (node.handles or node.staged is not None or node.unlinked_key)):
            self.chases.lost(node, thread)
            raise FSError(errno.ESTALE)
        self.chases.caught(node, thread)
        self._part_from_readers(node, flags)
        reading = flags & os.O_ACCMODE == os.O_RDONLY
        # Without others, and without pages that are kept, nobody has anything of this version any more.
        bound = node.pinned and (node.handles > 0 or node.pages_valid or self._core.settings.open_less)
        node.pinned = bound or not reading
        fh = self._handles.add(node, flags)
        if reading:
            self._prefetcher.opened(node, kept=node.pages_valid)
        local = self._core.notifier.is_local(node.ino)
        if local:
            node.pinned = True
            node.pages_valid = node.pages_valid and reading
            return OpenReply(fh, direct_io=not reading or not self._core.passthrough.right(node.ino))
        keep, node.pages_valid = node.pages_valid, True
        alone, whole = node.handles == 1, node.staged is None and not node.gone
        may_pass = local is False and reading and alone and whole and node.size >= MIN_BYTES
        passthrough_fd = self._core.passthrough.offer(node.ino, node.version()) if may_pass else -1
        node.pinned = node.pinned or passthrough_fd >= 0
        # Who only writes, and alone, needs none of the kernel's pages: no copy into them, and no question about a
        # security label before the first write.
        uncached = alone and flags & os.O_ACCMODE == os.O_WRONLY
        return OpenReply(fh, keep, False, passthrough_fd, uncached)

    def _part_from_readers(self, node: Node, flags: int) -> None:
        """Who may map a file for writing gets an inode of its own while others read it by passthrough.

        What is written to such a map would go to the cache file and nobody would learn of it; the readers keep the
        version that they opened. FSError(ESTALE), upon which the kernel looks the name up again; FSError(ETXTBSY) when
        it has unsent changes besides.
        """
        if flags & os.O_ACCMODE != os.O_RDWR or not self._core.notifier.is_local(node.ino):
            return
        if node.staged is not None or node.parent is None or node.gone:
            raise FSError(errno.ETXTBSY)
        self._core.notifier.inval_entry(node.parent.ino, node.name)
        node.lost = True
        self._core.nodes.detach(node)
        raise FSError(errno.ESTALE)

    async def release(self, ino: Ino, fh: Fh) -> None:
        """The last close of a handle."""
        handle = self._handles.remove(fh)
        node = handle.node if handle is not None else self._core.nodes.by_ino.get(ino)
        if node is None:
            return
        if node.handles == 0:
            if not self._core.passthrough.returned(node.ino):
                self._spare_pages(node)
            if (node.staged is not None or node.unlinked_key) and not self._is_sent_later(node):
                await self._finish(node)
        self._core.nodes.drop_unused(node)

    def _spare_pages(self, node: Node) -> None:
        """Have the kernel drop the pages of a file that is read by passthrough from now on.

        Its next open drops them too, but waits for that: 0.1 s for 1 GiB.
        """
        files = self._core.passthrough
        clean = node.pages_valid and node.staged is None and not node.gone and node.size >= MIN_BYTES
        if clean and self._core.notifier.is_local(node.ino) is False and files.available(node.version()):
            node.pages_valid = False
            self._core.notifier.inval_inode(node.ino)

    def _is_sent_later(self, node: Node) -> bool:
        """Whether whoever sends the file behind its close (writeBack) ends it: he looks for handles when it is sent."""
        staged = node.staged
        return staged is not None and staged.due > 0 and not staged.stuck and not node.gone and staged.dirty

    async def _finish(self, node: Node) -> None:
        """Nobody has the file open any more: send what mmap wrote late, keep what cannot be sent, drop the rest."""
        async with self._core.tree.shared(), node.lock:
            if node.handles:
                return
            if node.gone:
                await self._uploads.discard(node)
                self._core.removed.forget(node.ino)
                if node.unlinked_key:
                    await self._discard_copy(node.unlinked_key)
                return
            if node.staged is not None and node.staged.stuck:
                self._uploads.set_aside(node)
            elif self._uploads.waits(node):
                return
            try:
                await self._uploads.send(node)
            except (DatastoreError, OSError):
                return  # recorded and tried again later; nobody hears the answer to a release
            await self._uploads.settle(node)

    async def _discard_copy(self, key: str) -> None:
        """Remove the hidden copy of a file that was removed while open."""
        await self._core.remove(key)
        for intent in self._core.db.intents():
            if intent.source == key:
                self._core.db.end(intent.id)
