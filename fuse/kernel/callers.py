"""Who calls: whether that program is being ended, and what the kernel asks a second time for the same call.

The kernel sends INTERRUPT for every signal, timers and child exits included. On a local disk those don't disturb a
call, and few programs expect EINTR from a file; so only a caller that is being ended or asked to end is let go
(proc(5), signal(7)).

It looks a name up again when it could not be revalidated, and reads a page again when reading ahead failed
(fuse_dentry_revalidate and filemap_read in Linux). If the second request waited for the store as long as the first one
did, a call would take twice the time that is promised (S-64).
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
"""The kernel asks at once; the machine may be busy."""
_MAX = 256
_AGAIN = frozenset({abi.LOOKUP, abi.READ})
_Key = tuple[int, int, int]
"""opcode, node id, thread of the caller."""


def is_ended(pid: int, proc: Path = Path("/proc")) -> bool | None:
    """pid: the thread as the kernel names it, 0 from another pid namespace. None when it can't be told."""
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
    """Requests that failed a moment ago. Threads: the loop's."""

    def __init__(self) -> None:
        self.remembered: dict[_Key, tuple[float, Call]] = {}
        """While it is empty each request is a call of its own."""

    def call_of(self, header: Header, now: float) -> Call:
        """The call that a request of this moment belongs to: one whose first request failed just now, or a new one."""
        failed = self.remembered.pop((header[1], header[3], header[6]), None)
        return failed[1] if failed is not None and now - failed[0] < _WITHIN_S else Call(now)

    def failed(self, header: Header, call: Call, error: BaseException, *, first: bool, now: float) -> None:
        """A request of a call has failed. first: it was the call's first request; a second one has no successor."""
        if first and header[1] in _AGAIN and header[6] and isinstance(error, TransientStoreError):
            if len(self.remembered) >= _MAX:
                self.remembered.clear()
            self.remembered[header[1], header[3], header[6]] = (now, call)
