"""Locks that let one call at a time work on a volume; a second call fails at once (ABORTED) and has to be repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import VolumeBusy


class VolumeLocks:
    """The locks. Any thread may use them. INVARIANT: a volume is in `_handles` while a thread is inside hold()."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._handles: set[str] = set()

    @contextmanager
    def hold(self, volume_id: str) -> Iterator[None]:
        """Hold a volume's lock, without waiting. Errors: VolumeBusy when another call holds it."""
        with self._guard:
            if volume_id in self._handles:
                raise VolumeBusy(f"volume {volume_id}: another call is working on it; try again")
            self._handles.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._handles.remove(volume_id)
