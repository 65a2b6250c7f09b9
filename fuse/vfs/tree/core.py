"""What the parts of the file system share: settings, collaborators, the node table and the loop.

All of this state belongs to the event loop: code between two awaits needs no lock. Locks that are held across an await
are taken in this order (docs/CONCURRENCY.md): tree lock, directory.listing_lock, node.lock (ascending ino).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from datastore.clock import Clock
from datastore.errors import NotFound, StoreError

from ...data.blockcache import BlockCache
from ...data.reader import Reader
from ...loop import Future, Lock, Loop
from ...ops import Notifier
from ...state.attributes import AttributeMemory
from ...state.listings import SavedListings
from ...state.nodelog import NodeLog, NodeRecord
from ...state.opens import OpenTable
from ...state.removed import RemovedFiles
from ...state.statedb import StateDb
from ...store.base import ObjectInfo, ObjectStore
from .attrs import Defaults
from .nodes import Node, NodeTable
from .passthrough import PassthroughFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one mount. metadata_ttl_s: how long an answer of the store is fresh. full_attributes: read an
    object's metadata, by HEAD where no listing shows it; else attributes are defaults. silly_copy_bytes: a file removed
    while open is kept as a local copy up to this size, and as a copy in the bucket above it (64 MiB take about a second
    to download). memory_bytes: the limit of the process's resident size. refuse_conflicts: an upload must replace the
    version that was opened. write_back_s: how long after its close a file may be sent; 0: before the close returns.
    used_bytes, used_files: what statfs shows as taken. open_less: the mount is read-only; the kernel opens and closes
    files by itself (S-51), and caches what directories list (S-151).
    """

    metadata_ttl_s: float
    full_attributes: bool
    capacity_bytes: int
    used_bytes: int
    used_files: int
    defaults: Defaults
    memory_bytes: int
    refuse_conflicts: bool
    write_back_s: float
    open_less: bool
    silly_copy_bytes: int = 64 << 20
    retry_upload_s: float = 30.0


class TreeLock:
    """A shared lock for uploads and changes of names, exclusive for the rename of a directory: a key must not change
    while bytes are sent to it. It is granted in the order of requests: a task that waits for exclusive() keeps later
    ones out. Waiting has no deadline of its own: the holders wait only for the store, whose calls have one.
    """

    def __init__(self) -> None:
        self._gate = Lock()
        """The exclusive task holds this lock, also while it waits for the tasks that share."""
        self._sharing = 0
        self._unshared: Future[None] | None = None

    def shared(self) -> TreeLock:
        """Enter this with `async with`: keys stay as they are inside. It must not be nested."""
        return self

    async def __aenter__(self) -> None:
        if self._gate.locked:
            async with self._gate:
                self._sharing += 1
        else:
            self._sharing += 1

    async def __aexit__(self, *_: object) -> None:
        self._sharing -= 1
        if self._unshared is not None and not self._sharing:
            self._unshared.set_result(None)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Enter this with `async with` to change keys: no other task relies on them inside."""
        async with self._gate:
            if self._sharing:
                self._unshared = Future()
                try:
                    await self._unshared
                finally:
                    self._unshared = None
            yield


@dataclass(slots=True, kw_only=True)
class Core:
    """The shared state of one mounted file system."""

    settings: Settings
    store: ObjectStore
    reader: Reader
    cache: BlockCache
    db: StateDb
    known: AttributeMemory
    nodelog: NodeLog
    opens: OpenTable
    removed: RemovedFiles
    listings: SavedListings
    nodes: NodeTable
    passthrough: PassthroughFiles
    loop: Loop
    clock: Clock
    staging_dir: Path
    notifier: Notifier = field(default_factory=Notifier)
    tree: TreeLock = field(default_factory=TreeLock)

    def log_nodes(self, nodes: Iterable[Node]) -> None:
        """Record nodes before the kernel is told of them, and the dropped nodes since the last call."""
        dropped, self.nodes.dropped = self.nodes.dropped, []
        self.nodelog.append(_records(nodes), dropped)

    def rewrite_nodelog(self) -> None:
        """Rewrite the log of node ids, with only the nodes that the kernel has a reference to."""
        nodes = [node for node in self.nodes.by_ino.values() if node.nlookup]
        # When two nodes had one name, the one that is gone must come first (restore_nodes() in vfs/opened/handles.py).
        self.nodelog.rewrite(_records(sorted(nodes, key=lambda node: not node.gone)))
        self.nodes.dropped = []

    async def head(self, key: str) -> ObjectInfo | None:
        """Return what the store says of an object; None: it has no such object. Errors: StoreError."""
        with suppress(NotFound):
            return await self.store.head(key)
        return None

    async def remove(self, key: str) -> None:
        """Delete an object, and forget its attributes. Errors: StoreError."""
        await self.store.delete(key)
        self.known.forget(key)

    async def remove_many(self, keys: Sequence[str]) -> list[StoreError]:
        """Delete objects and forget their attributes; return the errors of those that the store kept.
        Errors: StoreError."""
        failures = await self.store.delete_many(keys)
        for key in keys:
            self.known.forget(key)
        return failures


def _records(nodes: Iterable[Node]) -> list[NodeRecord]:
    return [
        NodeRecord(node.ino, node.parent.ino, node.listed_kind, node.tail, node.name)
        for node in nodes
        if node.parent is not None
    ]
