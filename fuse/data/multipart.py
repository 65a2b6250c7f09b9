"""Plans the upload of a changed file: one PUT, or parts; the server copies unchanged parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from ..store.base import ByteRange, PartNumber
from .extents import Extents

MIB = 1 << 20
OBJECT_MAX = 5 << 40
"""The largest object that every S3 server accepts, in bytes; some accept more."""
PARTS_MAX = 10_000
SINGLE_MAX = 8 * MIB
"""The largest file that is sent by one PUT, in bytes: up to here that is quicker than the three calls of a multipart
upload, and the files that vfs/upload/delivery.py sends at once (8) take at most 64 MiB of memory."""
PART_SIZE = 8 * MIB
COPY_MAX = 256 * MIB
"""The longest part that is copied in one call, in bytes: the answer to a longer copy comes late, and parallel calls
can't share its work (S3 allows 5 GiB)."""


class Part(NamedTuple):
    """One part of a multipart upload: a range of the file, or (copied) the same range of the base object."""

    number: PartNumber
    byte_range: ByteRange
    copied: bool


_TIER = 1000
"""While the file's final size is unknown, this many parts in a row have the same size; then the size doubles."""


def scheduled(number: int) -> Part:
    """Return part `number` of a file whose final size is not known; 10,000 parts reach 7.8 TiB."""
    tier, index = divmod(number - 1, _TIER)
    step = PART_SIZE << tier
    start = PART_SIZE * _TIER * ((1 << tier) - 1) + index * step
    return Part(PartNumber(number), ByteRange(start, start + step), False)


def scheduled_parts(size: int) -> Iterator[Part]:
    """Yield the parts of a file of `size` bytes as scheduled() cuts them; the last part ends with the file."""
    for part in map(scheduled, count(1)):
        start, stop = part.byte_range
        if start >= size:
            return
        yield part._replace(byte_range=ByteRange(start, min(stop, size)))


def part_size(size: int) -> int:
    """Return the bytes of a part, in whole MiB, with which `size` bytes need at most PARTS_MAX parts."""
    least = -(-size // PARTS_MAX)
    return max(PART_SIZE, -(-least // MIB) * MIB)


def plan_upload(size: int, base_size: int, dirty: Extents) -> tuple[Part, ...]:
    """Return the parts of a file whose first base_size bytes are the base object's, except `dirty`; () for one PUT."""
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
