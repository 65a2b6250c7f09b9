"""SmallFileFetcher and Keeping: what is fetched before it is asked for, and what of that the disk cache gets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from datastore.errors import Unreachable
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.keeping import Keeping
from datastore.fuse.data.pieces import Piece
from datastore.fuse.data.reader import Reader
from datastore.fuse.data.smallfiles import SmallFileFetcher
from datastore.fuse.store.base import Body, ETag, ObjectVersion
from tests.driving import resolve, the_loop
from tests.patience import PATIENCE_S, eventually
from tests.unit.data.probe import NO_CACHE, Probe

BODY = b"b" * 5000


class SlowDisk(BlockCache):
    """What writes into it waits for the gate."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 64 << 20, "test")
        self.gate = threading.Event()
        self.begun: list[ObjectVersion] = []

    def write(self, version: ObjectVersion, offset: int, body: Body) -> bool:
        """See BlockCache."""
        self.begun.append(version)
        assert self.gate.wait(PATIENCE_S)
        return super().write(version, offset, body)

    def write_small(self, bodies: Iterable[tuple[ObjectVersion, int, Body]]) -> bool:
        """See BlockCache."""
        assert self.gate.wait(PATIENCE_S)
        return super().write_small(bodies)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    disk = SlowDisk(tmp_path)
    yield disk
    disk.gate.set()


def put(store: Probe, count: int, body: bytes = BODY) -> list[ObjectVersion]:
    return [store.add(f"f{number}", body) for number in range(count)]


def fetcher_of(store: Probe, cache: BlockCache = NO_CACHE) -> tuple[SmallFileFetcher, Reader]:
    reader = Reader(store, cache, the_loop())
    return SmallFileFetcher(reader), reader


def arrived_pieces(count: int, body: bytes) -> list[Piece]:
    pieces = [Piece(ObjectVersion(f"f{number}", ETag("e"), len(body)), 0, len(body)) for number in range(count)]
    for piece in pieces:
        piece.set_result(memoryview(body))
    return pieces


def test_each_is_fetched_once_and_kept(store: Probe, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 1 << 20, "test")
    made, reader = fetcher_of(store, cache)
    versions = put(store, 40)

    async def ask() -> None:
        made.add(versions, 8)
        made.add(versions, 8)
        for version in versions:
            await made.awaited(version.key)
            assert reader.held(version, 0, version.size) == BODY

    resolve(ask())
    assert sorted(store.keys) == sorted(version.key for version in versions)
    assert made.bytes == 0
    eventually(lambda: all(cache.present(version) for version in versions))


def test_who_asks_for_one_that_waits_fetches_it_himself(store: Probe) -> None:
    made, reader = fetcher_of(store)
    versions = put(store, 3)
    store.gate.clear()
    store.gated = lambda key: key == versions[0].key

    async def ask() -> None:
        made.add(versions, 8)
        assert await made.awaited(versions[2].key)
        assert versions[1].key not in store.keys
        assert reader.held(versions[2], 0, 1) == BODY[:1]
        store.gate.set()
        assert await made.brought(versions[0])
        assert await made.brought(versions[1])

    resolve(ask())
    assert sorted(store.keys) == [version.key for version in versions]


def test_a_failure_is_nobodys_but_who_asks_is_not_kept_waiting(store: Probe) -> None:
    store.fail = dict.fromkeys(range(100), Unreachable("no network"))
    made, reader = fetcher_of(store)
    versions = put(store, 4)

    async def ask() -> None:
        made.add(versions, 8)
        for version in versions:
            await made.awaited(version.key)

    resolve(ask())
    assert made.bytes == 0
    assert not resolve(made.awaited(versions[0].key))
    assert not resolve(made.brought(versions[0]))
    assert reader.table.held_bytes == 0


def test_pieces_are_kept_by_one_lane_and_beyond_a_bound_each_by_its_own(disk: SlowDisk) -> None:
    keeping = Keeping(disk, the_loop())
    pieces = arrived_pieces(10, bytes(4 << 20))

    def keep() -> None:
        for piece in pieces:
            keeping.later(piece)

    the_loop().call(keep)
    eventually(lambda: len(disk.begun) == 3)
    assert {version.key for version in disk.begun} == {"f0", "f8", "f9"}
    assert not any(piece.kept for piece in pieces)
    assert keeping.is_full
    disk.gate.set()
    resolve(keeping.caught_up())
    assert [piece.kept for piece in pieces[:8]] == [True] * 8
    eventually(lambda: all(piece.kept for piece in pieces))
    assert not keeping.is_full


@pytest.mark.parametrize("taken", [True, False])
def test_small_pieces_go_to_the_disk_together_and_are_kept_if_it_takes_them(
    disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    keeping, calls = Keeping(disk, the_loop()), list[list[ObjectVersion]]()

    def write(bodies: Iterable[tuple[ObjectVersion, int, Body]]) -> bool:
        calls.append([version for version, _, _ in bodies])
        return taken

    monkeypatch.setattr(disk, "write_small", write)
    pieces = arrived_pieces(3, BODY)

    async def keep() -> None:
        for piece in pieces:
            keeping.later(piece, more=True)
        await the_loop().sleep(0.01)
        assert not calls
        keeping.flush()
        keeping.flush()
        await keeping.caught_up()

    resolve(keep())
    assert calls == [[piece.version for piece in pieces]]
    assert [piece.kept for piece in pieces] == [taken] * 3


def test_no_more_is_fetched_ahead_than_the_disk_takes(store: Probe, disk: SlowDisk) -> None:
    """The mount's loop neither waits for the disk nor holds what that has no time for."""
    made, _ = fetcher_of(store, disk)
    versions = put(store, 10, bytes(4 << 20))
    the_loop().call(lambda: made.add(versions, 1))
    eventually(lambda: len(store.keys) == 8)
    resolve(the_loop().sleep(0.01))
    assert len(store.keys) == 8
    assert not any(disk.present(version) for version in versions)
    disk.gate.set()
    eventually(lambda: all(disk.present(version) for version in versions))


def test_several_are_fetched_at_a_time(store: Probe) -> None:
    made, _ = fetcher_of(store)
    versions = put(store, 10)
    store.gate.clear()
    the_loop().call(lambda: made.add(versions, 4))
    eventually(lambda: len(store.keys) == 4)
    the_loop().call(lambda: made.add(versions, 4))
    resolve(the_loop().sleep(0.01))
    assert len(store.keys) == 4
    store.gate.set()
    eventually(lambda: made.bytes == 0)
    assert len(store.keys) == 10
