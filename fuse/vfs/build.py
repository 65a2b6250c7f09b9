"""Composes a mounted store from a MountSpec: the only place that knows all classes of the data plane."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from datastore.api.mountspec import MountSpec, StaticCredentials
from datastore.clock import Clock, SystemClock
from datastore.errors import CredentialsInvalid, StoreError
from datastore.logs import fields

from ..data.blockcache import BlockCache
from ..data.reader import Reader
from ..state.attributes import AttributeMemory
from ..state.listings import SavedListings
from ..state.nodelog import NodeLog
from ..state.opens import OpenTable
from ..state.removed import RemovedFiles
from ..state.statedb import StateDb
from ..store.base import ObjectStore
from ..store.s3 import StaticSource, open_s3, probe
from .change.finishing import finish
from .filesystem import DatastoreFilesystem
from .opened.restoring import nodes_by_key, restore_nodes, restore_opens
from .tree.attrs import Defaults
from .tree.ceiling import Shares, holdings
from .tree.core import Core, Settings
from .tree.lent import LentFiles
from .tree.nodes import NodeTable
from .warm import warm

log = logging.getLogger(__name__)
_IO_THREADS = 64
"""HEADs are sent 64 wide (issue: attributes of a directory); parts and ranges use some of the same threads."""


class MountedStore:
    """One file system with its store, cache and journal."""

    def __init__(
        self,
        filesystem: DatastoreFilesystem,
        location: str,
        store_status: Callable[[], Mapping[str, object]],
        keys: StaticSource | None = None,
    ) -> None:
        self.filesystem = filesystem
        self._location = location
        self._store_status = store_status
        self._keys = keys

    def status(self) -> dict[str, object]:
        """What `datastore status` shows of this side."""
        core = self.filesystem.core
        used, limit = core.cache.usage() if core.cache is not None else (0, 0)
        return {
            "location": self._location,
            "dirty": self.filesystem.uploads.unsent(),
            "cache": {"bytes": used, "limit": limit, **core.reader.counts.snapshot()},
            "store": self._store_status(),
            "nodes": len(core.nodes.by_ino),
            "memory": holdings(core),
            "unfinished": [f"{i.kind} {i.source} -> {i.target}" for i in core.db.intents() if i.kind != "discard"],
        }

    def renew(self, given: StaticCredentials) -> None:
        """Other keys from now on. Errors: CredentialsInvalid when the mount was not made with a Secret's."""
        if self._keys is None:
            raise CredentialsInvalid("this mount finds its credentials by the AWS chain, so it takes no others")
        self._keys.replace(given)

    def show(self, group: int | None, capacity_bytes: int, used_bytes: int, used_files: int) -> None:
        """Show another size, or everything as of another group: then the kernel asks again for what it knew."""
        core = self.filesystem.core
        with core.lock:
            defaults = core.settings.defaults._replace(group=group)
            same = defaults == core.settings.defaults
            core.settings = replace(
                core.settings,
                defaults=defaults,
                capacity_bytes=capacity_bytes,
                used_bytes=used_bytes,
                used_files=used_files,
            )
            nodes = [] if same else list(core.nodes.by_ino.values())
            for node in nodes:
                node.attributes = defaults.seen(node.attributes)
        for node in nodes:
            core.notifier.inval_inode(node.ino, -1)

    def warm(self, path: str, progress: Callable[[dict[str, int | None]], None]) -> dict[str, object]:
        """Bring what is below a path into the cache; see warm.warm."""
        return warm(self.filesystem, path, progress)

    def discard(self, path: str) -> int:
        """Drop unsent bytes of a path; see Uploads.forget."""
        return self.filesystem.uploads.forget(path)

    def flush_all(self) -> list[str]:
        """Send all that is unsent; a line for each failure."""
        return self.filesystem.flush_all()


def build_mount(spec: MountSpec, *, resumed: bool = False) -> MountedStore:
    """Probe the backend, then make the file system; resumed: the kernel already knows nodes of an earlier server.

    Errors: those of probe() - wrong key, bucket, region, endpoint - within 5 s; nothing is changed then.
    """
    capabilities = None if resumed else probe(spec.s3, deadline_s=5.0, writable=not spec.read_only)
    keys = StaticSource(spec.s3.credentials) if spec.s3.credentials else None
    full = spec.attributes == "full"
    store = open_s3(spec.s3, capabilities=capabilities, keys=keys, list_metadata=full)
    location = f"s3://{spec.s3.bucket}/{spec.s3.prefix}"
    filesystem = build_filesystem(spec, store, resumed=resumed)
    return MountedStore(filesystem, location, store.metrics.snapshot, keys)


def believed_s(spec: MountSpec) -> float:
    """How long the mount believes what it knows. The kernel is told the rest of that with each answer; libfuse takes
    one time for all answers, so there the mount and the kernel have half of it each.
    """
    return spec.metadata_ttl_s / 2 if spec.transport == "libfuse" else spec.metadata_ttl_s


def defaults_of(spec: MountSpec) -> Defaults:
    """What an object without attributes of its own looks like on this mount."""
    umask = 0o022 if spec.umask is None else spec.umask
    return Defaults(
        uid=os.getuid() if spec.uid is None else spec.uid,
        gid=os.getgid() if spec.gid is None else spec.gid,
        file_mode=0o666 & ~umask,
        directory_mode=0o777 & ~umask,
        group=spec.group,
    )


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
    defaults = defaults_of(spec)
    clock = clock or SystemClock()
    shares = Shares.of(spec.memory_bytes)
    known = AttributeMemory(db, entries=shares.attributes)
    core = Core(
        settings=Settings(
            metadata_ttl_s=believed_s(spec),
            full_attributes=spec.attributes == "full",
            capacity_bytes=spec.capacity_bytes,
            used_bytes=spec.used_bytes or 0,
            used_files=spec.used_files or 0,
            defaults=defaults,
            memory_bytes=spec.memory_bytes,
            refuse_conflicts=spec.conflict == "fail",
            write_back_s=spec.write_back_s,
            open_less=spec.read_only and spec.transport == "kernel",
            keep_directories=spec.read_only and spec.transport == "kernel",
        ),
        store=store,
        reader=Reader(store, cache, io, memory_bytes=shares.pieces, learn=known.learn),
        cache=cache,
        db=db,
        known=known,
        nodelog=NodeLog(state / "nodes.log"),
        opens=OpenTable(state / "opens"),
        removed=RemovedFiles(state / "removed"),
        listings=SavedListings(state / "listings"),
        nodes=NodeTable(spec.s3.prefix, defaults.of(stat.S_IFDIR, clock.time_ns())),
        lent=LentFiles(cache, io),
        io=io,
        clock=clock,
        staging_dir=staging,
    )
    filesystem = DatastoreFilesystem(core)
    _recover(core, filesystem, resumed=resumed)
    return filesystem


def _recover(core: Core, filesystem: DatastoreFilesystem, *, resumed: bool) -> None:
    if resumed:
        restore_nodes(core)
        restore_opens(core, filesystem.handles)
    else:
        core.nodelog.rewrite([])
        core.opens.clear()
        core.removed.clear()
        core.listings.clear()
        _after_a_boot(core)
    filesystem.uploads.recover(nodes_by_key(core))
    failures = [] if resumed else filesystem.uploads.retry([])
    try:
        failures += finish(core, filesystem.renames, filesystem.uploads, resumed=resumed)
    except StoreError as error:
        failures.append(str(error))
    if resumed:
        filesystem.write_back.resume()
    for line in failures:
        log.error("left from an earlier run and not yet finished", extra=fields(what=line))


def _after_a_boot(core: Core) -> None:
    """The machine may have gone down before the end of what was begun was on the disk: it counts as put off (S-27)."""
    if core.db.rebooted:
        for intent in core.db.intents():
            with suppress(OSError):  # the disk is full
                core.db.put_off(intent.id, core.now_ns())
    core.db.seen_boot()
