"""What is done now and then beside the requests: growing files are published, failed uploads tried again.

And what the kernel keeps of open directories is dropped in time.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from datastore.errors import DatastoreError
from datastore.logs import fields

from ...loop import Task
from ..lookup.kerneldircache import KernelDirCache
from ..tree.core import Core
from ..tree.nodes import Node
from .uploads import Uploads

log = logging.getLogger(__name__)
_TICK_S = 1.0
QUIET_S = 3.0
"""A growing file that was not written for so long is published: a log's flush, as TensorBoard waits for it."""
BUSY_S = 15.0
"""One that is written all the time is published so often,"""
BUSY_BYTES = 16 << 20
"""as long as it grew by no more than this: a writer waits while its file is sent."""
QUIET_BYTES = 256 << 20
"""A quiet one that grew by more is left to its close for the same reason."""


class Upkeep:
    """One round of it after the other, in a task. stop() is idempotent."""

    def __init__(self, core: Core, uploads: Uploads, dir_cache: KernelDirCache) -> None:
        self._core = core
        self._uploads = uploads
        self._dir_cache = dir_cache
        self._retried_at = 0.0
        self._round: Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._retried_at = self._core.clock.monotonic()
        self._core.loop.every(_TICK_S, self._tick)

    async def stop(self) -> None:
        """End, after the round that is under way."""
        self._core.loop.never(self._tick)
        if self._round is not None:
            with suppress(Exception):  # it is logged
                await self._round

    async def publish(self) -> None:
        """Send open files that only grow and are due (S-44)."""
        now = self._core.clock.monotonic()
        for node in self._core.nodes.unsent():
            if _due(node, now):
                try:
                    await self._uploads.publish(node)
                except (DatastoreError, OSError) as error:
                    log.warning("a growing file is not published", extra=fields(path=node.path, error=error))

    async def retry(self) -> None:
        """Send again what failed (S-19)."""
        unsent = self._core.nodes.unsent()
        await self._uploads.retry([node for node in unsent if node.staged is not None and node.staged.error])

    def _tick(self) -> None:
        self._dir_cache.expire()
        if self._round is None or self._round.done:
            self._round = self._core.loop.background(self._look())

    async def _look(self) -> None:
        await self.publish()
        self._core.db.drop_forgotten()
        if self._core.clock.monotonic() - self._retried_at >= self._core.settings.retry_upload_s:
            await self.retry()
            self._retried_at = self._core.clock.monotonic()


def _due(node: Node, now: float) -> bool:
    staged = node.staged
    if staged is None or not staged.appended or staged.error or not staged.dirty_ranges:
        return False
    grown = staged.dirty_ranges.total
    if now - staged.written_at >= QUIET_S:
        return grown <= QUIET_BYTES
    return now - staged.grows_since >= BUSY_S and grown <= BUSY_BYTES
