"""The way down a tree, one name after the other: what the next step will ask for is asked at once with this one.

The kernel looks a path up name by name, and each waits for the store's answer to the one before. Where the store is far
away, the directory that a name leads to is listed while its attributes are asked for; and where the same way was gone
before, all directories that it led through are asked about side by side.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, wait

from datastore.errors import StoreError
from datastore.retry import carried

from ...ops import FSError
from ..tree.core import Core
from ..tree.nodes import Directory
from .remote import Remote

_WAYS_MAX = 1024
"""Directories of which the last step down is remembered."""
_LEVELS = 32
"""Asked about at once."""
_WAIT_S = 120.0


class Descent:
    """All ways down of a mount. No method is called with the state lock held."""

    def __init__(self, core: Core, remote: Remote) -> None:
        self._core = core
        self._remote = remote
        self._steps: OrderedDict[int, Directory] = OrderedDict()
        """By the directory's ino, where the last way through it led to."""
        self._coming: dict[int, Future[None]] = {}

    def ahead(self, directory: Directory) -> None:
        """Somebody asks for a directory that is not current: wait for its attributes, if they are on their way.

        Else ask for what comes next.
        """
        with self._core.lock:
            parent, coming = directory.parent, self._coming.get(directory.ino)
            if parent is not None:
                self._steps[parent.ino] = directory
                self._steps.move_to_end(parent.ino)
                if len(self._steps) > _WAYS_MAX:
                    self._steps.popitem(last=False)
            if coming is None and parent is not None and self._core.distance.is_far:
                self._go(directory)
        if coming is not None:
            wait((coming,), timeout=_WAIT_S)

    def _go(self, directory: Directory) -> None:
        last = directory
        for _ in range(_LEVELS):
            step = self._steps.get(last.ino)
            if step is None or step.parent is not last or step.gone or not self._is_old(last, step.checked_at):
                break
            if step.ino not in self._coming:
                self._start(step)
            last = step
        listing, walk = last.listing, last.parent.walk if last.parent is not None else None
        walked = walk is not None and walk.streak > 1
        if not last.large and not walked and self._is_old(last, listing.listed_at if listing is not None else None):
            self._core.io.submit(carried(self._list), last)

    def _is_old(self, directory: Directory, when: float | None) -> bool:
        return when is None or self._core.clock.monotonic() - when >= self._remote.ttl(directory)

    def _start(self, directory: Directory) -> None:
        future = self._core.io.submit(carried(self._ask), directory)
        self._coming[directory.ino] = future
        future.add_done_callback(lambda _: self._coming.pop(directory.ino, None))

    def _ask(self, directory: Directory) -> None:
        self._remote.head(directory)

    def _list(self, directory: Directory) -> None:
        """Unless somebody does already, or has; who wants the listing waits for the lock."""
        if not directory.listing_lock.acquire(blocking=False):
            return
        try:
            listing = directory.listing
            if self._is_old(directory, listing.listed_at if listing is not None else None):
                self._remote.begin(directory)
        except (StoreError, FSError):
            return  # who wants it asks again, and is told
        finally:
            directory.listing_lock.release()
