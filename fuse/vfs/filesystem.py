"""The file system that is served: ops.Filesystem, composed of the parts."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence

from datastore.logs import fields

from ..loop import Loop
from ..ops import (
    AttrReply,
    Caller,
    DirBudget,
    DirEntry,
    Entry,
    Fh,
    FSError,
    Ino,
    Notifier,
    OpenDirReply,
    OpenReply,
    OpenRequest,
    SetAttr,
    StatFs,
)
from .change.changes import Changes
from .change.renames import Renames
from .change.setattr import SetAttrs
from .lookup.directories import Directories
from .lookup.kerneldircache import KernelDirCache
from .lookup.prefetcher import Prefetcher
from .lookup.remote import Remote
from .lookup.resolver import Resolver
from .opened.files import Files
from .opened.handles import Handles
from .opened.reading import Bytes, Reading
from .opened.writeback import WriteBack
from .opened.writing import Writing
from .tree.core import Core
from .tree.names import NAME_MAX
from .tree.reclaimer import MemoryReclaimer
from .upload.upkeep import Upkeep
from .upload.uploads import Uploads

log = logging.getLogger(__name__)
_UNLIMITED_BYTES = 1 << 50
"""1 PiB: what statfs shows of a store without a capacity; larger numbers overflow in old tools."""
_BLOCK = 4096
_FILES = 1 << 32
"""A store has no limit of them."""


class DatastoreFilesystem:
    """Implements ops.Filesystem over one Core."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.remote = Remote(core)
        prefetcher = Prefetcher(core)
        self.resolver = Resolver(core, self.remote, prefetcher)
        self.uploads = Uploads(core, self.resolver)
        self.handles = Handles(core, self.resolver)
        self._reading = Reading(core, self.remote, self.resolver, self.uploads, self.handles, prefetcher)
        self.write_back = WriteBack(core, self.uploads)
        self._writing = Writing(core, self.uploads, self.handles, self.write_back)
        self._files = Files(core, self.resolver, self.uploads, self.handles, self._writing, prefetcher)
        self._changes = Changes(core, self.remote, self.resolver, self.uploads, self._files, self._writing)
        self.renames = Renames(core, self.resolver, self.uploads, self._changes)
        self._attrs = SetAttrs(core, self.resolver, self.uploads, self.handles, self._writing)
        self.kernel_dir_cache = KernelDirCache(core)
        self._directories = Directories(core, self.resolver, self.kernel_dir_cache)
        self.reclaimer = MemoryReclaimer(core)
        self.upkeep = Upkeep(core, self.uploads, self.kernel_dir_cache)

    # -- life

    @property
    def loop(self) -> Loop:
        """See ops.Filesystem."""
        return self.core.loop

    def start(self, notifier: Notifier) -> None:
        """Begin: the kernel can be told of changes, and what is due now and then is done. On the loop."""
        self.core.notifier = notifier
        self.kernel_dir_cache.start()
        self.upkeep.start()
        self.write_back.start()
        self.reclaimer.start()

    async def stop(self) -> None:
        """Send what is unsent; what cannot be sent stays in the journal. Idempotent."""
        await self.reclaimer.stop()
        await self.upkeep.stop()
        await self.write_back.stop()
        for line in await self.flush_all():
            log.error("not in the store, kept on disk", extra=fields(file=line))
        self.core.passthrough.close()
        self.core.known.save()

    async def flush_all(self) -> list[str]:
        """Send everything that is unsent; a line for each file that failed."""
        return await self.uploads.retry(self.core.nodes.unsent())

    # -- names

    async def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Entry:
        """See ops.Filesystem."""
        directory = self.resolver.directory(parent)
        entry = self.resolver.cached(directory, name) if not directory.gone else Entry(None, 0.0)
        if entry is None:
            entry = await self.resolver.lookup(directory, name)
        if entry.attr is None and len(name) > self._name_max():  # such exist only if another tool wrote them (S-35)
            raise FSError(errno.ENAMETOOLONG)
        return entry

    def forget(self, ino: Ino, nlookup: int) -> None:
        """See ops.Filesystem."""
        self.kernel_dir_cache.forgotten(ino, nlookup)
        self.core.nodes.forget(ino, nlookup)

    async def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Entry:
        """See ops.Filesystem."""
        return await self._changes.mknod(caller, parent, name, mode, rdev)

    async def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Entry:
        """See ops.Filesystem."""
        return await self._changes.mkdir(caller, parent, name, mode)

    async def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        """See ops.Filesystem."""
        entry = await self._changes.symlink(caller, parent, name, target)
        if entry.attr is not None:
            self._reading.linked(entry.attr.ino, target)
        return entry

    async def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """See ops.Filesystem."""
        await self._changes.unlink(parent, name)

    async def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        """See ops.Filesystem."""
        await self._changes.rmdir(parent, name)

    async def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> None:
        """See ops.Filesystem."""
        await self.renames.rename(parent, name, new_parent, new_name, flags)

    async def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Entry:
        """An object has one key: EOPNOTSUPP (S-10)."""
        raise FSError(errno.EOPNOTSUPP)

    async def readlink(self, ino: Ino) -> bytes:
        """See ops.Filesystem."""
        return await self._reading.readlink(ino)

    # -- attributes

    async def getattr(self, ino: Ino, fh: Fh) -> AttrReply:
        """See ops.Filesystem."""
        known = self.resolver.known(ino)
        return known if known is not None else await self._attrs.getattr(ino)

    async def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> AttrReply:
        """See ops.Filesystem."""
        return await self._attrs.setattr(ino, fh, changes)

    async def getxattr(self, ino: Ino, name: bytes) -> bytes:
        """See ops.Filesystem."""
        return await self._attrs.getxattr(ino, name)

    async def setxattr(self, caller: Caller, ino: Ino, name: bytes, content: bytes, flags: int) -> None:
        """See ops.Filesystem."""
        await self._attrs.setxattr(ino, name, content, flags)

    async def listxattr(self, ino: Ino) -> Sequence[bytes]:
        """See ops.Filesystem."""
        return await self._attrs.listxattr(ino)

    async def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        """See ops.Filesystem."""
        await self._attrs.removexattr(ino, name)

    async def statfs(self, ino: Ino) -> StatFs:
        """The capacity of the manifest, or a very large store; what is taken is known if somebody has told us."""
        shown = self.core.settings
        blocks = (shown.capacity_bytes or _UNLIMITED_BYTES) // _BLOCK
        free = max(0, blocks - -(-shown.used_bytes // _BLOCK))
        return StatFs(blocks, free, _FILES, max(0, _FILES - shown.used_files), _BLOCK, self._name_max())

    def _name_max(self) -> int:
        """Bytes of a name that can be made."""
        return min(NAME_MAX, self.core.store.capabilities.max_new_segment_bytes)

    # -- files

    async def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> OpenReply:
        """See ops.Filesystem. ENOSYS tells the kernel to open, and flush, files by itself from now on (S-51)."""
        if self.core.settings.open_less:
            raise FSError(errno.ENOSYS)
        return await self._files.open(ino, request, caller.pid)

    async def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> tuple[Entry, OpenReply]:
        """See ops.Filesystem."""
        return await self._changes.create(caller, parent, name, mode, request)

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> Bytes:
        """See ops.Filesystem."""
        return await self._reading.read(ino, fh, offset, size)

    async def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> int:
        """See ops.Filesystem."""
        return await self._writing.write(ino, fh, offset, payload, kill_suidgid)

    async def flush(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        if self.core.settings.open_less:
            raise FSError(errno.ENOSYS)
        await self._writing.flush(ino, fh)

    async def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> None:
        """See ops.Filesystem."""
        await self._writing.fsync(ino, fh)

    async def release(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        await self._files.release(ino, fh)

    async def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> None:
        """See ops.Filesystem."""
        await self._writing.fallocate(ino, fh, offset, length, mode)

    async def lseek(self, ino: Ino, fh: Fh, offset: int, whence: int) -> int:
        """See ops.Filesystem."""
        return await self._reading.lseek(ino, fh, offset, whence)

    # -- directories

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply:
        """See ops.Filesystem."""
        return self._directories.opendir(ino)

    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        """See ops.Filesystem."""
        return await self._directories.readdir(ino, fh, offset, budget, plus)

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        self._directories.releasedir(fh)
