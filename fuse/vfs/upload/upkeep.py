"""What is done now and then beside the requests: growing files are published, failed uploads tried again.

And what the kernel keeps of open directories is dropped in time.
"""

from __future__ import annotations

import logging
import threading

from datastore.errors import DatastoreError
from datastore.logs import fields

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
    """One thread. stop() is idempotent and bounded."""

    def __init__(self, core: Core, uploads: Uploads, dir_cache: KernelDirCache) -> None:
        self._core = core
        self._uploads = uploads
        self._dir_cache = dir_cache
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the upload that is under way."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=120)
            self._thread = None

    def publish(self) -> None:
        """Send open files that only grow and are due (S-44)."""
        now = self._core.clock.monotonic()
        for node in self._dirty():
            if _due(node, now):
                try:
                    self._uploads.publish(node)
                except (DatastoreError, OSError) as error:
                    log.warning("a growing file is not published", extra=fields(path=node.path, error=error))

    def retry(self) -> None:
        """Send again what failed (S-19)."""
        self._uploads.retry([node for node in self._dirty() if node.staged is not None and node.staged.error])

    def _dirty(self) -> list[Node]:
        with self._core.lock:
            return self._core.nodes.unsent()

    def _run(self) -> None:
        retried_at = self._core.clock.monotonic()
        while not self._stopping.wait(_TICK_S):
            self._dir_cache.expire()
            self.publish()
            self._core.db.drop_forgotten()
            if self._core.clock.monotonic() - retried_at >= self._core.settings.retry_upload_s:
                self.retry()
                retried_at = self._core.clock.monotonic()


def _due(node: Node, now: float) -> bool:
    staged = node.staged
    if staged is None or not staged.appended or staged.error or not staged.dirty_ranges:
        return False
    grown = staged.dirty_ranges.total
    if now - staged.written_at >= QUIET_S:
        return grown <= QUIET_BYTES
    return now - staged.grows_since >= BUSY_S and grown <= BUSY_BYTES
