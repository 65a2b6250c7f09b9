"""Walks of a tree: a page of the recursive listing tells of many directories at once (S-105).

Who reads the subdirectories of a directory one after the other is noticed. From then on a page of 1,000 keys is asked
for that begins with the directory wanted, or ends with it when the walk goes backwards, without a delimiter; each
directory of which the page has all keys is listed with it. Pages are remembered by their digests: a later walk asks
for them again, and those that are the same confirm what they told without being read.

Relies on keys being listed in the order of their bytes, which is checked; where they are not, each directory is listed
by itself.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

from ..store.base import ListedObject, ListPage
from ..store.limits import key_bytes
from .core import Core
from .listing import Listed, Listing, Stamp, listing_of
from .nodes import NEVER, Directory, Node
from .remote import Remote

_STREAK = 3
"""So many directories in order make a walk."""
_PAUSE_S = 10.0
"""A walk that rests for longer has ended."""
_JUMP = 1000
"""How far apart the directories may be that are still asked for: a page has told of those between them."""
_SIBLINGS_MAX = 10_000
"""Directories with more subdirectories are not followed: their index would cost more than it saves."""
_PAGES_MAX = 256
"""Pages remembered of one directory's walk."""
_ABREAST = 8
"""Pages that are known already and asked for again side by side."""
_PAGE_KEYS = 1000
_FILL = 0.9
"""Of a page that ends with the directory wanted: what is left over for directories larger than those before."""
_OFF_S = 60.0
"""For so long directories are listed by themselves after a page that did not tell of two."""
_SOON = 0.5
"""Of the time that a listing is believed: what is read later than that is not asked for ahead."""
_FEW = 8
"""So few directories are asked about one by one."""


class _Page(NamedTuple):
    """A page that was. max_keys: as it was asked for; told: the directories that it listed, and their stamps."""

    max_keys: int
    digest: bytes
    told: tuple[tuple[Directory, Stamp], ...]


class Walk:
    """How far a process came among the subdirectories of one directory. Fields are guarded by the state lock."""

    __slots__ = (
        "_index", "_last", "_last_at", "_of", "_tails", "keys_each", "max_keys", "off_until", "pages", "step", "streak",
    )  # fmt: skip

    def __init__(self) -> None:
        self._tails: list[str] = []
        self._index: dict[str, int] = {}
        self._of: Listing | None = None
        self._last = -1
        self._last_at = NEVER
        self.step = 1
        """1 or -1: onwards or backwards."""
        self.streak = 0
        self.keys_each = float(_PAGE_KEYS)
        """Keys that a directory was seen to have, on average."""
        self.max_keys = _PAGE_KEYS
        """What can be used before it is too old, at the pace of the walk."""
        self.off_until = NEVER
        self.pages: OrderedDict[str, _Page] = OrderedDict()
        """By the tail that they began after."""

    def follow(self, parent: Directory, tail: str, now: float, ttl_s: float) -> bool:
        """A directory is to be listed: whether it is one of a walk, and some more will be read within ttl_s."""
        listing = parent.listing
        if listing is not None and listing is not self._of:
            self._of = listing
            self._tails = sorted((one.tail for one in listing.entries.values() if _is_directory(one)), key=key_bytes)
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
        soon = int(min(ttl_s * _SOON / max(pace_s, 1e-6), _PAGE_KEYS))
        self.max_keys = max(1, min(_PAGE_KEYS, int((soon + 1) * self.keys_each)))
        self.step, self._last, self._last_at = step, at, now
        return self.streak >= _STREAK and soon >= _STREAK

    def starts(self, tail: str) -> list[str]:
        """What to ask for a directory of a walk: where pages begin, the one that tells of it first."""
        at = self._index[tail]
        known = next((start for start, page in self.pages.items() if any(d.tail == tail for d, _ in page.told)), None)
        if known is None:
            back = 0 if self.step > 0 else max(0, int(self.max_keys * _FILL / max(self.keys_each, 1.0)) - 1)
            return [self._tails[max(0, at - back)][:-1]]
        starts = sorted(self.pages, key=key_bytes, reverse=self.step < 0)
        first = starts.index(known)
        return starts[first : first + _ABREAST]


class Walks:
    """All walks of a mount. No method is called with the state lock held."""

    def __init__(self, core: Core, remote: Remote) -> None:
        self._core = core
        self._remote = remote

    def read(self, directory: Directory) -> Listing | None:
        """The listing of a directory that is one of a walk; None: it has to be listed by itself."""
        core = self._core
        started = core.clock.monotonic()
        with core.lock:
            parent = directory.parent
            if parent is None:
                return None
            walk = parent.walk = parent.walk or Walk()
            if not walk.follow(parent, directory.tail, started, self._remote.ttl(parent)):
                return None
            starts = walk.starts(directory.tail)
        self._ask(parent, walk, starts)
        with core.lock:
            listing = directory.listing
            return listing if listing is not None and listing.listed_at >= started else None

    def confirm(self, directories: list[Directory]) -> bool:
        """Ask again for the pages that told of many directories of one parent; whether that was worth it."""
        core = self._core
        if len(directories) < _FEW:
            return False
        with core.lock:
            parent = directories[0].parent
            walk = parent.walk if parent is not None else None
            if parent is None or walk is None:
                return False
            wanted = set(directories)
            starts = [start for start, page in walk.pages.items() if any(one in wanted for one, _ in page.told)]
        if not starts or len(starts) > len(directories) // 2:
            return False
        self._ask(parent, walk, starts)
        return True

    def _ask(self, parent: Directory, walk: Walk, starts: list[str]) -> None:
        request = _Request(self._core, self._remote, parent, walk)
        found = [request.ask(starts[0])] if len(starts) == 1 else self._core.each(request.ask, starts)
        for suspects, listed_at in found:
            self._remote.settle(suspects, listed_at)


class _Request:
    """Pages of one walk that are asked for together: what is told of a directory counts if it was here before."""

    def __init__(self, core: Core, remote: Remote, parent: Directory, walk: Walk) -> None:
        self._core = core
        self._remote = remote
        self._parent = parent
        self._walk = walk
        with core.lock:
            self._prefix = parent.key
            self._place = parent.place
            self._before = {
                node.tail: (node, node.moves, node.listings_dropped)
                for node in parent.children.values()
                if isinstance(node, Directory)
            }

    def ask(self, start: str) -> tuple[list[tuple[Node, Listed]], float]:
        """One page; what was found replaced while it was open, and when it was asked."""
        core, walk = self._core, self._walk
        with core.lock:
            had = walk.pages.get(start)
            max_keys = had.max_keys if had is not None else walk.max_keys
        started = core.clock.monotonic()
        unless = had.digest if had is not None else b""
        page = core.store.list_page(self._prefix, start_after=self._prefix + start, max_keys=max_keys, unless=unless)
        took_s = core.clock.monotonic() - started
        if had is not None and page.digest == had.digest:
            with core.lock:
                self._confirm(had, started)
            return [], started
        return self._take(start, max_keys, page, started, took_s), started

    def _confirm(self, page: _Page, started: float) -> None:
        for directory, stamp in page.told:
            listing = directory.listing
            if listing is not None and listing.stamp is stamp and not listing.edited and self._stands(directory):
                listing.confirmed(started)

    def _stands(self, directory: Directory) -> bool:
        """Whether it is where it was before the request, and nobody said that what is listed may be wrong."""
        before = self._before.get(directory.tail)
        as_before = before == (directory, directory.moves, directory.listings_dropped)
        return as_before and not directory.gone and self._parent.place == self._place

    def _take(
        self, start: str, max_keys: int, page: ListPage, started: float, took_s: float
    ) -> list[tuple[Node, Listed]]:
        core, walk = self._core, self._walk
        keys = [key_bytes(found.key) for found in page.objects]
        ordered = all(a < b for a, b in pairwise((key_bytes(self._prefix + start), *keys)))
        levels = split(self._prefix, page) if ordered else {}
        suspects: list[tuple[Node, Listed]] = []
        told: list[tuple[Directory, Stamp]] = []
        with core.lock:
            for tail, level in levels.items():
                directory = self._before.get(tail, (None,))[0]
                if directory is None or not self._stands(directory):
                    continue
                if directory.listing is not None and directory.listing.listed_at >= started:
                    continue
                listing = listing_of(self._prefix + tail, [level], started)
                directory.large, directory.list_s, directory.probe_s = False, took_s, 0.0
                directory.marker = listing.marker
                suspects += self._remote.install(directory, listing)
                told.append((directory, listing.stamp))
            if len(levels) < 2:
                walk.off_until = started + _OFF_S
            else:
                walk.keys_each = len(page.objects) / len(levels)
            walk.pages.pop(start, None)
            if told and page.digest:
                walk.pages[start] = _Page(max_keys, page.digest, tuple(told))
                if len(walk.pages) > _PAGES_MAX:
                    walk.pages.popitem(last=False)
        return suspects


def split(prefix: str, page: ListPage) -> dict[str, ListPage]:
    """What a page of a recursive listing says of the directories right below its prefix: by tail, a page of one level.

    Only of those that it tells of wholly, if it begins between two directories. Pure.
    """
    objects: dict[str, list[ListedObject]] = {}
    prefixes: dict[str, dict[str, None]] = {}
    tail = ""
    for found in page.objects:
        name, slash, rest = found.key[len(prefix) :].partition("/")
        tail = name + slash
        if not slash:
            continue
        own = objects.setdefault(tail, [])
        below, slash, _ = rest.partition("/")
        if slash:
            prefixes.setdefault(tail, {})[f"{prefix}{tail}{below}/"] = None
        else:
            own.append(found)
    if page.next_token is not None:
        objects.pop(tail, None)
    return {tail: ListPage(own, tuple(prefixes.get(tail, ())), None) for tail, own in objects.items()}


def _is_directory(listed: Listed) -> bool:
    return listed.kind == stat.S_IFDIR
