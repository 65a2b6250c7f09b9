"""How a changed file is cut into parts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datastore.fuse.data.extents import Extents
from datastore.fuse.data.multipart import (
    COPY_MAX,
    MIB,
    PART_SIZE,
    PARTS_MAX,
    SINGLE_MAX,
    part_size,
    plan_upload,
    scheduled,
    scheduled_parts,
)
from tests.promises import promise

GIB = 1 << 30
TIB = 1 << 40
S3_OBJECT_MAX = 5 * TIB
S3_PART_MIN = 5 * MIB
"""But for the last one (S3 user guide, multipart upload limits)."""
S3_PART_MAX = 5 * GIB

sizes = st.integers(0, 2 * GIB) | st.sampled_from([0, 1, SINGLE_MAX, SINGLE_MAX + 1, 16 * MIB, 16 * MIB + 1])


@st.composite
def files(draw: st.DrawFn) -> tuple[int, int, Extents]:
    """(size, base_size, dirty ranges within the size)."""
    size = draw(sizes)
    base_size = draw(st.integers(0, size) | st.just(size))
    ranges = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, 20 * MIB)), max_size=5))
    return size, base_size, Extents((start, min(start + length, size)) for start, length in ranges)


@promise("S-21")
@given(files())
@example((0, 0, Extents()))
@example((SINGLE_MAX, SINGLE_MAX, Extents([(0, 1)])))
def test_parts_cover_the_file_exactly_once(file: tuple[int, int, Extents]) -> None:
    """In order, without gap or overlap, within S3's limits; a small file, also an empty one, is sent at once."""
    size, _, _ = file
    parts = plan_upload(*file)
    assert bool(parts) == (size > SINGLE_MAX)
    at = 0
    for number, part in enumerate(parts, 1):
        assert part.number == number
        assert part.byte_range.start == at < part.byte_range.stop
        at = part.byte_range.stop
    assert at == (size if parts else 0)
    lengths = [part.byte_range.stop - part.byte_range.start for part in parts]
    assert all(length >= S3_PART_MIN for length in lengths[:-1])
    assert all(length <= S3_PART_MAX for length in lengths)
    assert len(parts) <= PARTS_MAX


@promise("S-21")
@given(files())
@example((TIB, TIB, Extents()))
def test_copied_parts_are_unchanged_bytes_of_the_base(file: tuple[int, int, Extents]) -> None:
    """Within the base and clean; what is uploaded has a reason."""
    size, base_size, dirty = file
    for part in plan_upload(*file):
        start, stop = part.byte_range
        if part.copied:
            assert stop <= base_size
            assert not dirty.overlaps(start, stop)
            assert stop - start <= COPY_MAX
        else:
            assert stop - start <= part_size(size)
            assert stop > base_size or dirty.overlaps(start, stop)


@promise("S-21")
def test_one_changed_byte() -> None:
    """Of 1 GiB one part is uploaded, the rest takes few calls."""
    parts = plan_upload(GIB, GIB, Extents([(500 * MIB, 500 * MIB + 1)]))
    uploaded = [part for part in parts if not part.copied]
    assert len(uploaded) == 1
    assert uploaded[0].byte_range.stop - uploaded[0].byte_range.start == PART_SIZE
    assert len(parts) <= 7


@promise("S-21")
def test_a_file_that_shrank_or_grew() -> None:
    """The part with the new end is uploaded, what is before is copied."""
    grown = plan_upload(33 * MIB, 32 * MIB, Extents([(32 * MIB, 33 * MIB)]))
    assert [(part.byte_range, part.copied) for part in grown] == [((0, 32 * MIB), True), ((32 * MIB, 33 * MIB), False)]
    shrunk = plan_upload(20 * MIB, 20 * MIB, Extents())
    assert [(part.byte_range, part.copied) for part in shrunk] == [((0, 20 * MIB), True)]


@promise("S-21")
@pytest.mark.parametrize("size", [1, GIB, 78 * GIB, 79 * GIB, 100 * GIB, TIB, S3_OBJECT_MAX])
def test_the_largest_files_fit(size: int) -> None:
    """5 TiB are at most 10,000 parts."""
    step = part_size(size)
    assert -(-size // step) <= PARTS_MAX
    assert PART_SIZE <= step <= S3_PART_MAX
    assert step % MIB == 0


@promise("S-45")
def test_parts_of_a_file_whose_end_is_not_known() -> None:
    """They adjoin, are within S3's limits, and 10,000 of them hold the largest object."""
    at = 0
    for number in range(1, PARTS_MAX + 1):
        part = scheduled(number)
        assert part.byte_range.start == at
        assert PART_SIZE <= part.byte_range.stop - at <= S3_PART_MAX
        at = part.byte_range.stop
    assert at >= S3_OBJECT_MAX


@promise("S-45")
@given(st.integers(1, 20 * GIB))
def test_scheduled_parts_end_with_the_file(size: int) -> None:
    """Exactly."""
    parts = list(scheduled_parts(size))
    assert parts[-1].byte_range.stop == size
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert parts[:-1] == [scheduled(number) for number in range(1, len(parts))]
