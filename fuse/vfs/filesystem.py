"""The file system that is served: ops.Filesystem, composed of the parts. Decides only what may be answered at once."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from functools import partial

from datastore.logs import fields

from ..loop import Loop
from ..ops import (
    AttrReply,
    Blocking,
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
    Reply,
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

    def use_loop(self, loop: Loop) -> None:
        """Let it wait for the small files that are fetched ahead."""
        self.core.reader.loop = loop

    def start(self, notifier: Notifier) -> None:
        """Begin: the kernel can be told of changes, and what is due now and then is done."""
        self.core.notifier = notifier
        self.kernel_dir_cache.start()
        self.upkeep.start()
        self.write_back.start()
        self.reclaimer.start()

    def stop(self) -> None:
        """Send what is unsent; what cannot be sent stays in the journal. Idempotent."""
        self.reclaimer.stop()
        self.upkeep.stop()
        self.write_back.stop()
        for line in self.flush_all():
            log.error("not in the store, kept on disk", extra=fields(file=line))
        self.core.passthrough.close()
        self.core.known.save()

    def flush_all(self) -> list[str]:
        """Send everything that is unsent; a line for each file that failed."""
        with self.core.lock:
            nodes = self.core.nodes.unsent()
        return self.uploads.retry(nodes)

    # -- names

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Reply[Entry]:
        """See ops.Filesystem."""
        if len(name) > self._name_max():
            return Blocking(partial(self._lookup_long, parent, name))
        with self.core.lock:
            directory = self.resolver.directory(parent)
            entry = self.resolver.cached(directory, name) if not directory.gone else Entry(None, 0.0)
        return entry if entry is not None else Blocking(partial(self.resolver.lookup, directory, name))

    def _lookup_long(self, parent: Ino, name: bytes) -> Entry:
        """Such names exist only if another tool wrote them (S-35)."""
        entry = self.resolver.lookup(self.resolver.directory(parent), name)
        if entry.attr is None:
            raise FSError(errno.ENAMETOOLONG)
        return entry

    def forget(self, ino: Ino, nlookup: int) -> None:
        """See ops.Filesystem."""
        with self.core.lock:
            self.kernel_dir_cache.forgotten(ino, nlookup)
            self.core.nodes.forget(ino, nlookup)

    def mknod(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int) -> Reply[Entry]:
        """See ops.Filesystem."""
        return Blocking(partial(self._changes.mknod, caller, parent, name, mode, rdev))

    def mkdir(self, caller: Caller, parent: Ino, name: bytes, mode: int) -> Reply[Entry]:
        """See ops.Filesystem."""
        return Blocking(partial(self._changes.mkdir, caller, parent, name, mode))

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Reply[Entry]:
        """See ops.Filesystem."""
        return Blocking(partial(self._symlink, caller, parent, name, target))

    def _symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Entry:
        entry = self._changes.symlink(caller, parent, name, target)
        if entry.attr is not None:
            self._reading.linked(entry.attr.ino, target)
        return entry

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> Reply[None]:
        """See ops.Filesystem."""
        return Blocking(partial(self._changes.unlink, parent, name))

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> Reply[None]:
        """See ops.Filesystem."""
        return Blocking(partial(self._changes.rmdir, parent, name))

    def rename(
        self, caller: Caller, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, flags: int
    ) -> Reply[None]:
        """See ops.Filesystem."""
        return Blocking(partial(self.renames.rename, parent, name, new_parent, new_name, flags))

    def link(self, caller: Caller, ino: Ino, new_parent: Ino, new_name: bytes) -> Reply[Entry]:
        """An object has one key: EOPNOTSUPP (S-10)."""
        raise FSError(errno.EOPNOTSUPP)

    def readlink(self, ino: Ino) -> Reply[bytes]:
        """See ops.Filesystem."""
        return self._reading.readlink(ino)

    # -- attributes

    def getattr(self, ino: Ino, fh: Fh) -> Reply[AttrReply]:
        """See ops.Filesystem."""
        return self._attrs.getattr(ino)

    def setattr(self, caller: Caller, ino: Ino, fh: Fh, changes: SetAttr) -> Reply[AttrReply]:
        """See ops.Filesystem."""
        return Blocking(partial(self._attrs.setattr, ino, fh, changes))

    def getxattr(self, ino: Ino, name: bytes) -> Reply[bytes]:
        """See ops.Filesystem."""
        return self._attrs.getxattr(ino, name)

    def setxattr(self, caller: Caller, ino: Ino, name: bytes, content: bytes, flags: int) -> Reply[None]:
        """See ops.Filesystem."""
        return Blocking(partial(self._attrs.setxattr, ino, name, content, flags))

    def listxattr(self, ino: Ino) -> Reply[Sequence[bytes]]:
        """See ops.Filesystem."""
        return Blocking(partial(self._attrs.listxattr, ino))

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> Reply[None]:
        """See ops.Filesystem."""
        return Blocking(partial(self._attrs.removexattr, ino, name))

    def statfs(self, ino: Ino) -> Reply[StatFs]:
        """The capacity of the manifest, or a very large store; what is taken is known if somebody has told us."""
        shown = self.core.settings
        blocks = (shown.capacity_bytes or _UNLIMITED_BYTES) // _BLOCK
        free = max(0, blocks - -(-shown.used_bytes // _BLOCK))
        return StatFs(blocks, free, _FILES, max(0, _FILES - shown.used_files), _BLOCK, self._name_max())

    def _name_max(self) -> int:
        """Bytes of a name that can be made."""
        return min(NAME_MAX, self.core.store.capabilities.max_new_segment_bytes)

    # -- files

    def open(self, caller: Caller, ino: Ino, request: OpenRequest) -> Reply[OpenReply]:
        """See ops.Filesystem. ENOSYS tells the kernel to open, and flush, files by itself from now on (S-51)."""
        if self.core.settings.open_less:
            raise FSError(errno.ENOSYS)
        return self._files.open(ino, request, caller.pid)

    def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, request: OpenRequest
    ) -> Reply[tuple[Entry, OpenReply]]:
        """See ops.Filesystem."""
        return self._changes.create(caller, parent, name, mode, request)

    def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> Reply[Bytes]:
        """See ops.Filesystem."""
        return self._reading.read(ino, fh, offset, size)

    def write(self, ino: Ino, fh: Fh, offset: int, payload: memoryview, kill_suidgid: bool) -> Reply[int]:
        """See ops.Filesystem."""
        return self._writing.write(ino, fh, offset, payload, kill_suidgid)

    def flush(self, ino: Ino, fh: Fh) -> Reply[None]:
        """See ops.Filesystem."""
        if self.core.settings.open_less:
            raise FSError(errno.ENOSYS)
        return self._writing.flush(ino, fh)

    def fsync(self, ino: Ino, fh: Fh, datasync: bool) -> Reply[None]:
        """See ops.Filesystem."""
        return self._writing.fsync(ino, fh)

    def release(self, ino: Ino, fh: Fh) -> Reply[None]:
        """See ops.Filesystem."""
        return self._files.release(ino, fh)

    def fallocate(self, ino: Ino, fh: Fh, offset: int, length: int, mode: int) -> Reply[None]:
        """See ops.Filesystem."""
        return self._writing.fallocate(ino, fh, offset, length, mode)

    def lseek(self, ino: Ino, fh: Fh, offset: int, whence: int) -> Reply[int]:
        """See ops.Filesystem."""
        return self._reading.lseek(ino, fh, offset, whence)

    # -- directories

    def opendir(self, caller: Caller, ino: Ino) -> Reply[OpenDirReply]:
        """See ops.Filesystem."""
        return self._directories.opendir(ino)

    def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Reply[Sequence[DirEntry]]:
        """See ops.Filesystem."""
        return self._directories.readdir(ino, fh, offset, budget, plus)

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        """See ops.Filesystem."""
        self._directories.releasedir(fh)
