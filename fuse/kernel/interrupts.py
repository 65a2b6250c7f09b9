"""Whether the caller of a request is being ended.

The kernel sends INTERRUPT for every signal, timers and child exits included. On a local disk those don't disturb a
call, and few programs expect EINTR from a file; so only a caller that is being ended or asked to end is let go
(proc(5), signal(7)).
"""

from __future__ import annotations

import signal
from pathlib import Path

ENDING = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
ENDING_MASK = sum(1 << (number - 1) for number in ENDING)


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
