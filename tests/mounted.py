"""Clients of one bucket in memory, each a file system without a mount; the clock stands still until a test moves it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location
from datastore.errors import ServerFault
from datastore.fuse.ops import Held, Ino, Notifier
from datastore.fuse.store.base import Capabilities, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.vfs.build import build_filesystem
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from datastore.fuse.vfs.tree.nodes import Directory, Node
from tests.clock import ManualClock
from tests.driving import beside, resolve, the_loop
from tests.faulty import AtOnce, Fault, FaultyStore, Plan, no_faults
from tests.killing import kill, quiet
from tests.localfs import File, LocalFs
from tests.memorystore import MemoryBucket, MemoryStore, tried_once

TTL_S = 1.0
DOWN = ServerFault("the server is down")
BUCKET = S3Location(bucket="bucket")
WRITING = ("put", "copy", "create_upload", "upload_part", "upload_part_copy", "complete_upload")


class Died(BaseException):
    """The simulated death of the process. It is a BaseException, so that no code handles it."""


def lived(call: Callable[..., object], *arguments: object) -> bool:
    """Make a call; return whether the process survived it."""
    try:
        call(*arguments)
    except Died:
        return False
    return True


def dies_at(n: int) -> Plan:
    """A plan by which the process dies at the n-th call to the store (from 0): from that on no call has an effect."""

    def plan(index: int, method: str) -> None:
        if index >= n:
            raise Died

    return AtOnce(plan)


def spec_at(directory: Path, source: S3Location = BUCKET, **more: Any) -> MountSpec:
    """Return the spec of a mount whose state is below a directory. more: fields of MountSpec."""
    place, state, cache = (str(directory / name) for name in ("mountpoint", "state", "cache"))
    return MountSpec(name="test", mountpoint=place, source=source, state_dir=state, cache_dir=cache, **more)


class Kernel(Notifier):
    """Records what the kernel was told to invalidate or release."""

    def __init__(self) -> None:
        self.entries: list[tuple[Ino, bytes]] = []
        self.inodes: list[tuple[Ino, int]] = []
        self.released: list[Held] = []

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        self.entries.append((parent, name))

    def inval_inode(self, ino: Ino, offset: int = 0) -> None:
        self.inodes.append((ino, offset))

    def release(self, held: Sequence[Held]) -> None:
        self.released += held


class Client:
    """One mount. `local` drives it by paths, `faulty` makes its store fail, `store` counts its requests."""

    def __init__(
        self, world: World, directory: Path, spec: MountSpec, *, resumed: bool = False, plan: Plan = no_faults
    ) -> None:
        self.world = world
        self.directory = directory
        self.spec = spec
        self.faulty = FaultyStore(MemoryStore(world.bucket), plan)
        self.store = tried_once(self.faulty)
        self.kernel = Kernel()
        self.fs: DatastoreFilesystem = build_filesystem(
            spec, self.store, loop=the_loop(), clock=world.clock, resumed=resumed
        )
        # fs.start() is not called: no periodic job runs, and tests ask for retries themselves.
        self.fs.core.notifier = self.kernel
        self.local = LocalFs(self.fs)
        self._open = True

    def calls(self, *methods: str) -> int:
        """Return how many requests by these methods of the store were sent."""
        tallies = self.store.metrics.snapshot()
        return sum(tallies[method]["calls"] for method in methods if method in tallies)

    def sent_bytes(self) -> int:
        """Return how many bytes were uploaded."""
        return sum(tally["sent_bytes"] for tally in self.store.metrics.snapshot().values())

    def ask_one_by_one(self, path: str = "") -> None:
        """Make lookups in a directory ask for single names, as if listing it were known to be slow."""
        node = self.folder(path)
        node.large, node.list_s, node.listing = True, 1e9, None

    def node(self, path: str) -> Node:
        """Return the mount's inode of a path."""
        return self.fs.core.nodes.by_ino[self.local.stat(path).ino]

    def folder(self, path: str) -> Directory:
        """Return the mount's inode of a directory."""
        node = self.node(path)
        assert isinstance(node, Directory)
        return node

    def before_next(self, method: str, do: Callable[[], object]) -> None:
        """Call `do` before the next request by this method of the store, once."""
        once = iter((True,))

        def plan(_index: int, called: str) -> None:
            if called == method and next(once, False):
                do()

        self.faulty.plan = plan

    def keep_small_copies_only(self, size: int) -> None:
        """Lower the size above which a removed open file is kept in the bucket."""
        self.fs.core.settings = replace(self.fs.core.settings, silly_copy_bytes=size)

    def quiet(self) -> None:
        """Wait until there is no background work."""
        assert quiet(), "something is still asked for"

    def nothing_left(self) -> None:
        """Check that all is sent: no file is unsent, no staging file is left, no upload is unfinished."""
        assert self.fs.uploads.unsent() == []
        assert list(self.fs.core.staging_dir.iterdir()) == []
        assert self.fs.core.db.uploads() == []
        assert not self.world.bucket.uploads

    def unmount(self) -> None:
        """Unmount as a user does: unsent files are sent. Idempotent."""
        if self._open:
            resolve(self.fs.stop())
            self.kill()

    def kill(self) -> None:
        """Let the process die: nothing more is sent or recorded. Idempotent."""
        if not self._open:
            return
        self._open = False
        kill(self.fs)

    def again(self, *, resumed: bool = False, plan: Plan = no_faults) -> Client:
        """Start a new process over the same state directory. resumed: it takes over the mount. plan: its faults."""
        self.kill()
        return self.world.add(Client(self.world, self.directory, self.spec, resumed=resumed, plan=plan))


def taken_over(client: Client, *files: File) -> tuple[Client, list[File]]:
    """Kill the server; return its successor, and the same open files, as the kernel goes on to use them."""
    again = client.again(resumed=True)
    return again, [File(again.fs, file.ino, file._fh) for file in files]


class World:
    """A bucket, a clock and the clients."""

    def __init__(self, root: Path, *, listed_metadata: bool = False) -> None:
        """listed_metadata: the server's listings show metadata, as MinIO's do."""
        self.clock = ManualClock()
        able = Capabilities(listed_metadata=listed_metadata)
        self.bucket = MemoryBucket(clock=self.clock.time_ns, capabilities=able)
        self.tool = BlockingStore(MemoryStore(self.bucket))
        """Another S3 tool's access to the bucket."""
        self._root = root
        self._numbers = itertools.count(1)
        self._clients: list[Client] = []

    def client(self, *, ttl_s: float = TTL_S, prefix: str = "", **fields: Any) -> Client:
        """A new mount with its own state and cache. fields: more of its MountSpec."""
        directory = self._root / f"client{next(self._numbers)}"
        source = replace(BUCKET, prefix=prefix)
        spec = spec_at(directory, source, cache_size_bytes=64 << 20, metadata_ttl_s=ttl_s, **fields)
        return self.add(Client(self, directory, spec))

    def add(self, client: Client) -> Client:
        """Remember a client so that it is closed."""
        self._clients.append(client)
        return client

    def later(self, seconds: float = TTL_S + 0.5) -> None:
        """Advance the clock until the time to live of what clients know has run out."""
        self.clock.advance(seconds)

    def put(self, key: str, body: bytes = b"", **metadata: str) -> None:
        """Write an object, as another tool."""
        self.tool.put(key, body, WriteOptions(metadata=metadata))

    def put_all(self, keys: Iterable[str], body: bytes = b"x") -> None:
        """Write the same content to each of these keys."""
        for key in keys:
            self.put(key, body)

    def body(self, key: str) -> bytes:
        """Read an object, as another tool."""
        return bytes(self.tool.get(key)[0])

    def metadata(self, key: str) -> dict[str, str]:
        """Return an object's user metadata, as another tool."""
        return dict(self.tool.head(key).metadata)

    def all_keys(self) -> list[str]:
        return [os.fsdecode(key) for key in self.bucket.sorted_keys]

    def contents(self) -> dict[str, bytes]:
        """Return the content of the bucket, without markers of directories."""
        return {key: self.body(key) for key in self.all_keys() if not key.endswith("/")}

    def close(self) -> None:
        """Kill every client: its files are released without sending anything."""
        for client in self._clients:
            client.kill()


@contextmanager
def world(root: Path, *, listed_metadata: bool = False) -> Iterator[World]:
    """Yield a world, and close it at the end."""
    made = World(root, listed_metadata=listed_metadata)
    try:
        yield made
    finally:
        made.close()


def failing(code: int, call: Callable[..., object], *arguments: object) -> None:
    """Check that the call ends with this errno."""
    assert fails(code, call, *arguments), f"no error, errno {code} was expected"


def fails(code: int, call: Callable[..., object], *arguments: object) -> bool:
    """Whether the call ends with this errno; it may also succeed."""
    try:
        call(*arguments)
    except OSError as error:
        if error.errno != code:
            raise
        return True
    return False


PERIOD = b"".join(b"%06d\n" % number for number in range(10_007))
"""Its length is no multiple of a block or part, so that no two of these have the same bytes."""


def pattern(size: int) -> bytes:
    """Bytes that differ from block to block."""
    return (PERIOD * (size // len(PERIOD) + 1))[:size]


def no_writes(index: int, method: str) -> Fault | None:
    """The plan of a store that refuses writes."""
    return Fault(DOWN) if method in WRITING else None


def refuse_writes(client: Client) -> None:
    """Make the client's store refuse writes from now on."""
    client.faulty.plan = no_writes


def around(
    monkeypatch: pytest.MonkeyPatch, client: Client, method: str, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """Make the next call of a store's method happen between `before` and `after`, which a thread calls. Later calls,
    and the calls that these two make, are left alone."""
    original = getattr(client.store, method)
    calls = iter((True,))

    async def between(*arguments: Any, **options: Any) -> Any:
        first = next(calls, False)
        if first:
            await beside(before)
        try:
            return await original(*arguments, **options)
        finally:
            if first:
                await beside(after)

    monkeypatch.setattr(client.store, method, between)
