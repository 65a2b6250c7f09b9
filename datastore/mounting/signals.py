"""Signals as facts to ask for, not as exceptions: so nothing is ever left half done.

Inside `watching()` a SIGINT, SIGTERM or SIGHUP is only noted, and makes `wait_fd` readable; code looks at it where
stopping is safe. One thread, the main one.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to stop, and what was begun has been undone. Not an Exception, like KeyboardInterrupt."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells have it."""
        return 128 + self.signum


class SignalWatch:
    """The signals that came, in order; `take` hands out each once."""

    def __init__(self, wait_fd: int) -> None:
        self.wait_fd = wait_fd
        self._came: list[int] = []

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        self._came.append(signum)

    @property
    def pending(self) -> bool:
        """Whether a signal waits to be taken."""
        return bool(self._came)

    def take(self) -> int | None:
        """The oldest signal not yet taken, or None."""
        self._drain()
        return self._came.pop(0) if self._came else None

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if (signum := self.take()) is not None:
            raise Interrupted(signum)

    def wait(self, fds: Sequence[int], timeout_s: float) -> list[int]:
        """Which of `fds` are readable; [] after timeout_s, and at once when a signal is waiting to be taken."""
        deadline = time.monotonic() + timeout_s
        while not self._came:
            left_s = max(0.0, deadline - time.monotonic())
            ready = select.select([self.wait_fd, *fds], [], [], left_s)[0]
            if found := [fd for fd in ready if fd != self.wait_fd]:
                return found
            self._drain()
            # SIGCHLD only wakes us: the caller looks for itself what happened.
            if ready or left_s <= 0:
                break
        return []

    def _drain(self) -> None:
        try:
            while os.read(self.wait_fd, 512):
                pass
        except BlockingIOError:
            pass


@contextmanager
def keyboard() -> Iterator[list[int]]:
    """The SIGINTs that come until the block ends, outside of watching(). Each raises KeyboardInterrupt, as ever.

    A library in the middle of something may make another error of that, or of an import that was cut off.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        signal.default_int_handler(signum, frame)

    if before is signal.default_int_handler:  # else it is ignored, as of a job in the background
        signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def watching() -> Iterator[SignalWatch]:
    """Note STOPPING signals, and wake at SIGCHLD, until the block ends; the handlers before are put back."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    watch = SignalWatch(read_fd)
    wakeup_before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    before = {number: signal.signal(number, watch.note) for number in STOPPING}
    child_before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, child_before)
        signal.set_wakeup_fd(wakeup_before)
        os.close(read_fd)
        os.close(write_fd)
