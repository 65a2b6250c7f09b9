"""Identifies the process that works on something, so that others on the machine can see when it is dead."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from datastore.ourprocess import boot_id


def identity() -> dict[str, str]:
    """Return the identity of this process: its host, the boot id, its PID namespace, its PID and its start time."""
    return {"host": socket.gethostname(), "kernel": _kernel(), "process": f"{os.getpid()}:{_started(os.getpid())}"}


def is_dead(said: dict[str, str]) -> bool:
    """Return whether the process of an identity is known to be dead; False when this process can't see that."""
    number, _, started = said.get("process", "").partition(":")
    if not number.isdecimal() or not started or said.get("kernel") != _kernel():
        return False
    return _started(int(number)) != started


def _kernel() -> str:
    """Return the boot id and the PID namespace, equal for processes that see each other; '' when they are unknown."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(number: int) -> str:
    """Return a process's start in clock ticks since boot (proc(5), stat, field 22); '' for none or a zombie."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
