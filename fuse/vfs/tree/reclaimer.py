"""Keeps the server below its memory limit (docs/SEMANTICS.md S-55): drops the least recently used nodes and listings.

Nodes stay for as long as the kernel may ask for them by id, so the kernel is asked to forget its references first.
Nodes and listed entries, which take the most memory, are counted; when the process's resident size shows that
something else takes more than its share, the limits are tightened.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ...loop import Task
from ...ops import Held
from .core import Core
from .nodes import Directory

MIB = 1 << 20
NODE_BYTES = 900
"""The memory of a node with its place in two tables, in bytes (measured)."""
ENTRY_BYTES = 420
"""The memory of a listed entry, in bytes (measured)."""
ATTRIBUTES_BYTES = 1400
"""The memory of one version's metadata in the cache before the database, in bytes (measured)."""
BASE_BYTES = 120 * MIB
"""The memory of the interpreter, the libraries and the threads, in bytes."""
_TICK_S = 0.25
_GROWN = 5000
"""How many new nodes and listed entries there must be before their share is checked."""
_TRIMMED = 0.75
"""Trimming stops at this fraction of the share, so that it does not begin again at once."""
_PRESSED, _RELAXED = 0.85, 0.7
"""Fractions of the memory limit: above the first the shares are tightened, below the second they are normal again."""
_IDLE_S = 5.0
"""A node that the kernel has no reference to is dropped when the store last confirmed it longer ago than this."""
_DROPPED_MAX = 4096
_AT_ONCE = 1000
"""How many directories and entries are processed before other tasks may run."""
_LOG_SLACK = 5000
_LOG_RATIO = 4
"""The log of node ids is rewritten when it has more than _LOG_RATIO records for each node and _LOG_SLACK besides."""


class Shares(NamedTuple):
    """How the memory limit is divided. The rest is for bytes on their way to the store and for fragmentation."""

    names: int
    """Bytes for nodes and listings."""
    pieces: int
    """Bytes for the contents of objects, read ahead or just read."""
    attributes: int
    """For how many objects (a number, not bytes) the metadata is cached in memory before the database."""

    @classmethod
    def of(cls, limit_bytes: int) -> Shares:
        """Divide a limit: what exceeds BASE_BYTES, but at least a quarter of the limit."""
        free = max(limit_bytes - BASE_BYTES, limit_bytes // 4)
        return cls(free * 4 // 10, min(128 * MIB, free * 3 // 10), free // 10 // ATTRIBUTES_BYTES)


def resident_bytes() -> int:
    """Return the process's resident size in bytes. Errors: OSError."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holdings(core: Core) -> dict[str, int]:
    """Return the use of memory: the process and the contents of objects in bytes, the rest as numbers of items."""
    return {
        "resident": resident_bytes(),
        "pieces": core.reader.table.held_bytes,
        "nodes": len(core.nodes.by_ino),
        "listed": _listed(core.nodes.used.values()),
        "staged": len(core.nodes.staged),
    }


class MemoryReclaimer:
    """Checks the memory a few times a second, and trims what exceeds its share. stop() is idempotent."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ceiling = core.settings.memory_bytes
        self._shares = Shares.of(self._ceiling)
        self._pressed = False
        self._looking: Task[None] | None = None

    def start(self) -> None:
        self._core.loop.every(_TICK_S, self._tick)

    async def stop(self) -> None:
        """End, after waiting for the check that is under way."""
        self._core.loop.never(self._tick)
        if self._looking is not None:
            with suppress(Exception):  # it is logged
                await self._looking

    def _tick(self) -> None:
        if self._looking is None or self._looking.done:
            self._looking = self._core.loop.background(self._look())

    async def _look(self) -> None:
        await self.look(resident_bytes())

    async def look(self, resident: int) -> None:
        """Check once, and drop what exceeds its share. resident: the process's resident size in bytes."""
        nodes = self._core.nodes
        pressed = resident > self._ceiling * (_RELAXED if self._pressed else _PRESSED)
        if pressed != self._pressed:
            self._pressed = pressed
            self._core.reader.table.limit(self._shares.pieces // 4 if pressed else self._shares.pieces)
        if nodes.grown >= _GROWN or self._pressed:
            nodes.grown = 0
            await self._trim(self._shares.names // 2 if self._pressed else self._shares.names)
        if len(nodes.dropped) >= _DROPPED_MAX:
            self._core.log_nodes(())
        # The log of node ids must contain what the kernel has now, not everything that it ever had.
        if self._core.nodelog.records > _LOG_RATIO * len(nodes.by_ino) + _LOG_SLACK:
            self._core.rewrite_nodelog()

    async def _trim(self, limit: int) -> None:
        core, passed = self._core, 0
        held = len(core.nodes.by_ino) * NODE_BYTES + _listed(core.nodes.used.values()) * ENTRY_BYTES
        if held <= limit:
            return
        for directory in list(core.nodes.used.values()):
            if held <= limit * _TRIMMED:
                break
            passed += 1 + len(directory.children)
            held -= self._shed(directory)
            if passed >= _AT_ONCE:
                passed = 0
                await core.loop.pause()
        if self._pressed:
            await core.loop.on_disk(_give_back)

    def _shed(self, directory: Directory) -> int:
        """Drop a directory's listing and unused nodes, and ask the kernel to forget others; return the bytes freed."""
        core = self._core
        freed = 0
        held: list[Held] = []
        if directory.listing is not None and not directory.handles:
            freed += len(directory.listing.entries) * ENTRY_BYTES
            directory.listing = None
        idle = core.clock.monotonic() - _IDLE_S
        for child in list(directory.children.values()):
            if child.handles or child.staged is not None or (isinstance(child, Directory) and child.children):
                continue
            if child.nlookup:
                held.append(Held(child.ino, directory.ino, b"" if isinstance(child, Directory) else child.name))
            elif child.checked_at < idle:
                core.nodes.drop_unused(child)
            else:
                continue
            freed += NODE_BYTES
        if directory.ino in core.nodes.used:
            core.nodes.use(directory)
        core.notifier.release(held)
        return freed


def _listed(directories: Iterable[Directory]) -> int:
    """Return how many entries the listings of these directories hold."""
    return sum(len(one.listing.entries) for one in directories if one.listing is not None)


def _give_back() -> None:
    """Give memory that malloc holds free back to the system; only glibc has a call for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
