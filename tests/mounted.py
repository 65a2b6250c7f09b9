"""Clients of one bucket in memory, each a file system without a mount; time stands still until a test moves it."""

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
from tests.faulty import Fault, FaultyStore, Plan, no_faults
from tests.killing import kill, quiet
from tests.localfs import File, LocalFs
from tests.memorystore import MemoryBucket, MemoryStore, tried_once

TTL_S = 1.0
DOWN = ServerFault("the server is down")
BUCKET = S3Location(bucket="bucket")
WRITING = ("put", "copy", "create_upload", "upload_part", "upload_part_copy", "complete_upload")


class Died(BaseException):
    """The process ended here: nothing in it handles this."""


def lived(call: Callable[..., object], *arguments: object) -> bool:
    """Whether the process was still there when the call returned."""
    try:
        call(*arguments)
    except Died:
        return False
    return True


def dies_at(n: int) -> Plan:
    """From the n-th call to the store on (from 0) the process is dead: no call has an effect."""

    def plan(index: int, method: str) -> None:
        if index >= n:
            raise Died

    return plan


def spec_at(directory: Path, source: S3Location = BUCKET, **more: Any) -> MountSpec:
    """Of a mount whose state is below a directory. more: fields of MountSpec."""
    place, state, cache = (str(directory / name) for name in ("mountpoint", "state", "cache"))
    return MountSpec(name="test", mountpoint=place, source=source, state_dir=state, cache_dir=cache, **more)


class Kernel(Notifier):
    """What the kernel was told to forget."""

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
        # Retries are the tests' to ask for: no task runs in the background.
        self.fs.core.notifier = self.kernel
        self.local = LocalFs(self.fs)
        self._open = True

    def calls(self, *methods: str) -> int:
        """How many of these requests were sent."""
        tallies = self.store.metrics.snapshot()
        return sum(tallies[method]["calls"] for method in methods if method in tallies)

    def sent_bytes(self) -> int:
        """Bytes uploaded."""
        return sum(tally["sent_bytes"] for tally in self.store.metrics.snapshot().values())

    def ask_one_by_one(self, path: str = "") -> None:
        """Make lookups in a directory ask for single names, as where listing it whole is known to be dear."""
        node = self.folder(path)
        node.large, node.list_s, node.listing = True, 1e9, None

    def node(self, path: str) -> Node:
        """What the mount knows of a name."""
        return self.fs.core.nodes.by_ino[self.local.stat(path).ino]

    def folder(self, path: str) -> Directory:
        """The same of a directory."""
        node = self.node(path)
        assert isinstance(node, Directory)
        return node

    def before_next(self, method: str, do: Callable[[], object]) -> None:
        """Have something happen before the next such request of the store, once."""
        once = iter((True,))

        def plan(_index: int, called: str) -> None:
            if called == method and next(once, False):
                do()

        self.faulty.plan = plan

    def keep_small_copies_only(self, size: int) -> None:
        """Lower the size above which a removed open file is kept in the bucket."""
        self.fs.core.settings = replace(self.fs.core.settings, silly_copy_bytes=size)

    def quiet(self) -> None:
        """Until nothing is asked for in the background."""
        assert quiet(), "something is still asked for"

    def nothing_left(self) -> None:
        """All must be sent: no file is unsent, nothing is staged, no upload is under way."""
        assert self.fs.uploads.unsent() == []
        assert list(self.fs.core.staging_dir.iterdir()) == []
        assert self.fs.core.db.uploads() == []
        assert not self.world.bucket.uploads

    def unmount(self) -> None:
        """As a person does it: what is unsent is sent. Idempotent."""
        if self._open:
            resolve(self.fs.stop())
            self.kill()

    def kill(self) -> None:
        """The process dies: nothing more is sent or written down. Idempotent."""
        if not self._open:
            return
        self._open = False
        kill(self.fs)

    def again(self, *, resumed: bool = False, plan: Plan = no_faults) -> Client:
        """A new process over the same state directory; resumed: under the mount that lives on; plan: its store's."""
        self.kill()
        return self.world.add(Client(self.world, self.directory, self.spec, resumed=resumed, plan=plan))


def taken_over(client: Client, *files: File) -> tuple[Client, list[File]]:
    """The server dies; the new one, and the same open files, as the kernel goes on to use them."""
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
        """Another S3 tool."""
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
        """Let the time to live of what clients know run out."""
        self.clock.advance(seconds)

    def put(self, key: str, body: bytes = b"", **metadata: str) -> None:
        """As another tool: write an object."""
        self.tool.put(key, body, WriteOptions(metadata=metadata))

    def put_all(self, keys: Iterable[str], body: bytes = b"x") -> None:
        """The same content under each of these keys."""
        for key in keys:
            self.put(key, body)

    def body(self, key: str) -> bytes:
        """As another tool: read an object."""
        return bytes(self.tool.get(key)[0])

    def metadata(self, key: str) -> dict[str, str]:
        """As another tool: its user metadata."""
        return dict(self.tool.head(key).metadata)

    def all_keys(self) -> list[str]:
        """All keys of the bucket."""
        return [os.fsdecode(key) for key in self.bucket.sorted_keys]

    def contents(self) -> dict[str, bytes]:
        """What is in the bucket, without markers of directories."""
        return {key: self.body(key) for key in self.all_keys() if not key.endswith("/")}

    def close(self) -> None:
        """Release every client's files without sending anything."""
        for client in self._clients:
            client.kill()


@contextmanager
def world(root: Path, *, listed_metadata: bool = False) -> Iterator[World]:
    """A world that is closed again."""
    made = World(root, listed_metadata=listed_metadata)
    try:
        yield made
    finally:
        made.close()


def failing(code: int, call: Callable[..., object], *arguments: object) -> None:
    """The call must end with this errno."""
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
"""No multiple of a block or part, so that bytes of one never look like those of another."""


def pattern(size: int) -> bytes:
    """Bytes that differ from block to block."""
    return (PERIOD * (size // len(PERIOD) + 1))[:size]


def no_writes(index: int, method: str) -> Fault | None:
    """The plan of a store that takes nothing."""
    return Fault(DOWN) if method in WRITING else None


def refuse_writes(client: Client) -> None:
    """From now on the store takes nothing."""
    client.faulty.plan = no_writes


def around(
    monkeypatch: pytest.MonkeyPatch, client: Client, method: str, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """The next call of a store's method happens between two others, which a thread makes; those after it, and theirs,
    are left alone."""
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
