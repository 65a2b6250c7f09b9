"""Plans the readahead of one open file. Pure: reads in, ranges to fetch out; not safe for threads.

Several readers of one file (threads of a program) are told apart by their positions, and sequential reads from random
reads by where each begins:
 - sequential: near the end of the reader's furthest read ("near" is two request sizes to either side, because the
   kernel's own readahead sends requests out of order). The readahead window doubles from FIRST_BYTES to MAX_BYTES,
   each time the reader has used half of it.
 - random: anything else, without a window. The first read of a block fetches only the wanted pages, so that the reader
   waits for few bytes; the second read fetches whole blocks, which the disk cache can keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..store.base import ByteRange
from .blockfile import BLOCK_BYTES
from .extents import on_grid

MIB = 1 << 20
PAGE = 4096
TOUCHED_MAX = 4096
"""How many partly fetched blocks are remembered: 512 MiB of a file."""
READERS_MAX = 8
FETCH_LIMIT = 16
"""How many prefetches may be under way at once; beyond, nothing is read ahead."""
WHOLE_BYTES = 4 * MIB
"""Objects up to this size are fetched by one GET without a range."""
RANGE_BYTES = 8 * MIB
"""The largest range request: enough to amortise a request; its first bytes are used long before the last arrive."""
FIRST_BYTES = 1 * MIB
"""The first window, whole blocks: the most that the kernel asks for in one request."""
MAX_BYTES = 64 * MIB
"""The largest window: 10 Gbit/s times 25 ms to the first byte is 31 MB, and the window is refilled at half."""
RUN_READS = 2
"""How many near reads after a jump count as sequential; the kernel at times splits a random read into two requests."""


class Plan(NamedTuple):
    """What to fetch for one read. wanted: covers the read. ahead: optional prefetches, the nearest first."""

    wanted: ByteRange
    ahead: tuple[ByteRange, ...] = ()


@dataclass(eq=False, slots=True)
class Run:
    """The state of one reader of the file.

    INVARIANT: ahead_until is aligned or the object's size; window_bytes is 0 or between FIRST_BYTES and MAX_BYTES.
    """

    head: int = 0
    """The end of the reader's furthest read, where a sequential reader continues."""
    ahead_until: int = 0
    """The end of the ranges that were planned for this reader."""
    reads: int = RUN_READS
    """How many reads have followed the last jump; a reader that begins at the file's start counts as sequential."""
    window_bytes: int = 0


class ReadAhead:
    """The read pattern of one open file so far. INVARIANT: at most READERS_MAX readers are followed."""

    __slots__ = ("_others", "_size", "_touched", "present")

    def __init__(self, size: int) -> None:
        """size: the object's, in bytes."""
        self._size = size
        self.present = Run()
        """The reader that the last plan was for."""
        self._others: list[Run] = []
        self._touched: set[int] = set()
        """The blocks of which only a part was fetched."""

    def plan(self, offset: int, size: int, share_bytes: int = MAX_BYTES) -> Plan:
        """Plan the fetches for a read of [offset, offset + size), with 0 <= offset < the object's size and size > 0.
        share_bytes: the most that the reader's window may take, but for FIRST_BYTES."""
        stop = min(offset + size, self._size)
        reach = 2 * max(size, BLOCK_BYTES)
        if abs(offset - self.present.head) > reach:
            known = next((run for run in self._others if abs(offset - run.head) <= reach), None)
            if known is not None:
                self._others.remove(known)
            self._others.append(self.present)
            del self._others[: 1 - READERS_MAX]
            self.present = known or Run(stop, self._up(stop), 0)
            if known is None:
                return Plan(self._jumped(offset, stop))
        return self._sequential(self.present, offset, stop, share_bytes)

    def retract(self, start: int) -> None:
        """Forget the last plan's prefetches from `start` on, which were not begun; a later plan has them again."""
        self.present.ahead_until = min(self.present.ahead_until, start)

    def _jumped(self, offset: int, stop: int) -> ByteRange:
        """Return the range to fetch for a random read."""
        block = offset // BLOCK_BYTES
        if stop - offset > BLOCK_BYTES // 2 or block in self._touched:
            return ByteRange(_down(offset), self._up(stop))
        if len(self._touched) >= TOUCHED_MAX:
            self._touched.clear()
        self._touched.add(block)
        return ByteRange(offset // PAGE * PAGE, min(self._size, -(-stop // PAGE) * PAGE))

    def _sequential(self, run: Run, offset: int, stop: int, share_bytes: int) -> Plan:
        run.reads += 1
        run.head = max(run.head, stop)
        begin = max(run.ahead_until, _down(run.head))
        wanted = ByteRange(_down(offset), self._up(stop))
        if run.reads < RUN_READS:
            run.ahead_until = max(begin, wanted.stop)
            return Plan(wanted)
        if run.window_bytes == 0 or begin - run.head <= run.window_bytes // 2:
            run.window_bytes = max(FIRST_BYTES, min(2 * run.window_bytes, share_bytes, MAX_BYTES))
            run.ahead_until = max(begin, self._up(run.head + run.window_bytes))
        # On a grid of their size; a window of 4 * FIRST_BYTES and more has at least four, so that they overlap in time.
        step = max(FIRST_BYTES, min(RANGE_BYTES, run.window_bytes // 4))
        return Plan(wanted, tuple(ByteRange(*one) for one in on_grid(max(begin, wanted.stop), run.ahead_until, step)))

    def _up(self, offset: int) -> int:
        return min(self._size, -(-offset // BLOCK_BYTES) * BLOCK_BYTES)


def _down(offset: int) -> int:
    return offset // BLOCK_BYTES * BLOCK_BYTES
