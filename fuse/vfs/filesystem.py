"""The file system that is served: an ops.Filesystem, composed of the classes of this package."""

from __future__ import annotations

import errno
import logging

from datastore.logs import fields

from .. import ops
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
from .opened.reading import Reading
from .tree.core import Core
from .tree.names import NAME_MAX, segment_of
from .tree.reclaimer import MemoryReclaimer
from .upload.upkeep import Upkeep
from .upload.uploads import Uploads

log = logging.getLogger(__name__)
_UNLIMITED_BYTES = 1 << 50
"""The size that statfs shows for a store without a capacity, 1 PiB; larger numbers overflow in old tools."""
_BLOCK = 4096
_FILES = 1 << 32
"""The number of inodes that statfs shows; a store has no limit."""


class DatastoreFilesystem:
    """Implements ops.Filesystem over one Core. An operation that one part does alone is that part's bound method."""

    def __init__(self, core: Core) -> None:
        self.core, self.loop = core, core.loop
        self.remote = Remote(core)
        prefetcher = Prefetcher(core, self.remote)
        self.resolver = Resolver(core, self.remote, prefetcher)
        self.uploads = Uploads(core, self.resolver)
        self.handles = Handles(core, self.resolver)
        reading = Reading(core, self.resolver, self.uploads, self.handles, prefetcher)
        self.kernel_dir_cache = KernelDirCache(core)
        self.upkeep = Upkeep(core, self.uploads, self.kernel_dir_cache)
        files = Files(core, self.resolver, self.uploads, self.handles, self.upkeep, prefetcher)
        self.chases = files.chases
        changes = Changes(core, self.remote, self.resolver, self.uploads, files, reading)
        self.renames = Renames(core, self.resolver, self.uploads, changes)
        attributes = SetAttrs(core, self.resolver, self.uploads, self.handles, files)
        directories = Directories(core, self.resolver, self.kernel_dir_cache)
        self.reclaimer = MemoryReclaimer(core)
        self.mknod, self.mkdir, self.symlink = changes.mknod, changes.mkdir, changes.symlink
        self.unlink, self.rmdir, self.rename = changes.unlink, changes.rmdir, self.renames.rename
        self.create, self.open, self.release = changes.create, files.open, files.release
        self.write, self.fallocate, self.flush, self.fsync = files.write, files.fallocate, files.flush, files.fsync
        self.read, self.readlink = reading.read, reading.readlink
        self.getattr, self.setattr = attributes.getattr, attributes.setattr
        self.getxattr, self.listxattr = attributes.getxattr, attributes.listxattr
        self.setxattr, self.removexattr = attributes.setxattr, attributes.removexattr
        self.opendir, self.readdir, self.releasedir = directories.opendir, directories.readdir, directories.releasedir

    # -- start and stop

    def start(self, notifier: ops.Notifier) -> None:
        """Start the periodic jobs; the kernel can be notified from now on. Only the loop's thread may call this."""
        self.core.notifier = notifier
        self.kernel_dir_cache.start()
        self.upkeep.start()
        self.reclaimer.start()

    async def stop(self) -> None:
        """Send what is unsent; what cannot be sent stays in the journal. Idempotent."""
        await self.reclaimer.stop()
        await self.upkeep.stop()
        for line in await self.flush_all():
            log.error("not in the store, kept on disk", extra=fields(file=line))
        self.core.passthrough.close()
        await self.core.known.save()

    async def flush_all(self) -> list[str]:
        """Send everything that is unsent; return a line for each file that failed."""
        return await self.uploads.retry(self.core.nodes.unsent())

    # -- names

    async def lookup(self, caller: ops.Caller, parent: ops.Ino, name: bytes) -> ops.Entry:
        directory = self.resolver.directory(parent)
        if self.uploads.orphans.arriving and await self.uploads.orphans.arrived(directory.key + segment_of(name)):
            self.resolver.doubt(directory, name)
        entry = self.resolver.cached(directory, name) if not directory.gone else ops.Entry(None, 0.0)
        if entry is None:
            entry = await self.resolver.lookup(directory, name)
        if entry.attr is None and len(name) > self._name_max():  # other tools may make longer names (S-35)
            raise ops.FSError(errno.ENAMETOOLONG)
        return entry

    def forget(self, ino: ops.Ino, nlookup: int) -> None:
        self.kernel_dir_cache.forgotten(ino, nlookup)
        self.core.nodes.forget(ino, nlookup)

    async def link(self, caller: ops.Caller, ino: ops.Ino, new_parent: ops.Ino, new_name: bytes) -> ops.Entry:
        """Refuse a hard link with EPERM (S-10), as an object has one key; programs can do without hard links then."""
        raise ops.FSError(errno.EPERM)

    async def statfs(self, ino: ops.Ino) -> ops.StatFs:
        """Return the manifest's capacity, or 1 PiB, and what is used of it if the settings tell that."""
        shown = self.core.settings
        blocks = (shown.capacity_bytes or _UNLIMITED_BYTES) // _BLOCK
        free = max(0, blocks - -(-shown.used_bytes // _BLOCK))
        return ops.StatFs(blocks, free, _FILES, max(0, _FILES - shown.used_files), _BLOCK, self._name_max())

    def _name_max(self) -> int:
        """Return the most bytes that a new name may have."""
        return min(NAME_MAX, self.core.store.capabilities.max_new_segment_bytes)
