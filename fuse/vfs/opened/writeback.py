"""`writeBack`: close returns when the bytes and the journal are on the local disk, the upload follows (S-48, S-49).

The staging file is synced, then the journal; both outlive the death of every process and a power cut. A file is sent a
part of maxDelay after its close, many side by side, each path in order because its node's lock is held. When too much
waits, a close sends its own file, as it does without writeBack.

Threads: one hands out what is due, `WIDTH` send.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor

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
_STOP_S = 120.0


class WriteBack:
    """Files that are closed here and on their way. stop() is idempotent and bounded."""

    def __init__(self, core: Core, uploads: Uploads) -> None:
        self._core = core
        self._uploads = uploads
        self._lock = threading.Lock()
        self._waiting: dict[Node, int] = {}
        """Size of each file at its close, in the order of the first close."""
        self._bytes = 0
        self._sending: dict[Node, Future[None]] = {}
        self._left_due = math.inf
        """When to send what an earlier server left and the kernel has forgotten."""
        self._stopping = threading.Event()
        self._started = False
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(WIDTH, thread_name_prefix="write-back")

    @property
    def on(self) -> bool:
        """Whether a close may return before the store has the file."""
        return self._core.settings.write_back_s > 0

    def start(self) -> None:
        """Begin to send; a mount without writeBack does so when it gets that and a file waits."""
        with self._lock:
            self._started = True
            if self.on:
                self._begin()

    def _begin(self) -> None:
        """The lock is held."""
        if self._started and self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, after what is being sent; the rest is flush_all's."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_S)
            self._thread = None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def resume(self) -> None:
        """Go on with what was closed at an earlier server. What is open for writing waits for its close."""
        if not self.on:
            return
        with self._core.lock:
            nodes = self._core.nodes.unsent()
        self._left_due = self._due_at()
        for node in nodes:
            staged = node.staged
            if staged is not None and not staged.error and not node.writers:
                staged.due = self._left_due
                self._wait(node, staged.size)

    def close(self, node: Node) -> None:
        """What close(2) waits for. StoreError, FSError when it has to send; OSError of the local disk."""
        if not self._take(node):
            self._uploads.flush(node)

    def _take(self, node: Node) -> bool:
        """Put the file on the disk and in the queue; False when it must be sent now."""
        with node.lock:
            staged = node.staged
            if staged is None or not self._uploads.owes(node):
                return True
            if staged.error or staged.published or staged.stream is not None or self._full(staged.size):
                return False
            self._uploads.persist(node)
            if not staged.due:
                staged.due = self._due_at()
        self._wait(node, staged.size)
        return True

    def _due_at(self) -> float:
        return self._core.clock.monotonic() + min(_REST_S, self._core.settings.write_back_s / _SHARE)

    def _wait(self, node: Node, size: int) -> None:
        with self._lock:
            self._bytes += size - self._waiting.get(node, 0)
            self._waiting[node] = size
            self._begin()

    def _full(self, size: int) -> bool:
        with self._lock:
            return len(self._waiting) >= MAX_FILES or self._bytes + size > MAX_BYTES

    def send_due(self, now: float) -> list[Future[None]]:
        """Begin to send what is due and nobody writes to."""
        with self._lock:
            for node in [node for node, future in self._sending.items() if future.done()]:
                del self._sending[node]
            idle = [node for node in self._waiting if node not in self._sending]
        begun = []
        if self._left_due <= now:
            self._left_due = math.inf
            begun.append(self._pool.submit(self._send_left))
        for node in idle:
            staged = node.staged
            if staged is not None and staged.due and not node.gone:
                if staged.due > now:
                    break
                if node.writers:
                    continue
            with self._lock:
                self._bytes -= self._waiting.pop(node, 0)
                self._sending[node] = future = self._pool.submit(self._send, node)
            begun.append(future)
        return begun

    def _send(self, node: Node) -> None:
        self._uploads.retry_one(node)

    def _send_left(self) -> None:
        self._uploads.retry([])

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            self.send_due(self._core.clock.monotonic())
