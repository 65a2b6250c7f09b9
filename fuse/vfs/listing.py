"""What a listing of one directory level says: entries by local name. Pure.

Rules (docs/SEMANTICS.md S-03, S-06, S-36, S-37): a common prefix is a directory; `x.rclonelink` is the link `x` unless
`x` is there as well; an object beside a directory of its name is shown under another name; the marker of the directory
itself is no entry.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..store.base import ETag, ListedObject, ListPage
from .names import BESIDE_DIRECTORY, LINK_SUFFIX, name_of

NO_ETAG = ETag("")


class Listed(NamedTuple):
    """One entry. kind: S_IFREG, S_IFDIR or S_IFLNK as the key tells; tail: what its key adds to the directory's prefix.

    size, etag, mtime_ns are 0, '' and 0 for directories. said: see ListedObject.
    """

    kind: int
    tail: str
    size: int = 0
    etag: ETag = NO_ETAG
    mtime_ns: int = 0
    said: str | None = None


class Stamp:
    """When something was last confirmed (monotonic seconds), for all who were told at once.

    shows: their attributes were as well, not only their versions.
    """

    __slots__ = ("at", "shows")

    def __init__(self, at: float, *, shows: bool = False) -> None:
        self.at = at
        self.shows = shows


@dataclass(slots=True)
class Listing:
    """One level of a directory as it was at `listed_at` (monotonic seconds, taken before the first request)."""

    listed_at: float
    entries: dict[bytes, Listed] = field(default_factory=dict)
    marker: bool = False
    own: ListedObject | None = None
    """The directory's marker, where `marker` says that there is one and the store told its version."""
    complete: bool = True
    pages: int = 0
    digest: bytes = b""
    """Of its only page: the store can be asked whether it is still so. b"" of several pages, which are read again."""
    edited: bool = False
    """We changed a name in it: the store's pages do not say it all."""
    stamp: Stamp = field(init=False)
    """For the nodes that it has confirmed; moves with listed_at."""
    _shown: Stamp = field(init=False)

    def __post_init__(self) -> None:
        """Confirmed when it was listed."""
        self.stamp = Stamp(self.listed_at)
        self._shown = Stamp(self.listed_at, shows=True)

    def stamp_of(self, listed: Listed) -> Stamp:
        """For the node of one of its entries."""
        return self.stamp if listed.said is None else self._shown

    def confirmed(self, when: float) -> None:
        """The store showed the same pages when it was asked at `when`."""
        self.listed_at = self.stamp.at = self._shown.at = max(self.listed_at, when)


def listing_of(
    prefix: str, pages: Iterable[ListPage], listed_at: float, hidden: frozenset[str] = frozenset()
) -> Listing:
    """Make a listing from pages asked with `prefix` and delimiter '/'. hidden: tails that are not shown."""
    listing = Listing(listed_at)
    files: list[tuple[str, ListedObject]] = []
    for page in pages:
        listing.digest = b"" if listing.pages else page.digest
        for common in page.common_prefixes:
            tail = common[len(prefix) :]
            if tail not in hidden:
                listing.entries[_free(listing.entries, name_of(tail[:-1], directory=True))] = Listed(stat.S_IFDIR, tail)
        for found in page.objects:
            tail = found.key[len(prefix) :]
            if tail == "":
                listing.marker, listing.own = True, found
            elif tail not in hidden:
                files.append((tail, found))
        listing.complete = page.next_token is None
        listing.pages += 1
    _add_files(listing.entries, files)
    return listing


def _add_files(entries: dict[bytes, Listed], files: list[tuple[str, ListedObject]]) -> None:
    links = []
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


def claim(entries: dict[bytes, Listed], name: bytes, own: Listed) -> None:
    """Show an entry of ours under its name; a file or link that had it is shown beside, as _add_files() would."""
    displaced = entries.pop(name, None)
    for other in (name + BESIDE_DIRECTORY, name.removesuffix(BESIDE_DIRECTORY)):
        if other in entries and entries[other].tail == own.tail:
            del entries[other]
    entries[name] = own
    if displaced is not None and displaced.tail != own.tail and displaced.kind != stat.S_IFDIR:
        raw = displaced.tail.encode("utf-8", "surrogateescape") if displaced.kind == stat.S_IFLNK else name
        entries[_free(entries, raw)] = displaced._replace(kind=stat.S_IFREG)


def _free(entries: dict[bytes, Listed], name: bytes) -> bytes:
    """The name, or what is shown instead when a directory or another key has it."""
    while name in entries:
        name += BESIDE_DIRECTORY
    return name


def _listed(kind: int, tail: str, found: ListedObject) -> Listed:
    return Listed(kind, tail, found.size, found.etag, found.mtime_ns, found.said)
