"""Signals are noted for the code to check, and raise no exceptions, so that nothing is left half done.

Within `watching()` a SIGINT, SIGTERM or SIGHUP is only noted, and makes `wait_fd` readable; the code checks for it
where it is safe to stop. Only the main thread may use this module.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 0.5
"""A signal that comes again sooner is the same request: timeout(1) sends it to us and to our process group, and when a
terminal closes, both the kernel and the shell send SIGHUP."""
_BEFORE_WATCHING: list[int] = []
"""What came within keyboard(), before watching()."""


class Interrupted(BaseException):
    """A signal asked us to stop, and unfinished work has been undone. Like KeyboardInterrupt, it is no Exception."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code as in shells: 128 + signal."""
        return 128 + self.signum


class SignalWatch:
    """The signals that came, in order; take() returns each once. wait_fd: readable after a signal."""

    def __init__(self, wait_fd: int) -> None:
        self.wait_fd = wait_fd
        self._came: list[int] = []
        self._last: dict[int, float] = {}

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Note a signal, unless it repeats one of its number that was noted; this is the handler."""
        now = time.monotonic()
        if now - self._last.get(signum, -REPEAT_S) >= REPEAT_S:
            self._came.append(signum)
            self._last[signum] = now  # of a Ctrl-C that comes again and again, the next one counts

    @property
    def pending(self) -> bool:
        """Whether a signal waits to be taken."""
        return bool(self._came)

    def take(self) -> int | None:
        """Return the oldest signal that is not taken yet, or None."""
        self._drain()
        return self._came.pop(0) if self._came else None

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if (signum := self.take()) is not None:
            raise Interrupted(signum)

    def wait(self, fds: Sequence[int], timeout_s: float) -> list[int]:
        """Return which of `fds` are readable; [] after timeout_s or a SIGCHLD, or when a signal waits to be taken."""
        deadline = time.monotonic() + timeout_s
        while not self._came:
            left_s = max(0.0, deadline - time.monotonic())
            ready = select.select([self.wait_fd, *fds], [], [], left_s)[0]
            if found := [fd for fd in ready if fd != self.wait_fd]:
                return found
            self._drain()
            # SIGCHLD only wakes the caller, which checks what happened.
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
    """Yield a list to which each SIGINT is added until the block ends, except within watching(). Each still raises
    KeyboardInterrupt, but a library that it interrupts, or a broken-off import, may turn that into another error; by
    the list the caller knows of the SIGINT nevertheless. Python drops the exception where it interrupts a destructor,
    as in an import: then the next watching() has the signal."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        _BEFORE_WATCHING.append(signum)
        signal.default_int_handler(signum, frame)

    if before is signal.default_int_handler:  # else it is ignored, as in a background job
        signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
        _BEFORE_WATCHING.clear()


@contextmanager
def watching() -> Iterator[SignalWatch]:
    """Note STOPPING signals and wake at SIGCHLD until the block ends; then the earlier handlers are restored. SIGHUP
    stays ignored where it is, as under nohup."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    watch = SignalWatch(read_fd)
    wakeup_before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, watch.note) for number in STOPPING if number not in ignored}
    if sys.exc_info()[0] is None:  # else the KeyboardInterrupt ends the command, which only cleans up here
        while _BEFORE_WATCHING:
            watch.note(_BEFORE_WATCHING.pop(0), None)
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
