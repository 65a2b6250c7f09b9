"""Composes a mounted store from a MountSpec: the only place that knows all classes of the data plane."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datastore.api.mountspec import MountSpec
from datastore.clock import Clock, SystemClock
from datastore.errors import StoreError
from datastore.logs import fields

from ..data.blockcache import BlockCache
from ..data.reader import Reader
from ..ops import Ino
from ..state.attributes import AttributeMemory
from ..state.nodelog import NodeLog
from ..state.statedb import StateDb
from ..store.base import ObjectStore
from ..store.s3 import open_s3, probe
from .attrs import Defaults
from .core import Core, Settings
from .filesystem import DatastoreFilesystem
from .listing import Listed
from .nodes import Directory, Node, NodeTable
from .renames import finish
from .warm import warm

log = logging.getLogger(__name__)
_IO_THREADS = 64
"""HEADs are sent 64 wide (issue: attributes of a directory); parts and ranges use some of the same threads."""


class MountedStore:
    """One file system with its store, cache and journal."""

    def __init__(
        self, filesystem: DatastoreFilesystem, location: str, store_status: Callable[[], Mapping[str, object]]
    ) -> None:
        self.filesystem = filesystem
        self._location = location
        self._store_status = store_status

    def status(self) -> dict[str, object]:
        """What `datastore status` shows of this side."""
        core = self.filesystem.core
        used, limit = core.cache.usage() if core.cache is not None else (0, 0)
        return {
            "location": self._location,
            "dirty": self.filesystem.uploads.unsent(),
            "cache": {"bytes": used, "limit": limit},
            "store": self._store_status(),
            "nodes": len(core.nodes.by_ino),
            "unfinished": [f"{i.kind} {i.source} -> {i.target}" for i in core.db.intents() if i.kind != "discard"],
        }

    def warm(self, path: str, progress: Callable[[dict[str, int | None]], None]) -> dict[str, object]:
        """Bring what is below a path into the cache; see warm.warm."""
        return warm(self.filesystem, path, progress)

    def flush_all(self) -> list[str]:
        """Send all that is unsent; a line for each failure."""
        return self.filesystem.flush_all()


def build_mount(spec: MountSpec, *, resumed: bool = False) -> MountedStore:
    """Probe the backend, then make the file system; resumed: the kernel already knows nodes of an earlier server.

    Errors: those of probe() - wrong key, bucket, region, endpoint - within 5 s; nothing is changed then.
    """
    capabilities = None if resumed else probe(spec.s3, deadline_s=5.0, writable=not spec.read_only)
    store = open_s3(spec.s3, capabilities=capabilities)
    location = f"s3://{spec.s3.bucket}/{spec.s3.prefix}"
    filesystem = build_filesystem(spec, store, resumed=resumed)
    return MountedStore(filesystem, location, store.metrics.snapshot)


def build_filesystem(
    spec: MountSpec, store: ObjectStore, *, clock: Clock | None = None, resumed: bool = False
) -> DatastoreFilesystem:
    """The file system over any store; unsent files and half-done renames of an earlier process are finished first."""
    state = Path(spec.state_dir)
    staging = state / "staging"
    staging.mkdir(mode=0o700, parents=True, exist_ok=True)
    db = StateDb(state / "state.db")
    io = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="io")
    cache = BlockCache(Path(spec.cache_dir), spec.cache_size_bytes, f"{spec.s3.endpoint}/{spec.s3.bucket}")
    defaults = Defaults(os.getuid(), os.getgid())
    clock = clock or SystemClock()
    known = AttributeMemory(db)
    core = Core(
        settings=Settings(
            metadata_ttl_s=spec.metadata_ttl_s,
            full_attributes=spec.attributes == "full",
            capacity_bytes=spec.capacity_bytes,
            defaults=defaults,
        ),
        store=store,
        reader=Reader(store, cache, io, learn=known.learn),
        cache=cache,
        db=db,
        known=known,
        nodelog=NodeLog(state / "nodes.log"),
        nodes=NodeTable(spec.s3.prefix, defaults.of(stat.S_IFDIR, clock.time_ns())),
        io=io,
        clock=clock,
        staging_dir=staging,
    )
    filesystem = DatastoreFilesystem(core)
    _recover(core, filesystem, resumed=resumed)
    return filesystem


def _recover(core: Core, filesystem: DatastoreFilesystem, *, resumed: bool) -> None:
    by_key: dict[str, Node] = {}
    if resumed:
        _restore_nodes(core)
        by_key = {node.key: node for node in core.nodes.by_ino.values()}
    else:
        core.nodelog.rewrite([])
    filesystem.uploads.recover(by_key.get)
    failures = [] if resumed else filesystem.uploads.retry([])
    try:
        failures += finish(core, resumed=resumed)
    except StoreError as error:
        failures.append(str(error))
    for line in failures:
        log.error("left from an earlier run and not yet finished", extra=fields(what=line))


def _restore_nodes(core: Core) -> None:
    """The nodes that the kernel may still ask for; the store is asked about each when it is used."""
    records = core.nodelog.load()
    waiting = list(records.values())
    while waiting:
        rest = []
        for record in waiting:
            parent = core.nodes.by_ino.get(record.parent)
            if not isinstance(parent, Directory):
                rest.append(record)
                continue
            attributes = core.settings.defaults.of(record.kind, core.clock.time_ns())
            kind = (
                stat.S_IFDIR
                if record.kind == stat.S_IFDIR
                else stat.S_IFLNK
                if record.kind == stat.S_IFLNK
                else stat.S_IFREG
            )
            core.nodes.restore(Ino(record.ino), parent, record.name, Listed(kind, record.tail), attributes)
        if len(rest) == len(waiting):
            return
        waiting = rest
