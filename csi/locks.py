"""Locks that let one call at a time work on a volume; another waits, or fails (ABORTED) and has to be repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import VolumeBusy


class VolumeLocks:
    """The locks. Any thread may use them. INVARIANT: a volume is in `_held` while a thread is inside hold()."""

    def __init__(self) -> None:
        self._released = threading.Condition()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, volume_id: str, wait_s: float = 0.0) -> Iterator[None]:
        """Hold a volume's lock, and wait for it up to wait_s. Errors: VolumeBusy when another call still holds it."""
        with self._released:
            if not self._released.wait_for(lambda: volume_id not in self._held, wait_s):
                raise VolumeBusy(f"volume {volume_id}: another call is working on it; try again")
            self._held.add(volume_id)
        try:
            yield
        finally:
            with self._released:
                self._held.remove(volume_id)
                self._released.notify_all()
