"""The planner of one handle: which patterns open a window and which do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.data.extents import Extents
from datastore.fuse.data.readahead import MAX_BYTES, MIB, RANGE_BYTES, READERS_MAX, Plan, ReadAhead
from tests.datachecks import check_readahead

KIB = 1 << 10
BIG = 1 << 30


def run(ahead: ReadAhead, reads: list[tuple[int, int]]) -> list[Plan]:
    plans = []
    for offset, size in reads:
        plans.append(ahead.plan(offset, size))
        check_readahead(ahead)
    return plans


def sequential(size: int, count: int, start: int = 0) -> list[tuple[int, int]]:
    return [(start + i * size, size) for i in range(count)]


@pytest.mark.parametrize("size", [4 * KIB, 128 * KIB, MIB])
def test_a_sequential_reader_gets_a_window_that_grows_to_the_largest(size: int) -> None:
    ahead = ReadAhead(BIG)
    first = ahead.plan(0, size)
    assert sum(stop - start for start, stop in first.ahead) >= MIB
    run(ahead, sequential(size, 128 * MIB // size)[1:])
    assert ahead.present.window_bytes == MAX_BYTES


@pytest.mark.parametrize("size", [4 * KIB, 100_000, 128 * KIB, MIB])
def test_a_sequential_reader_finds_everything_called_for_once_and_before_it_gets_there(size: int) -> None:
    ahead, called, total = ReadAhead(50 * MIB + 77), Extents(), 0
    for index, plan in enumerate(run(ahead, sequential(size, (50 * MIB + 77) // size + 1))):
        if index:
            assert called.contains(index * size, min((index + 1) * size, 50 * MIB + 77))
        called.add(*plan.wanted)
        for start, stop in plan.ahead:
            assert not called.overlaps(start, stop)
            called.add(start, stop)
            total += stop - start
    assert called.contains(0, 50 * MIB + 77)
    assert total <= 50 * MIB + 77


def test_requests_out_of_order_as_the_kernel_sends_them_are_sequential() -> None:
    ahead = ReadAhead(BIG)
    reads = sequential(MIB, 64)
    for i in range(0, 64, 2):
        reads[i], reads[i + 1] = reads[i + 1], reads[i]
    run(ahead, reads)
    assert ahead.present.window_bytes == MAX_BYTES


@pytest.mark.parametrize("size", [4 * KIB, 128 * KIB])
def test_a_random_reader_gets_only_what_it_wants_and_is_not_remembered_without_end(size: int) -> None:
    rng = random.Random(7)
    ahead = ReadAhead(BIG)
    fetched = 0
    for offset in [rng.randrange(1, BIG // size) * size for _ in range(500)]:
        plan = ahead.plan(offset, size)
        assert len(ahead._others) < READERS_MAX
        assert plan.wanted.start <= offset
        assert plan.wanted.stop >= min(offset + size, BIG)
        fetched += sum(stop - start for start, stop in (plan.wanted, *plan.ahead))
    assert fetched <= 500 * 128 * KIB * 1.1


def test_a_random_read_that_the_kernel_splits_opens_no_window() -> None:
    ahead = ReadAhead(BIG)
    plans = run(ahead, [(500 * MIB, 64 * KIB), (500 * MIB + 64 * KIB, 64 * KIB)])
    assert all(plan.ahead == () for plan in plans)


def test_a_reader_that_goes_on_after_a_jump_gets_a_window_at_its_third_read() -> None:
    ahead = ReadAhead(BIG)
    plans = run(ahead, sequential(128 * KIB, 3, start=500 * MIB))
    assert [bool(plan.ahead) for plan in plans] == [False, False, True]


def test_a_jump_closes_the_window() -> None:
    ahead = ReadAhead(BIG)
    run(ahead, sequential(MIB, 40))
    assert ahead.plan(900 * MIB, 4 * KIB).ahead == ()
    assert ahead.present.window_bytes == 0


def test_no_range_is_larger_than_the_largest_and_windows_are_cut_into_several() -> None:
    ahead = ReadAhead(BIG)
    for plan in run(ahead, sequential(MIB, 200)):
        assert all(stop - start <= 8 * MIB for start, stop in plan.ahead)
    assert ahead.present.window_bytes // RANGE_BYTES >= 8


@given(st.integers(1, 20 * MIB), st.lists(st.tuples(st.integers(0, 20 * MIB), st.integers(1, MIB)), max_size=40))
def test_plans_cover_the_read_and_stay_aligned_and_inside(size: int, reads: list[tuple[int, int]]) -> None:
    ahead = ReadAhead(size)
    for offset, length in reads:
        offset %= size
        plan = ahead.plan(offset, length)
        check_readahead(ahead)
        assert plan.wanted.start <= offset
        assert plan.wanted.stop >= min(offset + length, size)
        for start, stop in (plan.wanted, *plan.ahead):
            assert 0 <= start < stop <= size
            assert start % (4 * KIB) == 0
            assert stop % (4 * KIB) == 0 or stop == size
        for start, stop in plan.ahead:
            assert start % (128 * KIB) == 0
            assert stop % (128 * KIB) == 0 or stop == size


def test_the_first_random_read_of_a_block_gets_its_pages_and_the_second_the_block() -> None:
    ahead = ReadAhead(BIG)
    assert ahead.plan(50 * MIB + 5000, 100).wanted == (50 * MIB + 4096, 50 * MIB + 8192)
    assert ahead.plan(20 * MIB, 128 * KIB).wanted == (20 * MIB, 20 * MIB + 128 * KIB)
    assert ahead.plan(50 * MIB + 9000, 100).wanted == (50 * MIB, 50 * MIB + 128 * KIB)


def test_several_readers_of_one_file_are_told_apart() -> None:
    readers = ReadAhead(BIG)
    ahead = 0
    for step in range(8):
        for start in (0, 20 * MIB, 40 * MIB, 60 * MIB):
            ahead += sum(stop - begin for begin, stop in readers.plan(start + step * MIB, MIB).ahead)
    assert ahead >= 4 * 8 * MIB, "each is followed"
    assert len(readers._others) < READERS_MAX
