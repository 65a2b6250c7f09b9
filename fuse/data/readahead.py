"""What to fetch beside what was asked for, for one open file. Pure: reads in, ranges out; not safe for threads.

Sequential and random readers are told apart by where each read begins:
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


class ReadAhead:
    """The pattern seen so far of one handle.

    INVARIANT: _ahead_until is aligned or the object's size; window_bytes is 0 or between first_bytes and max_bytes.
    """

    __slots__ = ("_ahead_until", "_head", "_run", "_settings", "_size", "_touched", "window_bytes")

    def __init__(self, size: int, settings: ReadSettings = USUAL) -> None:
        """size: of the object, bytes."""
        self._size = size
        self._settings = settings
        self.window_bytes = 0
        self._head = 0
        """Where a sequential reader goes on: the end of the furthest read of the present run."""
        self._ahead_until = 0
        """The end of what was called for in the present run."""
        self._run = RUN_READS
        """Reads since the last jump; a reader that begins at the start of the file is taken to go on."""
        self._touched: set[int] = set()
        """Blocks of which only a part was fetched."""

    def plan(self, offset: int, size: int) -> Plan:
        """What to fetch for a read of [offset, offset + size), with 0 <= offset < the object's size and size > 0."""
        stop = min(offset + size, self._size)
        if self.near(offset, size):
            return self._sequential(offset, stop)
        self._run = self.window_bytes = 0
        self._head = stop
        self._ahead_until = self._up(stop)
        return Plan(self._jumped(offset, stop))

    def near(self, offset: int, size: int) -> bool:
        """Whether such a read would go on where the furthest one ended."""
        return abs(offset - self._head) <= 2 * max(size, BLOCK_BYTES)

    def fork(self) -> ReadAhead:
        """For a read elsewhere: what is known of jumps goes on, the present run stays here."""
        other = ReadAhead(self._size, self._settings)
        other._head, other._ahead_until, other._run = self._head, self._ahead_until, 0
        other._touched = self._touched
        return other

    def retract(self, start: int) -> None:
        """What was called for ahead from `start` on was not begun: call for it again."""
        self._ahead_until = min(self._ahead_until, start)

    def _jumped(self, offset: int, stop: int) -> ByteRange:
        """What to fetch for a read that follows no other."""
        block = offset // BLOCK_BYTES
        if stop - offset > BLOCK_BYTES // 2 or block in self._touched:
            return ByteRange(_down(offset), self._up(stop))
        if len(self._touched) >= TOUCHED_MAX:
            self._touched.clear()
        self._touched.add(block)
        return ByteRange(offset // PAGE * PAGE, min(self._size, -(-stop // PAGE) * PAGE))

    def _sequential(self, offset: int, stop: int) -> Plan:
        settings = self._settings
        self._run += 1
        self._head = max(self._head, stop)
        begin = max(self._ahead_until, _down(self._head))
        wanted = ByteRange(_down(offset), self._up(stop))
        if self._run < RUN_READS:
            self._ahead_until = max(begin, wanted.stop)
            return Plan(wanted)
        if self.window_bytes == 0 or begin - self._head <= self.window_bytes // 2:
            self.window_bytes = min(max(settings.first_bytes, 2 * self.window_bytes), settings.max_bytes)
            self._ahead_until = max(begin, self._up(self._head + self.window_bytes))
        return Plan(wanted, self._split(max(begin, wanted.stop), self._ahead_until))

    def _split(self, start: int, stop: int) -> tuple[ByteRange, ...]:
        """Ranges on a grid of their own size, at least four of them in a window so that they overlap in time."""
        settings = self._settings
        step = max(settings.first_bytes, min(settings.range_bytes, self.window_bytes // 4))
        return tuple(ByteRange(*one) for one in on_grid(start, stop, step))

    def _up(self, offset: int) -> int:
        return min(self._size, -(-offset // BLOCK_BYTES) * BLOCK_BYTES)


class Readers:
    """Several readers of one file, told apart by where they are: threads of a program, or all opens of an inode.

    INVARIANT: at most READERS_MAX places are followed.
    """

    def __init__(self, size: int, settings: ReadSettings = USUAL) -> None:
        """size: of the object, bytes."""
        self.present = ReadAhead(size, settings)
        """The one that the last plan was for."""
        self._others: list[ReadAhead] = []

    def plan(self, offset: int, size: int) -> Plan:
        """As ReadAhead.plan, of the reader that this read belongs to."""
        if not self.present.near(offset, size):
            other = next((other for other in self._others if other.near(offset, size)), None)
            if other is None:
                other = self.present.fork()
            else:
                self._others.remove(other)
            self._others.append(self.present)
            del self._others[: 1 - READERS_MAX]
            self.present = other
        return self.present.plan(offset, size)


def _down(offset: int) -> int:
    return offset // BLOCK_BYTES * BLOCK_BYTES
