"""One thread that waits for descriptors: what is ready is served at once, and never waits for anything else."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Ready = Callable[[], None]


class Loop:
    """Calls what belongs to each descriptor that can be read. What is called must not wait, nor raise.

    Threads: soon() and wake() are for any, the rest for the one that turns it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._poll = select.epoll()
        self._ready: dict[int, Ready] = {}
        self._ticks: dict[Ready, tuple[float, float]] = {}
        """What is called now and then: the seconds in between, and when it is called next."""
        self._at_end: dict[Ready, None] = {}
        self._soon: deque[Ready] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False
        self.watch(self._bell, self._rung)

    def watch(self, fd: int, ready: Ready) -> None:
        """Call `ready` whenever there is something to read, or the other side has gone."""
        self._ready[fd] = ready
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Call nothing for it any more. It is still open."""
        del self._ready[fd]
        self._poll.unregister(fd)

    def every(self, seconds: float, call: Ready) -> None:
        """Call it about so often until never()."""
        self._ticks[call] = (seconds, self.clock() + seconds)

    def at_end(self, call: Ready) -> None:
        """Call it when this loop turns no more."""
        self._at_end[call] = None

    def never(self, call: Ready) -> None:
        """Call it neither now and then nor at the end. Idempotent."""
        self._ticks.pop(call, None)
        self._at_end.pop(call, None)

    def wake(self) -> None:
        """End the turn that it is in. Any thread."""
        self.soon(lambda: None)

    def soon(self, call: Ready) -> bool:
        """Have the loop call it in its next turn; False when there will be none."""
        with self._lock:
            if self._closed:
                return False
            self._soon.append(call)
            os.eventfd_write(self._bell, 1)
            return True

    def turn(self) -> None:
        """Wait until something is ready, and serve all that is."""
        wait_s = None
        if self._ticks:
            wait_s = max(min(due for _, due in self._ticks.values()) - self.clock(), 0.0)
        for fd, _ in self._poll.poll(wait_s):
            ready = self._ready.get(fd)
            if ready is not None:  # one that was served before may have ended it
                ready()
        if self._ticks:
            self._tick(self.clock())

    def close(self) -> None:
        """After the last turn: what was to be called soon is, and then what waits for the end."""
        with self._lock:
            self._closed = True
        self._rung()
        while self._at_end:
            call, _ = self._at_end.popitem()
            call()
        self._poll.close()
        os.close(self._bell)

    def _rung(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._soon:
            self._soon.popleft()()

    def _tick(self, now: float) -> None:
        for call, (seconds, due) in list(self._ticks.items()):
            if now >= due and call in self._ticks:
                self._ticks[call] = (seconds, now + seconds)
                call()
