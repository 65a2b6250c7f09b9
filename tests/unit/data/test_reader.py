"""The reader: the right bytes of one version, few requests, no deadlock, no poisoned range."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from datastore.errors import CorruptBody, NotFound, PreconditionFailed, ServerFault
from datastore.fuse import loop as loop_module
from datastore.fuse.data import cachespace, readahead
from datastore.fuse.data.blockcache import BlockCache
from datastore.fuse.data.pieces import Piece, runs
from datastore.fuse.data.readahead import READERS_MAX
from datastore.fuse.data.reader import Read, Reader, ReadStream
from datastore.fuse.loop import Loop, Task, all_of, now
from datastore.fuse.store.base import Body, ByteRange, ETag, ObjectInfo, ObjectVersion, Sink
from tests.datachecks import check_pieces, forget
from tests.driving import resolve, the_loop
from tests.patience import PATIENCE_S, eventually
from tests.unit.data.probe import NO_CACHE, Probe

KIB = 1 << 10
MIB = 1 << 20
BIG = 12 * MIB + 77


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


BODY = content(BIG)


@pytest.fixture(autouse=True)
def patient_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched is kept, also on a busy machine."""
    monkeypatch.setattr(cachespace, "LOCK_WAIT_S", PATIENCE_S)


@pytest.fixture
def big(store: Probe) -> ObjectVersion:
    return store.add("big", BODY)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[BlockCache]:
    cache = BlockCache(tmp_path / "cache", 256 * MIB, "n")
    yield cache
    cache.close()


@pytest.fixture
def reader(store: Probe, cache: BlockCache) -> Reader:
    return Reader(store, cache, the_loop(), memory_bytes=64 * MIB)


@pytest.fixture
def narrow(store: Probe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """A loop with a single lane, which whoever calls its run() turns."""
    monkeypatch.setattr(loop_module, "LANES", 1)
    loop = Loop()
    yield loop
    store.gate.set()
    loop.close()


def is_idle(reader: Reader) -> bool:
    """Whether nothing of the reader is on its way, on a loop that nobody else uses."""
    unended = reader.loop.lanes._unended + reader.loop.disk._unended
    return not (
        unended or reader._ahead or reader.table.held_bytes > reader.table._settled_bytes or reader._keeping._writing
    )


def settle(reader: Reader) -> None:
    """Wait until nothing of the reader is on its way."""
    eventually(lambda: the_loop().call(lambda: is_idle(reader)))
    check(reader)


def check(reader: Reader) -> None:
    the_loop().call(lambda: check_pieces(reader.table))


def read(stream: ReadStream, offset: int, size: int) -> bytes:
    return bytes(resolve(stream.read(offset, size)))


def begun(coroutine: Coroutine[object, object, Read]) -> Task[Read]:
    """A task that has come as far as it can without waiting."""

    def begin() -> Task[Read]:
        task = Task(the_loop(), coroutine, None)
        task.step()
        return task

    return the_loop().call(begin)


def at_once(stream: ReadStream, offset: int, size: int) -> Read:
    """What is read without waiting for anything."""
    task = begun(stream.read(offset, size))
    assert task.done
    return task.result()


def ended(task: Task[Read]) -> bytes:
    """What it gives or raises in the end."""

    async def wait() -> bytes:
        return bytes(await task)

    return resolve(wait())


def test_a_small_object_is_one_get_without_a_range(store: Probe, reader: Reader) -> None:
    small = content(100_000)
    stream = reader.open(store.add("small", small))
    assert store.gets == []
    assert read(stream, 5000, 1000) == small[5000:6000]
    assert read(stream, 0, 1 << 20) == small
    assert read(stream, len(small), 10) == b""
    assert store.gets == [None]
    settle(reader)
    assert at_once(reader.open(stream.version), 0, 10) == small[:10], "a second handle waits for nothing"


def test_memory_lets_go_of_what_a_sequential_reader_has_behind_it_and_the_disk_has(
    store: Probe, cache: BlockCache
) -> None:
    content_ = content(40 * MIB, 3)
    version = store.add("long", content_)
    reader = Reader(store, cache, the_loop(), memory_bytes=256 * MIB)
    stream = reader.open(version)
    for offset in range(0, version.size, MIB):
        assert read(stream, offset, MIB) == content_[offset : offset + MIB]
        settle(reader)
    assert reader.table.held_bytes <= 10 * MIB
    assert all(read(stream, offset, MIB) == content_[offset : offset + MIB] for offset in range(0, version.size, MIB))
    assert store.fetched_bytes == version.size


def test_memory_lets_go_of_a_small_file_that_is_closed_and_on_the_disk(
    store: Probe, reader: Reader, cache: BlockCache
) -> None:
    body = content(100 * KIB)
    version = store.add("small", body)
    stream = reader.open(version)
    assert read(stream, 0, MIB) == body
    settle(reader)
    assert cache.present(version)
    stream.close()
    assert reader.table.held_bytes == 0
    assert read(reader.open(version), 0, MIB) == body
    assert store.gets == [None]


def test_an_empty_object_is_never_fetched(store: Probe, reader: Reader) -> None:
    version = store.add("empty", b"")
    assert at_once(reader.open(version), 0, 100) == b""
    assert resolve(reader.fetch(version, 0, 100)) == b""
    assert resolve(reader.prefetch(version))
    assert store.gets == []


@pytest.mark.parametrize("size", [16 * KIB, 100_001, 128 * KIB, MIB])
def test_a_sequential_reader_gets_all_bytes_and_each_is_fetched_once_and_kept(
    store: Probe, reader: Reader, cache: BlockCache, big: ObjectVersion, size: int
) -> None:
    stream = reader.open(big)
    got = b"".join(read(stream, offset, size) for offset in range(0, BIG, size))
    settle(reader)
    assert got == BODY
    assert store.fetched_bytes == BIG
    assert len(store.gets) < 20
    assert cache.present(big)


@pytest.mark.parametrize(("size", "on_loop"), [(MIB, True), (MIB + 1, False), (8 * MIB, False)])
def test_only_small_bodies_are_received_on_the_loop(store: Probe, reader: Reader, size: int, on_loop: bool) -> None:
    version = store.add("object", content(size))
    assert resolve(reader.fetch(version, 0, size)) == content(size)
    assert store.on_loop == [on_loop]
    other = store.add("other", content(size))
    assert resolve(reader.prefetch(other))
    assert store.on_loop == [on_loop, False], "nobody waits for what is prefetched"


def test_held_bytes_are_answered_at_once_and_without_a_copy(reader: Reader, big: ObjectVersion) -> None:
    stream = reader.open(big)
    read(stream, 0, MIB)
    settle(reader)
    answer = at_once(stream, 128 * KIB, 128 * KIB)
    assert isinstance(answer, memoryview)
    assert answer == BODY[128 * KIB : 256 * KIB]


def test_many_readers_of_one_version_share_its_fetches(store: Probe, reader: Reader, big: ObjectVersion) -> None:
    with ThreadPoolExecutor(16) as threads:
        streams = [reader.open(big) for _ in range(16)]

        def run(stream: ReadStream) -> bool:
            return b"".join(read(stream, offset, 256 * KIB) for offset in range(0, BIG, 256 * KIB)) == BODY

        assert all(threads.map(run, streams))
    # One that falls behind may find a piece gone from memory and not on the disk yet; on its own it would be 16 times.
    assert BIG <= store.fetched_bytes < 2 * BIG
    check(reader)


def test_more_waiters_than_lanes_never_deadlock(
    store: Probe, cache: BlockCache, narrow: Loop, big: ObjectVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "FETCH_LIMIT", 4)
    rng = random.Random(2)
    reader = Reader(store, cache, narrow)
    streams = [reader.open(big) for _ in range(4)]
    asked = [(rng.randrange(BIG), rng.choice([4 * KIB, MIB])) for _ in range(200)]

    async def read_all() -> list[Read]:
        return await all_of([narrow.spawn(streams[i % 4].read(at, size)) for i, (at, size) in enumerate(asked)])

    answers = narrow.run(read_all())
    assert all(bytes(got) == BODY[at : at + size] for got, (at, size) in zip(answers, asked, strict=True))


def test_a_failed_fetch_reaches_all_its_waiters_and_the_next_read_tries_again(store: Probe, reader: Reader) -> None:
    small = content(50_000)
    version = store.add("small", small)
    store.fail[0] = ServerFault("broken", key="small")
    store.gate.clear()
    tasks = [begun(reader.open(version).read(0, 10)) for _ in range(4)]
    assert store.entered.acquire(timeout=PATIENCE_S)
    store.gate.set()
    for task in tasks:
        with pytest.raises(ServerFault):
            ended(task)
    assert len(store.gets) == 1
    assert read(reader.open(version), 0, 10) == small[:10]
    check(reader)


def test_an_overwrite_surfaces_and_versions_never_mix(store: Probe, reader: Reader, big: ObjectVersion) -> None:
    stream = reader.open(big)
    assert read(stream, 0, 128 * KIB) == BODY[: 128 * KIB]
    settle(reader)
    other = content(BIG, seed=2)
    new = store.add("big", other)
    with pytest.raises(PreconditionFailed):
        read(stream, BIG - 10, 10)
    assert read(stream, 0, 128 * KIB) == BODY[: 128 * KIB], "what is held stays readable"
    assert read(reader.open(new), 0, MIB) == other[:MIB]
    now(store.delete("big"))
    with pytest.raises(NotFound):
        read(stream, BIG - 10, 10)


@pytest.mark.parametrize("size", [10, 4 * MIB])
def test_a_server_that_ignores_if_match_is_found_out_by_the_etag(
    store: Probe, reader: Reader, big: ObjectVersion, size: int
) -> None:
    store.honours_if_match = False
    store.add("big", content(BIG, seed=2))
    with pytest.raises(PreconditionFailed, match="replaced"):
        read(reader.open(big), 0, size)


@pytest.mark.parametrize("size", [50_000, BIG])
def test_a_short_body_is_corrupt_and_not_kept(store: Probe, reader: Reader, size: int) -> None:
    whole = content(size)
    version = store.add("object", whole)
    store.spoil = lambda body: body[:-1]
    with pytest.raises(CorruptBody, match="came instead of"):
        read(reader.open(version), 0, 100)
    store.spoil = lambda body: body
    assert read(reader.open(version), 0, 100) == whole[:100]


@pytest.mark.parametrize(("cut", "error"), [(2 * MIB + 1, "ended too early"), (5 * MIB, "longer than asked for")])
def test_a_large_body_of_a_wrong_length_is_corrupt(
    store: Probe, reader: Reader, big: ObjectVersion, cut: int, error: str
) -> None:
    store.spoil = lambda _: BODY[:cut]
    with pytest.raises(CorruptBody, match=error):
        resolve(reader.fetch(big, 0, 4 * MIB))
    store.spoil = lambda body: body
    assert resolve(reader.fetch(big, 0, 4 * MIB)) == BODY[: 4 * MIB]
    check(reader)


def test_another_attempt_of_a_get_brings_only_what_was_missing(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives each attempt from the start, and parts of one piece or of several."""

    class Attempts(Probe):
        async def get(
            self,
            key: str,
            *,
            byte_range: ByteRange | None = None,
            if_match: ETag | None = None,
            sink: Sink | None = None,
        ) -> tuple[Body, ObjectInfo]:
            body, answer = await super().get(key, byte_range=byte_range, if_match=if_match)
            assert sink is not None
            for edges in ((0, MIB, 3 * MIB), (0, 2 * MIB, 3 * MIB, len(body))):
                for start, stop in pairwise(edges):
                    sink(answer, start, body[start:stop])
            return b"", answer

    written: list[int] = []
    write = cache.write

    def noted(version: ObjectVersion, offset: int, body: Body) -> bool:
        written.append(offset)
        return write(version, offset, body)

    monkeypatch.setattr(cache, "write", noted)
    store = Attempts()
    reader = Reader(store, cache, the_loop())
    assert resolve(reader.fetch(store.add("big", BODY), 0, 6 * MIB)) == BODY[: 6 * MIB]
    eventually(lambda: len(written) >= 6)  # the last block may still be on its way to the disk
    assert sorted(written) == [number * MIB for number in range(6)]
    check(reader)


def test_runs_of_pieces_are_adjoining_and_bounded(big: ObjectVersion) -> None:
    made = [Piece(big, start, start + 10) for start in (0, 10, 20, 40)]
    assert [[piece.start for piece in run] for run in runs(made, 20)] == [[0, 10], [20], [40]]
    assert list(runs([], 20)) == []


def test_what_the_disk_cache_holds_is_not_fetched_ahead(
    store: Probe, reader: Reader, cache: BlockCache, big: ObjectVersion
) -> None:
    cache.write(big, 0, BODY[: 8 * MIB])
    stream = reader.open(big)
    for offset in range(0, 2 * MIB, 128 * KIB):
        assert at_once(stream, offset, 128 * KIB) == BODY[offset : offset + 128 * KIB]
    settle(reader)
    assert store.gets == []


def test_without_a_disk_cache_memory_serves(store: Probe) -> None:
    small = content(1000)
    reader = Reader(store, NO_CACHE, the_loop())
    version = store.add("small", small)
    assert read(reader.open(version), 0, 1000) == small
    assert read(reader.open(version), 0, 1000) == small
    assert len(store.gets) == 1
    forget(reader)
    assert read(reader.open(version), 0, 1000) == small
    assert len(store.gets) == 2


def test_memory_stays_in_its_limit(store: Probe, big: ObjectVersion) -> None:
    reader = Reader(store, NO_CACHE, the_loop(), memory_bytes=4 * MIB)
    stream = reader.open(big)
    for offset in range(0, BIG, 256 * KIB):
        assert read(stream, offset, 256 * KIB) == BODY[offset : offset + 256 * KIB]
        check(reader)
        assert reader.table.held_bytes <= 4 * MIB + 256 * KIB
    settle(reader)


def test_readers_in_sequence_share_the_memory_so_that_none_loses_what_was_read_ahead(store: Probe) -> None:
    """Each byte is fetched once, though the windows that each would have alone are larger than the memory."""
    reader = Reader(store, NO_CACHE, the_loop(), memory_bytes=32 * MIB)
    streams = [reader.open(store.add(f"big{number}", BODY)) for number in range(4)]
    for offset in range(0, BIG, MIB):
        for stream in streams:
            assert read(stream, offset, MIB) == BODY[offset : offset + MIB]
            settle(reader)
    assert store.fetched_bytes == len(streams) * BIG
    for place in range(READERS_MAX + 1):  # many places of one file are forgotten with it
        read(streams[1], (1 + place) * MIB, 4096)
        read(streams[1], (1 + place) * MIB + 4096, MIB // 4)
    for stream in streams[1:]:
        stream.close()
    assert read(streams[0], BIG - 10, 10) == BODY[-10:]
    assert reader.share_bytes == 16 * MIB


@pytest.fixture
def busy(store: Probe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """One that reads ahead as much as it may, until the gate is open."""
    monkeypatch.setattr(readahead, "FETCH_LIMIT", 1)
    reader = Reader(store, NO_CACHE, the_loop())
    store.gated = lambda key: key == "other"
    store.gate.clear()
    other = begun(reader.open(store.add("other", BODY)).read(0, 128 * KIB))
    for _ in range(2):
        assert store.entered.acquire(timeout=PATIENCE_S)
    del store.gets[:]
    yield reader
    store.gate.set()
    assert ended(other) == BODY[: 128 * KIB]


def test_who_fetches_enough_ahead_begins_no_more(store: Probe, busy: Reader, big: ObjectVersion) -> None:
    assert read(busy.open(big), 0, 128 * KIB) == BODY[: 128 * KIB]
    assert read(busy.open(big), 5 * MIB, 10) == BODY[5 * MIB : 5 * MIB + 10]
    assert store.gets == [ByteRange(0, 128 * KIB), ByteRange(5 * MIB, 5 * MIB + 4 * KIB)]


def test_readahead_that_found_no_room_is_begun_when_there_is(store: Probe, busy: Reader, big: ObjectVersion) -> None:
    stream = busy.open(big)
    assert read(stream, 0, MIB) == BODY[:MIB]
    assert store.fetched_bytes == MIB
    store.gate.set()
    settle(busy)
    assert read(stream, MIB, 128 * KIB) == BODY[MIB : MIB + 128 * KIB]
    settle(busy)
    assert store.fetched_bytes > MIB + 128 * KIB


@pytest.fixture
def large_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read ahead is received in a lane."""
    monkeypatch.setattr(readahead, "FIRST_BYTES", 16 * MIB)


async def waiting_for_a_lane(store: Probe, loop: Loop, stream: ReadStream) -> Task[Read]:
    """A read that is held up, and so is the only lane, for which something waits that is to be read ahead."""
    store.gate.clear()
    loop.lane(store.gate.wait, PATIENCE_S)
    reading = loop.spawn(stream.read(0, 128 * KIB))
    while loop.lanes._unended < 2:
        await loop.sleep(0.001)
    return reading


@pytest.mark.usefixtures("large_ahead")
def test_readahead_of_a_closed_stream_is_dropped(store: Probe, narrow: Loop, big: ObjectVersion) -> None:
    reader = Reader(store, NO_CACHE, narrow)
    stream = reader.open(big)

    async def close_it() -> Read:
        reading = await waiting_for_a_lane(store, narrow, stream)
        stream.close()
        store.gate.set()
        while reader._ahead:
            await narrow.sleep(0.001)
        return await reading

    assert narrow.run(close_it()) == BODY[: 128 * KIB]
    assert store.gets == [ByteRange(0, 128 * KIB)]
    assert reader.table.held_bytes == 128 * KIB
    assert narrow.run(stream.read(128 * KIB, 10)) == BODY[128 * KIB : 128 * KIB + 10], "reads still work"
    check_pieces(reader.table)


def test_small_readahead_of_a_closed_stream_is_dropped(store: Probe, big: ObjectVersion) -> None:
    reader = Reader(store, NO_CACHE, the_loop())
    stream = reader.open(big)

    async def close_it() -> Read:
        reading = the_loop().spawn(stream.read(0, 128 * KIB))
        await the_loop().pause()
        stream.close()
        return await reading

    assert resolve(close_it()) == BODY[: 128 * KIB]
    settle(reader)
    assert store.gets == [ByteRange(0, 128 * KIB)]


@pytest.mark.usefixtures("large_ahead")
def test_who_waits_for_dropped_readahead_has_it_fetched(store: Probe, narrow: Loop, big: ObjectVersion) -> None:
    reader = Reader(store, NO_CACHE, narrow)
    stream = reader.open(big)

    async def close_it() -> Read:
        await waiting_for_a_lane(store, narrow, stream)
        behind = narrow.spawn(reader.open(big).read(256 * KIB, MIB))
        await narrow.pause()
        stream.close()
        store.gate.set()
        return await behind

    assert narrow.run(close_it()) == BODY[256 * KIB : 256 * KIB + MIB]
    check_pieces(reader.table)


def test_fetch_gives_any_range_and_goes_through_memory_and_cache(
    store: Probe, reader: Reader, big: ObjectVersion
) -> None:
    assert resolve(reader.fetch(big, 1000, BIG)) == BODY[1000:]
    assert resolve(reader.fetch(big, BIG, 10)) == b""
    assert type(resolve(reader.fetch(big, 0, 10))) is bytes
    settle(reader)
    assert store.fetched_bytes == BIG
    assert all(one.stop - one.start <= 8 * MIB for one in store.gets if one)
    forget(reader)
    assert resolve(reader.fetch(big, 5, 10 * MIB)) == BODY[5 : 10 * MIB + 5]
    assert store.fetched_bytes == BIG


def test_prefetch_brings_the_whole_version_and_tells_its_progress(
    store: Probe, reader: Reader, cache: BlockCache, big: ObjectVersion
) -> None:
    cache.write(big, 0, BODY[: 8 * MIB])
    told: list[int] = []
    assert resolve(reader.prefetch(big, told.append))
    assert sum(told) == BIG
    assert store.fetched_bytes == BIG - 8 * MIB
    assert cache.read(big, 0, BIG) == BODY
    small = store.add("small", b"123")
    assert resolve(reader.prefetch(small))
    assert store.gets[-1] is None
    assert reader.table.held_bytes == 0, "memory is for readers"


def test_prefetch_says_when_there_is_no_room(store: Probe, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "tiny", MIB, "n")
    assert not resolve(Reader(store, cache, the_loop()).prefetch(store.add("object", content(2 * MIB))))
    cache.close()


@pytest.mark.parametrize("nth", range(2))
def test_prefetch_raises_the_error_of_any_range(
    store: Probe, reader: Reader, cache: BlockCache, big: ObjectVersion, nth: int
) -> None:
    store.fail[nth] = ServerFault("broken", key="big")
    with pytest.raises(ServerFault):
        resolve(reader.prefetch(big))
    assert not cache.present(big)
    assert resolve(reader.prefetch(big))


def test_a_broken_cache_disk_never_fails_a_read(store: Probe, tmp_path: Path, big: ObjectVersion) -> None:
    (tmp_path / "file").touch()
    reader = Reader(store, BlockCache(tmp_path / "file" / "cache", MIB, "n"), the_loop())
    stream = reader.open(big)
    assert b"".join(read(stream, offset, MIB) for offset in range(0, BIG, MIB)) == BODY
    settle(reader)
    assert not resolve(reader.prefetch(big))


def test_random_reads_from_many_threads_with_failures_are_right_or_raise(store: Probe, tmp_path: Path) -> None:
    bodies = [content(6 * MIB, seed=seed) for seed in range(3)]
    versions = [store.add(f"k{i}", one) for i, one in enumerate(bodies)]
    rng = random.Random(9)
    store.fail = {number: ServerFault("broken") for number in rng.sample(range(400), 40)}
    cache = BlockCache(tmp_path / "cache", 4 * MIB, "n")
    with ThreadPoolExecutor(8) as threads:
        reader = Reader(store, cache, the_loop(), memory_bytes=4 * MIB)

        def work(seed: int) -> int:
            dice, failed = random.Random(seed), 0
            for _ in range(60):
                which, offset, size = dice.randrange(3), dice.randrange(6 * MIB), dice.choice([1, 4 * KIB, MIB])
                stream = reader.open(versions[which])
                for _ in range(3):
                    try:
                        assert read(stream, offset, size) == bodies[which][offset : offset + size]
                    except ServerFault:
                        failed += 1
                    offset += size
                stream.close()
            return failed

        assert sum(threads.map(work, range(8))) < 200
        settle(reader)
    cache.close()
