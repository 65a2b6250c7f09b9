"""Makes staging files, out of others that were emptied where it can.

Before it makes a file, ext4 looks at every inode of the group that was deleted within the last minutes: measured 25 us
after few, 0.8 ms after thousands, which many small files leave behind (recently_deleted in fs/ext4/ialloc.c). A rename
costs the same however many there were.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path

from .staging import StagedFile
from .version import ObjectVersion

_SPARES_MAX = 32
_BYTES_MAX = 1 << 20
"""To empty a larger one takes longer than to make one."""


class StagingFiles:
    """Those of one process. A name is never used twice: the journal may still have a row for it. Threads: any."""

    def __init__(self, directory: Path) -> None:
        """directory: of what is staged; the empty files are beside it, as here is only what the journal speaks of.

        Where there is no room for theirs (a full disk) none are kept.
        """
        self._directory = directory
        self._run, self._numbers = uuid.uuid4().hex, count(1)
        self._spares: deque[Path] = deque()
        self._empty = directory.with_name("spare")
        with suppress(OSError):
            self._empty.mkdir(mode=0o700, exist_ok=True)
            for left in self._empty.iterdir():
                left.unlink()

    def new(self, base: ObjectVersion | None, since_ns: int) -> StagedFile:
        """A staging file. OSError."""
        path = self._directory / self._name()
        with suppress(IndexError, OSError):  # it makes one then
            os.rename(self._spares.pop(), path)
        return StagedFile(path, base, since_ns)

    def drop(self, staged: StagedFile) -> None:
        """Nobody wants its content any more."""
        spare = self._empty / self._name()
        if staged.size <= _BYTES_MAX and len(self._spares) < _SPARES_MAX and staged.emptied(spare):
            self._spares.append(spare)
        else:
            staged.close(remove=True)

    def _name(self) -> str:
        return f"{self._run}-{next(self._numbers)}"
