"""Reading directories: a snapshot per open directory, with stable cursors (S-05)."""

from __future__ import annotations

import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...ops import Caller, DirBudget, DirEntry, Entry, Fh, Ino, OpenDirReply
from ..tree import facts
from ..tree.core import Core
from ..tree.listing import Listed, Listing
from ..tree.nodes import Directory, Node
from .kerneldircache import KernelDirCache, index_of
from .resolver import Resolver

_DOTS = 2
"""Cursors 1 and 2 follow `.` and `..`."""
_HEAD_SHARE = 512
"""Entries of which the attributes are asked for before an answer begins: 8 rounds of 64."""
_FIRST_SHARE = 256
"""Before the first one: what fits it (200), for the kernel asks on only where somebody looks at the entries."""


@dataclass(slots=True)
class Snapshot:
    """The entries of one open directory as they were when it was read from the start."""

    directory: Directory
    fh: Fh
    """The open directory that reads it; 0: none."""
    listing: Listing | None = None
    """Where they come from."""
    base: int = 0
    """What is added to cursors."""
    entries: list[tuple[bytes, Listed]] | None = None
    current_upto: int = 0
    """Entries below this one have attributes that are believed ..."""
    current_until: float = 0.0
    """... until then (monotonic seconds)."""

    def looked_through(self, first: int, now: float) -> bool:
        """Whether the attributes of what fits an answer from `first` on are known to be believed."""
        enough = self.current_upto == len(self.entries or ()) or self.current_upto - first >= _FIRST_SHARE
        return enough and first < self.current_upto and now < self.current_until


class Directories:
    def __init__(self, core: Core, resolver: Resolver, dir_cache: KernelDirCache) -> None:
        self._core = core
        self._resolver = resolver
        self._dir_cache = dir_cache
        self._snapshots: dict[int, Snapshot] = {}
        self._next_fh = time.time_ns()

    async def opendir(self, caller: Caller, ino: Ino) -> OpenDirReply:
        """FSError(ENOTDIR, ESTALE)."""
        directory = self._resolver.directory(ino)
        fresh = self._resolver.fresh_listing(directory)
        fh = Fh(self._next_fh)
        self._next_fh += 1
        self._add(Snapshot(directory, fh))
        self._core.nodes.use(directory)
        return self._dir_cache.opened(directory, fh, fresh)

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
        """Entries from a cursor. From the start the directory is listed anew, if what is known is too old."""
        snapshot = self._snapshots.get(fh) or self._of_earlier_server(ino, fh)
        if offset == 0:
            self._dir_cache.begun(snapshot.directory, fh)
        if offset and offset - index_of(offset) != snapshot.base:
            kept = self._dir_cache.listing_of(snapshot.directory, offset)
            if kept is not None:  # the kernel read the beginning from what it keeps, and asks for the rest
                self._take(snapshot, kept)
        if offset == 0 or snapshot.entries is None:
            listing = self._resolver.fresh_listing(snapshot.directory)
            if listing is None and not snapshot.directory.gone:
                listing = await self._resolver.read_directory(snapshot.directory)
            self._take(snapshot, listing)
        inexact = self._inexact(snapshot, index_of(offset)) if plus else None
        if inexact:
            await self._resolver.make_exact(inexact)
        return self._answer(snapshot, offset, budget, plus)

    def _of_earlier_server(self, ino: Ino, fh: Fh) -> Snapshot:
        """A directory that is being read while the server was replaced: it goes on with the names that it had."""
        snapshot = Snapshot(self._resolver.directory(ino), fh)
        saved = self._core.listings.load(fh)
        if saved is not None:
            # What else was known of them is old: the attributes come from what is listed now.
            snapshot.entries = [(name, Listed(kind, "")) for kind, name in saved]
            snapshot.base = self._dir_cache.base(None)
        if fh:
            self._add(snapshot)
            self._dir_cache.resumed(snapshot.directory, fh)
        return snapshot

    def _take(self, snapshot: Snapshot, listing: Listing | None) -> None:
        if snapshot.directory.gone:
            listing = None
        snapshot.entries = sorted(listing.entries.items()) if listing is not None else []
        snapshot.listing, snapshot.base = listing, self._dir_cache.base(listing)
        snapshot.current_upto = 0

    def _inexact(self, snapshot: Snapshot, index: int) -> list[Node]:
        """Nodes of the next entries whose attributes must be asked for."""
        if not self._core.settings.full_attributes or snapshot.entries is None:
            return []
        first = max(0, index - _DOTS)
        if snapshot.looked_through(first, self._core.clock.monotonic()):
            return []
        lines = _Lines(self._core, self._resolver.ttl(snapshot.directory))
        upto = min(first + (_HEAD_SHARE if first else _FIRST_SHARE), len(snapshot.entries))
        nodes = [self._node(snapshot.directory, name) for name, _ in snapshot.entries[first:upto]]
        found = [node for node in nodes if node is not None and lines.left(node) is None]
        if not found:
            snapshot.current_upto, snapshot.current_until = upto, lines.until
        return found

    def _node(self, directory: Directory, name: bytes) -> Node | None:
        """Of an entry; None of one that is there no more."""
        listing = directory.listing
        listed = listing.entries.get(name) if listing is not None else None
        if listing is None or listed is None:
            return None
        return directory.children.get(name) or facts.adopted(self._core, directory, name, listed, listing.listed_at)

    def _answer(self, snapshot: Snapshot, offset: int, budget: DirBudget, plus: bool) -> list[DirEntry]:
        """Entries from a cursor, as many as fit."""
        directory, entries, first = snapshot.directory, snapshot.entries or [], index_of(offset)
        parent, base = directory.parent or directory, snapshot.base
        out: list[DirEntry] = []
        for cursor, (name, dots) in enumerate(((b".", directory), (b"..", parent)), 1):
            if first < cursor:
                if not budget.take(len(name)):
                    return out
                out.append(DirEntry(name, dots.ino, stat.S_IFDIR, base + cursor))
        lines = _Lines(self._core, self._resolver.ttl(directory))
        attrs_valid = True
        for cursor in range(max(1, first - _DOTS + 1), len(entries) + 1):
            name, listed = entries[cursor - 1]
            if not budget.take(len(name)):
                if snapshot.fh and first < _DOTS:
                    self._core.listings.save(snapshot.fh, ((each.kind, name) for name, each in entries))
                break
            node = self._node(directory, name) if plus else None
            entry = lines.entry(node) if node is not None else None
            if node is None or entry is None:
                attrs_valid, child = False, directory.children.get(name)
                kind = child.kind if child is not None and (child.attrs_valid or child.dirty) else listed.kind
                out.append(DirEntry(name, self._core.nodes.shown_ino(directory, name), kind, base + cursor + _DOTS))
            else:
                out.append(DirEntry(name, node.ino, node.attributes.mode, base + cursor + _DOTS, entry))
        if lines.fresh:  # before the kernel hears of them
            self._core.log_nodes(lines.fresh)
        until = lines.until if snapshot.listing is None else min(lines.until, lines.ttl + snapshot.listing.listed_at)
        self._dir_cache.told(
            directory, snapshot.fh, snapshot.listing, until, first=first <= _DOTS, last=not out, whole=attrs_valid
        )
        return out


class _Lines:
    """Entries of one directory with attributes, at one moment: the log of nodes is written once for all."""

    __slots__ = ("_core", "_full", "_now", "fresh", "ttl", "until")

    def __init__(self, core: Core, ttl_s: float) -> None:
        self._core = core
        self._now = core.clock.monotonic()
        self._full = core.settings.full_attributes
        self.fresh: list[Node] = []
        self.ttl = ttl_s
        self.until = self._now + ttl_s
        """When the first of them has to be asked about again, monotonic seconds."""

    def left(self, node: Node) -> float | None:
        """How long one may be shown without asking, seconds, as Resolver.current() has it; None: it may not."""
        if node.dirty or node.gone:
            return self._core.settings.metadata_ttl_s
        until = node.checked_at + self.ttl
        if until <= self._now or (self._full and not node.attrs_valid):
            return None
        self.until = min(self.until, until)
        return until - self._now

    def entry(self, node: Node) -> Entry | None:
        """As Resolver.entry(); None of one that has to be asked about first."""
        left = self.left(node)
        if left is None:
            return None
        node.nlookup += 1
        if node.nlookup == 1:
            self.fresh.append(node)
        return Entry(node.attr(), left, left)
