"""The credentials with which the server is called: the user and groups of a caller, in the form of AUTH_SYS."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..ops import Caller
from .client import GROUPS, Credentials

REMEMBERED_S = 1.0
REMEMBERED = 256
TEXT_LIMIT = 96
"""The most bytes that a tag may have in the table of state.opens."""


class Identities:
    """The credentials of callers. The kernel tells a caller's user and group; the supplementary groups are read from
    /proc and cached for a second. Any thread may call; a race only reads the groups twice.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: dict[tuple[int, int, int], tuple[float, Credentials]] = {}

    def of(self, caller: Caller) -> Credentials:
        """Return a caller's credentials; without groups for a process that ended or is in another pid namespace."""
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
    """Return credentials as a tag for the table of open files; groups that do not fit are left out."""
    text = f"{credentials.uid}:{credentials.gid}:{','.join(map(str, credentials.groups))}"
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT].rpartition(",")[0]


def from_text(text: str) -> Credentials:
    """Return the credentials that as_text() wrote; those of this process if the text is anything else."""
    try:
        uid, gid, groups = text.split(":")
        return Credentials(int(uid), int(gid), tuple(map(int, groups.split(","))) if groups else ())
    except ValueError:
        return Credentials(os.getuid(), os.getgid())
