"""Reading directories: a snapshot per open directory, with stable cursors (S-05)."""

from __future__ import annotations

import stat
import time
from collections.abc import Sequence
from functools import partial

from ..ops import Blocking, DirBudget, DirEntry, Fh, Ino, Reply
from .core import Core
from .listing import Listed, Listing
from .nodes import Directory, Node
from .resolver import Resolver

_DOTS = 2
"""Cursors 1 and 2 follow `.` and `..`."""
_HEAD_SHARE = 512
"""Entries of which the attributes are asked for before an answer begins: 8 rounds of 64."""


class Snapshot:
    """The entries of one open directory as they were when it was read from the start."""

    __slots__ = ("directory", "entries", "fh")

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.entries: list[tuple[bytes, Listed]] | None = None
        self.fh = 0
        """The open directory that reads it, once it was read from the start."""


class Directories:
    """All open directories of a mount."""

    def __init__(self, core: Core, resolver: Resolver) -> None:
        self._core = core
        self._resolver = resolver
        self._snapshots: dict[int, Snapshot] = {}
        self._next_fh = time.time_ns()

    def opendir(self, ino: Ino) -> Fh:
        """FSError(ENOTDIR, ESTALE)."""
        with self._core.lock:
            snapshot = Snapshot(self._resolver.directory(ino))
            fh = Fh(self._next_fh)
            self._next_fh += 1
            self._snapshots[fh] = snapshot
            snapshot.directory.handles += 1
            self._core.nodes.use(snapshot.directory)
            return fh

    def releasedir(self, fh: Fh) -> None:
        """Unknown handles are ignored."""
        with self._core.lock:
            self._core.listings.forget(fh)
            snapshot = self._snapshots.pop(fh, None)
            if snapshot is not None:
                snapshot.directory.handles -= 1
                self._core.nodes.drop_unused(snapshot.directory)

    def readdir(self, ino: Ino, fh: Fh, offset: int, budget: DirBudget, plus: bool) -> Reply[Sequence[DirEntry]]:
        """Entries from a cursor. From the start the directory is listed anew, if what is known is too old."""
        with self._core.lock:
            snapshot = self._snapshots.get(fh) or self._of_earlier_server(ino, fh)
            if offset == 0:
                snapshot.fh = fh
            if offset == 0 or snapshot.entries is None:
                fresh = self._resolver.fresh_listing(snapshot.directory)
                if fresh is None and not snapshot.directory.gone:
                    return Blocking(partial(self._list, snapshot, offset, budget, plus))
                self._take(snapshot, fresh)
            if plus and self._inexact(snapshot, offset):
                return Blocking(partial(self._fill, snapshot, offset, budget, plus))
            return self._answer(snapshot, offset, budget, plus)

    def _of_earlier_server(self, ino: Ino, fh: Fh) -> Snapshot:
        """A directory that is being read while the server was replaced: it goes on with the names that it had."""
        snapshot = Snapshot(self._resolver.directory(ino))
        saved = self._core.listings.load(fh)
        if saved is not None:
            # What else was known of them is old: the attributes come from what is listed now.
            snapshot.entries = [(name, Listed(kind, "")) for kind, name in saved]
            snapshot.directory.handles += 1
            self._snapshots[fh] = snapshot
        return snapshot

    def _list(self, snapshot: Snapshot, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        listing = self._resolver.read_directory(snapshot.directory)
        with self._core.lock:
            self._take(snapshot, listing)
        return self._fill(snapshot, offset, budget, plus)

    def _take(self, snapshot: Snapshot, listing: Listing | None) -> None:
        entries = {} if listing is None or snapshot.directory.gone else listing.entries
        snapshot.entries = sorted(entries.items())

    def _fill(self, snapshot: Snapshot, offset: int, budget: DirBudget, plus: bool) -> Sequence[DirEntry]:
        if plus:
            with self._core.lock:
                nodes = self._inexact(snapshot, offset)
            self._resolver.make_exact(nodes)
        with self._core.lock:
            return self._answer(snapshot, offset, budget, plus)

    def _inexact(self, snapshot: Snapshot, offset: int) -> list[Node]:
        """Nodes of the next entries whose attributes must be asked for. The state lock is held."""
        if not self._core.settings.full_attributes or snapshot.entries is None:
            return []
        first = max(0, offset - _DOTS)
        nodes = [self._node(snapshot, name) for name, _ in snapshot.entries[first : first + _HEAD_SHARE]]
        return [node for node in nodes if node is not None and not self._resolver.current(node)]

    def _node(self, snapshot: Snapshot, name: bytes) -> Node | None:
        directory = snapshot.directory
        listing = directory.listing
        if listing is None or name not in listing.entries:
            return None
        return self._resolver.adopt(directory, name, listing.entries[name], listing.listed_at)

    def _answer(self, snapshot: Snapshot, offset: int, budget: DirBudget, plus: bool) -> list[DirEntry]:
        directory, entries = snapshot.directory, snapshot.entries or []
        parent = directory.parent or directory
        out: list[DirEntry] = []
        for cursor, (name, node) in enumerate(((b".", directory), (b"..", parent)), 1):
            if offset < cursor:
                if not budget.take(len(name)):
                    return out
                out.append(DirEntry(name, node.ino, stat.S_IFDIR, cursor))
        for index in range(max(0, offset - _DOTS), len(entries)):
            name, listed = entries[index]
            if not budget.take(len(name)):
                if snapshot.fh and offset < _DOTS:
                    self._core.listings.save(snapshot.fh, ((each.kind, name) for name, each in entries))
                break
            out.append(self._line(snapshot, name, listed, index + 1 + _DOTS, plus))
        return out

    def _line(self, snapshot: Snapshot, name: bytes, listed: Listed, cursor: int, plus: bool) -> DirEntry:
        directory = snapshot.directory
        if plus:
            node = self._node(snapshot, name)
            if node is not None and self._resolver.current(node):
                return DirEntry(name, node.ino, node.attributes.mode, cursor, self._resolver.entry(node))
        child = directory.children.get(name)
        kind = child.kind if child is not None and (child.exact or child.dirty) else listed.kind
        return DirEntry(name, self._core.nodes.shown_ino(directory, name), kind, cursor)
