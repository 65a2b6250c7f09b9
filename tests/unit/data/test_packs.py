"""Small versions share files: each is given back as it was kept, or not at all, whatever became of its pack."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from datastore.fuse.data import blockcache, packs
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.blockfile import BLOCK_BYTES
from datastore.fuse.data.cachespace import CacheSpace
from datastore.fuse.data.openfiles import TOUCH_S
from datastore.fuse.data.packs import Packs, Small, in_groups
from datastore.fuse.store.base import Body, ETag, ObjectVersion
from tests.unit.data.probe import LIMIT, Caches

BODIES = {f"k{number}": os.urandom(1000 + number) for number in range(10)}


def version(key: str) -> ObjectVersion:
    return ObjectVersion(key, ETag("e"), len(BODIES[key]))


def evicted_and_open(fresh: Caches) -> int:
    """How many packs this process keeps from being given back to the disk."""
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(link.startswith(str(fresh.directory)) and link.endswith(".pack (deleted)") for link in links)


def keep(cache: BlockCache, *keys: str) -> bool:
    return cache.write_small([(version(key), 0, BODIES[key]) for key in keys or BODIES])


def held(cache: BlockCache) -> set[str]:
    """The keys that it has; what it gives back is right."""
    found = {key: cache.read(version(key), 0, 5000) for key in BODIES}
    assert all(body in (None, BODIES[key]) for key, body in found.items())
    return {key for key, body in found.items() if body is not None}


def test_what_is_kept_together_is_in_one_file_and_found_by_who_starts_later(fresh: Caches) -> None:
    one = fresh()
    assert keep(one)
    assert held(one) == held(fresh()) == set(BODIES)
    assert fresh.file(".pack").stat().st_size == 16 + 16 * 10 + sum(map(len, BODIES.values()))
    assert one.read(version("k3"), 10, 20) == BODIES["k3"][10:30]
    assert one.present(version("k3"))
    assert one.open_for_passthrough(version("k3")) is None
    assert not one.present(version("k3")._replace(etag=ETag("other")))
    assert all(path.stat().st_mode & 0o77 == 0 for path in (fresh.file(".pack"), *fresh.file(".pack").parents[:2]))


def test_what_is_kept_later_follows_in_the_same_file_and_nothing_is_kept_twice(fresh: Caches) -> None:
    one = fresh()
    for key in ("k0", "k1", "k0", "k1"):
        assert keep(one, key)
    one.tidy()
    assert held(one) == {"k0", "k1"}
    assert fresh.file(".pack").stat().st_size == 2 * (16 + 16) + 1000 + 1001
    assert one.write(version("k2"), 0, BODIES["k2"][:999]), "a part of a block is not for the disk"
    assert held(fresh()) == {"k0", "k1"}


def test_each_block_of_a_larger_one_is_kept_for_itself(fresh: Caches) -> None:
    cache, body = fresh(), os.urandom(blockcache.SMALL_BYTES - 1)
    file = ObjectVersion("large", ETag("e"), len(body))
    assert cache.write(file, BLOCK_BYTES - 1, body[BLOCK_BYTES - 1 : 3 * BLOCK_BYTES + 5])
    assert cache.holds(file, BLOCK_BYTES, 3 * BLOCK_BYTES)
    for start, stop in ((0, 1), (BLOCK_BYTES - 1, BLOCK_BYTES + 1), (3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 1)):
        assert not cache.holds(file, start, stop)
        assert cache.read(file, start, stop - start) is None
    assert cache.read(file, BLOCK_BYTES + 3, 2 * BLOCK_BYTES - 5) == body[BLOCK_BYTES + 3 : 3 * BLOCK_BYTES - 2]
    assert cache.write(file, 0, body)
    assert fresh().present(file)
    assert fresh().read(file, 0, len(body)) == body
    assert fresh.file(".pack").stat().st_size == len(body) + 2 * 16 + 8 * 16, "no block twice"


def test_more_than_one_group_and_more_than_one_pack(fresh: Caches) -> None:
    cache, many = fresh(), [ObjectVersion(f"n{number}", ETag("e"), 1024) for number in range(1200)]
    cache.resize(8 << 20)
    for first in (0, 600):
        assert cache.write_small([(one, 0, one.key.ljust(1024).encode()) for one in many[first : first + 600]])
    full = cache.usage()[1] // 32
    sizes = sorted(path.stat().st_size for path in fresh.objects("*.pack"))
    assert len(sizes) > 3
    assert full <= sizes[1]
    assert sizes[-1] < 2.1 * full
    later = fresh()
    assert [later.read(one, 0, 1024) for one in many] == [one.key.ljust(1024).encode() for one in many]
    assert cache.usage()[0] == fresh.on_disk()


def test_what_one_system_call_writes() -> None:
    smalls = [Small(b"", 0, bytes(10)) for _ in range(1200)]
    assert [len(group) for group in in_groups(smalls, 1 << 20)] == [500, 500, 200]
    assert [len(group) for group in in_groups(smalls[:7], 20)] == [2, 2, 2, 1]
    assert [len(group) for group in in_groups(smalls[:2], 5)] == [1, 1]


def test_what_several_threads_keep_at_once_is_counted_as_the_disk_does(fresh: Caches) -> None:
    cache, many = fresh(), [ObjectVersion(f"n{number}", ETag("e"), 1900) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda one: cache.write(one, 0, bytes(1900)), many))
    assert cache.usage()[0] == fresh.on_disk()


@pytest.mark.parametrize("limit", [32 << 10, 256 << 10, 2 << 20])
def test_a_small_cache_stays_in_its_limit(fresh: Caches, limit: int) -> None:
    cache = fresh()
    cache.resize(limit)
    for number in range(3000):
        cache.write(ObjectVersion(f"n{number}", ETag("e"), 900), 0, bytes(900))
        assert fresh.on_disk() <= limit
    assert fresh.on_disk() > 0


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda good: good[:-1], 5),
        (lambda good: good[:-1] + bytes([good[-1] ^ 1]), 9),
        (lambda good: good + b"more", 10),
        (lambda good: good[: len(good) // 2 + 20], 5),
        (lambda good: good[: len(good) // 2] + bytes(len(good) - len(good) // 2), 5),
        (lambda good: good[:20] + b"?" + good[21:], 0),
        (lambda good: b"?" + good[1:], 0),
        (lambda good: good[:8] + b"\xff\xff\xff\xff" + good[12:], 0),
        (lambda good: good[:10], 0),
        (lambda good: b"", 0),
    ],
)
@pytest.mark.parametrize("still_open", [True, False])
def test_a_damaged_pack_is_never_believed(
    fresh: Caches, damage: Callable[[bytes], bytes], left: int, still_open: bool
) -> None:
    """Of two groups of five."""
    cache, keys = fresh(), list(BODIES)
    assert keep(cache, *keys[:5])
    assert keep(cache, *keys[5:])
    path = fresh.file(".pack")
    with open(path, "r+b") as file:
        bad = damage(file.read())
        file.seek(0)
        file.truncate()
        file.write(bad)
    if not still_open:
        cache = fresh()
        assert len(held(cache)) == left
    held(cache)
    assert keep(cache)
    assert held(cache) == set(BODIES)


def test_what_another_mount_keeps_is_learned_by_who_keeps_something(fresh: Caches) -> None:
    one, two = fresh(), fresh()
    assert keep(one, "k0")
    assert keep(two, "k5")
    assert held(two) == {"k5"}
    fresh.now_s += TOUCH_S
    assert keep(two, "k6")
    assert held(two) == {"k0", "k5", "k6"}
    assert keep(one, "k1")
    fresh.now_s += TOUCH_S
    assert keep(two, "k7")
    assert held(two) == {"k0", "k1", "k5", "k6", "k7"}


def test_a_pack_in_use_says_so_and_the_others_are_evicted(fresh: Caches) -> None:
    one, two = fresh(), fresh()
    assert keep(one, "k0")
    assert keep(two, "k1")
    for path in fresh.objects("*.pack"):
        first = path.stat().st_size < len(BODIES["k1"]) + 32
        os.utime(path, ns=(1, 1) if first else (2, 2))
    fresh.now_s += TOUCH_S
    assert held(one) == {"k0"}
    one.resize(8192)
    assert one.make_room(4096) == 4096
    assert held(fresh()) == {"k0"}


def test_who_has_an_evicted_pack_open_reads_on_for_a_while_and_keeps_anew(fresh: Caches) -> None:
    one, two, three = fresh(), fresh(), fresh()
    assert keep(one, "k0", "k1")
    three.learn()
    assert held(three) == {"k0", "k1"}
    two.make_room(LIMIT)
    assert not fresh.objects("*.pack")
    assert held(one) == {"k0", "k1"}
    assert keep(one, "k0")
    with contextlib.closing(fresh()) as later:
        assert held(later) == {"k0"}
    three.tidy()
    assert held(three) == set()
    two.make_room(LIMIT)
    assert evicted_and_open(fresh) == 2
    fresh.now_s += TOUCH_S
    assert held(one) == set()
    assert evicted_and_open(fresh) == 0
    assert keep(one, "k1")
    assert held(fresh()) == {"k1"}


def test_who_reads_one_pack_lets_go_of_others_that_were_evicted(fresh: Caches) -> None:
    one, two = fresh(), fresh()
    assert keep(one, "k0")
    assert keep(two, "k1")
    one.learn()
    assert held(one) == {"k0", "k1"}
    two_pack = max(fresh.objects("*.pack"), key=lambda path: path.stat().st_size)
    two_pack.unlink()
    two.close()
    assert evicted_and_open(fresh) == 1
    fresh.now_s += TOUCH_S
    assert one.read(version("k0"), 0, 10) == BODIES["k0"][:10]
    assert evicted_and_open(fresh) == 0


def test_an_evicted_pack_that_is_not_open_is_not_held(fresh: Caches) -> None:
    one = fresh()
    assert keep(one, "k0", "k1")
    one.close()
    fresh().make_room(LIMIT)
    assert not one.present(version("k0"))
    assert held(one) == set()
    known = one._packs
    assert (known._ends, any(known._shards.values())) == ({}, False)


def test_a_pack_that_can_not_be_opened_now_is_held_another_time(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep(fresh(), "k0")
    cache = fresh()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
        assert held(cache) == set()
    assert held(cache) == {"k0"}


def test_what_was_evicted_is_no_longer_learned_of(fresh: Caches) -> None:
    one, two = fresh(), fresh()
    assert keep(one, "k0")
    two.learn()
    assert held(two) == {"k0"}
    one.make_room(LIMIT)
    one.close()
    two.learn()
    assert evicted_and_open(fresh) == 0
    assert not two.present(version("k0"))


@pytest.mark.parametrize("first", [True, False])
def test_what_could_not_be_written_is_not_held_and_the_rest_is(
    fresh: Caches, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    cache = fresh()
    if not first:
        assert keep(cache, "k0")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert not keep(cache, "k1")
    assert len(fresh.objects("*.pack")) == (0 if first else 1)
    assert cache.usage()[0] == fresh.on_disk()
    assert not keep(cache, "k1"), "the disk is left alone for a while"
    fresh.now_s += blockcache.PAUSE_S
    assert keep(cache, "k1")
    assert held(cache) == held(fresh()) == ({"k1"} if first else {"k0", "k1"})
    assert len(fresh.objects("*.pack")) == (1 if first else 2)
    assert cache.usage()[0] == fresh.on_disk()


def test_what_a_disk_took_of_a_group_before_it_was_full_is_given_back(
    fresh: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real = fresh(), os.pwritev
    assert keep(cache, "k0")

    def full(fd: int, parts: list[Body], at: int) -> int:
        real(fd, parts, at)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert not cache.write(ObjectVersion("large", ETag("e"), 900_000), 0, bytes(900_000))
    assert cache.usage()[0] == fresh.on_disk() == 4096
    assert held(fresh()) == {"k0"}


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo", "unreadable", "gone"])
def test_what_is_no_pack_does_not_hide_the_others(
    fresh: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = fresh()
    assert keep(cache)
    odd = fresh.file(".pack").with_name("0000000a.pack")
    if kind == "symlink":
        (tmp_path / "good").write_bytes(fresh.file(".pack").read_bytes())
        odd.symlink_to(tmp_path / "good")
    elif kind == "directory":
        odd.mkdir()
    else:
        odd.write_bytes(b"x" * 100)
        real = os.open

        def changed(path: str, flags: int, mode: int = 0o777) -> int:
            if Path(path) == odd and kind == "unreadable":
                raise OSError(errno.EIO, "no")
            if Path(path) == odd:  # since it was listed
                odd.unlink(missing_ok=True)
                if kind == "fifo":
                    os.mkfifo(odd)
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", changed)
    later = fresh()
    assert held(later) == set(BODIES)
    fresh.now_s += TOUCH_S
    assert later.write(ObjectVersion("new", ETag("e"), 10), 0, bytes(10)), "and it goes on keeping"


def test_what_is_found_gone_by_two_at_once(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads lets go of a pack that who learns is just about to let go of."""
    for key in ("k0", "k1"):
        assert keep(fresh(), key)
    one, real = fresh(), os.close
    assert held(one) == {"k0", "k1"}
    fresh().make_room(LIMIT)
    fresh.now_s += TOUCH_S

    def close(fd: int) -> None:
        evicted = os.readlink(f"/proc/self/fd/{fd}").endswith(".pack (deleted)")
        real(fd)
        if evicted:
            assert held(one) == set()

    monkeypatch.setattr(os, "close", close)
    one.learn()


def test_a_pack_that_is_evicted_while_it_is_written_to_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, real = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0), os.pwritev

    def evicted(fd: int, parts: list[Body], at: int) -> int:
        written = real(fd, parts, at)
        for path in (tmp_path / "objects" / "packs").iterdir():
            path.unlink()
        kept.files.tidy()
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", evicted)
        kept.append(kept.absent([(b"name", b"body")]), pack_bytes=1 << 20)
    assert not kept.holds(b"name")
    kept.append(kept.absent([(b"name", b"body")]), pack_bytes=1 << 20)
    assert kept.read(b"name", 4) == b"body"


def test_a_short_write_is_finished(fresh: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: whole(fd, [parts[0][:10]], at))
    assert keep(fresh())
    assert held(fresh()) == set(BODIES)


def test_open_packs_are_bounded(tmp_path: Path) -> None:
    kept = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0)
    before = len(os.listdir("/dev/fd"))
    names = [b"%d" % number for number in range(packs.OPEN_PACKS + 20)]
    for name in names:
        kept.append(kept.absent([(name, name)]), pack_bytes=1)
    assert len(os.listdir("/dev/fd")) == before + packs.OPEN_PACKS
    assert [kept.read(name, len(name)) for name in names] == names
    kept.files.close()
    assert len(os.listdir("/dev/fd")) == before


def test_what_is_remembered_is_bounded_and_the_oldest_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "_SHARD_BYTES", 4 * 20)
    monkeypatch.setattr(packs, "_fingerprint", lambda name: b"aa" + name.rjust(6))
    kept = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0)
    names = [b"%d" % number for number in range(7)]
    for name in [*names, names[-1]]:
        kept.append(kept.absent([(name, name)]), pack_bytes=1 << 20)
    assert [name for name in names if kept.read(name, 1)] == names[4:]
    (old,) = (tmp_path / "objects" / "packs").iterdir()
    os.utime(old, ns=(1, 1))
    newer = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0)
    newer.append(newer.absent([(b"n", b"n"), (b"5", b"5")]), pack_bytes=1 << 20)
    newer.learn(within_s=1)
    assert [name for name in [b"n", *names] if newer.read(name, 1)] == [b"n", b"0", b"1", b"5"], (
        "the newest, and others"
    )
    os.utime(old, ns=(1, 1))
    later = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0)
    later.learn(within_s=1)
    later.append(later.absent([(b"m", b"m")]), pack_bytes=1 << 20)
    assert [name for name in [b"m", b"n", *names] if later.read(name, 1)] == [b"m", b"n", b"5"], "the older half goes"


def test_a_fingerprint_that_lies_across_two_others_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a fingerprint in memory is the number of its pack, 1."""
    monkeypatch.setattr(packs, "_fingerprint", lambda name: name)
    kept = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0)
    kept.append(kept.absent([(b"aaaabcde", b"body")]), pack_bytes=1 << 20)
    across = b"aabcde\x01\x00"
    assert not kept.holds(across)
    kept.append(kept.absent([(across, b"other")]), pack_bytes=1 << 20)
    assert (kept.read(across, 5), kept.read(b"aaaabcde", 4)) == (b"other", b"body")


def test_learning_takes_a_bounded_time_and_the_packs_used_last_come_first(tmp_path: Path) -> None:
    other = Packs(CacheSpace(tmp_path, LIMIT), lambda: 0.0)
    for number in range(4):
        other.append(other.absent([(b"%d" % number, b"body")]), pack_bytes=1)
    for number, path in enumerate(sorted((tmp_path / "objects" / "packs").iterdir())):
        os.utime(path, ns=(number, number))
    ticks = iter(range(1000))
    late = Packs(CacheSpace(tmp_path, LIMIT), lambda: float(next(ticks)))
    late.learn(within_s=2.5)
    first = [number for number in range(4) if late.holds(b"%d" % number)]
    assert len(first) == 2
    late.learn(within_s=100)
    assert all(late.read(b"%d" % number, 4) == b"body" for number in range(4))
