"""A set of byte ranges: which bytes of a file are held, dirty or wanted. Pure; not safe for threads: its owner locks.

Ranges are half-open [start, stop) with 0 <= start; an empty range (start >= stop) changes nothing and is contained.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator


def on_grid(start: int, stop: int, step: int) -> Generator[tuple[int, int], None, None]:
    """Yield the parts of [start, stop), cut at multiples of `step`."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


class Extents:
    """Disjoint, sorted, merged byte ranges. A call costs O(log n) comparisons, and a change also the shift of a list.

    INVARIANT: _starts[i] < _stops[i] < _starts[i + 1]: sorted, not empty, never touching.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop), merged with the ranges that it overlaps or touches."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove [start, stop), splitting the ranges that it cuts."""
        if start >= stop:
            return
        first, last = self._overlapped(start, stop)
        if first >= last:
            return
        pieces = (self._starts[first], start), (stop, self._stops[last - 1])
        self._starts[first:last] = [begin for begin, end in pieces if begin < end]
        self._stops[first:last] = [end for begin, end in pieces if begin < end]

    def contains(self, start: int, stop: int) -> bool:
        """Whether every byte of [start, stop) is in the set."""
        if start >= stop:
            return True
        before = bisect_right(self._starts, start) - 1
        return before >= 0 and stop <= self._stops[before]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any byte of [start, stop) is in the set."""
        first, last = self._overlapped(start, stop)
        return start < stop and first < last

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that are not in the set, ascending."""
        gaps = []
        first, last = self._overlapped(start, stop)
        for held_start, held_stop in zip(self._starts[first:last], self._stops[first:last], strict=True):
            if start < held_start:
                gaps.append((start, held_start))
            start = held_stop
        if start < stop:
            gaps.append((start, stop))
        return gaps

    def truncate(self, size: int) -> None:
        """Remove everything from byte `size` on."""
        if self._stops:
            self.remove(size, self._stops[-1])

    @property
    def total(self) -> int:
        """How many bytes the set has."""
        return sum(self._stops) - sum(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over a copy of the ranges, ascending."""
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """How many ranges the set has."""
        return len(self._starts)

    def _overlapped(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indices [first, last) of the ranges that share a byte with [start, stop)."""
        return bisect_right(self._stops, start), bisect_left(self._starts, stop)
