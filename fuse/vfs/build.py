"""Builds a mounted store from a MountSpec. Only this module knows all classes of the data plane."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location, Source, StaticCredentials, credentials_of, with_credentials
from datastore.clock import Clock, SystemClock
from datastore.errors import CredentialsInvalid, DatastoreError, InvalidManifest, MountFailed, StoreError
from datastore.logs import fields

from ..data.blockcache import BlockCache
from ..data.reader import Reader
from ..loop import Loop
from ..state.attributes import AttributeMemory
from ..state.listings import SavedListings
from ..state.nodelog import NodeLog
from ..state.opens import OpenTable
from ..state.removed import RemovedFiles
from ..state.statedb import StateDb
from ..store.base import ObjectStore
from ..store.retrying import RetryingStore
from ..store.s3 import StaticSource, find_source, open_s3, probe
from .filesystem import DatastoreFilesystem
from .opened.handles import restore_nodes
from .tree import facts
from .tree.attrs import Defaults
from .tree.core import Core, Settings
from .tree.nodes import NodeTable
from .tree.passthrough import PassthroughFiles
from .tree.reclaimer import Shares, holdings
from .warm import warm

log = logging.getLogger(__name__)
LEFT_S = 20.0
"""How long a new mount waits, in seconds, until what an earlier one has left is sent; the supervisor waits for 60 s."""
PROBE_S = 4.0
"""How long the store may take to say whether a mount can be made, or whether it takes new keys."""
_LOOK_S = 0.005
"""The pause between two checks whether that has ended, in seconds."""


class MountedStore:
    """A file system with its store, cache and journal (server.MountedStore). Any thread but the loop's may call it."""

    def __init__(
        self, filesystem: DatastoreFilesystem, spec: MountSpec, store: RetryingStore, keys: StaticSource | None
    ) -> None:
        self.filesystem = filesystem
        self._spec = spec
        self._store = store
        self._store.upload_pace.limit(spec.upload_limit_bytes)
        self._keys = keys

    def status(self) -> dict[str, object]:
        """Return what `datastore status` shows of this server, also when the loop has ended."""
        core = self.filesystem.core
        used, limit = core.cache.usage()
        try:
            seen = core.loop.call(self._seen)
        except MountFailed:
            seen = self._seen()  # the loop has ended: nothing changes any more
        return {
            "location": str(self._spec.source),
            "cache": {"bytes": used, "limit": limit, **core.reader.counts},
            "store": self._store.metrics.snapshot(),
            "storage": self._store.metrics.silence.told(),
            **seen,
        }

    def _seen(self) -> dict[str, object]:
        core = self.filesystem.core
        return {
            "dirty": self.filesystem.uploads.unsent(),
            "nodes": len(core.nodes.by_ino),
            "memory": holdings(core),
            "unfinished": [f"{i.kind} {i.source} -> {i.target}" for i in core.db.intents() if i.kind != "discard"],
        }

    def apply(self, spec: MountSpec) -> dict[str, object]:
        """See server.MountedStore. When the group changes, the kernel is told to drop the attributes that it caches."""
        source, refused = self._renewed(spec.source)
        spec = replace(spec, source=with_credentials(spec.source, credentials_of(source)))
        running = replace(self._spec.with_live(spec), source=source)
        core = self.filesystem.core
        core.loop.call(partial(self._change_settings, running))
        core.cache.resize(running.cache_size_bytes)
        self._store.upload_pace.limit(running.upload_limit_bytes)
        self._spec = running
        return {"later": running.differences(spec), "refused": refused}

    def _change_settings(self, running: MountSpec) -> None:
        core = self.filesystem.core
        before, core.settings = core.settings, settings_of(running)
        defaults = core.settings.defaults
        for node in [] if defaults == before.defaults else core.nodes.by_ino.values():
            facts.edited(node, defaults.seen(node.attributes))
            core.notifier.inval_inode(node.ino, -1)

    def _renewed(self, source: Source) -> tuple[Source, str]:
        """Use the static keys of `source` from now on, unless the store refuses them; return our source with the keys
        in use, and why the store refuses others, or ''."""
        keys, ours = credentials_of(source), s3_of(self._spec)
        if self._keys is None or not isinstance(keys, StaticCredentials):
            return ours, ""
        renewed = replace(ours, credentials=keys)
        if keys != self._keys.keys():
            try:
                probe(renewed, deadline_s=PROBE_S, writable=False)
            except CredentialsInvalid as error:
                self._keys.offer(keys)
                return ours, str(error)
            except DatastoreError as error:
                log.info("new keys are used without a test", extra=fields(reason=error))
            self._keys.replace(keys)
        return renewed, ""

    def warm(self, path: str, progress: Callable[[dict[str, int | None]], None]) -> dict[str, object]:
        return self.filesystem.loop.run(warm(self.filesystem, path, progress))

    def discard(self, path: str) -> int:
        return self.filesystem.loop.run(self.filesystem.uploads.forget(path))

    def flush_all(self) -> list[str]:
        return self.filesystem.loop.run(self.filesystem.flush_all())


def build_mount(spec: MountSpec, *, resumed: bool = False) -> MountedStore:
    """Probe the store, then build the file system. resumed: an earlier server served this mount: nothing is probed.
    Errors: those of probe() (wrong key, bucket, region or endpoint), within 5 s of the command and before anything is
    changed.
    """
    location = s3_of(spec)
    capabilities = None if resumed else probe(location, deadline_s=PROBE_S, writable=not spec.read_only)
    keys = find_source(location)
    identity = token_hex()
    with suppress(CredentialsInvalid):  # the keys are not known yet
        identity = keys.identity()
    full = spec.attributes == "full"
    store = open_s3(location, capabilities=capabilities, keys=keys, list_metadata=full)
    filesystem = build_filesystem(spec, store, loop=Loop(), resumed=resumed, reader=identity)
    return MountedStore(filesystem, spec, store, keys if isinstance(keys, StaticSource) else None)


def s3_of(spec: MountSpec) -> S3Location:
    """Return the S3 location that a mount shows. Errors: InvalidManifest for a source of another kind."""
    if not isinstance(spec.source, S3Location):
        raise InvalidManifest(f"{spec.source} is no bucket")
    return spec.source


def settings_of(spec: MountSpec) -> Settings:
    """Return the settings that a specification asks for."""
    umask = 0o022 if spec.umask is None else spec.umask
    return Settings(
        metadata_ttl_s=spec.believed_s,
        full_attributes=spec.attributes == "full",
        capacity_bytes=spec.capacity_bytes,
        used_bytes=spec.used_bytes or 0,
        used_files=spec.used_files or 0,
        defaults=Defaults(
            uid=os.getuid() if spec.uid is None else spec.uid,
            gid=os.getgid() if spec.gid is None else spec.gid,
            file_mode=0o666 & ~umask,
            directory_mode=0o777 & ~umask,
            group=spec.group,
        ),
        memory_bytes=spec.memory_bytes,
        refuse_conflicts=spec.conflict == "fail",
        write_back_s=spec.write_back_s,
        open_less=spec.read_only and spec.transport == "kernel",
    )


def build_filesystem(
    spec: MountSpec,
    store: ObjectStore,
    *,
    loop: Loop,
    clock: Clock | None = None,
    resumed: bool = False,
    reader: str = "",
) -> DatastoreFilesystem:
    """Build the file system over any store, and finish what an earlier process left: half-done renames and, unless
    `resumed`, unsent files. For that, this call runs the loop if no other thread does. reader: an id of the
    credentials; bytes and attributes that were cached under another id are not used (S-205).
    """
    state = Path(spec.state_dir)
    staging = state / "staging"
    staging.mkdir(mode=0o700, parents=True, exist_ok=True)
    db = StateDb(state / "state.db")
    location = s3_of(spec)
    db.attributes_are_of(reader)
    namespace = f"{location.endpoint}/{location.bucket} {reader}"
    cache = BlockCache(Path(spec.cache_dir), spec.cache_size_bytes, namespace)
    cache.learn()
    if not resumed:  # in a fresh mount no file is open, and no directory is being read
        for path in (*state.glob("removed/*"), *state.glob("listings/*")):
            path.unlink()
    settings = settings_of(spec)
    clock = clock or SystemClock()
    shares = Shares.of(spec.memory_bytes)
    known = AttributeMemory(db, loop, entries=shares.attributes)
    core = Core(
        settings=settings,
        store=store,
        reader=Reader(store, cache, loop, memory_bytes=shares.pieces, asking=known.asking),
        cache=cache,
        db=db,
        known=known,
        nodelog=NodeLog(state / "nodes.log"),
        opens=OpenTable(state / "opens"),
        removed=RemovedFiles(state / "removed"),
        listings=SavedListings(state / "listings"),
        nodes=NodeTable(location.prefix, settings.defaults.of(stat.S_IFDIR, clock.time_ns())),
        passthrough=PassthroughFiles(cache, loop),
        loop=loop,
        clock=clock,
        staging_dir=staging,
    )
    filesystem = DatastoreFilesystem(core)
    loop.run(_recover(core, filesystem, resumed=resumed))
    return filesystem


async def _recover(core: Core, filesystem: DatastoreFilesystem, *, resumed: bool) -> None:
    if resumed:
        restore_nodes(core)
        filesystem.handles.resume()
        filesystem.chases.resume()
    else:
        core.nodelog.rewrite([])
        core.opens.clear()
        for intent in core.db.intents() if core.db.rebooted else ():
            # The machine may have gone down before the end of an intent reached the disk: treat it as put off (S-27).
            with suppress(OSError):  # the disk is full
                core.db.put_off(intent, core.clock.time_ns())
        core.db.seen_boot()
    filesystem.uploads.orphans.recover()
    failures: list[str] = []
    if not resumed:
        sending = filesystem.uploads.orphans.send_first()
        # A rename that was begun must find there what it renames.
        failures = await (sending if core.db.intents() else _in_time(core.loop, sending))
    try:
        failures += await filesystem.renames.finish(resumed=resumed)
    except StoreError as error:
        failures.append(str(error))
    if resumed:
        filesystem.upkeep.resume()
    for line in failures:
        log.error("left from an earlier run and not yet finished", extra=fields(what=line))


async def _in_time(loop: Loop, sending: Coroutine[Any, Any, list[str]]) -> list[str]:
    """Return what a coroutine returns, or nothing after LEFT_S; then it continues in the background."""
    task, until = loop.background(sending), loop.clock() + LEFT_S
    while not task.done and loop.clock() < until:
        await loop.sleep(_LOOK_S)
    return task.result() if task.done else []
