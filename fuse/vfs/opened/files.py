"""Opening, writing and closing files: what is written goes into the staging file, and to the store at fsync and close
(S-17 to S-24).
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from datastore.errors import DatastoreError

from ...data.multipart import OBJECT_MAX
from ...data.staging import StagedFile
from ...ops import Caller, Fh, FSError, Ino, OpenReply, OpenRequest
from ..lookup.prefetcher import Prefetcher
from ..lookup.resolver import Resolver
from ..tree import facts
from ..tree.attrs import without_suidgid
from ..tree.core import Core
from ..tree.nodes import Directory, Node
from ..tree.passthrough import MIN_BYTES
from ..upload.upkeep import Upkeep
from ..upload.uploads import Uploads
from .handles import SENT_BACK, Handles

_ZEROS_AT_ONCE = 4 << 20
"""So many bytes of a range that becomes zero are written before others run."""
PATIENCE_S = 1.0
"""Longest wait for an open on its way; the kernel comes back at once, if it comes."""
_LOOK_S = 0.002
"""How often it is looked whether it was there: hardly ever is anybody waited for."""


def refuse_beyond(size: int) -> None:
    """FSError(EFBIG) for a file that no object can hold: all of it, holes too, would be sent before that is said."""
    if size > OBJECT_MAX:
        raise FSError(errno.EFBIG)


class Chases:
    """Opens that lost their file to a rename, and come back for the name. A thread is one of the program that opens.

    An open reaches us as a LOOKUP and an OPEN. When a rename replaced the file in between, the answer is ESTALE, upon
    which Linux walks the path again, once (do_filp_open). Should the name be replaced again in that moment, the program
    would see ESTALE from open(2): so whoever replaces or removes a name lets those pass that are on their way to it.

    Who is sent back stands in the table of open files, too. The next server knows no version of a file and sends each
    open for writing back once; one that an earlier server has sent back would see that as an error (S-58). A caller of
    another pid namespace has the thread id 0, and is not recognised.
    """

    def __init__(self, core: Core) -> None:
        self._clock, self._sleep = core.loop.clock, core.loop.sleep
        self._opens, self._nodes = core.opens, core.nodes
        self._chased: dict[tuple[int, bytes], dict[int, float]] = {}
        """By name, the threads that are on their way to it, and until when (the loop's clock) they are waited for."""

    def resume(self) -> None:
        """Those that an earlier server sent back come to this one."""
        for opened in self._opens.load():
            if opened.fh & SENT_BACK:
                self._opens.remove(opened.fh)
                node = self._nodes.by_ino.get(Ino(opened.ino))
                if node is not None:
                    self.lost(node, opened.fh ^ SENT_BACK)

    def lost(self, node: Node, thread: int) -> None:
        """An open of this node is sent back. Of a name that nobody has now it is not waited."""
        if node.parent is None or node.name not in node.parent.children:
            return
        now = self._clock()
        for name, threads in list(self._chased.items()):
            if max(threads.values()) < now:
                self._forget(name)
        self._chased.setdefault((node.parent.ino, node.name), {})[thread] = now + PATIENCE_S
        self._opens.remove(SENT_BACK | thread)
        self._opens.add(SENT_BACK | thread, node.ino, 0, "", 0)

    def comes_back(self, node: Node, thread: int) -> bool:
        """Whether this thread was sent back from this name a moment ago."""
        if not self._chased or not thread or node.parent is None:
            return False
        return self._clock() < self._chased.get((node.parent.ino, node.name), {}).get(thread, 0.0)

    def caught(self, node: Node, thread: int) -> None:
        """An open of this node succeeds."""
        if self._chased and node.parent is not None:
            name = node.parent.ino, node.name
            threads = self._chased.get(name, {})
            if threads.pop(thread, None) is not None:
                self._opens.remove(SENT_BACK | thread)
                if not threads:
                    del self._chased[name]

    async def let_pass(self, parent: Ino, name: bytes) -> None:
        """Wait until those that are on their way to a name have opened it, or their time is over."""
        while max(self._chased.get((parent, name), {}).values(), default=0.0) > self._clock():
            await self._sleep(_LOOK_S)
        self._forget((parent, name))

    def _forget(self, name: tuple[int, bytes]) -> None:
        for thread in self._chased.pop(name, {}):
            self._opens.remove(SENT_BACK | thread)


@dataclass(eq=False, repr=False)
class Files:
    """What open, write, truncate, fallocate, fsync, close and the last close do."""

    _core: Core
    _resolver: Resolver
    _uploads: Uploads
    _handles: Handles
    _upkeep: Upkeep
    _prefetcher: Prefetcher

    def __post_init__(self) -> None:
        self.chases = Chases(self._core)

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply:
        """open(2) without O_CREAT. FSError(ESTALE) sends the kernel to look the name up again; with ENOSYS it opens,
        and flushes, files by itself from now on (S-51).
        """
        if self._core.settings.open_less:
            raise FSError(errno.ENOSYS)
        node, flags, thread = self._resolver.node(ino), request.flags, caller.pid
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
                await self.truncate(node, 0, kill_suidgid=request.kill_suidgid)
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

    # -- writing

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """Into the staging file; at once unless the node is busy or part of a block must be fetched."""
        node = self._handles.node_of(ino, fh)
        if not payload:
            return 0
        refuse_beyond(offset + len(payload))
        if node.unknown:
            await self._handles.confirm(node)
        if not node.lock.try_acquire():
            await node.lock.acquire()
        try:
            staged = self._uploads.stage(node)
            gaps = staged.missing_for_write(offset, len(payload))
            if gaps:
                await self._uploads.fill(staged, gaps)
            if not staged.dirty_ranges:
                staged.grows_since = self._core.clock.monotonic()
            written = staged.write(offset, payload)
            self._core.passthrough.write(node.ino, offset, payload)
            self.modified(node, kill_suidgid=kill_suidgid)
            return written
        finally:
            node.lock.release()

    def modified(self, node: Node, *, kill_suidgid: bool = False) -> None:
        """The staged content changed: size and times follow, and setuid and setgid may fall. node.lock is held."""
        staged = node.staged
        assert staged is not None
        now = self._core.clock.time_ns()
        staged.written_at = self._core.clock.monotonic()
        staged.times_set = False
        had = node.attributes
        mode = without_suidgid(had.mode) if kill_suidgid else had.mode
        facts.edited(node, had._replace(mode=mode, mtime_ns=now, ctime_ns=now), staged.size)
        if not staged.journaled:
            self._uploads.record(node)
        if staged.size >= staged.stream_at:
            self._uploads.grown(node)

    async def truncate(self, node: Node, size: int, *, kill_suidgid: bool = False) -> None:
        """Set the size in the staging file. node.lock is held; may fetch the last block."""
        refuse_beyond(size)
        staged = self._uploads.stage(node) if size else await self._uploads.restart(node)
        if 0 < size < staged.size:
            await self._uploads.fill(staged, staged.missing(size - size % 4096, size))
        staged.truncate(size)
        self._core.passthrough.truncate(node.ino, size)
        self.modified(node, kill_suidgid=kill_suidgid)
        self._uploads.record(node)

    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        """mode 0, KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE; FSError(EOPNOTSUPP) otherwise."""
        keep_size, punch, zero = mode & 1, mode & 2, mode & 16
        if mode & ~(1 | 2 | 16) or (punch and not keep_size):
            raise FSError(errno.EOPNOTSUPP)
        if not keep_size:
            refuse_beyond(offset + length)
        node = self._handles.node_of(ino, fh)
        if node.unknown:
            await self._handles.confirm(node)
        async with node.lock:
            staged = self._uploads.stage(node)
            if punch or zero:
                await self._uploads.fill(staged, staged.missing_for_write(offset, length))
                await self._zero(node, staged, offset, length)
            if not keep_size and offset + length > staged.size:
                staged.truncate(offset + length)
                self._core.passthrough.truncate(node.ino, staged.size)
            self.modified(node)

    async def _zero(self, node: Node, staged: StagedFile, offset: int, length: int) -> None:
        """Make a range inside the size zero, in steps that end with a block; others run in between."""
        at, stop = offset, min(offset + length, staged.size)
        while at < stop:
            step = min(stop - at, _ZEROS_AT_ONCE - at % _ZEROS_AT_ONCE)
            staged.zero(at, step)
            self._core.passthrough.zero(node.ino, at, step)
            at += step
            await self._core.loop.pause()

    # -- closing

    async def flush(self, ino: Ino, fh: Fh) -> None:
        """close(2): what this handle may have written goes to the store."""
        if self._core.settings.open_less:
            raise FSError(errno.ENOSYS)
        handle = self._handles.get(fh)
        node = self._handles.node_of(ino, fh)
        if not self._uploads.owes(node) or (handle is not None and not handle.writable):
            return
        if self._upkeep.writes_back:
            await self._upkeep.close(node)
            return
        # Who can read may have mapped the file, and what is written to the map comes after the close.
        only_writes = handle is not None and handle.flags & os.O_ACCMODE == os.O_WRONLY
        await self._uploads.flush(node, unread=only_writes and node.handles == 1)

    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None:
        """fsync(2): the same, through any handle."""
        node = self._handles.node_of(ino, fh)
        if node.dirty and not node.gone:
            await self._uploads.flush(node)

    async def release(self, ino: Ino, fh: Fh) -> None:
        """The last close of a handle."""
        handle = self._handles.remove(fh)
        node = handle.node if handle is not None else self._core.nodes.by_ino.get(ino)
        if node is None:
            return
        if node.handles == 0:
            if not self._core.passthrough.returned(node.ino):
                self._spare_pages(node)
            # What it waits for may just be ending: then it is looked at again with the lock held.
            left = node.lock.locked or not self._uploads.waits(node)
            if left and (node.staged is not None or node.unlinked_key):
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

    async def _finish(self, node: Node) -> None:
        """Nobody has the file open any more: send what mmap wrote late, keep what cannot be sent, drop the rest."""
        async with self._core.tree.shared(), node.lock:
            if node.handles:
                return
            if node.gone:
                await self._uploads.discard(node)
                self._core.removed.forget(node.ino)
                if hidden := node.unlinked_key:  # the copy of a file that was removed while open
                    await self._core.remove(hidden)
                    for intent in self._core.db.intents():
                        if intent.source == hidden:
                            self._core.db.end(intent)
                return
            if node.staged is not None and node.staged.stuck:
                self._uploads.set_aside(node)
                return
            if self._uploads.waits(node):
                return
            try:
                await self._uploads.send(node)
            except (DatastoreError, OSError):
                return  # recorded and tried again later; nobody hears the answer to a release
            await self._uploads.settle(node)
