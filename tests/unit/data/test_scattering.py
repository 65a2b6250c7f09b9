"""The directories of the cache are spread over the disk, where its file system can do that."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datastore.fuse.data import cachespace
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.cachespace import FLAGS, GET_FLAGS, SET_FLAGS, UNRELATED, CacheSpace, scatter
from datastore.fuse.store.base import ETag, ObjectVersion


def test_what_the_disk_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file system the tests run on."""
    asked: list[tuple[int, int]] = []

    def ioctl(fd: int, request: int, data: bytearray | bytes) -> int:
        if isinstance(data, bytearray):
            data[:] = FLAGS.pack(0x80000)
        asked.append((request, FLAGS.unpack(data)[0]))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    scatter(tmp_path)
    assert asked == [(GET_FLAGS, 0x80000), (SET_FLAGS, 0x80000 | UNRELATED)]


@pytest.mark.parametrize("refused", [GET_FLAGS, SET_FLAGS])
def test_a_disk_that_refuses(refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system, an overlay, a disk of another kind: the cache works there as before."""

    def ioctl(fd: int, request: int, data: object) -> int:
        if request == refused:
            raise OSError(95, "not supported")
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    opened = len(os.listdir("/proc/self/fd"))
    cache = BlockCache(tmp_path / "cache", 1 << 20, "bucket")
    version = ObjectVersion("a", ETag("1"), 4096)
    cache.write(version, 0, b"x" * 4096)
    assert cache.read(version, 0, 4096) == b"x" * 4096
    cache.close()
    assert len(os.listdir("/proc/self/fd")) <= opened


def test_nothing_there(tmp_path: Path) -> None:
    scatter(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    scatter(tmp_path / "file")


def test_the_cache_is_spread_before_its_first_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(cachespace, "scatter", lambda place: found.append(os.listdir(place)))
    space = CacheSpace(tmp_path / "cache", 1 << 20)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: space.make_directory(space.place(f"{number % 16:02x}stem")), range(64)))
    assert len(list((tmp_path / "cache" / "objects").iterdir())) == 16
    assert len(found) == 1


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file is in the way")
    space = CacheSpace(tmp_path / "cache", 1 << 20)
    with pytest.raises(NotADirectoryError):
        space.make_directory(space.place("00stem"))
