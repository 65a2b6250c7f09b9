"""`writeBack`: close returns when the bytes and the journal are on the local disk, the upload follows (S-48, S-49).

The staging file is synced, then the journal; both outlive the death of every process and a power cut. A file is sent a
part of maxDelay after its close, many side by side, each path in order because its node's lock is held. When too much
waits, a close sends its own file, as it does without writeBack.
"""

from __future__ import annotations

import math
from contextlib import suppress

from ...loop import Semaphore, Task
from ..tree.core import Core
from ..tree.nodes import Node
from ..upload.uploads import Uploads

WIDTH = 16
"""Files sent at once."""
MAX_FILES = 10_000
MAX_BYTES = 1 << 30
"""Beyond so many unsent files or bytes a close sends its own."""
_SHARE, _REST_S = 5, 0.2
"""A file is sent a fifth of maxDelay after its close, or so many seconds: rewritten at once it goes once."""
_TICK_S = 0.05


class WriteBack:
    """Files that are closed here and on their way. stop() is idempotent."""

    def __init__(self, core: Core, uploads: Uploads) -> None:
        self._core = core
        self._uploads = uploads
        self._waiting: dict[Node, int] = {}
        """Size of each file at its close, in the order of the first close."""
        self._bytes = 0
        self._sending: dict[Node | None, Task[None]] = {}
        """None: what an earlier server left and the kernel has forgotten."""
        self._left_due = math.inf
        """When to send that."""
        self._places = Semaphore(WIDTH)
        self._started = self._looks = self._stopping = False

    @property
    def on(self) -> bool:
        """Whether a close may return before the store has the file."""
        return self._core.settings.write_back_s > 0

    def start(self) -> None:
        """Begin to send."""
        self._started = True
        self._look()

    async def stop(self) -> None:
        """End, after what is being sent; the rest is flush_all's."""
        self._stopping = True
        self._core.loop.never(self._tick)
        for task in list(self._sending.values()):
            with suppress(Exception):  # it is logged
                await task

    def resume(self) -> None:
        """Go on with what was closed at an earlier server. What is open for writing waits for its close."""
        if not self.on:
            return
        self._left_due = self._due_at()
        for node in self._core.nodes.unsent():
            staged = node.staged
            if staged is not None and not staged.error and not node.writers:
                staged.due = self._left_due
                self._wait(node, staged.size)
        self._look()

    async def close(self, node: Node) -> None:
        """What close(2) waits for. StoreError, FSError when it has to send; OSError of the local disk."""
        async with node.lock:
            staged = node.staged
            if staged is None or not self._uploads.owes(node):
                return
            full = len(self._waiting) >= MAX_FILES or self._bytes + staged.size > MAX_BYTES
            sends = bool(full or staged.error or staged.published or staged.stream is not None)
            if not sends:
                await self._uploads.persist(node)
                staged.due = staged.due or self._due_at()
        if sends:
            await self._uploads.flush(node)
        else:
            self._wait(node, staged.size)
            self._look()

    def _due_at(self) -> float:
        return self._core.clock.monotonic() + min(_REST_S, self._core.settings.write_back_s / _SHARE)

    def _wait(self, node: Node, size: int) -> None:
        self._bytes += size - self._waiting.get(node, 0)
        self._waiting[node] = size

    def send_due(self, now: float) -> list[Task[None]]:
        """Begin to send what is due and nobody writes to."""
        begun = []
        if self._left_due <= now:
            self._left_due = math.inf
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
            async with self._places:
                if self._stopping:
                    return
                if node is None:
                    await self._uploads.retry([])
                else:
                    await self._uploads.retry_one(node)
        finally:
            del self._sending[node]

    def _look(self) -> None:
        """Look now and then for what is due, for as long as anything waits."""
        waits = self._waiting or self._left_due < math.inf
        if waits and self._started and not self._looks and not self._stopping:
            self._looks = True
            self._core.loop.every(_TICK_S, self._tick)

    def _tick(self) -> None:
        self.send_due(self._core.clock.monotonic())
        if not self._waiting and self._left_due == math.inf:
            self._looks = False
            self._core.loop.never(self._tick)
