"""Resolves names to nodes: from memory while that is fresh, else by asking the store.

What the store confirmed less than metadata_ttl_s ago is fresh (docs/SEMANTICS.md S-28). The kernel is told only the
rest of that time, so that the two times do not add up.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from ...loop import each
from ...ops import AttrReply, Entry, FSError, Ino
from ..tree import facts
from ..tree.core import Core
from ..tree.listing import Listed, Listing, Span
from ..tree.names import BESIDE_DIRECTORY, LINK_SUFFIX, one_key, segment_of
from ..tree.nodes import Change, Directory, Node
from .pages import look, page_of
from .prefetcher import Prefetcher
from .remote import Remote
from .walks import Descent, Walks

_CHANGED_MAX = 4096
"""With more changed names than this in a directory, those are dropped that changed more than _LISTING_MAX_S ago."""
_LISTING_MAX_S = 600.0
"""The longest time that a listing takes."""
_OVERTAKEN_MAX = 16
"""How often the store is asked for a name that this mount changes each time before the answer is applied."""
_Found = tuple[Listed | None, float, Callable[[], bool]]
"""What the store said of a name, when, and a function that tells whether the name is unchanged by this mount since."""


class _OvertakenError(Exception):
    """This mount changed the name after the store was asked."""


class Resolver:
    """Looks names up. The first methods use only cached knowledge; those below the line may ask the store."""

    def __init__(self, core: Core, remote: Remote, prefetcher: Prefetcher) -> None:
        self._core = core
        self._prefetcher = prefetcher
        self._remote = remote
        self._walks = Walks(core, remote, prefetcher)
        self._descent = Descent(core, remote)
        self._page: Span | None = None
        """The page of the last lookup that found its page too old."""
        self.ttl, self.fresh_listing = remote.ttl, remote.fresh_listing

    def node(self, ino: Ino) -> Node:
        """Return the node of an id that the kernel sent. Errors: FSError(ESTALE)."""
        node = self._core.nodes.by_ino.get(ino)
        if node is None or node.replaced_before:
            raise FSError(errno.ESTALE)
        return node

    def directory(self, ino: Ino) -> Directory:
        """Return the directory of an id that the kernel sent. Errors: FSError(ESTALE, ENOTDIR)."""
        node = self._core.nodes.by_ino.get(ino)
        if isinstance(node, Directory):
            return node
        raise FSError(errno.ESTALE if node is None else errno.ENOTDIR)

    def current(self, node: Node) -> bool:
        """Whether what is known of a node may be shown without asking the store."""
        return self.left(node) is not None

    def left(self, node: Node) -> float | None:
        """Return for how many seconds from now on a node stays current(); None if it is not current."""
        settings, parent = self._core.settings, node.parent
        if node.dirty or node.gone:
            return settings.metadata_ttl_s
        if not node.attrs_valid and settings.full_attributes:
            return None
        if parent is None:
            return settings.metadata_ttl_s
        left = self._remote.ttl(parent) - (self._core.clock.monotonic() - node.checked_at)
        return left if left > 0 else None

    def own(self, node: Node) -> bool:
        """Whether a writer need not ask the store: this mount made the version within metadata_ttl_s (S-161)."""
        if node.dirty or node.gone:
            return True
        return node.attrs_valid and self._age(node.made_at) < self._core.settings.metadata_ttl_s

    def entry(self, node: Node, left: float | None = None) -> Entry:
        """Return the answer to a lookup, and add 1 to the lookup count. left: the result of left(), if it is known."""
        if left is None:
            left = self.left(node) or 0.0
        node.nlookup += 1
        if node.nlookup == 1:
            self._core.log_nodes((node,))
        return Entry(node.attr(), left, left)

    def attr_reply(self, node: Node) -> AttrReply:
        return AttrReply(node.attr(), self.left(node) or 0.0)

    def cached(self, parent: Directory, name: bytes) -> Entry | None:
        """Return the answer to a lookup, if memory has it."""
        self._core.nodes.use(parent)
        child = parent.children.get(name)
        left = self.left(child) if child is not None else None
        if child is not None and left is not None:
            return self.entry(child, left)
        told = self._remote.believed(parent, name)
        if told is None:
            return None
        listed, told_at = told[0].entries.get(name), told[1]
        if child is not None and listed is not None and self._known_before(child, listed):
            # The name exists. A removal or rename needs no more; for attributes the kernel sends a GETATTR.
            return self.entry(child)._replace(entry_ttl_s=self.ttl(parent) - self._age(told_at), attr_ttl_s=0.0)
        if listed is not None and listed.said is None:
            self._prefetcher.looked_up(parent, name)
        if child is not None:
            return None
        if listed is None:
            return Entry(None, self.ttl(parent) - self._age(told_at))
        child = facts.adopted(self._core, parent, name, listed, told_at)
        left = self.left(child)
        return self.entry(child, left) if left is not None else None

    def _known_before(self, child: Node, listed: Listed) -> bool:
        """Whether a listing shows the node, in the known version, but can't confirm that the attributes are current."""
        if listed.tail != child.tail:
            return False
        return child.attrs_valid if isinstance(child, Directory) else child.racy and child.is_version(listed)

    def doubt(self, directory: Directory, name: bytes) -> None:
        """Make the next use of a name ask the store."""
        directory.forget_listing()
        if name in directory.children:
            facts.doubted(directory.children[name])

    def changed(self, node: Node) -> None:
        """Note that this mount made or changed a name: pending answers of the store are older."""
        node.changes += 1
        if node.parent is not None:
            self._mark(node.parent, node.name, node.as_listed())

    def _mark(self, directory: Directory, name: bytes, listed: Listed | None) -> None:
        now, changed = self._core.clock.monotonic(), directory.changed
        changed[name] = Change(now, listed)
        changed.move_to_end(name)
        while len(changed) > _CHANGED_MAX and now - next(iter(changed.values())).when >= _LISTING_MAX_S:
            changed.popitem(last=False)
        if directory.listing is not None:
            directory.listing.put(name, listed)

    def appeared(self, node: Node, directory: Directory) -> None:
        """Note that this mount made a node's name in a directory."""
        self.changed(node)
        self._follow(directory, node, 1)

    def removed(self, node: Node, parent: Directory) -> None:
        """Note that this mount is about to take a node's name out of its directory."""
        name = node.name
        self._mark(parent, name, None)
        link = (segment_of(name) + LINK_SUFFIX).encode("utf-8", "surrogateescape")
        if parent.listing is not None and not parent.listing.entries.keys().isdisjoint((name + BESIDE_DIRECTORY, link)):
            # Another object, shown under a substitute name so far, gets this name now (S-37).
            parent.forget_listing()
        self._follow(parent, node, -1)

    def _follow(self, directory: Directory, node: Node, change: int) -> None:
        """Update a directory's times and number of subdirectories after an entry came (1) or went (-1)."""
        now = self._core.clock.time_ns()
        facts.edited(directory, directory.attributes._replace(mtime_ns=now, ctime_ns=now))
        if isinstance(node, Directory) and directory.subdirectories >= 0:
            directory.subdirectories = max(0, directory.subdirectories + change)

    def _age(self, when: float) -> float:
        return self._core.clock.monotonic() - when

    # -- these may ask the store

    async def lookup(self, parent: Directory, name: bytes) -> Entry:
        if self._listing_pays(parent, name):
            await self.read_directory(parent)
            entry = self.cached(parent, name)
            if entry is not None:
                return entry
        node = await self.find(parent, name)
        if node is not None and not node.gone:
            return self.entry(node)
        _, told_at = self._remote.believed(parent, name) or (None, self._core.clock.monotonic())
        return Entry(None, max(0.0, self.ttl(parent) - self._age(told_at)))

    async def find(self, parent: Directory, name: bytes) -> Node | None:
        """Return the live node of a name, confirmed within the time to live; None if the name does not exist."""
        child = parent.children.get(name)
        if child is not None and self.current(child):
            return child
        if isinstance(child, Directory) and self._core.settings.full_attributes:
            started = self._core.clock.monotonic()
            lives = await self._head(child)
            parent.probe_s += self._core.clock.monotonic() - started
            if lives:
                return child
        return await self._find_anew(parent, name)

    def _listing_pays(self, parent: Directory, name: bytes) -> bool:
        """Whether to list a directory instead of requesting one known name: it is then likely to be _known_before().
        For a file a listing is needed anyway; subdirectories are requested alone until that took longer than a listing.
        """
        child = parent.children.get(name)
        if child is None or self.current(child) or parent.large or not one_key(name) or self.fresh_listing(parent):
            return False
        return child.attrs_valid and parent.probe_s > parent.list_s if isinstance(child, Directory) else child.racy

    async def standing(self, parent: Directory, name: bytes) -> Node | None:
        """Do the same as find() for a caller that does not need the attributes, which may be old."""
        child = parent.children.get(name)
        if child is not None and not child.gone and self._remote.shown_at(child) is not None:
            return child
        return await self.find(parent, name)

    async def existing(self, parent: Directory, name: bytes) -> Node:
        """Do the same as standing(). Errors: FSError(ENOENT) if the name does not exist."""
        node = await self.standing(parent, name)
        if node is None:
            raise FSError(errno.ENOENT)
        return node

    async def revalidate(self, node: Node) -> bool:
        """Confirm a node with the store if it is not current; return False when it is gone (it is detached then)."""
        if self.current(node):
            return not node.gone
        if isinstance(node, Directory) and (node.parent is None or self._core.settings.full_attributes):
            return await self._head(node)
        return node.parent is not None and await self._find_anew(node.parent, node.name) is node

    async def _head(self, directory: Directory) -> bool:
        """Do the same as Remote.head(), with one request for all lookups at the same time."""
        await self._descent.ahead(directory)
        async with directory.lock:
            return not directory.gone if self.current(directory) else await self._remote.head(directory)

    async def read_directory(self, directory: Directory, *, whole: bool = True) -> Listing:
        """Return a fresh listing; whole False: of a large directory only the first pages."""
        async with directory.listing_lock:
            fresh = self.fresh_listing(directory)
            if fresh is None:
                fresh = await self._walks.read(directory)
            return fresh if fresh is not None else await self._remote.read_directory(directory, whole=whole)

    async def make_exact(self, nodes: list[Node]) -> None:
        """Fetch unknown attributes of nodes of one directory, given in its order. Nodes that are gone are detached."""
        await self._walks.confirm([node for node in self._inexact(nodes) if isinstance(node, Directory)])
        wanted = self._inexact(nodes)
        files = [node for node in wanted if not isinstance(node, Directory)]
        for node in await self._prefetcher.told(files):
            facts.recalled(self._core, node)
        await each(self._remote.head, self._inexact(wanted), self._remote.width)

    def _inexact(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes to ask for: files without valid attributes (listings show changes), stale directories."""
        inexact = (node for node in nodes if not self.current(node))
        return [node for node in inexact if isinstance(node, Directory) or not node.attrs_valid]

    async def ask(self, node: Node) -> bool:
        """For a writer: whether the store has a node, asked now unless the node is own(). If not, it is detached; else
        it may have another version afterwards.
        """
        return self.own(node) or await self.ask_now(node)

    async def ask_now(self, node: Node) -> bool:
        """Do the same as ask(), but always ask the store. Drop the parent's listing if that showed something else."""
        parent, before = node.parent, node.version()
        lives = await self._remote.head(node)
        if parent is not None and not isinstance(node, Directory) and (not lives or node.version() != before):
            parent.forget_listing()
        return lives

    async def find_now(self, parent: Directory, name: bytes) -> Node | None:
        """Do the same as find() for a writer, which needs the present state of the store."""
        child = parent.children.get(name)
        if child is not None and await self.ask(child):
            return child
        if not one_key(name):
            parent.forget_listing()
        found = await self._find_anew(parent, name, now=one_key(name))
        if parent.listing is not None and not _shows(parent.listing.entries.get(name), found):
            parent.forget_listing()
        return found

    async def refuse_hiding(self, parent: Directory, name: bytes) -> None:
        """Check that a file `name` hides no objects of other clients below it (S-161). Errors: FSError(EISDIR)."""
        store, below = self._core.store, f"{parent.key}{segment_of(name)}/"
        hides = store.capabilities.hides_below_files and one_key(name)
        if hides and (await store.list_page(below, max_keys=1)).objects:
            parent.forget_listing()
            raise FSError(errno.EISDIR)

    async def _find_anew(self, parent: Directory, name: bytes, *, now: bool = False) -> Node | None:
        """Ask the store for a name and return its node. now: do not use a listing, even if it is fresh."""
        for _ in range(_OVERTAKEN_MAX):
            try:
                return await self._settle(parent, name, await self._ask(parent, name, now=now))
            except _OvertakenError:
                continue
        return parent.children.get(name)

    async def _ask(self, parent: Directory, name: bytes, *, now: bool) -> _Found:
        told, read = None, None
        if not now:
            told = self._remote.believed(parent, name)
            opens = self._prefetcher.opens_next(parent, name) if told is None else None
            if opens is not None:
                read = self._prefetcher.unread(parent, opens)
            if told is None and read is None:
                told = await self._told_anew(parent, name, whole=opens is None and not parent.large)
        if told is not None:
            listing, told_at = told
            there = listing.entries.get(name)
            # This mount enters its own changes into the listing, so it is right as long as it is the directory's
            # listing.
            return there, told_at, lambda: parent.listing is listing and listing.entries.get(name) is there
        started, mark = self._core.clock.monotonic(), parent.changed.get(name)
        child = parent.children.get(name)
        etag = child.etag if child is not None else None
        found = await self._remote.probe(parent, name, read)
        if read is None and page_of(parent, name) is None:
            parent.probe_s += self._core.clock.monotonic() - started

        def holds() -> bool:
            """Whether the name is unchanged: it has no new Change and, as old Changes are dropped, no other version."""
            now, version = parent.children.get(name), found.etag if found is not None else None
            same = now is None or now.etag == (etag if now is child else version)
            return same and parent.changed.get(name) is mark

        return found, started, holds

    async def _told_anew(self, parent: Directory, name: bytes, *, whole: bool) -> tuple[Listing, float] | None:
        """List a directory (whole: in any case), or request the page of a name, if that pays. Return the listing that
        covers the name, and its time; None if the name has to be requested alone.
        """
        odd = not one_key(name)
        if odd or whole or parent.probe_s >= parent.list_s:
            listing = await self.read_directory(parent, whole=odd or parent.large)
            return (listing, listing.listed_at) if listing.complete else None
        page, before = page_of(parent, name), self._page
        self._page = page
        if page is not None:
            await look(self._core, parent, page, self.ttl(parent), again=page is before)
        return self._remote.believed(parent, name)

    async def _settle(self, parent: Directory, name: bytes, found: _Found) -> Node | None:
        """Return the node for what a listing or probe found, with attributes. Errors: _OvertakenError when outdated."""
        listed, checked_at, holds = found
        if not holds():
            raise _OvertakenError
        child = parent.children.get(name)
        if child is not None and (child.dirty or (not listed and child.holds_unsent())):
            return child
        if child is not None and (listed is None or listed.tail != child.tail):
            self._remote.lost(child)
            child = None
        if listed is None:
            return None
        if child is not None and self._remote.is_replaced(child, listed):
            await self._remote.settle([(child, listed)], checked_at)
            if not holds():
                raise _OvertakenError
            child = parent.children.get(name)
        if child is None:
            child = facts.adopted(self._core, parent, name, listed, checked_at)
        elif not child.dirty and not self._remote.is_replaced(child, listed):
            facts.listed(self._core, child, listed, checked_at)
        if child.attrs_valid or not self._core.settings.full_attributes:
            return child
        if isinstance(child, Directory):  # a HEAD for its attributes may be under way
            await self._descent.ahead(child)
            arrived = self.current(child)
        else:
            self._prefetcher.looked_up(parent, name)
            await self._prefetcher.arrive(child)
            facts.recalled(self._core, child)
            arrived = child.attrs_valid
        return child if arrived or await self._remote.head(child) else None


def _shows(listed: Listed | None, node: Node | None) -> bool:
    """Whether a listing's entry for a name agrees with the name's node; None: no entry, or no node."""
    if listed is None or node is None:
        return listed is None and node is None
    return listed.tail == node.tail and (isinstance(node, Directory) or node.dirty or listed.etag == node.etag)
