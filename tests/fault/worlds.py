"""One bucket, one mount over a store that fails on demand, and checks of what must hold after a fault."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from datastore.fuse.store.base import ObjectStore, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.retrying import Retrier, RetryingStore
from datastore.fuse.vfs.build import build_filesystem
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from datastore.fuse.vfs.upload.delivery import Stream
from tests.clock import ManualClock
from tests.driving import resolve, the_loop
from tests.faulty import FaultyStore, Plan, no_faults
from tests.killing import kill
from tests.localfs import LocalFs
from tests.memorystore import MemoryBucket, MemoryStore
from tests.model.invariants import check_staged
from tests.model.reference import HIDDEN
from tests.mounted import spec_at
from tests.patience import eventually

MIN_PART = 4096
SILLY_COPY = 16384


def stopped() -> float:
    """A clock that stands still, so that the retry budget never runs out on a slow machine; for faults that pass."""
    return 0.0


async def no_sleep(seconds: float) -> None:
    """Do not sleep: retries follow at once."""


class FaultWorld:
    """retrying: use the retry layer, as in production; without it each fault reaches the file system."""

    def __init__(
        self, directory: Path, before: Mapping[str, bytes], *, retrying: bool, mount: Mapping[str, Any]
    ) -> None:
        self.clock = ManualClock()
        self.bucket = MemoryBucket(min_part_bytes=MIN_PART, clock=self.clock.time_ns)
        direct = BlockingStore(MemoryStore(self.bucket))
        for key, body in before.items():
            direct.put(key, body, WriteOptions())
        self._directory, self._retrying, self._mount = directory, retrying, mount
        self.build()

    def build(self, plan: Plan = no_faults, *, resumed: bool = False) -> None:
        """Mount, or (resumed) take over from a server that died. Between calls the clock stands still, because the
        choice of calls depends on how long others took (LIST, HEAD)."""
        self.clock.advance(10.0)
        self.faulty = FaultyStore(MemoryStore(self.bucket), plan)
        store: ObjectStore = self.faulty
        if self._retrying:
            store = RetryingStore(store, Retrier(first_delay_s=0.0, clock=stopped, sleep=no_sleep))
        spec = spec_at(self._directory, metadata_ttl_s=0.0, **self._mount)
        self.fs: DatastoreFilesystem = build_filesystem(spec, store, loop=the_loop(), clock=self.clock, resumed=resumed)
        core = self.fs.core
        core.settings = replace(core.settings, silly_copy_bytes=SILLY_COPY)
        self.local = LocalFs(self.fs)
        self.writes_accepted = 0
        self.fs.write = self._counted(self.fs.write)

    def _counted(self, write: Callable[..., Awaitable[int]]) -> Callable[..., Coroutine[Any, Any, int]]:
        async def counted(*arguments: object) -> int:
            written = await write(*arguments)
            self.writes_accepted += 1
            return written

        return counted

    def release(self) -> None:
        """Let all processes die."""
        kill(self.fs)

    def heal(self) -> list[str]:
        """Let the store work again, wait for the prefetches that began before, and return the store calls so far."""
        self.clock.advance(10.0)
        self.faulty.plan = no_faults
        reader = self.fs.core.reader
        eventually(lambda: reader._ahead == 0, "what was asked for ahead ends")
        return list(self.faulty.calls)

    def keys(self) -> dict[str, bytes]:
        """Return the objects of the bucket without the hidden copies of removed files."""
        found = {raw.decode("utf-8", "surrogateescape"): stored.body for raw, stored in self.bucket.objects.items()}
        return {key: body for key, body in found.items() if not key.startswith(HIDDEN)}

    def hidden(self) -> list[bytes]:
        """Return the keys of the hidden copies of removed files."""
        return [key for key in self.bucket.objects if key.startswith(HIDDEN.encode())]

    def streams(self) -> set[str]:
        """Return the ids of uploads of open files that are still written; wait for those being created."""
        found = set()
        for node in self.fs.core.nodes.by_ino.values():
            stream = node.staged.stream if node.staged is not None else None
            if isinstance(stream, Stream) and not node.gone and stream._created and resolve(stream.begins()):
                found.add(str(stream._created.result()[1]))
        return found

    def all_done(self, where: str) -> None:
        """Check that nothing is unsent, unfinished or left behind."""
        assert not self.fs.uploads.unsent(), f"{where}: something is unsent"
        assert not self.fs.core.db.intents(), f"{where}: what was begun is still in the journal"
        assert not self.bucket.uploads, f"{where}: an unfinished upload stays behind"
        assert not self.hidden(), f"{where}: hidden copies stay"

    def check(self) -> None:
        """Check the invariants that hold at rest, even after a fault."""
        for node in self.fs.core.nodes.by_ino.values():
            if node.staged is not None:
                check_staged(node.staged)
            assert node.gone or node.parent is None or node.parent.children.get(node.name) is node
        rows = {row.staging for row in self.fs.core.db.unsent()}
        dirty = {
            node.staged.name
            for node in self.fs.core.nodes.by_ino.values()
            if node.staged is not None and node.dirty and not node.gone
        }
        assert rows == dirty | set(self.fs.uploads.orphans.files), f"journal {rows}, unsent {dirty}"


@contextmanager
def fault_world(
    directory: Path,
    before: Mapping[str, bytes],
    *,
    retrying: bool = False,
    mount: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[FaultWorld]:
    """Yield a world; release it at the end and remove its directory, as a sweep makes hundreds."""
    world = FaultWorld(directory, before, retrying=retrying, mount=mount)
    try:
        yield world
    finally:
        world.release()
        shutil.rmtree(directory)
