"""SmallFileFetcher and Keeping: what is fetched before it is asked for, and what of that the disk cache gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from datastore.errors import Unreachable
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.keeping import Keeping
from datastore.fuse.data.pieces import Piece
from datastore.fuse.data.reader import Reader
from datastore.fuse.data.smallfiles import SmallFileFetcher
from datastore.fuse.store.base import ETag, ObjectVersion, WriteOptions
from tests.memorystore import MemoryStore
from tests.patience import PATIENCE_S

BODY = b"b" * 5000


class Gated(MemoryStore):
    """A bucket whose GETs wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked: list[str] = []
        self.broken = False

    def get(self, key: str, **options: Any) -> Any:
        """See ObjectStore."""
        self.asked.append(key)
        assert self.gate.wait(PATIENCE_S)
        if self.broken:
            raise Unreachable("no network")
        return super().get(key, **options)


@pytest.fixture
def store() -> Gated:
    return Gated()


@pytest.fixture
def io() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def put(store: Gated) -> Callable[[int], list[ObjectVersion]]:
    def make(count: int) -> list[ObjectVersion]:
        keys = [f"f{number}" for number in range(count)]
        return [ObjectVersion(key, ETag(store.put(key, BODY, WriteOptions()).etag), len(BODY)) for key in keys]

    return make


def test_each_is_fetched_once_by_few_threads_and_kept(
    store: Gated, io: ThreadPoolExecutor, put: Callable[[int], list[ObjectVersion]], tmp_path: Path
) -> None:
    cache = BlockCache(tmp_path, 1 << 20, "test")
    reader = Reader(store, cache, io)
    made, versions = SmallFileFetcher(reader, io), put(40)
    store.gate.set()
    made.add(versions)
    made.add(versions)
    for version in versions:
        made.awaited(version.key)
        assert reader.held(version, 0, version.size) == BODY
    io.shutdown()
    assert sorted(store.asked) == sorted(version.key for version in versions)
    assert made.bytes == 0
    assert all(cache.present(version) for version in versions)


def test_who_asks_for_one_that_waits_fetches_it_himself(
    store: Gated, put: Callable[[int], list[ObjectVersion]]
) -> None:
    with ThreadPoolExecutor(1) as one:
        held = threading.Event()
        one.submit(held.wait, PATIENCE_S)
        reader = Reader(store, None, one)
        made, versions = SmallFileFetcher(reader, one), put(3)
        made.add(versions)
        store.gate.set()
        made.awaited(versions[2].key)
        assert store.asked == [versions[2].key]
        assert reader.held(versions[2], 0, 1) == BODY[:1]
        held.set()
    assert sorted(store.asked) == [version.key for version in versions]


def test_a_failure_is_nobodys_but_who_asks_is_not_kept_waiting(
    store: Gated, io: ThreadPoolExecutor, put: Callable[[int], list[ObjectVersion]]
) -> None:
    store.broken = True
    store.gate.set()
    reader = Reader(store, None, io)
    made, versions = SmallFileFetcher(reader, io), put(4)
    made.add(versions)
    for version in versions:
        made.awaited(version.key)
    io.shutdown()
    assert made.bytes == 0
    assert not made.awaited(versions[0].key)
    assert reader.held_bytes == 0


def test_after_the_shutdown_nothing_is_begun(
    store: Gated, io: ThreadPoolExecutor, put: Callable[[int], list[ObjectVersion]]
) -> None:
    made, versions = SmallFileFetcher(Reader(store, None, io), io), put(1)
    io.shutdown()
    made.add(versions)
    assert not store.asked


class Postponing(Executor):
    """Runs nothing by itself."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """Remember it."""
        self.jobs.append(partial(job, *args, **named))
        return Future()


def test_pieces_are_kept_by_one_job_and_by_their_fetcher_beyond_a_bound(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 64 << 20, "test")
    executor = Postponing()
    keeping = Keeping(cache, executor)
    body = bytes(4 << 20)
    pieces = [Piece(ObjectVersion(f"f{number}", ETag("e"), len(body)), 0, len(body)) for number in range(10)]
    for piece in pieces:
        assert piece.claim()
        piece.settle(body, None)
        keeping.later(piece)
    assert len(executor.jobs) == 1
    assert [piece.kept for piece in pieces] == [False] * 8 + [True] * 2
    executor.jobs[0]()
    assert all(piece.kept for piece in pieces)


def test_without_a_thread_the_fetcher_keeps_it(tmp_path: Path) -> None:
    piece = Piece(ObjectVersion("f", ETag("e"), len(BODY)), 0, len(BODY))
    assert piece.claim()
    piece.settle(BODY, None)
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    Keeping(BlockCache(tmp_path, 1 << 20, "test"), executor).later(piece)
    assert piece.kept


def test_pieces_that_follow_each_other_are_kept_together(tmp_path: Path) -> None:
    executor = Postponing()
    keeping = Keeping(BlockCache(tmp_path, 64 << 20, "test"), executor)
    pieces = [Piece(ObjectVersion(f"f{number}", ETag("e"), len(BODY)), 0, len(BODY)) for number in range(3)]
    for piece in pieces:
        assert piece.claim()
        piece.settle(BODY, None)
        keeping.later(piece, more=True)
    assert not executor.jobs
    keeping.flush()
    keeping.flush()
    (job,) = executor.jobs
    job()
    assert all(piece.kept for piece in pieces)


def test_no_more_is_fetched_ahead_than_the_disk_takes(store: Gated, tmp_path: Path) -> None:
    """Who takes the answers is the mount's loop: it neither waits for the disk nor holds what that has no time for."""
    cache, body = BlockCache(tmp_path, 64 << 20, "test"), bytes(4 << 20)
    keys = [f"f{number}" for number in range(10)]
    versions = [ObjectVersion(key, ETag(store.put(key, body, WriteOptions()).etag), len(body)) for key in keys]
    reader, arrived = Reader(store, cache, Postponing()), list[ObjectVersion]()
    store.gate.set()
    left = iter(versions)
    reader.bring_many(lambda: next(left, None), arrived.append)
    assert arrived == versions[:8]
    assert not any(cache.present(version) for version in arrived)
    reader.bring_many(lambda: next(left, None), arrived.append)
    assert arrived == versions
    assert [cache.present(version) for version in versions] == [True] * 8 + [False] * 2
