"""Repeats the warnings and errors of the node's mounts in the daemon's own log, where `kubectl logs` shows them.

The processes of a mount write to mount.log in its state directory. A server may be hacked and write anything there, so
its lines are only a field of ours, and few of them are repeated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from datastore.logs import fields

from .daemon import MountState

log = logging.getLogger(__name__)

LOOK_S = 2.0
LINES = 10
"""The most lines of a mount that one look() repeats."""
LEVELS = ([b"WARNING"], [b"ERROR"])
READ_BYTES = 64 << 10
LINE_LENGTH = 1000


class MountLogs:
    """The logs of all mounts. Not thread-safe."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}

    def look(self, mounts: Iterable[MountState]) -> None:
        """Repeat what was written since the last look; of a mount that is seen for the first time, all."""
        for mount in mounts:
            with suppress(OSError):
                lines = list(self._new_lines(mount.state_dir))
                if lines[:-LINES]:
                    left_out = fields(volume=mount.volume_id, lines=len(lines) - LINES, directory=mount.state_dir)
                    log.warning("a mount's log has more lines", extra=left_out)
                for line in lines[-LINES:]:
                    log.warning("from a mount's log", extra=fields(volume=mount.volume_id, line=line))
        self._read = {each: at for each, at in self._read.items() if os.path.isdir(each)}

    def _new_lines(self, state_dir: str) -> Iterator[str]:
        descriptor = os.open(Path(state_dir, "mount.log"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size, start = os.fstat(descriptor).st_size, self._read.get(state_dir, 0)
            if start > size:  # it was trimmed
                start = 0
            start = max(start, size - READ_BYTES)
            text = os.pread(descriptor, READ_BYTES, start)
        finally:
            os.close(descriptor)
        whole = text[: text.rfind(b"\n") + 1]
        self._read[state_dir] = start + len(whole)
        for line in whole.split(b"\n"):
            if line.split(b" ", 2)[1:2] in LEVELS:  # after the time
                shown = line[:LINE_LENGTH].decode(errors="backslashreplace")
                yield "".join(each if each.isprintable() else "?" for each in shown)
