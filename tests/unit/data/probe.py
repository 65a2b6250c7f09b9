"""The store of the reader's tests, and caches of one directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.blockfile import page_rounded
from datastore.fuse.loop import now, running
from datastore.fuse.store.base import Body, ByteRange, ETag, ObjectInfo, ObjectVersion, Sink, WriteOptions, handed_over
from tests.memorystore import MemoryStore
from tests.patience import passed

LIMIT = 64 << 20
NO_CACHE = BlockCache(Path("/dev/null"), 0, "n")
"""It can't keep anything there."""


class Probe(MemoryStore):
    """A MemoryStore that counts GETs, and can fail, cut short or hold up chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []
        self.gets: list[ByteRange | None] = []
        self.on_loop: list[bool] = []
        self.fail: dict[int, Exception] = {}
        self.spoil: Callable[[Body], Body] = lambda body: body
        self.gate = threading.Event()
        self.gate.set()
        self.gated: Callable[[str], bool] = lambda _key: True
        self.entered = threading.Semaphore(0)
        self.honours_if_match = True
        self._counting = threading.Lock()

    async def get(
        self, key: str, *, byte_range: ByteRange | None = None, if_match: ETag | None = None, sink: Sink | None = None
    ) -> tuple[Body, ObjectInfo]:
        with self._counting:
            number = len(self.gets)
            self.keys.append(key)
            self.gets.append(byte_range)
            self.on_loop.append(running() is not None)
        self.entered.release()
        assert if_match is not None
        if self.gated(key):
            await passed(self.gate)
        if number in self.fail:
            raise self.fail[number]
        asked = if_match if self.honours_if_match else None
        body, answer = await super().get(key, byte_range=byte_range, if_match=asked)
        return handed_over((self.spoil(body), answer), sink)

    def add(self, key: str, body: bytes) -> ObjectVersion:
        return ObjectVersion(key, now(self.put(key, body, WriteOptions())).etag, len(body))

    @property
    def fetched_bytes(self) -> int:
        return sum(one.stop - one.start for one in self.gets if one is not None)


class Caches:
    """Makes a cache on the same directory each time, as another process would; their clock is set by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 1000.0
        self.made: list[BlockCache] = []

    def __call__(self) -> BlockCache:
        self.made.append(BlockCache(self.directory, LIMIT, "http://s3/bucket", monotonic=lambda: self.now_s))
        self.made[-1].learn()
        return self.made[-1]

    def on_disk(self) -> int:
        """Without the block with which ext4 lists the pieces of a file that lies in many."""
        stats = [file.stat() for file in self.objects() if file.is_file()]
        return sum(min(each.st_blocks * 512, page_rounded(each.st_size)) for each in stats)

    def objects(self, pattern: str = "*") -> list[Path]:
        return list((self.directory / "objects").rglob(pattern))

    def file(self, suffix: str) -> Path:
        (found,) = self.objects(f"*{suffix}")
        return found
