"""Walks of a tree: a page of the recursive listing tells of many directories at once (S-105).

Who reads the subdirectories of a directory one after the other is noticed. From then on a page of 1,000 keys is asked
for that begins with the directory wanted, or ends with it when the walk goes backwards, without a delimiter; each
directory of which the page has all keys is listed with it. Pages are remembered by their digests: a later walk asks
for them again, and those that are the same confirm what they told without being read.

Relies on keys being listed in the order of their bytes, which is checked; where they are not, each directory is listed
by itself.
"""

from __future__ import annotations

from itertools import pairwise

from datastore.errors import StoreError

from ...store.base import ListedObject, ListPage
from ...store.limits import key_bytes
from ..tree.core import Core
from ..tree.listing import Listed, Listing, Stamp, listing_of
from ..tree.nodes import Directory, Node
from ..tree.walk import Coming, Walk, WalkPage
from .prefetcher import Prefetcher
from .remote import Remote

_PAGES_MAX = 256
"""Pages remembered of one directory's walk."""
_OFF_S = 60.0
"""For so long directories are listed by themselves after a page that did not tell of two."""
_FEW = 8
"""So few directories are asked about one by one."""
_SHOWN = 256
"""Entries of a directory whose attributes a walk asks for at once."""


class Walks:
    def __init__(self, core: Core, remote: Remote, prefetcher: Prefetcher) -> None:
        self._core = core
        self._remote = remote
        self._prefetcher = prefetcher

    async def read(self, directory: Directory) -> Listing | None:
        """The listing of a directory that is one of a walk; None: it has to be listed by itself."""
        started = self._core.clock.monotonic()
        parent = directory.parent
        if parent is None:
            return None
        walk = parent.walk = parent.walk or Walk()
        if not walk.follow(parent, directory.tail, started, self._remote.ttl(parent)):
            return None
        listing = await self._arrived(directory, walk.awaited(directory.tail))
        if listing is not None:
            return listing
        await self._ask(parent, walk, walk.starts(directory.tail))
        listing = directory.listing
        if listing is None or listing.listed_at < started:
            return None
        self._go_on(parent, walk, directory.tail)
        return listing

    async def _arrived(self, directory: Directory, coming: list[Coming]) -> Listing | None:
        """The listing of a directory, if it was asked for ahead and came in time."""
        for one in coming:
            try:
                await self._remote.settle(*await one.page)
            except StoreError:
                continue  # whoever wants it asks again, and is told
        listing = directory.listing
        age = self._core.clock.monotonic() - listing.listed_at if listing is not None else 0.0
        return listing if coming and age < self._remote.ttl(directory) else None

    def _go_on(self, parent: Directory, walk: Walk, tail: str) -> None:
        """Ask for what a walk comes to next."""
        spans = walk.beyond(tail)
        if spans:
            request = _Request(self._core, self._remote, self._prefetcher, parent, walk)
            for first, last, start in spans:
                walk.coming.append(Coming(first, last, self._core.loop.spawn(request.ask(start))))

    async def confirm(self, directories: list[Directory]) -> bool:
        """Ask again for the pages that told of many directories of one parent; whether that was worth it."""
        parent = directories[0].parent if len(directories) >= _FEW else None
        walk = parent.walk if parent is not None else None
        if parent is None or walk is None:
            return False
        wanted = set(directories)
        starts = [start for start, page in walk.pages.items() if any(one in wanted for one, _ in page.told)]
        if not starts or len(starts) > len(directories) // 2:
            return False
        await self._ask(parent, walk, starts)
        return True

    async def _ask(self, parent: Directory, walk: Walk, starts: list[str]) -> None:
        request = _Request(self._core, self._remote, self._prefetcher, parent, walk)
        for suspects, listed_at in await self._core.each(request.ask, starts):
            await self._remote.settle(suspects, listed_at)


class _Request:
    """Pages of one walk that are asked for together: what is told of a directory counts if it was here before."""

    def __init__(self, core: Core, remote: Remote, prefetcher: Prefetcher, parent: Directory, walk: Walk) -> None:
        self._core, self._remote, self._prefetcher = core, remote, prefetcher
        self._parent, self._walk = parent, walk
        self._prefix, self._place = parent.key, parent.place
        self._before = {
            node.tail: (node, node.moves, node.listings_dropped)
            for node in parent.children.values()
            if isinstance(node, Directory)
        }

    async def ask(self, start: str) -> tuple[list[tuple[Node, Listed]], float]:
        """One page; what was found replaced while it was open, and when it was asked."""
        core, walk = self._core, self._walk
        had = walk.pages.get(start)
        max_keys, unless = (had.max_keys, had.digest) if had is not None else (walk.max_keys, b"")
        started, after = core.clock.monotonic(), self._prefix + start
        page = await core.store.list_page(self._prefix, start_after=after, max_keys=max_keys, unless=unless)
        took_s = core.clock.monotonic() - started
        if had is not None and page.digest == had.digest:
            self._confirm(had, started)
            return [], started
        return self._take(start, max_keys, page, started, took_s), started

    def _confirm(self, page: WalkPage, started: float) -> None:
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
        walk = self._walk
        keys = [key_bytes(found.key) for found in page.objects]
        ordered = all(a < b for a, b in pairwise((key_bytes(self._prefix + start), *keys)))
        levels = split(self._prefix, page) if ordered else {}
        suspects: list[tuple[Node, Listed]] = []
        told: list[tuple[Directory, Stamp]] = []
        for tail, level in sorted(levels.items(), reverse=walk.step < 0):
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
            self._prefetcher.coming(self._prefix + tail, (each for _, each in sorted(listing.entries.items())[:_SHOWN]))
        if len(levels) < 2:
            walk.off_until = started + _OFF_S
        else:
            walk.keys_each = len(page.objects) / len(levels)
        walk.pages.pop(start, None)
        if told and page.digest:
            walk.pages[start] = WalkPage(max_keys, page.digest, tuple(told))
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
