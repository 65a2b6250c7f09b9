"""PassthroughFiles: a passthrough file has what its node has, or is not called right (S-52)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datastore.errors import PreconditionFailed
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.ops import Ino
from datastore.fuse.store.base import ETag, ObjectVersion
from datastore.fuse.vfs.tree import passthrough
from datastore.fuse.vfs.tree.passthrough import MIN_BYTES, PassthroughFiles
from tests.driving import resolve, the_loop
from tests.killing import quiet
from tests.mounted import Client, World
from tests.promises import promise

INO = Ino(7)
BODY = bytes(range(256)) * (MIN_BYTES // 128)
VERSION = ObjectVersion("k", ETag("e"), len(BODY))


@pytest.fixture
def cache(tmp_path: Path) -> BlockCache:
    made = BlockCache(tmp_path, 64 << 20, "test")
    made.write(VERSION, 0, BODY)
    return made


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 30, 0)


@promise("S-52")
def test_changes_of_the_node_reach_the_lent_file_and_not_the_cache(cache: BlockCache) -> None:
    files = PassthroughFiles(cache, the_loop())
    fd = files.offer(INO, VERSION)
    assert content(fd) == BODY
    files.write(INO, 100, b"abc")
    files.write(INO, 200, bytes(50))
    files.truncate(INO, 1000)
    wanted = bytearray(BODY[:1000])
    wanted[100:103], wanted[200:250] = b"abc", bytes(50)
    assert content(fd) == wanted
    assert files.right(INO)
    assert cache.read(VERSION, 0, 10) is None
    files.returned(INO)
    files.returned(INO)
    assert not files.right(INO)


def test_whether_a_file_would_be_lent_is_known_before_its_open(cache: BlockCache) -> None:
    files, other = PassthroughFiles(cache, the_loop()), PassthroughFiles(cache, the_loop())
    assert files.available(VERSION)
    assert not files.available(VERSION._replace(key="absent"))
    assert not files.available(VERSION._replace(size=MIN_BYTES - 1))
    assert files.offer(INO, VERSION) >= 0
    assert not other.available(VERSION)
    assert files.returned(INO)
    assert not files.returned(INO)
    assert other.available(VERSION)


def test_a_write_while_the_cache_is_busy_makes_the_file_wrong(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PassthroughFiles(cache, the_loop())
    fd = files.offer(INO, VERSION)
    monkeypatch.setattr(cache, "drop", lambda _: None)
    files.write(INO, 0, b"abc")
    assert content(fd) == BODY
    assert not files.right(INO)
    files.close()


@promise("S-52", "S-31")
def test_what_another_client_appended_is_fetched(cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "_STEP", 7)
    files = PassthroughFiles(cache, the_loop())
    grown = BODY + b"more than seven bytes"

    async def fetch(_: ObjectVersion, start: int, size: int) -> bytes:
        return grown[start : start + size]

    assert not resolve(files.grow(INO, VERSION, VERSION, fetch))
    fd = files.offer(INO, VERSION)
    new = ObjectVersion("k", ETag("f"), len(grown))
    assert resolve(files.grow(INO, VERSION, new, fetch))
    assert content(fd) == grown
    files.close()


@promise("S-52", "S-31")
def test_what_was_replaced_while_it_was_fetched_is_fetched_anew(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the version that went is left between the bytes of the one that came."""
    monkeypatch.setattr(passthrough, "_STEP", 7)
    files = PassthroughFiles(cache, the_loop())
    grown = BODY + b"more than seven bytes"

    async def goes(_: ObjectVersion, start: int, size: int) -> bytes:
        if start > len(BODY):
            raise PreconditionFailed("it has another version", key="k")
        return b"!" * size

    async def fetch(_: ObjectVersion, start: int, size: int) -> bytes:
        return grown[start : start + size]

    fd = files.offer(INO, VERSION)
    with pytest.raises(PreconditionFailed):
        resolve(files.grow(INO, VERSION, ObjectVersion("k", ETag("e"), len(grown)), goes))
    assert resolve(files.grow(INO, VERSION, ObjectVersion("k", ETag("f"), len(grown)), fetch))
    assert content(fd) == grown
    files.close()


@promise("S-54")
def test_a_large_file_without_a_seal_is_checked_first_and_lent_then(cache: BlockCache, tmp_path: Path) -> None:
    large = ObjectVersion("l", ETag("e"), 6 << 20)
    cache.write(large, 0, bytes(6 << 20))
    os.utime(cache._place(large).data_path, ns=(1, 1))  # as after a reboot
    later = PassthroughFiles(BlockCache(tmp_path, 64 << 20, "test"), the_loop())
    assert the_loop().call(lambda: later.offer(INO, large)) == -1
    assert quiet()
    assert later.offer(INO, large) >= 0
    later.close()


@promise("S-52")
def test_pages_are_dropped_before_their_file_is_lent(
    world: World, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next open would wait while the kernel drops them; what is not lent next keeps its pages."""
    monkeypatch.setattr(one.kernel, "is_local", lambda _: False)
    monkeypatch.setattr(one.fs.core.passthrough, "available", lambda version: version.size >= MIN_BYTES)
    world.put("large", BODY)
    world.put("small", b"small")
    for name, dropped in (("large", True), ("small", False)):
        first, second = one.local.open(name), one.local.open(name)
        first.read()
        first.close()
        assert (first.ino, 0) not in one.kernel.inodes
        second.close()
        assert ((first.ino, 0) in one.kernel.inodes) is dropped
