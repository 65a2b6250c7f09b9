"""Opens, writes and closes files (S-17 to S-24): writes go to a staging file, and to the store at fsync and close."""

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
"""How many bytes of a range are zeroed before other tasks may run."""
PATIENCE_S = 1.0
"""The longest wait for the kernel to repeat an open, in seconds; the kernel does so at once, if at all."""
_LOOK_S = 0.002
"""The pause between two checks for such an open, in seconds; there is hardly ever one to wait for."""


def refuse_beyond(size: int) -> None:
    """Raise FSError(EFBIG) for a size that no object can have; the store would refuse it only after the upload."""
    if size > OBJECT_MAX:
        raise FSError(errno.EFBIG)


class Chases:
    """Opens that lost their file to a rename, were answered with ESTALE, and are repeated by the kernel.

    An open reaches us as a LOOKUP and an OPEN. When a rename replaced the file in between, the answer is ESTALE, upon
    which Linux walks the path again, once (do_filp_open). If the name were replaced again before that, the program
    would see ESTALE from open(2). So a rename onto a name, or its removal, first waits for the opens to be repeated.

    These opens are in the table of open files, too, by the thread id of the caller. The next server knows no version of
    a file and answers each open for writing with ESTALE once; for an open that an earlier server has answered so, the
    program would see the error (S-58). A caller of another pid namespace has the thread id 0 and is not recognised.
    """

    def __init__(self, core: Core) -> None:
        self._clock, self._sleep = core.loop.clock, core.loop.sleep
        self._opens, self._nodes = core.opens, core.nodes
        self._until: dict[tuple[int, bytes, int], float] = {}
        """By directory, name and thread that repeats an open: until when (loop's clock) to wait for it."""

    def resume(self) -> None:
        """Expect the opens that an earlier server answered with ESTALE to be repeated."""
        for opened in self._opens.load():
            if opened.fh & SENT_BACK:
                self._opens.remove(opened.fh)
                node = self._nodes.by_ino.get(Ino(opened.ino))
                if node is not None:
                    self.lost(node, opened.fh ^ SENT_BACK)

    def lost(self, node: Node, thread: int) -> None:
        """Expect an open of this node, which is answered with ESTALE, to be repeated, unless the name is free now."""
        if node.parent is None or node.name not in node.parent.children:
            return
        now = self._clock()
        for key in [key for key, until in self._until.items() if until < now]:
            self._forget(key)
        self._until[node.parent.ino, node.name, thread] = now + PATIENCE_S
        self._opens.remove(SENT_BACK | thread)
        self._opens.add(SENT_BACK | thread, node.ino, 0, "", 0)

    def comes_back(self, node: Node, thread: int) -> bool:
        """Return whether an open of the node's name by this thread was answered with ESTALE a moment ago."""
        if not thread or node.parent is None:
            return False
        return self._clock() < self._until.get((node.parent.ino, node.name, thread), 0.0)

    def caught(self, node: Node, thread: int) -> None:
        """Note that an open of this node succeeds, so that this thread is not expected to repeat it any more."""
        if self._until and node.parent is not None:
            self._forget((node.parent.ino, node.name, thread))

    async def let_pass(self, parent: Ino, name: bytes) -> None:
        """Wait until every expected open of a name has succeeded, or its time is over."""
        while any(key[:2] == (parent, name) and until > self._clock() for key, until in self._until.items()):
            await self._sleep(_LOOK_S)

    def _forget(self, key: tuple[int, bytes, int]) -> None:
        if self._until.pop(key, None) is not None:
            self._opens.remove(SENT_BACK | key[2])


@dataclass(eq=False, repr=False)
class Files:
    """Implements open, write, truncate, fallocate, fsync, flush (each close) and release (the last close)."""

    _core: Core
    _resolver: Resolver
    _uploads: Uploads
    _handles: Handles
    _upkeep: Upkeep
    _prefetcher: Prefetcher

    def __post_init__(self) -> None:
        self.chases = Chases(self._core)

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply:
        """open(2) without O_CREAT. Errors: FSError(ESTALE), which makes the kernel look the name up again; ENOSYS,
        after which the kernel opens and flushes files by itself (S-51); EISDIR.
        """
        if self._core.settings.open_less:
            raise FSError(errno.ENOSYS)
        node, flags = self._resolver.node(ino), request.flags
        if node.parent is not None and self._uploads.orphans.arriving and await self._uploads.orphans.arrived(node.key):
            self._resolver.doubt(node.parent, node.name)
            raise FSError(errno.ESTALE)
        reads = not flags & (os.O_ACCMODE | os.O_TRUNC)
        fresh = self._resolver.current(node) if reads else self._resolver.own(node)
        if fresh and not node.leaving and not flags & os.O_TRUNC:
            return self.opened(node, flags, caller)
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        if node.leaving:
            async with node.lock:  # the removal or rename holds the lock until it ends
                node.leaving = False
        await self._confirm(node, flags, caller.pid)
        if flags & os.O_TRUNC:
            self._part_from_readers(node, flags)
            async with node.lock:
                await self.truncate(node, 0, kill_suidgid=request.kill_suidgid)
        return self.opened(node, flags, caller)

    async def _confirm(self, node: Node, flags: int, thread: int) -> None:
        """Confirm a node for an open. An open for writing has to see what any client closed before (S-161).

        Errors: FSError(ESTALE) when the node is gone, or has another version, whose size the kernel has to learn by a
        lookup; the open that the kernel then repeats does not ask the store again.
        """
        writes = flags & (os.O_ACCMODE | os.O_TRUNC)
        if writes and not self.chases.comes_back(node, thread):
            before = node.version()
            lives = await self._resolver.ask(node)
            lives = lives and (node.version() == before or bool(flags & os.O_TRUNC))
        else:
            lives = node.gone or await self._resolver.revalidate(node)
            if writes and lives:
                # The upload writes the attributes too: a writer needs them also with `attributes: listing`.
                await self._resolver.make_exact([node])
        if not lives:
            self.chases.lost(node, thread)
            raise FSError(errno.ESTALE)

    def opened(self, node: Node, flags: int, caller: Caller) -> OpenReply:
        """Open a handle for a node that is no directory.
        Errors: FSError(ESTALE) when it is gone, and its bytes were not kept or another client has its name (S-30).
        """
        if isinstance(node, Directory):
            raise FSError(errno.EISDIR)
        if node.gone and (node.lost or not (node.handles or node.staged is not None or node.unlinked_key)):
            self.chases.lost(node, caller.pid)
            raise FSError(errno.ESTALE)
        self.chases.caught(node, caller.pid)
        self._part_from_readers(node, flags)
        reading = flags & os.O_ACCMODE == os.O_RDONLY
        # Without other handles and cached pages, nobody has bytes of this version: the handle need not stay on it.
        bound = node.pinned and (node.handles > 0 or node.pages_valid or self._core.settings.open_less)
        node.pinned = bound or not reading
        fh = self._handles.add(node, flags, caller)
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
        # A handle that is alone and only writes bypasses the kernel's pages: that saves a copy into them, and a request
        # for a security label before the first write.
        uncached = alone and flags & os.O_ACCMODE == os.O_WRONLY
        return OpenReply(fh, keep, False, passthrough_fd, uncached)

    def _part_from_readers(self, node: Node, flags: int) -> None:
        """Give an open for reading and writing its own inode while others read the file by passthrough.

        Such an open may map the file, and what is written to the map would go to the cache file unnoticed. The readers
        keep their version. Errors: FSError(ESTALE), which makes the kernel look the name up again; FSError(ETXTBSY) if
        the file also has unsent changes.
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
        """Write into the staging file; this waits only if node.lock is held or part of a block must be fetched."""
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
            try:
                written = staged.write(offset, payload)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                await self._core.loop.on_disk(self._core.cache.make_room, len(payload))
                written = staged.write(offset, payload)
            self._core.passthrough.write(node.ino, offset, payload)
            self.modified(node, kill_suidgid=kill_suidgid)
            return written
        finally:
            node.lock.release()

    def modified(self, node: Node, *, kill_suidgid: bool = False) -> None:
        """Update size and times after the staged content changed; clear setuid, setgid if asked. node.lock is held."""
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
        if staged.size >= staged.stream_at and not node.gone:
            self._uploads.grown(node, staged)

    async def truncate(self, node: Node, size: int, *, kill_suidgid: bool = False) -> None:
        """Set the size of the staging file; the last block may have to be fetched. node.lock is held."""
        refuse_beyond(size)
        staged = self._uploads.stage(node) if size else self._uploads.restart(node)
        if 0 < size < staged.size:
            await self._uploads.fill(staged, staged.missing(size - size % 4096, size))
        staged.truncate(size)
        self._core.passthrough.truncate(node.ino, size)
        self.modified(node, kill_suidgid=kill_suidgid)
        self._uploads.record(node)

    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        """mode: 0, KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE. Errors: FSError(EOPNOTSUPP) for others; EFBIG."""
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
        """Set a range inside the size to zero, in steps of _ZEROS_AT_ONCE; other tasks may run in between."""
        at, stop = offset, min(offset + length, staged.size)
        while at < stop:
            zeros = bytes(min(stop - at, _ZEROS_AT_ONCE - at % _ZEROS_AT_ONCE))
            staged.write(at, zeros)
            self._core.passthrough.write(node.ino, at, zeros)
            at += len(zeros)
            await self._core.loop.pause()

    # -- closing

    async def flush(self, ino: Ino, fh: Fh) -> None:
        """close(2): send what this handle may have written or, with writeBack, schedule that (Upkeep.close())."""
        if self._core.settings.open_less:
            raise FSError(errno.ENOSYS)
        handle = self._handles.get(fh)
        node = self._handles.node_of(ino, fh)
        if self._uploads.owed(node) is None or (handle is not None and not handle.writable):
            return
        if self._core.settings.write_back_s:
            await self._upkeep.close(node)
            return
        # A handle that can read may have mapped the file, and what is written to the map arrives after the close.
        only_writes = handle is not None and handle.flags & os.O_ACCMODE == os.O_WRONLY
        await self._uploads.flush(node, unread=only_writes and node.handles == 1)

    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None:
        """fsync(2): send what is unsent of the file, also with writeBack and through a handle that only reads."""
        node = self._handles.node_of(ino, fh)
        if node.dirty and not node.gone:
            await self._uploads.flush(node)

    async def release(self, ino: Ino, fh: Fh) -> None:
        """Drop a handle after its last close."""
        handle = self._handles.remove(fh)
        node = handle.node if handle is not None else self._core.nodes.by_ino.get(ino)
        if node is None:
            return
        if node.handles == 0:
            if not self._core.passthrough.returned(node.ino):
                self._spare_pages(node)
            # The upload that the node waits for may just be ending: _finish() checks again when it has the lock.
            left = node.lock.locked or not self._uploads.waits(node)
            if left and (node.staged is not None or node.unlinked_key):
                await self._finish(node)
        self._core.nodes.drop_unused(node)

    def _spare_pages(self, node: Node) -> None:
        """Make the kernel drop its pages of a file that the next open can read by passthrough. That open would also
        drop them, but would have to wait for it: 0.1 s for 1 GiB.
        """
        files = self._core.passthrough
        clean = node.pages_valid and node.staged is None and not node.gone and node.size >= MIN_BYTES
        if clean and self._core.notifier.is_local(node.ino) is False and files.available(node.version()):
            node.pages_valid = False
            self._core.notifier.inval_inode(node.ino)

    async def _finish(self, node: Node) -> None:
        """After the last close of a file: send late mmap writes, keep what cannot be sent, drop the rest."""
        async with self._core.tree.shared(), node.lock:
            if node.handles:
                return
            if node.gone:
                self._uploads.discard(node)
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
                return  # recorded and tried again later; the kernel ignores errors of a release
            await self._uploads.settle(node)
