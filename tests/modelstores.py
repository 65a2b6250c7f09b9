"""Stores of models for tests: one interface to a directory, a bucket in memory and a bucket of a server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from datastore.fuse.store.base import ObjectStore, WriteOptions
from datastore.fuse.store.s3 import open_s3, probe
from datastore.models.directory import DirectoryStorage, DirectoryTree
from datastore.models.objects import Objects, ObjectStorage, ObjectTree, Place
from datastore.models.registry import Models
from datastore.models.saving import Wish
from datastore.models.storage import Storage, Tree
from tests.contract.conftest import location_of
from tests.memorystore import MemoryBucket, MemoryStore, tried_once
from tests.servers import Server

PREFIX = "store/"
BUCKETS = ("models", "data")
_numbers = itertools.count(1)

Wrap = Callable[[ObjectStore], ObjectStore]


@dataclass
class Home:
    """A store of models, and beside it a place for data. Each call of storage() makes a separate client."""

    name: str
    root: Path | None = None
    stores: Callable[[str], ObjectStore] | None = None
    suffix: str = ""
    """The suffix of the buckets' real names."""
    _open: list[Objects] = field(default_factory=list)

    def storage(self, wrap: Wrap = lambda store: store) -> Storage:
        if self.root is not None:
            (self.root / "models").mkdir(exist_ok=True)
            return DirectoryStorage(self.root / "models")
        return ObjectStorage(self.objects("models", wrap), PREFIX)

    def models(self) -> Models:
        return Models(self.storage(), who="tester")

    def data(self, path: str = "run") -> Tree:
        """A directory beside the store, to save from and to export to."""
        if self.root is not None:
            return DirectoryTree(self.root / "data" / path, within=self.root / "data")
        return ObjectTree(self.objects("data"), f"{path}/", within="")

    def objects(self, bucket: str, wrap: Wrap = lambda store: store) -> Objects:
        assert self.stores is not None
        observed = tried_once(wrap(self.stores(bucket)))
        objects = Objects(observed, Place(self.name, bucket + self.suffix), observed.metrics)
        self._open.append(objects)
        return objects

    def put(self, path: str, body: bytes) -> None:
        """Write a file of the store, as another client."""
        if self.root is not None:
            at = self.root / "models" / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(body)
        else:
            self.objects("models").store.put(PREFIX + path, body, WriteOptions())

    def get(self, path: str) -> bytes:
        if self.root is not None:
            return (self.root / "models" / path).read_bytes()
        return bytes(self.objects("models").store.get(PREFIX + path)[0])

    def flip(self, path: str, at: int) -> None:
        """Flip one bit of a stored file; its size, mode and times stay."""
        if self.root is not None:
            flip(self.root / "models" / path, at)
            return
        store = self.objects("models").store
        content, info = store.get(PREFIX + path)
        body = bytearray(content)
        body[at] ^= 1
        store.put(PREFIX + path, body, WriteOptions(metadata=store.head(PREFIX + path).metadata))
        assert info.size == len(body)

    def everything(self) -> list[str]:
        """Return every path in the store, and the unfinished uploads."""
        if self.root is not None:
            root = self.root / "models"
            return sorted(str(each.relative_to(root)) for each in root.rglob("*") if not each.is_dir())
        store = self.objects("models").store
        found = [f"{upload.key} (upload)" for upload in store.pending_uploads(PREFIX)]
        token = None
        while True:
            page = store.list_page(PREFIX, token=token)
            found += [listed.key.removeprefix(PREFIX) for listed in page.objects]
            if (token := page.next_token) is None:
                return sorted(found)

    def close(self) -> None:
        for each in self._open:
            each.close()


@contextmanager
def directory_home(root: Path) -> Iterator[Home]:
    yield Home("directory", root=root)


@contextmanager
def memory_home() -> Iterator[Home]:
    buckets = {name: MemoryBucket() for name in BUCKETS}
    for bucket in buckets.values():
        bucket.others = buckets
    home = Home("memory", stores=lambda name: MemoryStore(buckets[name]))
    try:
        yield home
    finally:
        home.close()


@contextmanager
def server_home(server: Server, prepare: Callable[[Callable[[], None]], object] | None = None) -> Iterator[Home]:
    """prepare: calls its argument, which makes the buckets and starts threads; in a child if this process forks."""
    suffix = f"{os.getpid()}-{next(_numbers)}"

    def make() -> None:
        for bucket in BUCKETS:
            location = location_of(server, f"{bucket}-{suffix}")
            probe(replace(location, create=True), writable=True, deadline_s=100)

    if prepare is None:
        make()
    else:
        prepare(make)
    home = Home(server.name, stores=lambda name: open_s3(location_of(server, f"{name}-{suffix}")), suffix=f"-{suffix}")
    try:
        yield home
    finally:
        home.close()


def flip(file: Path, at: int) -> None:
    """Flip one bit of a file; its size, mode and times stay."""
    before = file.stat()
    body = bytearray(file.read_bytes())
    body[at] ^= 1
    file.chmod(0o600)
    file.write_bytes(body)
    file.chmod(before.st_mode & 0o7777)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def wish(model: str = "digits", **more: object) -> Wish:
    return Wish(model=model, **more)  # type: ignore[arg-type]


def plant(root: Path, seed: int = 0, *, large: int = 0, longest: int = 255) -> Path:
    """Make a directory with all that models have: empty files and directories, modes, links, a name of `longest`."""
    (root / "assets").mkdir(parents=True)
    (root / "variables").mkdir()
    (root / "saved_model.pb").write_bytes(b"graph %d" % seed * 100)
    (root / "variables" / "data").write_bytes(bytes(range(256)) * 40)
    (root / "variables" / "index").write_bytes(b"")
    (root / "variables" / "index").chmod(0o600)
    (root / "run.sh").write_bytes(b"#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / ("n" * longest)).write_bytes(b"long")
    (root / "ümläut 漢字 +%").write_bytes(b"name")
    (root / "latest").symlink_to("variables/data")
    (root / "variables" / "up").symlink_to("../saved_model.pb")
    (root / "dangling").symlink_to("nowhere")
    if large:
        (root / "weights").write_bytes(os.urandom(1 << 20) * (large >> 20))
    return root


def tree_of(root: Path) -> dict[str, tuple[str, object]]:
    """Return all that a directory contains, for comparison."""
    found: dict[str, tuple[str, object]] = {}
    for each in sorted(root.rglob("*")):
        path = str(each.relative_to(root))
        if each.is_symlink():
            found[path] = ("link", os.readlink(each))
        elif each.is_dir():
            found[path] = ("directory", each.stat().st_mode & 0o7777)
        else:
            found[path] = (f"file {each.stat().st_mode & 0o7777:o}", each.read_bytes())
    return found
