"""Follows a process through the subdirectories of one directory, and remembers the pages that listed them. No I/O."""

from __future__ import annotations

import stat
from collections import OrderedDict
from typing import NamedTuple

from ...loop import Task
from ...store.limits import key_bytes
from .listing import Listed, Listing, Stamp
from .nodes import NEVER, Directory, Node

_STREAK = 3
"""How many directories must be read in order to make a walk."""
_PAUSE_S = 10.0
"""A walk without a step for longer than this has ended."""
_JUMP = 1000
"""The most places from one step to the next: the directories between them were listed by a page already."""
_SIBLINGS_MAX = 10_000
"""Directories with more subdirectories are not followed: their index would cost more than it saves."""
_ABREAST = 8
"""The most known pages that are requested again in parallel."""
_AHEAD = 4
"""The most pages that are prefetched in parallel."""
_PAGE_KEYS = 1000
_FILL = 0.9
"""The planned fraction of a page; the rest is room for directories that are larger than the average so far."""
_SOON = 0.5
"""The fraction of a listing's time to live within which a directory must be read to be prefetched."""


class WalkPage(NamedTuple):
    """A received page. max_keys: as requested; told: the directories that it listed, and their stamps."""

    max_keys: int
    digest: bytes
    told: tuple[tuple[Directory, Stamp], ...]


class Coming(NamedTuple):
    """A prefetched page. first, last: the directories that it should list, by their places (see Walk)."""

    first: int
    last: int
    page: Task[tuple[list[tuple[Node, Listed]], float]]


class Walk:
    """A process's walk through the subdirectories of one directory, whose places are their indices in key order."""

    __slots__ = (
        "_index", "_last", "_last_at", "_of", "_soon", "_tails", "coming", "keys_each", "max_keys", "off_until",
        "pages", "step", "streak",
    )  # fmt: skip

    def __init__(self) -> None:
        self._tails: list[str] = []
        self._index: dict[str, int] = {}
        self._of: Listing | None = None
        self._last = -1
        self._last_at = NEVER
        self.step = 1
        """The direction of the walk: 1 in the order of keys, -1 backwards."""
        self.streak = 0
        self.keys_each = float(_PAGE_KEYS)
        """The average number of keys of a directory on the last page."""
        self.max_keys = _PAGE_KEYS
        """How many keys to request: as many as the walk reads before they are too old, at its pace."""
        self.off_until = NEVER
        self._soon = 0
        """How many directories the walk reads before an answer of now is too old."""
        self.coming: list[Coming] = []
        self.pages: OrderedDict[str, WalkPage] = OrderedDict()
        """The received pages, by the tail after which they were requested."""

    def follow(self, parent: Directory, tail: str, now: float, ttl_s: float) -> bool:
        """Note that `tail` is to be listed; return whether this is a walk that reads _STREAK more in _SOON * ttl_s."""
        listing = parent.listing
        if listing is not None and listing is not self._of:
            self._of = listing
            directories = (one.tail for one in listing.entries.values() if one.kind == stat.S_IFDIR)
            self._tails = sorted(directories, key=key_bytes)
            self._index = {tail: at for at, tail in enumerate(self._tails)}
        at = self._index.get(tail, -1)
        if at < 0 or now < self.off_until or len(self._tails) > _SIBLINGS_MAX:
            return False
        step = 1 if at >= self._last else -1
        goes_on = 0 < abs(at - self._last) <= _JUMP and now - self._last_at <= _PAUSE_S
        if goes_on and (step == self.step or self.streak == 1):
            self.streak += 1
        elif at != self._last:
            self.streak = 1
        pace_s = (now - self._last_at) / max(1, abs(at - self._last))
        self._soon = int(min(ttl_s * _SOON / max(pace_s, 1e-6), _PAGE_KEYS))
        self.max_keys = max(1, min(_PAGE_KEYS, int((self._soon + 1) * self.keys_each)))
        self.step, self._last, self._last_at = step, at, now
        return self.streak >= _STREAK and self._soon >= _STREAK

    def starts(self, tail: str) -> list[str]:
        """Return the tails after which the pages to request begin; first the page that lists this directory. Empty when
        the parent's listing does not have the directory any more.
        """
        at = self._index.get(tail)
        if at is None:
            return []
        known = next((start for start, page in self.pages.items() if any(d.tail == tail for d, _ in page.told)), None)
        if known is None:
            back = 0 if self.step > 0 else max(0, int(self.max_keys * _FILL / max(self.keys_each, 1.0)) - 1)
            return [self._tails[max(0, at - back)][:-1]]
        starts = sorted(self.pages, key=key_bytes, reverse=self.step < 0)
        first = starts.index(known)
        return starts[first : first + _ABREAST]

    def awaited(self, tail: str) -> list[Coming]:
        """Take out of `coming` the pages that should list this directory, and those that have arrived."""
        at = self._index[tail]
        wanted = [one for one in self.coming if one.first <= at <= one.last or one.page.done]
        self.coming = [one for one in self.coming if one not in wanted]
        return wanted

    def beyond(self, tail: str) -> list[tuple[int, int, str]]:
        """Return the pages to prefetch beyond this directory's: first and last place, and start (as of starts())."""
        told = next((page.told for page in self.pages.values() if any(one.tail == tail for one, _ in page.told)), ())
        places = [self._index[one.tail] for one, _ in told if one.tail in self._index]
        each = max(1, int(self.max_keys * _FILL / max(self.keys_each, 1.0)))
        if not places or self.coming:
            return []
        edge = max(places) + 1 if self.step > 0 else min(places) - each
        spans = []
        for number in range(min(_AHEAD, self._soon // each)):
            first = edge + number * each * self.step
            last = min(first + each, len(self._tails)) - 1
            first = max(0, first)
            if last < first:
                break
            spans.append((first, last, self._tails[first][:-1]))
        return spans
