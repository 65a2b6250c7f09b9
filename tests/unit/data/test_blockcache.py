"""The disk cache: it gives back exactly what was put in, or nothing; it stays in its limit; it never fails a read."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datastore.fuse.data import blockcache, cachespace
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.blockfile import BLOCK_BYTES, BlockFile, Place, create_files
from datastore.fuse.data.cachespace import CacheBusyError, CacheSpace
from datastore.fuse.data.openfiles import TOUCH_S
from datastore.fuse.store.base import ETag, ObjectVersion
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.unit.data.probe import LIMIT, Caches

MIB = 1 << 20


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def version(size: int, key: str = "a/b", etag: str = "e1") -> ObjectVersion:
    return ObjectVersion(key, ETag(etag), size)


@pytest.fixture(autouse=True)
def exact_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out on a busy machine.

    What has more than one block has its own files: two blocks show what eight do.
    """
    monkeypatch.setattr(blockcache, "SMALL_BYTES", BLOCK_BYTES + 1)
    monkeypatch.setattr(cachespace, "LOCK_WAIT_S", PATIENCE_S)


def put(cache: BlockCache, size: int, held: int | None = None) -> tuple[BlockCache, ObjectVersion, bytes]:
    """The cache, a version of this size, and its bytes, of which the cache holds the first ones; all if not said."""
    file, body = version(size), content(size)
    if held != 0:
        assert cache.write(file, 0, body[:held])
    return cache, file, body


def on_disk(fresh: Caches, file: ObjectVersion, suffix: str) -> Path:
    """One of a version's files, whose name is the same in each release."""
    label = json.dumps(("http://s3/bucket", *file)).encode()
    name = hashlib.blake2b(label, digest_size=16).hexdigest()
    return fresh.directory / "objects" / name[:2] / f"{name}{suffix}"


def lends(cache: BlockCache, file: ObjectVersion) -> bool:
    """Whether it is, for a moment."""
    fd = cache.open_for_passthrough(file)
    if fd is not None:
        os.close(fd)
    return fd is not None


def test_what_was_written_is_read_back_and_nothing_else_is_held(fresh: Caches) -> None:
    cache, file, body = put(fresh(), 3 * BLOCK_BYTES + 5, 0)
    assert cache.write(file, BLOCK_BYTES, body[BLOCK_BYTES : 2 * BLOCK_BYTES])
    assert cache.read(file, BLOCK_BYTES, BLOCK_BYTES) == body[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert cache.read(file, BLOCK_BYTES + 7, 9) == body[BLOCK_BYTES + 7 : BLOCK_BYTES + 16]
    assert cache.read(file, BLOCK_BYTES - 1, 2) is None
    assert cache.read(file, 2 * BLOCK_BYTES - 1, 2) is None
    assert not cache.present(file)
    assert cache.open_for_passthrough(file) is None


def test_partial_blocks_at_the_edges_are_left_out(fresh: Caches) -> None:
    cache, file, body = put(fresh(), 4 * BLOCK_BYTES, 0)
    cache.write(file, 100, body[100 : 3 * BLOCK_BYTES + 100])
    assert cache.read(file, 100, 10) is None
    assert cache.read(file, BLOCK_BYTES, 2 * BLOCK_BYTES) == body[BLOCK_BYTES : 3 * BLOCK_BYTES]
    assert cache.read(file, 3 * BLOCK_BYTES, 10) is None
    assert cache.write(file, 3 * BLOCK_BYTES + 1, body[3 * BLOCK_BYTES + 1 :])
    assert not cache.holds(file, 3 * BLOCK_BYTES, 4 * BLOCK_BYTES)


@pytest.mark.parametrize(
    "other",
    [
        version(BLOCK_BYTES, etag="e2"),
        version(BLOCK_BYTES, key="a/c"),
        version(BLOCK_BYTES + 1),
        version(BLOCK_BYTES, key="a/b\udcff"),
    ],
)
def test_another_key_etag_or_size_is_another_version(fresh: Caches, other: ObjectVersion) -> None:
    cache = fresh()
    cache.write(version(BLOCK_BYTES), 0, content(BLOCK_BYTES))
    assert cache.read(other, 0, 10) is None
    assert cache.write(other, 0, content(other.size, seed=2))
    assert cache.read(other, 0, 10) == content(other.size, seed=2)[:10]


def test_an_empty_object_is_always_present_and_takes_no_file(fresh: Caches, tmp_path: Path) -> None:
    cache = fresh()
    (tmp_path / "empty").touch()
    assert cache.present(version(0))
    assert cache.read(version(0), 0, 10) == b""
    assert cache.write(version(0), 0, b"")
    assert cache.open_for_passthrough(version(0)) is None
    assert not cache.adopt(version(0), tmp_path / "empty")
    assert not fresh.directory.exists()


def test_a_later_process_finds_whole_and_partial_versions(fresh: Caches) -> None:
    body = content(4 * BLOCK_BYTES + 3)
    whole, part = version(len(body)), version(len(body), key="part")
    first = fresh()
    first.write(whole, 0, body)
    first.write(part, 0, body[: 2 * BLOCK_BYTES])
    first.close()
    later = fresh()
    assert later.present(whole)
    assert later.read(whole, 0, len(body)) == body
    assert not later.present(part)
    assert later.holds(part, 0, 2 * BLOCK_BYTES)
    assert later.read(part, 10, BLOCK_BYTES) == body[10 : BLOCK_BYTES + 10]
    assert later.read(part, 2 * BLOCK_BYTES, 1) is None


def test_a_name_on_the_disk_is_the_same_in_each_release(fresh: Caches) -> None:
    file = version(2 * BLOCK_BYTES, key='a"\\\u00e9\udcff\n', etag="e-\u00e9")
    assert fresh().write(file, 0, content(file.size))
    assert fresh.file(".data") == on_disk(fresh, file, ".data")


@pytest.mark.parametrize("size", [BLOCK_BYTES, 2 * BLOCK_BYTES])
def test_what_is_read_while_it_is_checked_is_what_was_asked_for(
    fresh: Caches, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The first read of a block after a reboot."""
    body, file = content(size), version(size)
    for start in range(0, size, BLOCK_BYTES):
        fresh().write(file, start, body[start : start + BLOCK_BYTES])
    monkeypatch.setattr(blockcache, "boot_id", lambda: "")
    for start, stop in ((10, 20), (0, size), (size - 5, size), (size - BLOCK_BYTES + 3, size)):
        cache = fresh()
        assert cache.read(file, start, stop - start) == body[start:stop]
        assert cache.read(file, start, stop - start) == body[start:stop]


def test_what_another_process_writes_is_seen_at_once(fresh: Caches) -> None:
    (one, file, body), two = put(fresh(), 4 * BLOCK_BYTES, BLOCK_BYTES), fresh()
    assert two.read(file, 0, BLOCK_BYTES) == body[:BLOCK_BYTES]
    two.write(file, BLOCK_BYTES, body[BLOCK_BYTES:])
    assert one.read(file, 0, len(body)) == body
    assert one.present(file)
    assert two.present(file)


def test_what_is_lent_outlives_the_cache_entry(fresh: Caches) -> None:
    cache, file, body = put(fresh(), 2 * BLOCK_BYTES + 1)
    fd = cache.open_for_passthrough(file)
    assert fd is not None
    try:
        cache.drop(file)
        cache.close()
        assert os.pread(fd, len(body), 0) == body
    finally:
        os.close(fd)
    assert cache.open_for_passthrough(file) is None


@pytest.fixture(params=["the cache's disk", "another disk"])
def staged(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file that may be adopted."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if request.param == "another disk" else tmp_path) as folder:
        yield Path(folder, "staged")


def test_adopt_takes_the_file_over(fresh: Caches, staged: Path) -> None:
    """From another disk it is copied."""
    cache, file, body = put(fresh(), 5 * BLOCK_BYTES + 1, BLOCK_BYTES)
    staged.write_bytes(body)
    inode, same_disk = staged.stat().st_ino, staged.stat().st_dev == fresh.directory.stat().st_dev
    assert cache.adopt(file, staged)
    assert not staged.exists()
    assert (fresh.file(".data").stat().st_ino == inode) is same_disk
    assert cache.read(file, 0, len(body)) == body
    assert fresh().present(file)
    assert lends(fresh(), file)
    assert {each.suffix for each in fresh.objects("*.*")} == {".data", ".blocks"}


def test_adopt_refuses_a_file_of_another_size_or_none_or_one_too_large(
    fresh: Caches, tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing makes room for one that finds none."""
    cache, file, body = put(fresh(), 5 * BLOCK_BYTES)
    staged.write_bytes(b"12345")
    assert not cache.adopt(version(6), staged)
    assert staged.read_bytes() == b"12345"
    os.truncate(staged, LIMIT + 1)
    assert not cache.adopt(version(LIMIT + 1), staged)
    assert staged.stat().st_size == LIMIT + 1
    assert not cache.adopt(version(5), tmp_path / "absent")
    os.truncate(staged, LIMIT // 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: Disk((1 << 30) + LIMIT // 4))
        assert not cache.adopt(version(LIMIT // 2), staged), "the disk has no room for it"
    assert staged.stat().st_size == LIMIT // 2
    assert cache.read(file, 0, len(body)) == body


def test_adopt_bears_that_another_process_evicts_at_once(
    fresh: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the cache's by then, and so it is gone."""
    made = create_files

    def evicted(place: Place, records: bytes, path: Path) -> None:
        made(place, records, path)
        Path(f"{place.stem}.data").unlink()

    monkeypatch.setattr(blockcache, "create_files", evicted)
    (tmp_path / "staged").write_bytes(content(5 * BLOCK_BYTES))
    assert fresh().adopt(version(5 * BLOCK_BYTES), tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize("at", [0, BLOCK_BYTES + 17, 4 * BLOCK_BYTES + 2])
def test_a_flipped_byte_is_never_served(fresh: Caches, at: int) -> None:
    _, file, body = put(fresh(), 4 * BLOCK_BYTES + 3)
    with open(fresh.file(".data"), "r+b", buffering=0) as data:
        data.seek(at)
        data.write(bytes([body[at] ^ 1]))
    later = fresh()
    assert later.read(file, at, 1) is None
    assert not later.present(file)
    assert later.open_for_passthrough(file) is None
    assert not later.verify(file)
    later.write(file, 0, body)
    assert later.read(file, 0, len(body)) == body


def test_a_byte_flipped_under_an_open_whole_file_is_noticed(fresh: Caches) -> None:
    cache, file, body = put(fresh(), 2 * BLOCK_BYTES)
    assert cache.read(file, 0, 10) == body[:10]
    path = fresh.file(".data")
    with open(path, "r+b", buffering=0) as data:
        data.seek(-5, os.SEEK_END)
        data.write(b"other")
    os.utime(path, ns=(1, 1))
    assert cache.read(file, len(body) - 10, 10) is None


def test_a_touched_file_is_checked_and_then_trusted_again(fresh: Caches) -> None:
    _, file, body = put(fresh(), 2 * BLOCK_BYTES)
    os.utime(fresh.file(".data"), ns=(1, 1))
    later = fresh()
    assert later.read(file, 0, len(body)) == body
    assert lends(later, file)


def test_without_boot_ids_checksums_do_the_work(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockcache, "boot_id", lambda: "")
    _, file, body = put(fresh(), 2 * BLOCK_BYTES)
    assert fresh().read(file, 5, len(body)) == body[5:]


def garble_head(place: Caches) -> None:
    with open(place.file(".blocks"), "r+b") as file:
        file.write(b"NONSENSE")


def garble_records(place: Caches) -> None:
    path = place.file(".blocks")
    with open(path, "r+b") as file:
        file.seek(32)
        file.write(bytes(44))
        file.seek(path.stat().st_size - 8)
        file.write(b"NONSENSE")


def claim_too_much(place: Caches) -> None:
    """A record for a block that was never written."""
    path = place.file(".blocks")
    sidecar = bytearray(path.read_bytes())
    sidecar[32:76] = bytes(44)
    sidecar[-8:] = sidecar[-16:-8]
    path.write_bytes(sidecar)


@pytest.mark.parametrize(
    "damage",
    [
        lambda place: os.truncate(place.file(".data"), 100),
        lambda place: place.file(".data").unlink(),
        lambda place: place.file(".blocks").unlink(),
        lambda place: os.truncate(place.file(".blocks"), place.file(".blocks").stat().st_size - 4),
        lambda place: os.truncate(place.file(".blocks"), 0),
        garble_head,
        garble_records,
        claim_too_much,
    ],
)
@pytest.mark.parametrize("still_open", [True, False])
def test_damaged_files_are_dropped_and_can_be_written_again(
    fresh: Caches, damage: Callable[[Caches], None], still_open: bool
) -> None:
    cache, file, body = put(fresh(), 3 * BLOCK_BYTES)
    damage(fresh)
    if still_open:
        fresh.now_s += TOUCH_S
    else:
        cache = fresh()
    held = cache.read(file, 2 * BLOCK_BYTES, BLOCK_BYTES)
    assert held in (None, body[2 * BLOCK_BYTES :])
    assert cache.write(file, 0, body)
    assert cache.read(file, 0, len(body)) == body


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_full_or_broken_disk_turns_caching_off_until_it_is_well(
    fresh: Caches, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    cache, file, body = put(fresh(), 2 * BLOCK_BYTES, BLOCK_BYTES)
    calls = []

    def refuse(fd: int, buffer: bytes, offset: int) -> int:
        calls.append(offset)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", refuse)
        assert not cache.write(file, BLOCK_BYTES, body[BLOCK_BYTES:])
        tried = len(calls)
        assert not cache.write(file, BLOCK_BYTES, body[BLOCK_BYTES:])
        assert len(calls) == tried, "off means that the disk is left alone"
        assert cache.read(file, 0, BLOCK_BYTES) == body[:BLOCK_BYTES]
        assert cache.read(file, BLOCK_BYTES, 1) is None

    fresh.now_s += blockcache.PAUSE_S
    assert cache.write(file, BLOCK_BYTES, body[BLOCK_BYTES:])
    assert cache.read(file, 0, len(body)) == body


def test_each_failing_write_leaves_either_nothing_or_the_truth(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    body, real = content(3 * BLOCK_BYTES), os.pwrite
    for nth in range(12):
        file = version(len(body), etag=f"nth{nth}")
        left = [nth]

        def sometimes(fd: int, buffer: bytes, offset: int, left: list[int] = left) -> int:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.ENOSPC, "full")
            return real(fd, memoryview(buffer)[: max(1, len(buffer) // 2)], offset)  # short writes are legal

        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", sometimes)
            fresh().write(file, 0, body)
        later = fresh()
        for start in range(0, len(body), BLOCK_BYTES):
            assert later.read(file, start, BLOCK_BYTES) in (None, body[start : start + BLOCK_BYTES])


def test_a_read_error_of_the_disk_means_not_held(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, file, body = put(fresh(), BLOCK_BYTES)

    def refuse(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", refuse)
        assert cache.read(file, 0, 10) is None
        assert cache.usage() == (0, LIMIT)
        assert cache.make_room(1) == 0
    assert cache.read(file, 0, 10) == body[:10]


def test_the_cache_stays_in_its_limit_and_evicts_what_was_used_longest_ago(fresh: Caches) -> None:
    cache, body = fresh(), content(4 * MIB)
    for index in range(15):
        file = version(len(body), key=f"k{index}")
        assert cache.write(file, 0, body)
        os.utime(on_disk(fresh, file, ".blocks"), ns=(index, index))
    fresh.now_s += TOUCH_S
    assert cache.read(version(len(body), key="k0"), 0, 1) == body[:1]
    for index in range(15, 20):
        assert cache.write(version(len(body), key=f"k{index}"), 0, body)
        assert fresh.on_disk() <= LIMIT
    assert cache.usage()[0] <= LIMIT
    assert cache.usage()[1] == LIMIT
    assert cache.present(version(len(body), key="k0"))
    assert fresh().read(version(len(body), key="k1"), 0, 1) is None
    assert fresh().present(version(len(body), key="k19"))


@promise("S-52")
def test_a_version_is_lent_to_one_at_a_time_for_as_long_as_the_descriptor_lives(fresh: Caches) -> None:
    cache, other, body = fresh(), fresh(), content(2 * MIB)
    file = version(len(body))
    assert cache.open_for_passthrough(file) is None
    cache.write(file, 0, body)
    lent = cache.open_for_passthrough(file)
    assert lent is not None
    assert other.open_for_passthrough(file) is None
    kept = os.dup(lent)  # as the kernel keeps the open file
    os.close(lent)
    assert other.open_for_passthrough(file) is None
    os.close(kept)
    assert lends(other, file)


@promise("S-52")
def test_what_is_written_to_a_lent_file_is_nobody_elses(fresh: Caches) -> None:
    (cache, file, body), other = put(fresh(), 2 * MIB), fresh()
    assert other.read(file, 0, 10) == body[:10]
    lent = cache.open_for_passthrough(file)
    assert lent is not None
    cache.drop(file)
    os.pwrite(lent, b"changed", 0)
    os.close(lent)
    assert other.read(file, 0, 10) is None
    assert cache.read(file, 0, 10) is None
    cache.write(file, 0, body)
    assert other.read(file, 0, 10) == body[:10]


@promise("S-54")
def test_a_changed_file_is_not_lent(fresh: Caches) -> None:
    cache, file, body = put(fresh(), 2 * MIB)
    fresh.file(".data").write_bytes(bytes(len(body)))
    assert cache.open_for_passthrough(file) is None


@pytest.mark.parametrize("size", [5000, BLOCK_BYTES + 1])
def test_the_figure_agrees_with_the_disk(fresh: Caches, size: int) -> None:
    cache = fresh()
    for index in range(20):
        for _ in range(2):
            cache.write(version(size, key=f"k{index}"), 0, content(size))
    assert cache.usage()[0] == fresh.on_disk() >= 20 * size
    (fresh.directory / "usage").unlink()
    assert cache.usage()[0] == fresh.on_disk()


def test_an_object_larger_than_the_cache_is_kept_in_part_and_the_limit_holds(fresh: Caches) -> None:
    cache, body = fresh(), content(8 * MIB)
    file = version(2 * LIMIT)
    for start in range(0, 2 * LIMIT, len(body)):
        cache.write(file, start, body)
        assert fresh.on_disk() <= LIMIT
    assert cache.read(file, 2 * LIMIT - len(body), len(body)) == body


def test_a_body_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", 2 * BLOCK_BYTES, "n")
    assert not cache.write(version(3 * BLOCK_BYTES), 0, content(3 * BLOCK_BYTES))
    assert not BlockCache(tmp_path / "tiny", 100, "n").write(version(10), 0, b"0123456789")


class Disk:
    """What statvfs(3) says of a disk of 100 GiB on which others take what is not free."""

    f_frsize = 1
    f_blocks = 100 << 30

    def __init__(self, free_bytes: int) -> None:
        self.f_bavail = free_bytes


@promise("S-207")
def test_what_the_disk_has_left_is_not_taken(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GiB stays for others, and when these take more the cache gives it back."""
    cache, body = fresh(), content(4 * BLOCK_BYTES)
    disk = Disk(2 << 30)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert cache.write(version(len(body), "a"), 0, body)
    assert cache.usage()[1] == LIMIT
    disk.f_bavail = (1 << 30) - 1
    assert not cache.write(version(len(body), "b"), 0, body)
    assert fresh.on_disk() == 0
    assert not cache.write(version(len(body), "b"), 0, body)
    disk.f_bavail = 2 << 30
    assert not cache.write(version(len(body), "b"), 0, body), "it looks again in 5 s"
    fresh.now_s += 6
    assert cache.write(version(len(body), "b"), 0, body)


@promise("S-206")
def test_what_is_over_a_lower_limit_goes_at_once(fresh: Caches) -> None:
    cache, body = fresh(), content(BLOCK_BYTES)
    for number in range(16):
        assert cache.write(version(len(body), f"{number}"), 0, body)
    before = fresh.on_disk()
    cache.resize(8 * BLOCK_BYTES)
    assert fresh.on_disk() <= 8 * BLOCK_BYTES < before
    cache.resize(16 * BLOCK_BYTES)
    assert cache.write(version(len(body), "another"), 0, body)


def test_an_evicted_version_stays_readable_for_who_has_it_open_and_is_written_anew(fresh: Caches) -> None:
    (one, file, body), two = put(fresh(), 2 * BLOCK_BYTES, BLOCK_BYTES), fresh()
    assert two.make_room(LIMIT) > 0
    assert one.read(file, 0, BLOCK_BYTES) == body[:BLOCK_BYTES]
    assert two.read(file, 0, BLOCK_BYTES) is None
    assert one.write(file, BLOCK_BYTES, body[BLOCK_BYTES:])
    assert two.read(file, BLOCK_BYTES, BLOCK_BYTES) == body[BLOCK_BYTES:]
    two.make_room(LIMIT)
    fresh.now_s += TOUCH_S
    assert one.read(file, BLOCK_BYTES, 1) is None, "lets go of evicted files in time"


def test_open_files_are_bounded(fresh: Caches) -> None:
    cache, body = fresh(), content(BLOCK_BYTES + 1)
    gc.collect()  # what other tests left open does not close while this one counts
    before = len(os.listdir("/dev/fd"))
    for index in range(blockcache.OPEN_FILES + 20):
        cache.write(version(len(body), key=f"k{index}"), 0, body)
        assert cache.read(version(len(body), key=f"k{index}"), 0, 10) == body[:10]
    assert before + blockcache.OPEN_FILES < len(os.listdir("/dev/fd")) <= before + 2 * blockcache.OPEN_FILES
    assert cache.read(version(len(body), key="k0"), 0, 10) == body[:10]
    cache.close()
    assert len(os.listdir("/dev/fd")) == before


def test_a_busy_directory_means_not_kept_but_still_readable(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cachespace, "LOCK_WAIT_S", 0.005)
    cache, file, body = put(fresh(), BLOCK_BYTES)
    with CacheSpace(fresh.directory, LIMIT).exclusive():
        assert not cache.write(version(len(body), key="other"), 0, body)
        assert cache.read(file, 0, len(body)) == body
    fresh.now_s += blockcache.PAUSE_S
    assert cache.write(version(len(body), key="other"), 0, body)


def test_threads_of_one_process_wait_for_each_other_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachespace, "LOCK_WAIT_S", 0.005)
    space = CacheSpace(tmp_path / "cache", LIMIT)
    with space.exclusive(), pytest.raises(CacheBusyError):
        space.reserve(1)


WORKER = """
import random, sys
from pathlib import Path
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.blockfile import BLOCK_BYTES
from datastore.fuse.store.base import ObjectVersion
directory, seed = Path(sys.argv[1]), int(sys.argv[2])
cache = BlockCache(directory, 6 << 20, "n")
sizes = [(1, 3, 9)[i % 3] * BLOCK_BYTES for i in range(15)]
bodies = [(ObjectVersion(f"k{i}", "e", size), random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
rng = random.Random(seed)
hits = 0
for _ in range(400):
    file, body = rng.choice(bodies)
    block = rng.randrange(len(body) // BLOCK_BYTES) * BLOCK_BYTES
    if rng.random() < 0.5:
        cache.write(file, block, body[block : block + 2 * BLOCK_BYTES])
    else:
        held = cache.read(file, block, BLOCK_BYTES)
        hits += held is not None
        assert held in (None, body[block : block + BLOCK_BYTES]), (file, block)
print(hits)
"""


def test_processes_share_one_directory_within_its_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "cache")]
    root = Path(__file__).parents[3]
    running = [
        subprocess.Popen([*command, str(seed)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    ended = [(*process.communicate(timeout=PATIENCE_S), process.returncode) for process in running]
    for printed, errors, code in ended:
        assert code == 0, errors
        assert int(printed) > 0
    in_flight = 3 * (2 * BLOCK_BYTES + 4096)  # an eviction does not see what the others are just writing
    assert Caches(tmp_path / "cache").on_disk() <= 6 * MIB + in_flight
    assert BlockCache(tmp_path / "cache", 6 * MIB, "n").usage()[0] <= 6 * MIB


def test_opening_a_sidecar_that_is_unlinked_meanwhile_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "x"), b"x", 10, b"")
    create_files(place)
    real = os.open

    def evict_between(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags, mode)
        if path == place.data_path:
            os.unlink(place.sidecar_path)
        return fd

    monkeypatch.setattr(os, "open", evict_between)
    with pytest.raises(FileNotFoundError, match="evicted"):
        BlockFile(place)


def test_threads_that_create_one_version_at_once_share_it(fresh: Caches) -> None:
    cache, body, gate = fresh(), content(8 * BLOCK_BYTES), threading.Barrier(8)

    def write(block: int) -> bool:
        gate.wait(PATIENCE_S)
        return cache.write(
            version(len(body)), block * BLOCK_BYTES, body[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, range(8)))
    assert cache.read(version(len(body)), 0, len(body)) == body
