"""A lock that uploads share and the rename of a directory takes alone: keys must not change while bytes go to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from datastore.errors import DeadlineExceeded


class TreeLock:
    """Shared and exclusive; who waits for exclusive keeps newcomers out. Waits are bounded by `deadline_s`."""

    def __init__(self, deadline_s: float = 600.0) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._sharing = 0
        self._alone = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keys stay as they are meanwhile. DeadlineExceeded. Not to be nested."""
        with self._lock:
            if self._alone or self._waiting:
                self._wait(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._lock:
                self._sharing -= 1
                if self._waiting:
                    self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else relies on keys meanwhile. DeadlineExceeded."""
        with self._condition:
            self._waiting += 1
            try:
                self._wait(lambda: not self._alone and not self._sharing)
            finally:
                self._waiting -= 1
                self._condition.notify_all()  # who waits to share may go on, if this one gave up
            self._alone = True
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not self._condition.wait_for(ready, self._deadline_s):
            raise DeadlineExceeded("a rename of a directory or an upload took too long; try again")
