"""What the kernel keeps of the directories that it reads, and until when it may go by that (S-151).

How Linux does it (fs/fuse/readdir.c): with FOPEN_CACHE_DIR it keeps names, types and ids in the order in which it reads
them. What is read next is added where its cursor is the one at which that ended, and what came to its end is read from
there. It never asks whether that is still so, nor for attributes with it; it drops it when an OPENDIR is answered
without FOPEN_KEEP_CACHE, when it is told to, and when it needs the memory.

So the cursors of each listing are its own (two of them never mix), an OPENDIR is answered with FOPEN_KEEP_CACHE only
while all that the kernel was told is believed, and who keeps a directory open for longer than that is looked after.
What was not read to its end is kept in any case: its pages dropped, Linux would never add to it, nor begin anew.

The process whose OPENDIR has it dropped does that when it runs again. Others that open the directory before are to go
by what is kept no more than it is, nor drop what it has read by then: they read past it, without FOPEN_CACHE_DIR.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from dataclasses import dataclass, field

from ...ops import Fh, Ino, OpenDirReply
from ..tree.core import Core
from ..tree.listing import Listing
from ..tree.nodes import Directory

_EARLY_S = 2.0
"""So long before its time is over a listing is read again: a walk has that long, and expire() comes each second."""
_INDEX_BITS = 27
_NUMBER_BITS = 36
"""Cursors are positive and have 63 bits."""
_LISTINGS_MAX = 4
"""So many of an open directory are remembered: the kernel asks for the rest of one when it lost what it kept."""
_ARRIVED_S = 1.0
"""An answer is at the kernel by then."""


def index_of(cursor: int) -> int:
    """The place in its listing that a cursor stands for."""
    return cursor & ((1 << _INDEX_BITS) - 1)


@dataclass(slots=True)
class _Reading:
    """A directory that is open, by all of its handles that go by what is kept."""

    handles: dict[int, bool] = field(default_factory=dict)
    """Whether each has it dropped. It surely is when that one is read, or closed."""
    listings: deque[Listing] = field(default_factory=lambda: deque(maxlen=_LISTINGS_MAX))
    """What its handles were told, or the kernel has of it; the newest last."""
    mixed: bool = False
    """They were told different ones: which of them the kernel has is not known until all are closed."""
    until: float = math.inf
    """When what the kernel may have read of it has to go."""
    told_at: float = -math.inf
    again_at: float = math.inf
    """When it has to go once more: what was told just before it went may have come after that."""

    def shows(self, listing: Listing) -> bool:
        """This is the newest one from now on. Whether there was another."""
        other = self.differs(listing)
        if other or not self.listings:
            self.listings.append(listing)
        return other

    def goes(self, now: float) -> bool:
        """Whether what the kernel may have read of it has to go now; it does then."""
        if now < min(self.until, self.again_at):
            return False
        late = self.until <= now <= self.told_at + _ARRIVED_S
        self.until, self.again_at = math.inf, now + _ARRIVED_S if late else math.inf
        return True

    def differs(self, listing: Listing) -> bool:
        """Whether the newest one is another."""
        return bool(self.listings) and self.listings[-1] is not listing


class KernelDirCache:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[int, _Reading] = {}
        # Not one of an earlier server, whose cursors the kernel may have.
        self._number = secrets.randbits(_NUMBER_BITS)

    @property
    def enabled(self) -> bool:
        """Whether the kernel keeps any."""
        return self._core.settings.open_less

    def start(self) -> None:
        """Drop what an earlier server told: nobody looks after that."""
        for node in self._core.nodes.by_ino.values() if self.enabled else ():
            if isinstance(node, Directory):
                self._core.notifier.inval_inode(node.ino)

    def base(self, listing: Listing | None) -> int:
        """What the cursors of a listing begin from; None: of names that are no directory's listing any more."""
        if not self.enabled:
            return 0
        if listing is not None and listing.number:
            return listing.number << _INDEX_BITS
        self._number = (self._number + 1) % (1 << _NUMBER_BITS) or 1
        if listing is not None:
            listing.number = self._number
        return self._number << _INDEX_BITS

    def listing_of(self, directory: Directory, cursor: int) -> Listing | None:
        """That from which the kernel has a cursor, if it was told lately."""
        number = cursor >> _INDEX_BITS
        reading = self._open.get(directory.ino)
        return next((one for one in reading.listings if one.number == number), None) if number and reading else None

    def opened(self, directory: Directory, fh: Fh, fresh: Listing | None) -> OpenDirReply:
        """One more handle: what the kernel may do. fresh: the listing, if that is believed."""
        if not self.enabled:
            return OpenDirReply(fh)
        reading = self._open.setdefault(directory.ino, _Reading())
        if any(reading.handles.values()):
            return OpenDirReply(fh, keep=True)
        keep = self._is_right(directory, reading, fresh)
        reading.handles[fh] = not keep
        return OpenDirReply(fh, cache=True, keep=keep)

    def _is_right(self, directory: Directory, reading: _Reading, fresh: Listing | None) -> bool:
        """Whether the kernel may go by what it keeps, or does not."""
        listing = directory.listing
        if listing is None:
            return False
        believed = fresh is listing and self._core.clock.monotonic() < listing.cached_until
        if believed:
            reading.until = min(reading.until, listing.cached_until)
        same = not reading.mixed and not reading.differs(listing) and listing.cached_until > 0
        if same and (believed or not listing.cached_whole):
            reading.shows(listing)
            return True
        listing.cached_whole = False
        return False

    def resumed(self, directory: Directory, fh: Fh) -> None:
        """A handle that an earlier server gave out."""
        if self.enabled:
            self._open.setdefault(directory.ino, _Reading()).handles[fh] = False

    def begun(self, directory: Directory, fh: Fh) -> None:
        """It is read from the start."""
        reading = self._open.get(directory.ino)
        if reading is not None and fh in reading.handles:
            reading.handles[fh] = False

    def closed(self, directory: Directory, fh: Fh) -> None:
        reading = self._open.get(directory.ino)
        if reading is not None and reading.handles.pop(fh, None) is not None and not reading.handles:
            del self._open[directory.ino]

    def told(
        self, directory: Directory, fh: Fh, listing: Listing | None, due: float, *, first: bool, last: bool, whole: bool
    ) -> None:
        """An answer is on its way, the first or last one of a listing. due: when the first thing that it says is too
        old. whole: each line has its attributes, so that who goes by the names alone has not to ask one by one.
        """
        reading = self._open.get(directory.ino)
        if reading is None or fh not in reading.handles:
            return
        until, reading.told_at = due - _EARLY_S, self._core.clock.monotonic()
        reading.until = min(reading.until, until)
        if listing is None:
            reading.mixed = True
            if directory.listing is not None:
                directory.listing.cached_until = 0.0
            return
        reading.mixed |= reading.shows(listing) and len(reading.handles) > 1
        listing.cached_whole = listing.cached_whole or last
        if reading.mixed or not whole:
            listing.cached_until = 0.0
        else:
            listing.cached_until = until if first else min(listing.cached_until, until)

    def forgotten(self, ino: int, nlookup: int) -> None:
        """The kernel gives up a node. It would look up each that it lacks: better to be asked for all of them again."""
        if not self.enabled:
            return
        node = self._core.nodes.by_ino.get(ino)
        parent = node.parent if node is not None and node.nlookup <= nlookup and not node.gone else None
        if parent is not None and parent.listing is not None:
            parent.listing.cached_until = min(parent.listing.cached_until, self._core.clock.monotonic())

    def expire(self) -> None:
        """Have the kernel drop what it may not go by any more although it is open, each second: for rewinddir(3), where
        nothing but a new OPENDIR would do it.
        """
        now = self._core.clock.monotonic()
        for ino, reading in self._open.items():
            if reading.goes(now):
                self._core.notifier.inval_inode(Ino(ino))
