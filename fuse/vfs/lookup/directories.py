"""Reading directories: a snapshot per open directory, with stable cursors (S-05)."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ...ops import Caller, DirBudget, DirEntry, Entry, Fh, Ino, OpenDirReply
from ..tree import facts
from ..tree.core import Core
from ..tree.listing import Listed, Listing
from ..tree.nodes import Directory, Node
from .kerneldircache import KernelDirCache, index_of
from .resolver import Resolver

_DOTS = [(name, Listed(stat.S_IFDIR, "")) for name in (b".", b"..")]
_HEAD_SHARE = 512
"""How many entries' attributes are requested at once if the answer or the middle entry lacks some: 8 rounds of 64."""
_FIRST_SHARE = 256
"""The same for the first answer, of 200 entries: the kernel wants more attributes only if a process looks at them."""


@dataclass(slots=True)
class Snapshot:
    """The entries of one open directory as they were when it was read from the start."""

    directory: Directory
    fh: Fh
    listing: Listing | None = None
    """The listing that the entries come from."""
    base: int = 0
    """The offset of each cursor. A cursor is the number of entries up to its own, `.` and `..` included."""
    entries: list[tuple[bytes, Listed]] | None = None


class Directories:
    def __init__(self, core: Core, resolver: Resolver, dir_cache: KernelDirCache) -> None:
        self._core = core
        self._resolver = resolver
        self._dir_cache = dir_cache
        self._snapshots: dict[int, Snapshot] = {}
        self._numbers = count(time.time_ns())  # as in Handles

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply:
        """Open a directory. Errors: FSError(ENOTDIR, ESTALE)."""
        directory = self._resolver.directory(ino)
        fh = Fh(next(self._numbers))
        self._add(Snapshot(directory, fh))
        self._core.nodes.use(directory)
        return self._dir_cache.opened(directory, fh)

    def _add(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.fh] = snapshot
        snapshot.directory.handles += 1

    def releasedir(self, ino: Ino, fh: Fh) -> None:
        """Unknown handles are ignored."""
        self._core.listings.forget(fh)
        snapshot = self._snapshots.pop(fh, None)
        if snapshot is not None:
            snapshot.directory.handles -= 1
            self._dir_cache.closed(snapshot.directory, fh)
            self._core.nodes.drop_unused(snapshot.directory)

    async def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        """Return entries from a cursor on. At offset 0 the directory is listed again, if its listing is too old."""
        snapshot = self._snapshots.get(fh) or self._of_earlier_server(ino, fh)
        directory, first = snapshot.directory, index_of(offset)
        if offset == 0:
            self._dir_cache.begun(directory, fh)
        elif offset - first != snapshot.base and (kept := self._dir_cache.listing_of(directory, offset)) is not None:
            self._take(snapshot, kept)  # the kernel read the beginning from its cache, and asks for the rest
        if offset == 0 or snapshot.entries is None:
            listing = self._resolver.fresh_listing(directory)
            if listing is None and not directory.gone:
                listing = await self._resolver.read_directory(directory)
            self._take(snapshot, listing)
        snapshot = replace(snapshot)  # during an await, another task may read the same handle from the start
        entries, upto = snapshot.entries or [], first
        while upto < len(entries) and budget.take(len(entries[upto][0])):
            upto += 1
        share = first + (_HEAD_SHARE if first >= len(_DOTS) else _FIRST_SHARE)
        half = (first + share) // 2
        if plus and self._inexact(directory, entries[first : min(upto, share)] + entries[half : half + 1]):
            await self._resolver.make_exact(self._inexact(directory, entries[first:share]))
        return self._answer(snapshot, first, upto, plus)

    def _of_earlier_server(self, ino: Ino, fh: Fh) -> Snapshot:
        """Make the snapshot of a handle of an earlier server, with the names that the server saved, if it did."""
        snapshot = Snapshot(self._resolver.directory(ino), fh)
        saved = self._core.listings.load(fh)
        if saved is not None:
            # Only names and types were saved: the attributes come from the present listing.
            snapshot.entries = _DOTS + [(name, Listed(kind, "")) for kind, name in saved]
        self._add(snapshot)
        self._dir_cache.resumed(snapshot.directory, fh)
        return snapshot

    def _take(self, snapshot: Snapshot, listing: Listing | None) -> None:
        if snapshot.directory.gone:
            listing = None
        snapshot.entries = _DOTS + (sorted(listing.entries.items()) if listing is not None else [])
        snapshot.listing, snapshot.base = listing, self._dir_cache.base(listing)

    def _inexact(self, directory: Directory, entries: Iterable[tuple[bytes, Listed]]) -> list[Node]:
        """Return the nodes of the entries whose attributes must be requested."""
        if not self._core.settings.full_attributes:
            return []
        nodes = (self._node(directory, name) for name, _ in entries)
        return [node for node in nodes if node is not None and self._resolver.left(node) is None]

    def _node(self, directory: Directory, name: bytes) -> Node | None:
        """Return the node of an entry; None if the directory does not list it any more, and for `.` and `..`."""
        listing = directory.listing
        listed = listing.entries.get(name) if listing is not None else None
        if listing is None or listed is None:
            return None
        return directory.children.get(name) or facts.adopted(self._core, directory, name, listed, listing.listed_at)

    def _answer(self, snapshot: Snapshot, first: int, upto: int, plus: bool) -> list[DirEntry]:
        """Return a snapshot's entries from one cursor to another; their new nodes are logged with one write."""
        core, directory, listing, entries = self._core, snapshot.directory, snapshot.listing, snapshot.entries or []
        least, now, whole = self._resolver.ttl(directory), core.clock.monotonic(), True
        until = now + least if listing is None else listing.listed_at + least
        out: list[DirEntry] = []
        fresh: list[Node] = []
        for cursor, (name, listed) in enumerate(entries[first:upto], first + 1):
            if cursor <= len(_DOTS):
                dots = directory.parent or directory if cursor > 1 else directory
                out.append(DirEntry(name, dots.ino, stat.S_IFDIR, snapshot.base + cursor))
                continue
            node = self._node(directory, name) if plus else None
            left = self._resolver.left(node) if node is not None else None
            if node is None or left is None:
                whole, child = False, directory.children.get(name)
                kind = child.kind if child is not None and (child.attrs_valid or child.dirty) else listed.kind
                ino = child.ino if child is not None else core.nodes.free_ino(directory.ino, name)
                out.append(DirEntry(name, ino, kind, snapshot.base + cursor))
                continue
            least, node.nlookup = min(least, left), node.nlookup + 1
            if node.nlookup == 1:
                fresh.append(node)
            entry = Entry(node.attr(), left, left)
            out.append(DirEntry(name, node.ino, node.attributes.mode, snapshot.base + cursor, entry))
        begins = first < len(_DOTS)
        if begins and upto < len(entries):
            core.listings.save(snapshot.fh, ((each.kind, name) for name, each in entries[len(_DOTS) :]))
        if fresh:  # before the kernel is told of them
            core.log_nodes(fresh)
        due = min(until, now + least)
        self._dir_cache.told(directory, snapshot.fh, listing, due, first=begins, last=not out, whole=whole)
        return out
