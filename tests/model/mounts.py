"""Mounts of one in-memory bucket for the state machine: a manual clock, small pages, stop, crash and restart."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from datastore.fuse.loop import pause
from datastore.fuse.store.base import ListPage
from datastore.fuse.vfs.build import build_filesystem
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from datastore.fuse.vfs.tree.attrs import Defaults, from_metadata
from datastore.fuse.vfs.tree.nodes import Node
from tests.clock import ManualClock
from tests.driving import resolve, the_loop
from tests.killing import kill
from tests.localfs import File, LocalFs
from tests.memorystore import HookedStore, MemoryBucket, MemoryStore
from tests.model.reference import Object
from tests.mounted import spec_at

T = TypeVar("T")
_DEFAULTS = Defaults(os.getuid(), os.getgid()).of(stat.S_IFREG, 0)


class PagedStore(HookedStore):
    """A server whose listing pages are small, so that a few entries make a large directory. A page takes 1 ms of the
    clock. During each call other tasks run."""

    def __init__(self, bucket: MemoryBucket, page_keys: int, clock: ManualClock) -> None:
        super().__init__(MemoryStore(bucket))
        self._page_keys, self._clock = page_keys, clock

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await pause(0.0)
        return await call()

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        max_keys: int = 1000,
        unless: bytes = b"",
    ) -> ListPage:
        keys = min(max_keys, self._page_keys)
        self._clock.advance(0.001)
        return await super().list_page(
            prefix, delimiter=delimiter, token=token, start_after=start_after, max_keys=keys, unless=unless
        )


class Mount:
    """One mount, which can be stopped, crash and be built again over its state directory."""

    def __init__(
        self,
        directory: Path,
        bucket: MemoryBucket,
        clock: ManualClock,
        *,
        ttl_s: float = 0.0,
        page_keys: int = 1000,
        silly_copy_bytes: int = 1 << 20,
        **more: Any,
    ) -> None:
        """more: fields of MountSpec."""
        self.bucket, self._clock = bucket, clock
        self._page_keys, self._silly_copy_bytes = page_keys, silly_copy_bytes
        self._spec = spec_at(directory, metadata_ttl_s=ttl_s, **more)
        self.build()

    def build(self, *, resumed: bool = False) -> None:
        """Mount, or (resumed) take over from a server that died."""
        self.restarted = resumed
        store = PagedStore(self.bucket, self._page_keys, self._clock)
        self.fs: DatastoreFilesystem = build_filesystem(
            self._spec, store, loop=the_loop(), clock=self._clock, resumed=resumed
        )
        core = self.fs.core
        core.settings = replace(core.settings, silly_copy_bytes=self._silly_copy_bytes)
        self.local = LocalFs(self.fs)

    def take_over(self, files: list[File]) -> None:
        """Let files that were opened at an earlier server go on with this one."""
        for file in files:
            file.__init__(self.fs, file.ino, file._fh)  # type: ignore[misc]

    def stop(self) -> None:
        """Unmount."""
        resolve(self.fs.stop())
        kill(self.fs)

    def crash(self) -> None:
        """Let all processes die: nothing is sent, nothing removed."""
        kill(self.fs)

    def forget(self, opened: Collection[int] = ()) -> None:
        """Let the kernel forget inodes that are neither open (`opened`: at an earlier server) nor above an open one."""
        self.fs.loop.call(lambda: self._forget(opened))

    def _forget(self, opened: Collection[int]) -> None:
        nodes = self.fs.core.nodes
        held: set[int] = {nodes.root.ino}
        for node in nodes.by_ino.values():
            above: Node | None = node if node.handles or node.ino in opened else None
            while above is not None:
                held.add(above.ino)
                above = None if above.gone else above.parent
        for node in list(nodes.by_ino.values()):
            if node.ino not in held and node.nlookup:
                self.fs.forget(node.ino, node.nlookup)


def objects_of(bucket: MemoryBucket) -> dict[str, Object]:
    """Return the bucket's objects as the model's Object."""
    found = {}
    for raw, stored in bucket.objects.items():
        kind = stat.S_IFDIR if raw.endswith(b"/") else stat.S_IFREG
        mode, mtime_ns, xattrs = None, None, {}
        if "mode" in stored.metadata:
            attributes = from_metadata(stored.metadata, kind, _DEFAULTS)
            mode, mtime_ns, xattrs = attributes.mode, attributes.mtime_ns, dict(attributes.xattrs)
        found[raw.decode("utf-8", "surrogateescape")] = Object(stored.body, mode, mtime_ns, xattrs)
    return found
