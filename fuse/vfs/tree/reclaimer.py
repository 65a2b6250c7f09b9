"""The memory limit (docs/SEMANTICS.md S-55): what is known of names is let go of, the longest unused first.

Nodes stay for as long as the kernel may ask for them by id, so the kernel is asked to give up its own first. Counted is
what there is most of, nodes and listed entries; the process's resident size is looked at as well, and is what tightens
the limits when something else takes more than its share.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ...loop import Task
from ...ops import Held
from .core import Core
from .nodes import Directory

log = logging.getLogger(__name__)

MIB = 1 << 20
NODE_BYTES = 900
"""Of a node with its place in two tables (measured)."""
ENTRY_BYTES = 420
"""Of a listed entry (measured)."""
ATTRIBUTES_BYTES = 1400
"""Of the metadata of one version that memory has before the database (measured)."""
BASE_BYTES = 120 * MIB
"""What the interpreter, the libraries and the threads take."""
_TICK_S = 0.25
_GROWN = 5000
"""So many new nodes and entries are worth a look."""
_TRIMMED = 0.75
"""How much of its share stays when something is let go of, so that it is not done all the time."""
_PRESSED, _RELAXED = 0.85, 0.7
"""Shares of the memory limit: above the first the limits are tightened, below the second they are as they were."""
_IDLE_S = 5.0
"""What the kernel does not have is let go of when nobody asked for it for so long."""
_DROPPED_MAX = 4096
_AT_ONCE = 1000
"""So many directories and entries are gone through before others run."""
_LOG_SLACK = 5000
_LOG_RATIO = 4
"""The log of node ids is written anew above this many records for each node, and so many besides."""


class Shares(NamedTuple):
    """What the limit leaves to whom, bytes. The rest is for what is on its way to the store and for fragments."""

    names: int
    """Nodes and listings."""
    pieces: int
    """Bytes of objects, read ahead or just read."""
    attributes: int
    """How many objects' metadata memory has before the database; a number."""

    @classmethod
    def of(cls, limit_bytes: int) -> Shares:
        """The shares of a limit; of one below the base size everything is as small as it can be."""
        free = max(limit_bytes - BASE_BYTES, limit_bytes // 4)
        return cls(free * 4 // 10, min(128 * MIB, free * 3 // 10), free // 10 // ATTRIBUTES_BYTES)


def resident_bytes() -> int:
    """The process's resident size. OSError."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holdings(core: Core) -> dict[str, int]:
    """What the memory is taken by, as far as it is counted: the process's and the pieces' bytes, and numbers."""
    return {
        "resident": resident_bytes(),
        "pieces": core.reader.table.held_bytes,
        "nodes": len(core.nodes.by_ino),
        "listed": _listed(core.nodes.used.values()),
        "staged": len(core.nodes.staged),
    }


class MemoryReclaimer:
    """Looks a few times a second. stop() is idempotent."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ceiling = core.settings.memory_bytes
        self._shares = Shares.of(self._ceiling)
        self._pressed = False
        self._looking: Task[None] | None = None

    def start(self) -> None:
        self._core.loop.every(_TICK_S, self._tick)

    async def stop(self) -> None:
        """End, after the look that is under way."""
        self._core.loop.never(self._tick)
        if self._looking is not None:
            with suppress(Exception):  # it is logged
                await self._looking

    def _tick(self) -> None:
        if self._looking is None or self._looking.done:
            self._looking = self._core.loop.background(self._look())

    async def _look(self) -> None:
        try:
            await self.look(resident_bytes())
        except OSError as error:
            log.error(f"the memory could not be looked after: {error}")

    async def look(self, resident: int) -> None:
        """Let go of what is too much; resident: the process's size, bytes."""
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
        # The log of node ids says what the kernel has, not what it ever had.
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
        """Let go of a directory's listing and entries; bytes that become free."""
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
    """Entries that are held in listings."""
    return sum(len(one.listing.entries) for one in directories if one.listing is not None)


def _give_back() -> None:
    """What malloc holds free goes back to the system; a C library other than glibc has no call for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
