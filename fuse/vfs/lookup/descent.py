"""The way down a tree, one name after the other: what the next step will ask for is asked at once with this one.

The kernel looks a path up name by name, and each waits for the store's answer to the one before. Where the store is far
away, the directory that a name leads to is listed while its attributes are asked for; and where the same way was gone
before, all directories that it led through are asked about side by side.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from functools import partial

from datastore.errors import StoreError

from ...loop import Task
from ...ops import FSError
from ..tree.core import Core
from ..tree.nodes import Directory
from .remote import Remote

_WAYS_MAX = 1024
"""Directories of which the last step down is remembered."""
_LEVELS = 32
"""Asked about at once."""


class Descent:
    def __init__(self, core: Core, remote: Remote) -> None:
        self._core = core
        self._remote = remote
        self._steps: OrderedDict[int, Directory] = OrderedDict()
        """By the directory's ino, where the last way through it led to."""
        self._coming: dict[int, Task[None]] = {}

    async def ahead(self, directory: Directory) -> None:
        """Somebody asks for a directory that is not current: wait for its attributes, if they are on their way; else
        ask for what comes next.
        """
        parent, coming = directory.parent, self._coming.get(directory.ino)
        if parent is not None:
            self._steps[parent.ino] = directory
            self._steps.move_to_end(parent.ino)
            if len(self._steps) > _WAYS_MAX:
                self._steps.popitem(last=False)
        if coming is not None:
            await coming
        elif parent is not None and self._remote.is_far:
            self._go(directory)

    def _go(self, directory: Directory) -> None:
        last = directory
        for _ in range(_LEVELS):
            step = self._steps.get(last.ino)
            if step is None or step.parent is not last or step.gone or not self._is_old(last, step.checked_at):
                break
            if step.ino not in self._coming:
                coming = self._coming[step.ino] = self._core.loop.spawn(self._ask(step))
                coming.on_done(partial(self._coming.__delitem__, step.ino))
            last = step
        walk = last.parent.walk if last.parent is not None else None
        if not last.large and (walk is None or walk.streak <= 1) and self._unlisted(last):
            self._core.loop.spawn(self._list(last))

    def _is_old(self, directory: Directory, when: float) -> bool:
        return self._core.clock.monotonic() - when >= self._remote.ttl(directory)

    def _unlisted(self, directory: Directory) -> bool:
        return directory.listing is None or self._is_old(directory, directory.listing.listed_at)

    async def _ask(self, directory: Directory) -> None:
        with suppress(StoreError, FSError):  # who wants it asks again, and is told
            await self._remote.head(directory)

    async def _list(self, directory: Directory) -> None:
        """Unless somebody does already, or has; who wants the listing waits for the lock."""
        if not directory.listing_lock.locked and self._unlisted(directory):
            async with directory.listing_lock:
                with suppress(StoreError, FSError):  # who wants it asks again, and is told
                    await self._remote.begin(directory)
