"""Tells the kernel what another client changed (ops.Notifier).

A thread of its own writes the notifications to the device, never the loop's thread: the kernel takes a folio's or a
directory's lock for them, which a request that we have not answered yet may hold. For the same reason no other thread
waits for this one, except stop(), which has a timeout.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from datastore.logs import fields

from ..ops import Held, Ino, Notifier
from . import reply

log = logging.getLogger(__name__)

NAME_LIMIT = 65_536
"""The most names in the queue. Beyond that the oldest is dropped, and the kernel forgets that name when its time to
live is over. Inodes are not dropped, since pages have no time to live; the queue holds each inode only once."""
HELD_LIMIT = 65_536
"""The most nodes in the queue that the kernel is to give up; beyond that the oldest are dropped from the queue."""
PRUNE_MAX = 512
"""The most nodes in one notification: as many as the kernel copies at once."""


class DeviceNotifier(Notifier):
    """The queue of notifications, and the thread that writes them to the device."""

    def __init__(self, device_fd: int, is_local: Callable[[Ino], bool | None] = lambda _: None) -> None:
        self._device_fd = device_fd
        self.is_local = is_local  # type: ignore[method-assign, assignment]
        self._changed = threading.Condition()
        self._names: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._inodes: OrderedDict[int, int] = OrderedDict()
        self._held: deque[Held] = deque(maxlen=HELD_LIMIT)
        self._can_prune = True
        self._stopping = False
        self._expire_only = False
        self._thread = threading.Thread(target=self._deliver, name="fuse-notify", daemon=True)

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        """Let the kernel forget this name."""
        with self._changed:
            self._names[parent, name] = None
            if len(self._names) > NAME_LIMIT:
                self._names.popitem(last=False)
            self._changed.notify()

    def inval_inode(self, ino: Ino, offset: int = 0) -> None:
        """Let the kernel drop cached attributes, and pages too unless the offset is -1, here and in the queue."""
        with self._changed:
            self._inodes[ino] = max(offset, self._inodes.get(ino, -1))
            self._changed.notify()

    def release(self, held: Sequence[Held]) -> None:
        """Let the kernel give up nodes. For nodes that the queue has no room for, the caller has to ask again."""
        with self._changed:
            self._held.extend(held)
            self._changed.notify()

    def start(self, *, expire_only: bool) -> None:
        """Start the thread, once INIT is settled. expire_only: the kernel can expire a name without detaching it."""
        self._expire_only = expire_only
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Drop the queue and end the thread; a write that the kernel blocks for longer is left behind. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _next(self) -> bytes | None:
        with self._changed:
            while not (self._stopping or self._inodes or self._names or self._held):
                self._changed.wait()
            if self._stopping:
                return None
            if self._inodes:
                return reply.inval_inode(*self._inodes.popitem(last=False))
            if not self._names:
                return self._prune()
            (parent, name), _ = self._names.popitem(last=False)
            return reply.inval_entry(parent, name, expire_only=self._expire_only)

    def _prune(self) -> bytes:
        """Return the next frame that gives up nodes. Before Linux 6.18 there is no prune: a file's name is detached
        instead, one per frame. release() gets no files that somebody has open."""
        if self._can_prune:
            count = min(PRUNE_MAX, len(self._held))
            return reply.prune([self._held.popleft().ino for _ in range(count)])
        one = self._held.popleft()
        while not one.name and self._held:
            one = self._held.popleft()
        if not one.name:
            return reply.inval_inode(one.ino, -1)
        return reply.inval_entry(one.parent, one.name, expire_only=False)

    def _deliver(self) -> None:
        while (frame := self._next()) is not None:
            try:
                os.write(self._device_fd, frame)
            except FileNotFoundError:
                pass  # ENOENT: the kernel does not know this inode or name, so it has nothing to forget
            except OSError as error:
                if reply.is_prune(frame):
                    self._can_prune = False
                log.debug("an invalidation was refused", extra=fields(error=error))
