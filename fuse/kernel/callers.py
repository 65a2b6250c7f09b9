"""Finds out whether a calling program is being ended, and which requests the kernel repeats for one call of a program.

The kernel sends INTERRUPT for every signal, timers and child exits included. On a local disk such signals don't disturb
a call, and few programs expect EINTR from a file; so a call gets EINTR only when its program is being killed or asked
to end (proc(5), signal(7)).

The kernel looks a name up again when it could not revalidate the dentry, and reads a page again when reading ahead
failed (fuse_dentry_revalidate and filemap_read in Linux). If the second request waited for the store as long as the
first one did, a call would take twice the time that is promised (S-64).
"""

from __future__ import annotations

import signal
from pathlib import Path

from datastore.errors import TransientStoreError
from datastore.retry import Call

from . import abi
from .dispatch import Header

ENDING = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
ENDING_MASK = sum(1 << (number - 1) for number in ENDING)
_WITHIN_S = 1.0
"""How many seconds after a failure a repetition may come. The kernel repeats at once, but the machine may be busy."""
_MAX = 256
_AGAIN = frozenset({abi.LOOKUP, abi.READ})
_Key = tuple[int, int, int]
"""(opcode, node id, thread id of the caller)."""


def is_ended(pid: int, proc: Path = Path("/proc")) -> bool | None:
    """Return whether a signal that ends the program is pending for thread `pid`; None when that can't be told.
    pid: as the kernel's request names the thread; 0: it is in another pid namespace."""
    if not pid:
        return None
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return None
    masks = {line[:6]: int(line[7:], 16) for line in status.splitlines() if line[:6] in ("SigPnd", "ShdPnd", "SigBlk")}
    pending = (masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)) & ~masks.get("SigBlk", 0)
    return bool(pending & ENDING_MASK)


class FollowUps:
    """The requests that failed a moment ago and that the kernel may repeat. Only the loop's thread may use it."""

    def __init__(self) -> None:
        self.remembered: dict[_Key, tuple[float, Call]] = {}
        """When each request failed, and its call. While this is empty, each request belongs to a call of its own."""

    def call_of(self, header: Header, now: float) -> Call:
        """Return the call that a new request belongs to: one whose first request just failed, or a new call."""
        failed = self.remembered.pop((header[1], header[3], header[6]), None)
        return failed[1] if failed is not None and now - failed[0] < _WITHIN_S else Call(now)

    def failed(self, header: Header, call: Call, error: BaseException, *, first: bool, now: float) -> None:
        """Remember a failed request that the kernel may repeat: only a call's first, as no repetition is repeated."""
        if first and header[1] in _AGAIN and header[6] and isinstance(error, TransientStoreError):
            if len(self.remembered) >= _MAX:
                self.remembered.clear()
            self.remembered[header[1], header[3], header[6]] = (now, call)
