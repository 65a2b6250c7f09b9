"""What to fetch beside what was asked for, for one open file. Pure: reads in, ranges out; not safe for threads.

Several readers of one file (threads of a program) are told apart by where they are, and sequential from random ones by
where each read begins:
 - sequential: near the end of the furthest read (the kernel's own readahead sends requests out of order, so "near" is
   two request sizes to either side). The window doubles from first_bytes to max_bytes, each time the reader has used
   half.
 - random: anything else; the window closes. The first read of a block gets only the wanted pages, so that few bytes
   are waited for; the second one gets whole blocks, which the disk cache can keep.
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
"""Blocks remembered: 512 MiB of a file."""
READERS_MAX = 8
RUN_READS = 2
"""Near reads after a jump that make a run: the kernel splits one random read into two requests at times."""


class Plan(NamedTuple):
    """What one read calls for. wanted: covers the read; ahead: worth fetching now, nearest first, may be dropped."""

    wanted: ByteRange
    ahead: tuple[ByteRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How reads are turned into requests; sizes in bytes. Those of windows are multiples of a block."""

    fetch_limit: int = 16
    """Fetches at once that were begun before anybody waited for them; beyond, nothing is read ahead."""
    whole_bytes: int = 4 << 20
    """Objects up to this size are fetched by one GET without a range."""
    range_bytes: int = 8 * MIB
    """Largest single range: long enough to amortise a request; its beginning is there long before its end."""
    first_bytes: int = 1 * MIB
    """First window: what the kernel asks for at most in one request."""
    max_bytes: int = 64 * MIB
    """Largest window: 10 Gbit/s times 25 ms to the first byte is 31 MB, and it is filled up when half of it is used."""


USUAL = ReadSettings()


@dataclass(eq=False, slots=True)
class Run:
    """Where one reader is.

    INVARIANT: ahead_until is aligned or the object's size; window_bytes is 0 or between first_bytes and max_bytes.
    """

    head: int = 0
    """Where a sequential reader goes on: the end of its furthest read."""
    ahead_until: int = 0
    """The end of what was called for."""
    reads: int = RUN_READS
    """Since the last jump; a reader that begins at the start of the file is taken to go on."""
    window_bytes: int = 0


class ReadAhead:
    """The pattern seen so far of one file. INVARIANT: at most READERS_MAX places are followed."""

    __slots__ = ("_others", "_settings", "_size", "_touched", "present")

    def __init__(self, size: int, settings: ReadSettings = USUAL) -> None:
        """size: of the object, bytes."""
        self._size = size
        self._settings = settings
        self.present = Run()
        """The one that the last plan was for."""
        self._others: list[Run] = []
        self._touched: set[int] = set()
        """Blocks of which only a part was fetched."""

    def plan(self, offset: int, size: int, share_bytes: int = USUAL.max_bytes) -> Plan:
        """What to fetch for a read of [offset, offset + size), with 0 <= offset < the object's size and size > 0.

        share_bytes: so much of the memory is for one reader's window.
        """
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
        """What was called for ahead from `start` on was not begun: call for it again."""
        self.present.ahead_until = min(self.present.ahead_until, start)

    def _jumped(self, offset: int, stop: int) -> ByteRange:
        """What to fetch for a read that follows no other."""
        block = offset // BLOCK_BYTES
        if stop - offset > BLOCK_BYTES // 2 or block in self._touched:
            return ByteRange(_down(offset), self._up(stop))
        if len(self._touched) >= TOUCHED_MAX:
            self._touched.clear()
        self._touched.add(block)
        return ByteRange(offset // PAGE * PAGE, min(self._size, -(-stop // PAGE) * PAGE))

    def _sequential(self, run: Run, offset: int, stop: int, share_bytes: int) -> Plan:
        settings = self._settings
        run.reads += 1
        run.head = max(run.head, stop)
        begin = max(run.ahead_until, _down(run.head))
        wanted = ByteRange(_down(offset), self._up(stop))
        if run.reads < RUN_READS:
            run.ahead_until = max(begin, wanted.stop)
            return Plan(wanted)
        if run.window_bytes == 0 or begin - run.head <= run.window_bytes // 2:
            most = min(share_bytes, settings.max_bytes)
            run.window_bytes = max(settings.first_bytes, min(2 * run.window_bytes, most))
            run.ahead_until = max(begin, self._up(run.head + run.window_bytes))
        # On a grid of their own size, at least four of them in a window so that they overlap in time.
        step = max(settings.first_bytes, min(settings.range_bytes, run.window_bytes // 4))
        return Plan(wanted, tuple(ByteRange(*one) for one in on_grid(max(begin, wanted.stop), run.ahead_until, step)))

    def _up(self, offset: int) -> int:
        return min(self._size, -(-offset // BLOCK_BYTES) * BLOCK_BYTES)


def _down(offset: int) -> int:
    return offset // BLOCK_BYTES * BLOCK_BYTES
