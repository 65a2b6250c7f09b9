"""Which process works on something, so that others on the machine know when it is dead."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def identity() -> dict[str, str]:
    """This process: its machine since the last start, its process namespace, its number and when that began."""
    return {"host": socket.gethostname(), "kernel": _kernel(), "process": f"{os.getpid()}:{_started(os.getpid())}"}


def is_dead(said: dict[str, str]) -> bool:
    """Whether the process of an identity is known to be dead; False where that can't be seen from here."""
    number, _, started = said.get("process", "").partition(":")
    if not number.isdecimal() or not started or said.get("kernel") != _kernel():
        return False
    return _started(int(number)) != started


def _kernel() -> str:
    """Equal for processes that see each other. '' where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(number: int) -> str:
    """When a process began, in ticks since the machine did (proc(5), stat, field 22); '' when there is none."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
