"""One call at a time per volume; who finds it taken is told so at once (ABORTED) and comes again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import VolumeBusy


class VolumeLocks:
    """Threads: any. INVARIANT: a volume is in `_handles` exactly while one thread is inside hold()."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._handles: set[str] = set()

    @contextmanager
    def hold(self, volume_id: str) -> Iterator[None]:
        """Errors: VolumeBusy when another call works on the volume."""
        with self._guard:
            if volume_id in self._handles:
                raise VolumeBusy(f"volume {volume_id}: another call is at work on it; ask again")
            self._handles.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._handles.remove(volume_id)
