"""Uploads in the background: closed files (write-back), failed uploads (S-19), files that grow (S-44).

With `writeBack` close returns when the bytes and the journal are on the local disk; the upload follows (S-48, S-49).
The staging file is synced, then the journal; both outlive the death of every process and a power cut. A file is sent
some time after its close (_REST_S), at the same time as others; node.lock keeps the contents of one path in order. If
too much waits, a close sends its own file, as without writeBack.

The same timer drops what the kernel caches of open directories when it is too old.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress

from datastore.errors import DatastoreError
from datastore.logs import fields

from ...data.staging import StagedFile
from ...loop import Semaphore, Task
from ..lookup.kerneldircache import KernelDirCache
from ..tree.core import Core
from ..tree.nodes import Node
from .uploads import Uploads

log = logging.getLogger(__name__)
_TICK_S = 1.0
QUIET_S = 3.0
"""Seconds without a write until a growing file is published (sent while open), as TensorBoard needs for its logs."""
BUSY_S = 15.0
"""How often a growing file that is written all the time is published, in seconds."""
BUSY_BYTES = 16 << 20
"""The most bytes by which that file may have grown to be published: its writer waits while it is sent."""
QUIET_BYTES = 256 << 20
"""The same limit for a file without writes for QUIET_S; one that grew by more is sent at its close."""
WIDTH = 16
"""How many closed files are sent at a time."""
MAX_FILES = 10_000
MAX_BYTES = 1 << 30
"""If more files or bytes than this wait, a close sends its own file."""
_SHARE, _REST_S = 5, 0.2
"""A file is sent a fifth of maxDelay after its close, at most 0.2 s: if it is rewritten at once, it is sent once."""
_LOOK_S = 0.05
"""The interval, in seconds, between checks for files that are due, while any wait."""


class Upkeep:
    """Sends files in tasks of the loop. stop() is idempotent."""

    def __init__(self, core: Core, uploads: Uploads, dir_cache: KernelDirCache) -> None:
        self._core = core
        self._uploads = uploads
        self._dir_cache = dir_cache
        self._retry_at = math.inf
        """Monotonic seconds at which failed files, and files of an earlier server that no node has, are sent again."""
        self._round: Task[None] | None = None
        self._waiting: dict[Node, int] = {}
        """The closed files and their sizes at the last close, in the order of the first close."""
        self._bytes = 0
        self._sending: dict[Node | None, Task[None]] = {}
        """The task for each node; the key None is the task that retries failed uploads."""
        self._places = Semaphore(WIDTH)
        self._may_look = False
        """Whether the checks for due files have ended, because nothing waits, and must restart when something does."""

    def start(self) -> None:
        """Start the timers."""
        self._retry_at = min(self._retry_at, self._core.clock.monotonic() + self._core.settings.retry_upload_s)
        self._core.loop.every(_TICK_S, self._tick)
        self._core.loop.every(_LOOK_S, self._look)

    async def stop(self) -> None:
        """Stop the timers and wait for what is being sent; flush_all() has to send the rest."""
        self._may_look = False
        self._core.loop.never(self._tick)
        self._core.loop.never(self._look)
        for task in [*self._sending.values(), *([self._round] if self._round is not None else [])]:
            with suppress(Exception):  # it is logged
                await task

    async def go_round(self) -> None:
        """Send open files that only grow and are due (S-44); delete what the journal need not keep any more."""
        now = self._core.clock.monotonic()
        for node, staged in self._core.nodes.unsent().items():
            if _due(staged, now):
                try:
                    await self._uploads.publish(node)
                except (DatastoreError, OSError) as error:
                    log.warning("a growing file is not published", extra=fields(path=node.path, error=error))
        self._core.db.drop_forgotten()

    async def retry(self) -> None:
        """Send again what failed (S-19)."""
        await self._uploads.retry([node for node, staged in self._core.nodes.unsent().items() if staged.error])

    def _tick(self) -> None:
        self._dir_cache.expire()
        self.send_due(self._core.clock.monotonic())
        if self._round is None or self._round.done:
            self._round = self._core.loop.background(self.go_round())

    # -- uploads after a close

    def resume(self) -> None:
        """Queue the files that were closed at an earlier server; one that is open for writing waits for its close."""
        if not self._core.settings.write_back_s:
            return
        self._retry_at = self._due_at()
        for node, staged in self._core.nodes.unsent().items():
            if not staged.error:
                staged.due = self._retry_at
                self._wait(node, staged.size)

    async def close(self, node: Node) -> None:
        """Persist a file at its close, or send it. Errors: OSError of the local disk; StoreError, FSError if sent."""
        async with node.lock:
            staged = self._uploads.owed(node)
            if staged is None:
                return
            full = len(self._waiting) >= MAX_FILES or self._bytes + staged.size > MAX_BYTES
            sends = full or staged.stuck or staged.published or staged.stream is not None
            if not sends:
                await self._uploads.persist(node)
                staged.due = staged.due or self._due_at()
        if sends:
            await self._uploads.flush(node)
        else:
            self._wait(node, staged.size)
            if self._may_look:
                self._may_look = False
                self._core.loop.every(_LOOK_S, self._look)

    def _due_at(self) -> float:
        return self._core.clock.monotonic() + min(_REST_S, self._core.settings.write_back_s / _SHARE)

    def _wait(self, node: Node, size: int) -> None:
        self._bytes += size - self._waiting.get(node, 0)
        self._waiting[node] = size

    def send_due(self, now: float) -> list[Task[None]]:
        """Begin to send the files that are due and not open for writing; return the tasks."""
        begun = []
        if now > self._retry_at:
            self._retry_at = math.inf
            begun.append(self._begin(None))
        for node in [node for node in self._waiting if node not in self._sending]:
            staged = node.staged
            if staged is not None and staged.due and not node.gone:
                if staged.due > now:
                    break
                if node.writers:
                    continue
            self._bytes -= self._waiting.pop(node)
            begun.append(self._begin(node))
        return begun

    def _begin(self, node: Node | None) -> Task[None]:
        task = self._sending[node] = self._core.loop.background(self._send(node))
        return task

    async def _send(self, node: Node | None) -> None:
        try:
            if node is None:  # this takes no place: it need not wait for the closed files
                await self.retry()
            else:
                async with self._places:
                    await self._uploads.retry_one(node)
        finally:
            del self._sending[node]
            if node is None:
                self._retry_at = self._core.clock.monotonic() + self._core.settings.retry_upload_s

    def _look(self) -> None:
        now = self._core.clock.monotonic()
        self.send_due(now)
        if not self._waiting and self._retry_at > now + _TICK_S:
            self._may_look = True
            self._core.loop.never(self._look)


def _due(staged: StagedFile, now: float) -> bool:
    if not staged.appended or staged.error or not staged.dirty_ranges:
        return False
    grown = staged.dirty_ranges.total
    if now - staged.written_at >= QUIET_S:
        return grown <= QUIET_BYTES
    return now - staged.grows_since >= BUSY_S and grown <= BUSY_BYTES
