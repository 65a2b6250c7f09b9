"""What the parts of the file system share: settings, collaborators, the node table and the state lock.

Lock order (docs/CONCURRENCY.md): tree lock, directory.listing_lock, node.lock (ascending ino), state lock. Only the
state lock may be taken by the loop thread with waiting; it is never held across I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from datastore.clock import Clock
from datastore.errors import DeadlineExceeded
from datastore.retry import carried

from ...data.blockcache import BlockCache
from ...data.reader import Reader
from ...ops import NoNotifier, Notifier
from ...state.attributes import AttributeMemory
from ...state.listings import SavedListings
from ...state.nodelog import NodeLog, NodeRecord
from ...state.opens import OpenTable
from ...state.removed import RemovedFiles
from ...state.statedb import StateDb
from ...store.base import DeleteFailure, ObjectStore
from .attrs import Defaults
from .distance import Distance
from .nodes import Node, NodeTable
from .passthrough import PassthroughFiles
from .treelock import TreeLock

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One mount's choices. metadata_ttl_s: how long what the store said may be believed.

    silly_copy_bytes: a file removed while open is kept by a local copy up to this size, by a copy in the bucket above
    (that is where a download would be felt: 64 MiB is about a second). memory_bytes: the limit of the process's
    resident size. refuse_conflicts: an upload must replace the version that was opened. write_back_s: how long after
    its close a file may be sent; 0: before the close returns.
    used_bytes, used_files: what statfs shows as taken. open_less: the kernel opens and closes files by itself (S-51).
    keep_directories: it keeps what directories list (S-151).
    """

    metadata_ttl_s: float = 1.0
    full_attributes: bool = True
    capacity_bytes: int = 0
    used_bytes: int = 0
    used_files: int = 0
    defaults: Defaults = field(default_factory=lambda: Defaults(0, 0))
    silly_copy_bytes: int = 64 << 20
    retry_upload_s: float = 30.0
    memory_bytes: int = 512 << 20
    refuse_conflicts: bool = False
    write_back_s: float = 0.0
    open_less: bool = False
    keep_directories: bool = False


@dataclass(slots=True, kw_only=True)
class Core:
    """The shared state of one mounted file system.

    io runs single requests of a larger piece of work (parts, HEADs, copies); such a task never waits for another.
    """

    settings: Settings
    store: ObjectStore
    reader: Reader
    cache: BlockCache | None
    db: StateDb
    known: AttributeMemory
    nodelog: NodeLog
    opens: OpenTable
    removed: RemovedFiles
    listings: SavedListings
    nodes: NodeTable
    passthrough: PassthroughFiles
    io: Executor
    clock: Clock
    staging_dir: Path
    notifier: Notifier = field(default_factory=NoNotifier)
    lock: threading.RLock = field(default_factory=threading.RLock)
    tree: TreeLock = field(default_factory=TreeLock)
    distance: Distance = field(default_factory=Distance)

    def now_ns(self) -> int:
        """The time for mtime and ctime."""
        return self.clock.time_ns()

    def log_nodes(self, nodes: Iterable[Node]) -> None:
        """Record nodes before the kernel hears of them, and those that are no more; the state lock is held."""
        dropped, self.nodes.dropped = self.nodes.dropped, []
        self.nodelog.append(_records(nodes), dropped)

    def rewrite_nodelog(self) -> None:
        """Record what the kernel has, and nothing else; the state lock is held."""
        nodes = [node for node in self.nodes.by_ino.values() if node.nlookup]
        # Of two nodes of one name the one that is gone has to come first (NodeTable.restore).
        self.nodelog.rewrite(_records(sorted(nodes, key=lambda node: not node.gone)))
        self.nodes.dropped = []

    def remove(self, key: str) -> None:
        """Delete an object, and what is known of it. StoreError."""
        self.store.delete(key)
        self.known.forget(key)

    def remove_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """The same of several; those that the store kept. StoreError."""
        failures = self.store.delete_many(keys)
        for key in keys:
            self.known.forget(key)
        return failures

    def each(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """call(item), a single request, for all, side by side; results in order.

        The first error is raised after all have ended. DeadlineExceeded when for minutes none of them ended: then those
        that are at work are lost, and the others are never begun.
        """
        job = carried(call)
        futures = [self.io.submit(job, item) for item in items]
        results: list[R] = []
        failure: BaseException | None = None
        for future in futures:
            _await(future, futures)
            try:
                results.append(future.result(timeout=0))
            except Exception as error:  # raised below, when no sibling is at work any more
                failure = failure or error
        if failure is not None:
            raise failure
        return results

    def both(self, one: Callable[[], T], other: Callable[[], R]) -> tuple[T, R]:
        """Two single requests side by side, when both have ended. Errors: the first one's before the other's."""
        future = self.io.submit(carried(other))
        try:
            found = one()
        finally:
            _await(future, (future,))
        return found, future.result(timeout=0)


def _await(future: Future[R], siblings: Sequence[Future[R]]) -> None:
    """Until it has ended; DeadlineExceeded."""
    ended = -1
    while not wait((future,), timeout=_PATIENCE_S).done:
        before, ended = ended, sum(one.done() for one in siblings)
        if ended == before:
            for one in siblings:
                one.cancel()
            raise DeadlineExceeded("nothing was heard of a request to the store for too long; try again")


def _records(nodes: Iterable[Node]) -> list[NodeRecord]:
    return [
        NodeRecord(node.ino, node.parent.ino, node.listed_kind, node.tail, node.name)
        for node in nodes
        if node.parent is not None
    ]


_PATIENCE_S = 450.0
"""A request is bounded by the store's own deadlines, and its repetitions by their budget: no two of these go by."""
