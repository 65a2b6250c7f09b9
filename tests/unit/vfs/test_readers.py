"""What one reader has fetched, another one with other credentials does not see (S-205)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location
from datastore.errors import AccessDenied
from datastore.fuse.vfs.build import build_filesystem
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from tests.driving import resolve, the_loop
from tests.faulty import Fault, FaultyStore, no_faults
from tests.killing import kill
from tests.localfs import LocalFs
from tests.memorystore import MemoryStore
from tests.mounted import World, world
from tests.patience import eventually
from tests.promises import promise


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        made.put("file", b"secret", mode=str(0o100640))
        made.later()
        yield made


@contextmanager
def mounted(
    world: World,
    root: Path,
    reader: str,
    attributes: Literal["full", "listing"],
    *,
    may_read: bool,
    state: str = "state",
) -> Iterator[LocalFs]:
    """A mount of this user's, whose cache all of his mounts share. may_read: listings are always allowed."""

    def plan(_index: int, method: str) -> Fault | None:
        return Fault(AccessDenied("no")) if method in {"get", "head"} else None

    spec = MountSpec(
        name="m",
        mountpoint=str(root / "m"),
        source=S3Location(bucket="bucket"),
        state_dir=str(root / state),
        cache_dir=str(root / "cache"),
        attributes=attributes,
    )
    store = FaultyStore(MemoryStore(world.bucket), no_faults if may_read else plan)
    fs = build_filesystem(spec, store, loop=the_loop(), clock=world.clock, reader=reader)
    try:
        yield LocalFs(fs)
    finally:
        resolve(fs.stop())
        kill(fs)


def on_disk(local: LocalFs, path: str) -> bool:
    """Whether the cache has all of a file; who reads it does not wait for that."""
    assert isinstance(local.fs, DatastoreFilesystem)
    core = local.fs.core
    return core.cache is not None and core.cache.present(core.nodes.by_ino[local.stat(path).ino].version())


@promise("S-205")
def test_mounts_share_the_cache_when_their_credentials_are_the_same(shared: World, tmp_path: Path) -> None:
    with mounted(shared, tmp_path, "alice", "listing", may_read=True) as local:
        assert local.read("file") == b"secret"
        eventually(lambda: on_disk(local, "file"))
    with mounted(shared, tmp_path, "alice", "listing", may_read=False, state="second") as local:
        assert local.read("file") == b"secret"
    with (
        mounted(shared, tmp_path, "bob", "listing", may_read=False, state="bobs") as local,
        pytest.raises(PermissionError),
    ):
        local.read("file")


@promise("S-205")
def test_attributes_are_remembered_for_the_credentials_that_were_told_them(shared: World, tmp_path: Path) -> None:
    """The same directory, mounted again."""
    with mounted(shared, tmp_path, "alice", "full", may_read=True) as local:
        local.scandir(plus=True)
        assert local.stat("file").mode & 0o777 == 0o640
    with mounted(shared, tmp_path, "alice", "full", may_read=False) as local:
        local.scandir(plus=True)
        assert local.stat("file").mode & 0o777 == 0o640
    with mounted(shared, tmp_path, "bob", "full", may_read=False) as local, pytest.raises(PermissionError):
        local.scandir(plus=True)
