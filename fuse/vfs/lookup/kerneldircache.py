"""Controls the kernel's cache of directory entries, and until when the kernel may use it (S-151).

How Linux does it (fs/fuse/readdir.c): with FOPEN_CACHE_DIR the kernel caches names, types and ids in the order in which
it reads them. An answer is appended if its cursor is the one at which the cache ends, and a cache that is complete
answers all reads. The kernel never asks whether the cache is still right, nor for attributes with it; it drops the
cache when an OPENDIR is answered without FOPEN_KEEP_CACHE, when it is told to, and when it needs the memory.

So each listing has its own cursors (the entries of two never mix), an OPENDIR is answered with FOPEN_KEEP_CACHE only
while everything that the kernel was told is still trusted, and expire() handles directories that stay open for longer.
A cache that is not complete is kept even when it is too old: with its pages dropped, Linux would neither append nor
start over.

When an OPENDIR makes the kernel drop the cache, this happens when the opening process runs again. Other processes that
open the directory before must neither use the old cache nor drop what the first has read by then: their OPENDIRs are
answered without FOPEN_CACHE_DIR, and they read past the cache.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from ...ops import Fh, Ino, OpenDirReply
from ..tree.core import Core
from ..tree.listing import Listing
from ..tree.nodes import Directory

_EARLY_S = 2.0
"""How long before a listing is too old it is read again: a walk has this time to end, and expire() runs each second."""
_INDEX_BITS = 27
_NUMBER_BITS = 36
"""A cursor has 63 bits, so that it is positive: the listing's number, and the place of an entry in the listing."""
_LISTINGS_MAX = 4
"""How many listings of an open directory are remembered, for a kernel that lost its cache and asks for the rest."""
_ARRIVED_S = 1.0
"""The time after which an answer has surely reached the kernel."""


def index_of(cursor: int) -> int:
    """Return the place in its listing that a cursor stands for."""
    return cursor & ((1 << _INDEX_BITS) - 1)


@dataclass(slots=True)
class _Reading:
    """An open directory, with all of its handles that use the kernel's cache."""

    handles: dict[int, bool] = field(default_factory=dict)
    """By handle, whether a drop of the cache that its OPENDIR asked for may be still to come: until its first read."""
    listings: deque[Listing] = field(default_factory=lambda: deque(maxlen=_LISTINGS_MAX))
    """The listings that the handles were answered from, or that the kernel has cached; the newest last."""
    mixed: bool = False
    """Whether open handles got different listings: which one the kernel has is not known until all are closed."""
    until: float = math.inf
    """When the kernel's cache of the directory has to be dropped (monotonic seconds)."""
    told_at: float = -math.inf
    again_at: float = math.inf
    """When the cache has to be dropped once more: an answer sent just before the drop may have arrived after it."""

    def shows(self, listing: Listing) -> bool:
        """Make this the newest listing; return whether another one was the newest before."""
        other = self.differs(listing)
        if other or not self.listings:
            self.listings.append(listing)
        return other

    def goes(self, now: float) -> bool:
        """Whether the kernel's cache has to be dropped now, which the caller must then do."""
        if now < min(self.until, self.again_at):
            return False
        late = self.until <= now <= self.told_at + _ARRIVED_S
        self.until, self.again_at = math.inf, now + _ARRIVED_S if late else math.inf
        return True

    def differs(self, listing: Listing) -> bool:
        """Whether the newest listing is another one than this."""
        return bool(self.listings) and self.listings[-1] is not listing


class KernelDirCache:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[int, _Reading] = {}
        # They begin at random, because the kernel may have cursors of an earlier server.
        self._numbers = count(secrets.randbits(_NUMBER_BITS - 1) | 1)

    @property
    def enabled(self) -> bool:
        """Whether the kernel may cache directories at all."""
        return self._core.settings.open_less

    def start(self) -> None:
        """Have the kernel drop what it cached from an earlier server, which expire() does not know."""
        for node in self._core.nodes.by_ino.values() if self.enabled else ():
            if isinstance(node, Directory):
                self._core.notifier.inval_inode(node.ino)

    def base(self, listing: Listing | None) -> int:
        """Return the number that a listing's cursors count from; None: for names that come from no present listing."""
        if listing is None or not self.enabled:
            return 0
        listing.number = listing.number or next(self._numbers)
        return listing.number << _INDEX_BITS

    def listing_of(self, directory: Directory, cursor: int) -> Listing | None:
        """Return the listing that a cursor of the kernel belongs to, if it is one of the last _LISTINGS_MAX."""
        listings = self._open.get(directory.ino, _Reading()).listings
        return next((one for one in listings if one.number == cursor >> _INDEX_BITS), None)

    def opened(self, directory: Directory, fh: Fh) -> OpenDirReply:
        """Answer an OPENDIR that got the handle `fh`."""
        if not self.enabled:
            return OpenDirReply(fh)
        reading = self._open.setdefault(directory.ino, _Reading())
        if any(reading.handles.values()):
            return OpenDirReply(fh, keep=True)
        keep = self._is_right(directory, reading)
        reading.handles[fh] = not keep
        return OpenDirReply(fh, cache=True, keep=keep)

    def _is_right(self, directory: Directory, reading: _Reading) -> bool:
        """Whether the kernel need not drop its cache: it is right, or incomplete, so that the kernel ignores it."""
        listing = directory.listing
        if listing is None:
            return False
        believed = self._core.clock.monotonic() < listing.cached_until
        if believed:
            reading.until = min(reading.until, listing.cached_until)
        same = not reading.mixed and not reading.differs(listing) and listing.cached_until > 0
        if same and (believed or not listing.cached_whole):
            reading.shows(listing)
            return True
        listing.cached_whole = False
        return False

    def resumed(self, directory: Directory, fh: Fh) -> None:
        """Register a handle that an earlier server gave out."""
        if self.enabled:
            self._open.setdefault(directory.ino, _Reading()).handles[fh] = False

    def begun(self, directory: Directory, fh: Fh) -> None:
        """Note that a handle is read from the start."""
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
        """Note that an answer is being sent. first, last: whether it begins or ends the listing. due: when the first of
        its items is too old. whole: it has all attributes, so that a later walk needs no lookup for each name.
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
        """Note that the kernel forgets a node. Make it read the directory again, which spares it a lookup per name."""
        if not self.enabled:
            return
        node = self._core.nodes.by_ino.get(ino)
        parent = node.parent if node is not None and node.nlookup <= nlookup and not node.gone else None
        if parent is not None and parent.listing is not None:
            parent.listing.cached_until = min(parent.listing.cached_until, self._core.clock.monotonic())

    def expire(self) -> None:
        """Drop outdated caches of open directories in the kernel: rewinddir(3) sends no OPENDIR. Called each second."""
        now = self._core.clock.monotonic()
        for ino, reading in self._open.items():
            if reading.goes(now):
                self._core.notifier.inval_inode(Ino(ino))
