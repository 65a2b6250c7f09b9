"""Whom the server is asked for: the caller with his groups, as AUTH_SYS tells them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..ops import Caller
from .client import GROUPS, Credentials

REMEMBERED_S = 1.0
REMEMBERED = 256
TEXT_LIMIT = 96
"""Bytes that state.opens has room for."""


class Identities:
    """The credentials of callers. The kernel tells a caller's user and group; his other groups are looked up in /proc,
    and believed for a second. Threads: any; a race only looks something up twice.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: dict[tuple[int, int, int], tuple[float, Credentials]] = {}

    def of(self, caller: Caller) -> Credentials:
        """Without other groups where they can't be told: a process that has ended, or of another pid namespace."""
        key, now = (caller.pid, caller.uid, caller.gid), time.monotonic()
        known = self._known.get(key)
        if known is not None and now - known[0] < REMEMBERED_S:
            return known[1]
        found = Credentials(caller.uid, caller.gid, self._groups(caller.pid))
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[key] = (now, found)
        return found

    def _groups(self, pid: int) -> tuple[int, ...]:
        try:
            status = (self._proc / str(pid) / "status").read_bytes() if pid else b""
        except OSError:
            return ()
        for line in status.splitlines():
            if line.startswith(b"Groups:"):
                return tuple(map(int, line[7:].split()))[:GROUPS]
        return ()


def as_text(credentials: Credentials) -> str:
    """For the table of open files; groups that do not fit are left out."""
    text = f"{credentials.uid}:{credentials.gid}:{','.join(map(str, credentials.groups))}"
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT].rpartition(",")[0]


def from_text(text: str) -> Credentials:
    """What as_text() wrote; whoever runs this process where it is not that."""
    try:
        uid, gid, groups = text.split(":")
        return Credentials(int(uid), int(gid), tuple(map(int, groups.split(","))) if groups else ())
    except ValueError:
        return Credentials(os.getuid(), os.getgid())
