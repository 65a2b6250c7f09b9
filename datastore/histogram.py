"""A histogram of latencies whose buckets are powers of two: to add a latency costs one list index. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_FIRST, _LAST = 12, 36
EDGES_S = tuple((1 << power) / 1e9 for power in range(_FIRST, _LAST + 1))
"""The upper edges of the buckets, 4.1 us to 69 s; one more bucket counts all longer latencies."""
_BITS = 64
"""The most bits that a latency in nanoseconds may have."""


class Histogram:
    """Counts of latencies. It has no lock: callers that add from several threads need one."""

    __slots__ = ("_by_bits", "total_ns")

    def __init__(self) -> None:
        self._by_bits = [0] * (_BITS + 1)
        self.total_ns = 0

    def add(self, spent_ns: int) -> None:
        """Count a latency. spent_ns: nanoseconds, not negative."""
        self._by_bits[spent_ns.bit_length()] += 1
        self.total_ns += spent_ns

    def buckets(self) -> list[int]:
        """Return the count of each bucket of EDGES_S, and of the latencies beyond the last edge."""
        counts = self._by_bits
        return [sum(counts[: _FIRST + 1]), *counts[_FIRST + 1 : _LAST + 1], sum(counts[_LAST + 1 :])]


def added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the sum of two rows of buckets, bucket by bucket."""
    return [a + b for a, b in zip(left, right, strict=True)]


def quantile_s(buckets: Sequence[int], share: float) -> float | None:
    """Return about how many seconds the given share (0 to 1) of the latencies stayed under; None if there are none.
    Latencies are taken as evenly spread within their bucket, so the answer is right within a factor of two."""
    wanted = share * sum(buckets)
    if not wanted:
        return None
    below = 0
    for count, edge_s in zip(buckets, EDGES_S, strict=False):
        if count and below + count >= wanted:
            lower_s = 0.0 if edge_s == EDGES_S[0] else edge_s / 2
            return lower_s + (edge_s - lower_s) * (wanted - below) / count
        below += count
    return EDGES_S[-1]
