"""How reads were answered: plain counters that `status` reads now and then."""

from __future__ import annotations


class ReadCounts:
    """Reads of file handles that were answered at once, and those that had to wait for the store; bytes asked for.

    The loop alone counts. What the kernel answers by itself (its page cache, passthrough) is not seen here.
    """

    __slots__ = ("hit_bytes", "hits", "miss_bytes", "misses")

    def __init__(self) -> None:
        self.hits = self.hit_bytes = self.misses = self.miss_bytes = 0

    def snapshot(self) -> dict[str, int]:
        """hits, misses, hitBytes, missBytes."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hitBytes": self.hit_bytes,
            "missBytes": self.miss_bytes,
        }
