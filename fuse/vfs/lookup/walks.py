"""Prefetches for walks of a tree: across subdirectories, by pages of a recursive listing (S-105), and down a path.

When a process reads the subdirectories of a directory one after the other, a page of up to 1,000 keys is requested
without a delimiter. It begins with the directory wanted, or ends with it when the walk goes backwards; each directory
of which the page has all keys is listed with it. Pages are remembered by their digests: a later walk requests them
again, and an unchanged page confirms the listings that came from it without being parsed.

This relies on keys being listed in the order of their bytes, which is checked; where they are not, each directory is
listed by itself.

The kernel looks a path up name by name, and each lookup waits for the store's answer to the one before. Where the store
is far away, the directory that a name leads to is listed while its attributes are asked for; and where the same path
was used before, the attributes of all its directories are requested in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise

from datastore.errors import StoreError

from ...loop import Task, each
from ...ops import FSError
from ...store.base import ListedObject, ListPage
from ...store.limits import key_bytes
from ..tree.core import Core
from ..tree.listing import Listed, Listing, Stamp, listing_of
from ..tree.nodes import Directory, Node
from ..tree.walk import Coming, Walk, WalkPage
from .prefetcher import Prefetcher
from .remote import Remote

_PAGES_MAX = 256
"""The most pages that are remembered of one directory's walk."""
_OFF_S = 60.0
"""How long directories are listed by themselves after a page that did not list at least two; seconds."""
_FEW = 8
"""Fewer directories than this are requested one by one, not by pages."""
_SHOWN = 256
"""For how many entries of a directory on a page the attributes are prefetched."""
_LEVELS = 32
"""The most levels of a path that are requested at once."""


class Walks:
    def __init__(self, core: Core, remote: Remote, prefetcher: Prefetcher) -> None:
        self._core = core
        self._remote = remote
        self._prefetcher = prefetcher

    async def read(self, directory: Directory) -> Listing | None:
        """Return the listing of a directory that belongs to a walk; None: it has to be listed by itself."""
        started = self._core.clock.monotonic()
        parent = directory.parent
        if parent is None:
            return None
        walk = parent.walk = parent.walk or Walk()
        if not walk.follow(parent, directory.tail, started, self._remote.ttl(parent)):
            return None
        for one in walk.awaited(directory.tail):
            with suppress(StoreError):  # a reader that needs the page asks again, and gets the error
                await self._remote.settle(*await one.page)
        listing = self._remote.fresh_listing(directory)
        if listing is not None:
            return listing
        await self._ask(parent, walk, walk.starts(directory.tail))
        listing = directory.listing
        if listing is None or listing.listed_at < started:
            return None
        stands = _standing(parent)
        for first, last, start in walk.beyond(directory.tail):  # directories that the walk will come to
            page = self._core.loop.spawn(self._page(parent, walk, stands, start))
            walk.coming.append(Coming(first, last, page))
        return listing

    async def confirm(self, directories: list[Directory]) -> None:
        """Request again the pages that listed these siblings, if there are at most half as many."""
        parent = directories[0].parent if len(directories) >= _FEW else None
        walk = parent.walk if parent is not None else None
        if parent is None or walk is None:
            return
        wanted = set(directories)
        starts = [start for start, page in walk.pages.items() if any(one in wanted for one, _ in page.told)]
        if len(starts) <= len(directories) // 2:
            await self._ask(parent, walk, starts)

    async def _ask(self, parent: Directory, walk: Walk, starts: list[str]) -> None:
        for suspects, listed_at in await each(partial(self._page, parent, walk, _standing(parent)), starts):
            await self._remote.settle(suspects, listed_at)

    async def _page(
        self, parent: Directory, walk: Walk, stands: _Standing, start: str
    ) -> tuple[list[tuple[Node, Listed]], float]:
        """Request a page; return the open files that it shows in another version, and when it was requested."""
        core, prefix, had = self._core, parent.key, walk.pages.get(start)
        max_keys, unless = (had.max_keys, had.digest) if had is not None else (walk.max_keys, b"")
        started, after = core.clock.monotonic(), prefix + start
        page = await core.store.list_page(prefix, start_after=after, max_keys=max_keys, unless=unless)
        took_s = core.clock.monotonic() - started
        if had is not None and page.digest == had.digest:
            for known, stamp in had.told:
                listing = known.listing
                if listing and listing.stamp is stamp and not listing.edited:
                    listing.confirmed(started)
            return [], started
        keys = [key_bytes(after), *(key_bytes(found.key) for found in page.objects)]
        levels = split(prefix, page) if all(a < b for a, b in pairwise(keys)) else {}
        suspects: list[tuple[Node, Listed]] = []
        told: list[tuple[Directory, Stamp]] = []
        for tail, level in sorted(levels.items(), reverse=walk.step < 0):
            directory = stands(tail)
            if directory is None or (directory.listing is not None and directory.listing.listed_at >= started):
                continue
            listing = listing_of(prefix + tail, [level], started)
            directory.large, directory.list_s, directory.probe_s = False, took_s, 0.0
            suspects += self._remote.install(directory, listing)
            told.append((directory, listing.stamp))
            self._prefetcher.coming(prefix + tail, (each for _, each in sorted(listing.entries.items())[:_SHOWN]))
        if len(levels) < 2:
            walk.off_until = started + _OFF_S
        else:
            walk.keys_each = len(page.objects) / len(levels)
        walk.pages.pop(start, None)
        if told and page.digest:
            walk.pages[start] = WalkPage(max_keys, page.digest, tuple(told))
            if len(walk.pages) > _PAGES_MAX:
                walk.pages.popitem(last=False)
        return suspects, started


_Standing = Callable[[str], Directory | None]
"""A function that returns a subdirectory by its tail; None if it was moved or its listing dropped since the request."""


def _standing(parent: Directory) -> _Standing:
    """Make a _Standing of the subdirectories that have a node now, before pages are requested."""
    place = parent.place
    directories = [node for node in parent.children.values() if isinstance(node, Directory)]
    before = {node.tail: (node, node.moves, node.listings_dropped) for node in directories}

    def stands(tail: str) -> Directory | None:
        directory, *was = before.get(tail, (None,))
        if directory is None or directory.gone or [directory.moves, directory.listings_dropped] != was:
            return None
        return directory if parent.place == place else None

    return stands


def split(prefix: str, page: ListPage) -> dict[str, ListPage]:
    """Split a page of a recursive listing into pages of one level for the directories right below `prefix`, by tail.
    Only directories of which the page has all keys are returned, if it begins between two directories. Pure.
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


class Descent:
    """Follows lookups down a tree, name after name, and sends the requests of the next steps with those of this one."""

    def __init__(self, core: Core, remote: Remote) -> None:
        self._core = core
        self._remote = remote
        self._coming: dict[int, Task[None]] = {}

    async def ahead(self, directory: Directory) -> None:
        """Note that a directory which is not current is looked up. Wait for its attributes if they are on their way;
        else, if the store is far away, request what the next steps down need.
        """
        parent, coming = directory.parent, self._coming.get(directory.ino)
        if parent is not None:
            parent.way = directory.name
        if coming is not None:
            await coming
        elif parent is not None and self._remote.is_far:
            self._go(directory)

    def _go(self, directory: Directory) -> None:
        last = directory
        for _ in range(_LEVELS):
            step = last.children.get(last.way)
            if not isinstance(step, Directory) or self._remote.is_fresh(last, step.checked_at):
                break
            if step.ino not in self._coming:
                coming = self._coming[step.ino] = self._core.loop.spawn(self._ask(step))
                coming.on_done(partial(self._coming.__delitem__, step.ino))
            last = step
        walk = last.parent.walk if last.parent is not None else None
        if not last.large and (walk is None or walk.streak <= 1):
            self._core.loop.spawn(self._list(last))

    async def _ask(self, directory: Directory) -> None:
        with suppress(StoreError, FSError):  # a lookup that needs it asks again, and gets the error
            await self._remote.head(directory)

    async def _list(self, directory: Directory) -> None:
        """List a directory, unless that was done or is under way, or it is large. A reader waits for listing_lock."""
        pages = len(directory.listing.spans) if directory.listing is not None else 0
        if pages <= 1 and not directory.listing_lock.locked and self._remote.fresh_listing(directory) is None:
            async with directory.listing_lock:
                with suppress(StoreError, FSError):  # a reader asks again, and gets the error
                    await self._remote.read_directory(directory, whole=False)
