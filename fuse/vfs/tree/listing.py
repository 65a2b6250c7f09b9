"""The listing of one directory level: its entries by local name. Pure.

Rules (docs/SEMANTICS.md S-03, S-06, S-36, S-37): a common prefix is a directory; `x.rclonelink` is the link `x` unless
`x` exists as well; an object beside a directory of its name is shown under another name; the marker of the directory
itself is no entry.
"""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ...loop import Lock
from ...store.base import ETag, ListedObject, ListPage
from ...store.limits import key_bytes
from .names import BESIDE_DIRECTORY, LINK_SUFFIX, name_of, one_key, segment_of

NO_ETAG = ETag("")
_end_of = attrgetter("end")


class Listed(NamedTuple):
    """One entry of a listing. kind: S_IFREG, S_IFDIR or S_IFLNK, as the key shows. tail: the part of the key behind the
    directory's prefix. size, etag, mtime_ns are 0, '' and 0 for directories. said: see ListedObject.
    """

    kind: int
    tail: str
    size: int = 0
    etag: ETag = NO_ETAG
    mtime_ns: int = 0
    said: str | None = None


class Stamp:
    """When the store last confirmed a listing or a page (monotonic seconds), shared by all nodes that it shows."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    def confirmed(self, when: float) -> None:
        """Note that the store showed the same when it was asked at `when`."""
        self.at = max(self.at, when)


class Span(Stamp):
    """One page of a listing: the range of tails that it covers, and when the store last showed it."""

    __slots__ = ("after", "asked", "asked_since", "asking", "digest", "end", "upto")

    def __init__(self, after: str, upto: str, digest: bytes, at: float) -> None:
        super().__init__(at)
        self.after = after
        """The page covers the tails behind this one ..."""
        self.upto = upto
        """... up to this one; '' on the last page, which covers all that follow."""
        self.end = key_bytes(upto)
        self.digest = digest
        """The page's digest, to ask the store whether it is unchanged; b"": unknown, or this mount changed a name."""
        self.asked, self.asked_since = 0, 0.0
        """How much was looked up in the outdated page, and since when it is counted (see lookup/pages.py)."""
        self.asking = Lock()
        """Held while the page is requested by itself, so that it is requested once."""


@dataclass(slots=True)
class Listing:
    """One level of a directory as it was at `listed_at` (monotonic seconds, taken before the first request)."""

    listed_at: float
    entries: dict[bytes, Listed] = field(default_factory=dict)
    marker: bool = False
    own: ListedObject | None = None
    """The directory's marker, if there is one (`marker`) and a listing showed its version."""
    complete: bool = True
    pages: int = 0
    spans: list[Span] = field(default_factory=list)
    """The pages in order; empty where the store does not list keys in the order of their bytes."""
    edited: bool = False
    """Whether this mount changed a name in the listing, so that the store's pages do not show all of it."""
    number: int = 0
    """The upper bits of the listing's readdir cursors, which tell them from those of other listings; 0: none yet."""
    cached_until: float = 0.0
    """How long the kernel may use its cache of this listing (monotonic seconds); 0: not at all."""
    cached_whole: bool = False
    """Whether the kernel may have cached the listing to its end; before that it does not use its cache."""
    stamp: Stamp = field(init=False)
    """The stamp of the nodes that the listing confirms; it moves with listed_at."""

    def __post_init__(self) -> None:
        self.stamp = Stamp(self.listed_at)

    def stamp_of(self, tail: str) -> Stamp:
        """Return the stamp for an entry's node: its page, if one page alone decides what is shown, else `stamp`."""
        return (self.span_of(tail) if len(self.spans) > 1 else None) or self.stamp

    def confirmed(self, when: float) -> None:
        """Note that the store showed the same pages when it was asked at `when`."""
        self.listed_at = max(self.listed_at, when)
        for stamp in (self.stamp, *self.spans):
            stamp.confirmed(when)

    def span_of(self, tail: str) -> Span | None:
        """Return the page that covers all keys that decide how a tail is shown (file, link, directory); None: none."""
        first, last = self._ends_around(tail)
        return self.spans[first] if self.spans and first == last else None

    def told_at(self, name: bytes) -> float:
        """Return when the store last showed what this name is, or that it does not exist (monotonic seconds)."""
        span = self.span_of(segment_of(name)) if len(self.spans) > 1 and one_key(name) else None
        return self.listed_at if span is None else max(self.listed_at, span.at)

    def put(self, name: bytes, listed: Listed | None) -> None:
        """Enter what this mount has made of a name; None: the mount removed it."""
        before = self.entries.pop(name, None)
        if listed is not None:
            self.entries[name] = listed
        self.edit(*([one.tail for one in (before, listed) if one is not None] or (segment_of(name),)))

    def edit(self, *tails: str) -> None:
        """Note that this mount changed these keys, so that the pages with them are no longer complete."""
        self.edited = self.edited or bool(tails)
        for tail in set(tails) if self.spans else ():
            first, last = self._ends_around(tail)
            for span in self.spans[first : last + 1]:
                span.digest = b""

    def add_span(self, prefix: str, page: ListPage) -> None:
        """Append the next page; drop all spans if its keys are not in the order of their bytes."""
        self.pages += 1
        if self.pages > 1 and not self.spans:
            return
        after = self.spans[-1].upto if self.spans else ""
        more = page.next_token is not None
        low, high = ends_of(prefix, page) if more or self.spans else ("", "")
        if (more and not high) or (high and key_bytes(low) < key_bytes(after)):
            self.spans = []
        else:
            self.spans.append(Span(after, high if more else "", page.digest, self.listed_at))

    def _ends_around(self, tail: str) -> tuple[int, int]:
        base, last = tail.removesuffix("/").removesuffix(LINK_SUFFIX), max(0, len(self.spans) - 1)
        first = bisect_left(self.spans, key_bytes(base), 0, last, key=_end_of)
        return first, bisect_left(self.spans, key_bytes(base + "/"), first, last, key=_end_of)


def ends_of(prefix: str, page: ListPage) -> tuple[str, str]:
    """Return the first and the last tail of a page in the order of their bytes; '' and '' for an empty page."""
    tails = [common[len(prefix) :] for common in page.common_prefixes]
    tails += [found.key[len(prefix) :] for found in page.objects]
    key = None if all(map(str.isascii, tails)) else key_bytes
    return min(tails, default="", key=key), max(tails, default="", key=key)


def listing_of(
    prefix: str, pages: Iterable[ListPage], listed_at: float, hidden: frozenset[str] = frozenset()
) -> Listing:
    """Make a listing from pages requested with `prefix` and delimiter '/'. hidden: tails that are not shown."""
    listing = Listing(listed_at)
    directories: dict[str, None] = {}  # in their order; a server may list one on two pages
    files: list[tuple[str, ListedObject]] = []
    for page in pages:
        listing.add_span(prefix, page)
        directories |= dict.fromkeys(common[len(prefix) :] for common in page.common_prefixes)
        for found in page.objects:
            tail = found.key[len(prefix) :]
            segment, slash, _ = tail.partition("/")
            if tail == "":
                listing.marker, listing.own = True, found
            elif slash:  # some servers list markers as objects, too
                directories[segment + "/"] = None
            elif tail not in hidden:
                files.append((tail, found))
        listing.complete = page.next_token is None
    for tail in directories:
        if tail not in hidden:
            listing.entries[_free(listing.entries, name_of(tail[:-1], directory=True))] = Listed(stat.S_IFDIR, tail)
    entries, links = listing.entries, []
    for tail, found in files:
        if tail.endswith(LINK_SUFFIX) and len(tail) > len(LINK_SUFFIX):
            links.append((tail, found))
            continue
        entries[_free(entries, name_of(tail))] = _listed(stat.S_IFREG, tail, found)
    for tail, found in links:
        name = name_of(tail[: -len(LINK_SUFFIX)])
        if name in entries:
            own = _free(entries, tail.encode("utf-8", "surrogateescape"))
            entries[own] = _listed(stat.S_IFREG, tail, found)
        else:
            entries[name] = _listed(stat.S_IFLNK, tail, found)
    return listing


def claim(entries: dict[bytes, Listed], name: bytes, own: Listed) -> None:
    """Show this mount's entry `own` under its name; a file or link that had it gets another, as in listing_of()."""
    displaced = entries.pop(name, None)
    for other in (name + BESIDE_DIRECTORY, name.removesuffix(BESIDE_DIRECTORY)):
        if other in entries and entries[other].tail == own.tail:
            del entries[other]
    entries[name] = own
    if displaced is not None and displaced.tail != own.tail and displaced.kind != stat.S_IFDIR:
        raw = displaced.tail.encode("utf-8", "surrogateescape") if displaced.kind == stat.S_IFLNK else name
        entries[_free(entries, raw)] = displaced._replace(kind=stat.S_IFREG)


def _free(entries: dict[bytes, Listed], name: bytes) -> bytes:
    """Return the name, or the name to show instead when a directory or another key has it."""
    while name in entries:
        name += BESIDE_DIRECTORY
    return name


def _listed(kind: int, tail: str, found: ListedObject) -> Listed:
    return Listed(kind, tail, found.size, found.etag, found.mtime_ns, found.said)
