"""How a changed file becomes an object: one PUT, or parts of which the unchanged are copied on the server. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from ..store.base import ByteRange, PartNumber
from .extents import Extents

MIB = 1 << 20
OBJECT_MAX = 5 << 40
"""What every S3 server takes; some take more."""
PARTS_MAX = 10_000
SINGLE_MAX = 8 * MIB
"""Up to here one PUT is quicker than three calls, and 32 at a time stay within 256 MiB of memory."""
PART_SIZE = 8 * MIB
COPY_MAX = 256 * MIB
"""Longest part that is copied in one call: longer ones answer late and can't be shared out (S3 allows 5 GiB)."""


class Part(NamedTuple):
    """One part: bytes of the file, or the same range of the base object."""

    number: PartNumber
    byte_range: ByteRange
    copied: bool


_TIER = 1000
"""Parts of one size while the file's end is not known; then the size doubles."""


def scheduled(number: int) -> Part:
    """Part `number` of a file of which the end is not known: 10,000 of them reach 7.8 TiB."""
    tier, index = divmod(number - 1, _TIER)
    step = PART_SIZE << tier
    start = PART_SIZE * _TIER * ((1 << tier) - 1) + index * step
    return Part(PartNumber(number), ByteRange(start, start + step), False)


def scheduled_parts(size: int) -> Iterator[Part]:
    """The parts of `size` bytes that were sent by that schedule."""
    for part in map(scheduled, count(1)):
        start, stop = part.byte_range
        if start >= size:
            return
        yield part._replace(byte_range=ByteRange(start, min(stop, size)))


def part_size(size: int) -> int:
    """Bytes of a part so that `size` bytes need at most PARTS_MAX parts, in whole MiB."""
    least = -(-size // PARTS_MAX)
    return max(PART_SIZE, -(-least // MIB) * MIB)


def plan_upload(size: int, base_size: int, dirty: Extents) -> tuple[Part, ...]:
    """The parts of `size` bytes, the first base_size of which come from the base object but for `dirty`.

    None: one PUT of the whole.
    """
    if size <= SINGLE_MAX:
        return ()
    step = part_size(size)
    ranges: list[tuple[int, int, bool]] = []
    for start in range(0, size, step):
        stop = min(start + step, size)
        copied = stop <= base_size and not dirty.overlaps(start, stop)
        if copied and ranges and ranges[-1][2] and stop - ranges[-1][0] <= COPY_MAX:
            ranges[-1] = (ranges[-1][0], stop, True)
        else:
            ranges.append((start, stop, copied))
    return tuple(
        Part(PartNumber(i), ByteRange(start, stop), copied) for i, (start, stop, copied) in enumerate(ranges, 1)
    )
