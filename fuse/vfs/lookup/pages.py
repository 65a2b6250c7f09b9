"""Lists a directory page by page. Pages of its last listing are compared by their digests, not read again (S-155)."""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections.abc import Iterable

from ...loop import each
from ...store.base import ListedObject, ListPage
from ...store.limits import key_bytes
from ..tree.core import Core
from ..tree.listing import Listed, Listing, Span, ends_of, listing_of
from ..tree.names import segment_of
from ..tree.nodes import Directory

_ABREAST = 8
"""The most known pages that are requested in parallel."""
_KEYS = 100
"""One name may be asked for alone for so many keys of its page; then the whole page is requested."""
_NEXT = 4
"""A lookup counts as this many if the one before was in the same page, too: the process visits the names in order."""


class Pages:
    """All pages of one directory, in order. The pages of its last listing are requested in parallel, each from where it
    began. From the first page that differs, they are read one after the other, until one ends where a known page ended.
    """

    def __init__(self, core: Core, directory: Directory) -> None:
        had = directory.listing or Listing(0.0)
        self._core = core
        self._prefix = directory.key
        self._spans = [(span.after, span.end, span.digest) for span in had.spans]
        self._entries = list(had.entries.values())
        self._marker = had.own
        self._answers: dict[int, ListPage] = {}
        """Answers for known pages after one that differs, by the number of the page."""

    async def read(self, listed_at: float, hidden: frozenset[str], at_most: int | None) -> Listing | None:
        """Return the listing (of `at_most` pages); None: none changed. hidden: as listing_of(). Errors: StoreError."""
        same, differs = await self._compare(0, _ABREAST)
        if differs is None:
            return None
        pages = (await self._read(same, differs, at_most))[:at_most]
        if len(pages) > 1 or len(self._spans) > 1:  # parsing that much would hold up the loop
            return await self._core.loop.on_disk(self._listing_of, pages, listed_at, hidden)
        return self._listing_of(pages, listed_at, hidden)

    async def _read(self, at: int, page: ListPage | None, at_most: int | None) -> list[ListPage | int]:
        """Return the pages, or at least `at_most`, unchanged ones as numbers. page: number `at`, the first changed."""
        first = 0
        starts = {after: number for number, (after, _, _) in enumerate(self._spans)}
        pages: list[ListPage | int] = []
        while True:
            pages += range(first, at)
            if page is None:
                return pages
            pages.append(page)
            if page.next_token is None or (at_most is not None and len(pages) >= at_most):
                return pages
            first = at = starts.get(ends_of(self._prefix, page)[1], 0)
            if first:
                at, page = await self._compare(first, 1)
            else:
                page = await self._core.store.list_page(self._prefix, delimiter="/", token=page.next_token)

    async def _compare(self, at: int, abreast: int) -> tuple[int, ListPage | None]:
        """Return the number and the content of the first known page from `at` on that differs; None: none differs."""
        if not self._spans:
            return 0, await self._ask(0)
        while at < len(self._spans):
            batch = [one for one in range(at, min(at + abreast, len(self._spans))) if one not in self._answers]
            self._answers.update(zip(batch, await each(self._ask, batch), strict=True))
            while at in self._answers:
                page = self._answers.pop(at)
                if not page.digest or page.digest != self._spans[at][2]:
                    return at, page
                at += 1
            abreast = min(2 * abreast, _ABREAST)
        return at, None

    async def _ask(self, number: int) -> ListPage:
        after, _, digest = self._spans[number] if self._spans else ("", "", b"")
        start = self._prefix + after if after else ""
        return await self._core.store.list_page(self._prefix, delimiter="/", start_after=start, unless=digest)

    def _listing_of(self, pages: Iterable[ListPage | int], listed_at: float, hidden: frozenset[str]) -> Listing:
        """Make the listing, in a lane or on the loop: this changes no state."""
        ends = [end for _, end, _ in self._spans[:-1]]
        told: list[list[Listed]] = [[] for _ in self._spans]
        for listed in self._entries if told else ():
            told[bisect_left(ends, key_bytes(listed.tail))].append(listed)
        whole = (self._as_it_was(page, told[page]) if isinstance(page, int) else page for page in pages)
        return listing_of(self._prefix, whole, listed_at, hidden)

    def _as_it_was(self, number: int, told: list[Listed]) -> ListPage:
        objects = [ListedObject(self._prefix + one.tail, *one[2:]) for one in told if one.kind != stat.S_IFDIR]
        if number == 0 and self._marker is not None:
            objects.append(self._marker)
        prefixes = [self._prefix + one.tail for one in told if one.kind == stat.S_IFDIR]
        return ListPage(objects, prefixes, None if number == len(self._spans) - 1 else "", self._spans[number][2])


def page_of(directory: Directory, name: bytes) -> Span | None:
    """Return the page that a name belongs to, if it can be requested again by itself."""
    span = directory.listing.span_of(segment_of(name)) if directory.listing is not None else None
    return span if span is not None and span.digest else None


async def look(core: Core, directory: Directory, span: Span, ttl_s: float, *, again: bool) -> None:
    """Request a page again, because a name of it is looked up, if that was done often within the time to live. again:
    the last lookup that found its page too old was in this page, too. Errors: StoreError.
    """
    listing, now = directory.listing, core.clock.monotonic()
    if listing is None:
        return
    if now - span.asked_since > ttl_s:
        span.asked, span.asked_since = 0, now
    span.asked += _NEXT if again else 1
    if span.asked < max(2, len(listing.entries) // len(listing.spans) // _KEYS):
        return
    async with span.asking:
        seen, digest = directory.listed_as, span.digest
        started = core.clock.monotonic()
        if directory.listing is not listing or not digest or started - span.at < ttl_s:
            return
        start = directory.key + span.after if span.after else ""
        page = await core.store.list_page(directory.key, delimiter="/", start_after=start, unless=digest)
        if page.digest != digest:
            span.digest = b""
        elif directory.listing is listing and directory.listed_as == seen:
            span.confirmed(started)
