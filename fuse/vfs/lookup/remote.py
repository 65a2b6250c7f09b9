"""Brings nodes up to date with the store: lists directories, requests objects, and applies changes by other clients
(docs/SEMANTICS.md S-28 to S-33).
"""

from __future__ import annotations

import errno
import stat
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from datastore.api.names import MARKER
from datastore.errors import KeyTooLong, NotFound, PreconditionFailed, StoreError

from ...loop import each
from ...ops import FSError
from ...store.base import ETag, ObjectInfo, ObjectVersion
from ..tree import facts
from ..tree.core import Core
from ..tree.growth import grew
from ..tree.listing import Listed, Listing, claim
from ..tree.names import LINK_SUFFIX, segment_of
from ..tree.nodes import Directory, Node
from .pages import Pages

FIRST_PAGES = 4
"""A directory with more pages is large: only this many are read where the whole listing is not needed."""
_SLOW_LISTING = 2.0
"""A listing is trusted for at least this many times as long as it took, even beyond the time to live."""
AGAIN_MAX = 100
"""How often a request is repeated when a rename or another change by this mount made its answer useless."""
_GUESSED_COST = 4
"""Until a large directory was listed whole, this is assumed to cost this many times as much as its first pages."""
UNLINKED = ".datastore.unlinked/"
"""The prefix, below the mount's root and not shown, of copies of large files that were removed while open."""
HIDDEN = frozenset((UNLINKED, MARKER))
"""The tails that are not shown in the mount's root, and that can't be made there."""
FAR_S = 0.005
"""A store that is near lists a directory of the usual size in less than this; seconds."""
_LAST = 4
_TOLD = 2
"""How many listings must have been slow: one alone may have been retried, or this machine may have been busy."""
_WIDTH_FAR, _WIDTH_NEAR = 64, 8


_Learn = Callable[[ObjectInfo], None]
_AskedAs = tuple[tuple[int, ...], ETag, int]
"""See Node.asked_as."""


class Remote:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.took_s: deque[float] = deque(maxlen=_LAST)
        """How long the last listings took, in seconds."""

    @property
    def is_far(self) -> bool:
        """Whether the store is so slow that prefetching pays, though its answers may not be needed."""
        return len(self.took_s) >= _TOLD and min(self.took_s) >= FAR_S

    @property
    def width(self) -> int:
        """How many objects to request at once: as many as there are connections from a distant store, few from one near
        by, which is as quick with them."""
        return _WIDTH_FAR if self.is_far else _WIDTH_NEAR

    async def read_directory(self, directory: Directory, *, whole: bool) -> Listing:
        """Ask for the directory's entries and take them in; whole False stops after the first pages of a large one. The
        answer is discarded, and asked for again, if the directory was renamed or forget_listing() called meanwhile.
        """
        for _ in range(AGAIN_MAX):
            listing = await self._read(directory, whole=whole)
            if listing is not None:
                return listing
        raise FSError(errno.EBUSY, f"'{directory.key}' is renamed again and again")

    async def _read(self, directory: Directory, *, whole: bool) -> Listing | None:
        core, seen, had, started = self._core, directory.listed_as, directory.listing, self._core.clock.monotonic()
        hidden = HIDDEN if directory is core.nodes.root else frozenset[str]()
        listing = await Pages(core, directory).read(started, hidden, None if whole else FIRST_PAGES)
        took_s = core.clock.monotonic() - started
        self.took_s.append(took_s)
        if directory.listed_as != seen:
            return None
        if listing is None:  # the store shows the same pages as before
            if had is None or directory.listing is not had:
                return None
            had.confirmed(started)
            directory.list_s, directory.probe_s = took_s, 0.0
            return had
        newer = directory.listing
        if newer is not None and newer.listed_at > started:
            return newer  # a walk has listed it since, and dropped our earlier changes from directory.changed
        directory.large = listing.pages > FIRST_PAGES or not listing.complete
        directory.list_s = took_s if listing.complete else took_s * _GUESSED_COST
        directory.probe_s = 0.0
        if listing.complete:
            await self.settle(self.install(directory, listing), listing.listed_at)
        return listing

    async def settle(self, suspects: list[tuple[Node, Listed]], listed_at: float) -> None:
        """Handle new versions, written by another client, of objects whose earlier version is open here."""
        for node, listed in suspects:
            if node.asked_at > listed_at or not self.is_replaced(node, listed):
                continue  # another call has asked for it since, and the node may have moved on
            goes_on = await self._accept(node, listed)
            if goes_on:
                facts.listed(self._core, node, listed, listed_at)
            elif goes_on is None:
                await self.head(node)

    def install(self, directory: Directory, listing: Listing) -> list[tuple[Node, Listed]]:
        """Make a listing the directory's own; return the open files that were replaced, for settle()."""
        directory.marker = listing.marker
        if self._core.settings.full_attributes and directory.checked_at <= listing.listed_at:
            facts.listed_itself(self._core, directory, listing)
        self._keep_own_changes(directory, listing)
        directory.listing = listing
        self._core.nodes.grown += len(listing.entries)
        directory.subdirectories = sum(1 for listed in listing.entries.values() if listed.kind == stat.S_IFDIR)
        suspects: list[tuple[Node, Listed]] = []
        for name, child in list(directory.children.items()):
            listed = listing.entries.get(name)
            if child.dirty:
                continue
            if listed is None or listed.tail != child.tail:
                self.lost(child)
            elif self.is_replaced(child, listed):
                suspects.append((child, listed))
            else:
                facts.listed(self._core, child, listed, listing.listed_at)
        return suspects

    def _keep_own_changes(self, directory: Directory, listing: Listing) -> None:
        """Enter what this mount did after the listing was begun, and names with unsent bytes, into the listing."""
        newer = ((name, one) for name, one in directory.changed.items() if one.when >= listing.listed_at)
        changed = directory.changed = OrderedDict(newer)
        entries = listing.entries
        kept = [
            name
            for name, child in directory.children.items()
            if not (isinstance(child, Directory) and (listed := entries.get(name)) and listed.kind == stat.S_IFDIR)
            and child.holds_unsent()
        ]
        for name in (*changed, *kept):
            child = directory.children.get(name)
            # The kernel may have forgotten the node of a name that this mount made.
            own = child.as_listed() if child is not None else changed[name].listed
            listing.edit(*(one.tail for one in (own, entries.get(name)) if one is not None))
            if own is not None:
                claim(entries, name, own)
            else:
                entries.pop(name, None)

    def lost(self, node: Node) -> None:
        """Detach a node whose name the store does not have any more, or has as something else."""
        if node.gone:
            # This mount removed it while the store was asked: a write must not take the name back.
            return
        parent = node.parent
        if parent is not None and node.nlookup:
            self._core.notifier.inval_entry(parent.ino, node.name)
        node.lost = True
        self._core.nodes.detach(node)

    # -- single nodes and names

    async def probe(self, parent: Directory, name: bytes, read: ObjectVersion | None = None) -> Listed | None:
        """Find out what a name (one_key() holds) is, without a listing: a directory, else a file, else a link. What the
        last listing showed as a file is one as long as its object is there. read: the version that this listing shows,
        if that will be read: it is fetched, which tells the same.
        """
        place, segment = parent.place, segment_of(name)
        before = parent.listing.entries.get(name) if parent.listing is not None else None
        if before is not None and before.kind == stat.S_IFREG and before.tail == segment:
            file = await self._fetched(parent, read) or await self._probe_kind(parent, segment, stat.S_IFREG)
            if file is not None and parent.place == place:
                return file
        found = await each(partial(self._probe_kind, parent, segment), (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK))
        if parent.place != place:
            return await self.probe(parent, name)
        return next((listed for listed in found if listed is not None), None)

    async def _fetched(self, parent: Directory, version: ObjectVersion | None) -> Listed | None:
        """Fetch a file; return what the store says of it, None if this call has not fetched it."""
        info = None
        if version is not None:
            with suppress(StoreError):
                info = await self._core.reader.bring(version)
        if info is None:
            return None
        return Listed(stat.S_IFREG, info.key[len(parent.key) :], info.size, info.etag, info.mtime_ns)

    async def _probe_kind(self, parent: Directory, segment: str, kind: int) -> Listed | None:
        core = self._core
        if kind == stat.S_IFDIR:
            page = await core.store.list_page(parent.key + segment + "/", max_keys=1)
            return Listed(stat.S_IFDIR, segment + "/") if page.objects else None
        tail = segment + (LINK_SUFFIX if kind == stat.S_IFLNK else "")
        key, learn = parent.key + tail, core.known.asking()
        try:
            if not core.settings.full_attributes:
                page = await core.store.list_page(key, max_keys=1)
                found = next((one for one in page.objects if one.key == key), None)
                return Listed(kind, tail, found.size, found.etag, found.mtime_ns) if found is not None else None
            info = await core.store.head(key)
        except (NotFound, KeyTooLong):
            return None
        learn(info)
        return Listed(kind, tail, info.size, info.etag, info.mtime_ns)

    async def head(self, node: Node) -> bool:
        """Ask for a node's version and attributes; return False when it is gone (it is detached then). A directory
        without a marker exists while there are objects below.
        """
        if not node.key:
            return True  # the root of a whole bucket has no object: a HEAD of the key '' would ask for the bucket
        if isinstance(node, Directory) and await self._has_no_marker_still(node):
            return True
        for _ in range(AGAIN_MAX):
            was, learn = node.asked_as, self._core.known.asking()
            answer: ObjectInfo | StoreError
            try:
                answer = await self._core.store.head(node.key)
            except NotFound as error:
                answer = error
            lives = await self._settled(node, was, answer, learn)
            if lives is not None:
                return lives
        return not node.gone

    async def _has_no_marker_still(self, node: Directory) -> bool:
        """Confirm by one request a directory that exists because there are objects below, if it is known as one. Its
        marker would be the first key of a listing. False: a HEAD has to tell.
        """
        if node.marker or not node.attrs_valid or node.parent is None:
            return False
        if self.shown_at(node) is not None:  # then a HEAD alone tells all, and costs less
            return False
        was, started = node.asked_as, self._core.clock.monotonic()
        page = await self._core.store.list_page(node.key, max_keys=1)
        if not page.objects or page.objects[0].key == node.key or node.asked_as != was:
            return False
        facts.without_marker(self._core, node, started)
        return True

    async def _settled(self, node: Node, was: _AskedAs, answer: ObjectInfo | StoreError, learn: _Learn) -> bool | None:
        """Process the answer to a HEAD and return what head() does; None: ask again, because the node has changed."""
        if isinstance(answer, NotFound):
            return await self._missing(node, was)
        if isinstance(answer, StoreError):
            raise answer
        if node.asked_as == was and self.is_replaced(node, answer):
            goes_on = await self._accept(node, answer)
            if not goes_on:
                return goes_on
        if node.asked_as != was:
            return None
        self._take(node, answer, learn)
        return True

    def _take(self, node: Node, info: ObjectInfo, learn: _Learn) -> None:
        """Apply what the store says of a node's object, of which no other version is open."""
        learn(info)
        if not node.dirty:
            facts.headed(self._core, node, info)

    async def _missing(self, node: Node, was: _AskedAs) -> bool | None:
        """Do the same as _settled() when the store has no object of the key."""
        core = self._core
        if node.asked_as != was:
            return None
        if node.dirty:
            return True
        if not isinstance(node, Directory):
            self.lost(node)
            return False
        shown_at = core.clock.monotonic() if node.parent is None else self.shown_at(node)
        if shown_at is None:
            page = await core.store.list_page(node.key, max_keys=1)
            if node.asked_as != was:
                return None
            if not (page.objects or node.holds_unsent()):
                self.lost(node)
                return False
            shown_at = core.clock.monotonic()
        facts.without_marker(core, node, shown_at)
        return True

    def shown_at(self, node: Node) -> float | None:
        """Return when the parent's listing, if fresh, showed the version of a node; None if it does not show it."""
        told = self.believed(node.parent, node.name) if node.parent is not None else None
        listed = told[0].entries.get(node.name) if told is not None else None
        if told is None or listed is None or listed.tail != node.tail:
            return None
        return told[1] if isinstance(node, Directory) or listed.etag == node.etag else None

    def believed(self, directory: Directory, name: bytes) -> tuple[Listing, float] | None:
        """Return the listing and when the store last showed this name in it; None if that is too old."""
        listing = directory.listing
        if listing is None:
            return None
        oldest = self._core.clock.monotonic() - self.ttl(directory)
        told_at = listing.listed_at if listing.listed_at > oldest else listing.told_at(name)
        return (listing, told_at) if told_at > oldest else None

    def is_fresh(self, directory: Directory, when: float) -> bool:
        """Whether what the store said of a directory's entries at `when` (monotonic seconds) is still fresh."""
        return self._core.clock.monotonic() - when < self.ttl(directory)

    def fresh_listing(self, directory: Directory) -> Listing | None:
        """Return the whole listing of a directory, if it is fresh."""
        listing = directory.listing
        return listing if listing is not None and self.is_fresh(directory, listing.listed_at) else None

    def ttl(self, directory: Directory) -> float:
        """How long entries are fresh, in seconds: longer after a slow listing, which would be stale on arrival."""
        ttl = self._core.settings.metadata_ttl_s
        return ttl if directory.listing is None else max(ttl, _SLOW_LISTING * directory.list_s)

    def is_replaced(self, node: Node, seen: Listed | ObjectInfo) -> bool:
        """Whether another client replaced an object while the node's version is in use, so that it has to stay."""
        if seen.etag == node.etag or not node.etag or isinstance(node, Directory) or node.dirty:
            return False
        in_use = node.handles > 0 or node.staged is not None or self._core.settings.open_less
        # With another size, the kernel, or a process that has asked for the size, would read only a part, or zeros.
        free = node.staged is None and not node.pinned and seen.size == node.size
        return in_use and not free

    async def _accept(self, node: Node, seen: Listed | ObjectInfo) -> bool | None:
        """Handle that another client wrote an object that is open here. Return True if it only grew: the node continues
        as the newer version. Else it keeps its version and loses its name, like a file that a rename replaces. Return
        None, for the store to be asked again, if it does not have the newer version any more: a log grows all the time.
        """
        old = node.version()
        # A writer keeps the version that it opened: the kernel decides at which end of it an append goes.
        followable = node.staged is None and not node.writers and 0 < old.size < seen.size
        new = ObjectVersion(old.key, seen.etag, seen.size)
        try:
            if followable and await grew(self._core, old, new):
                if not self._core.notifier.is_local(node.ino):
                    return True
                # A passthrough file must get the appended bytes as well.
                if await self._core.passthrough.grow(node.ino, old, new, self._core.reader.fetch):
                    return True
        except (PreconditionFailed, NotFound):
            return None
        if not node.gone:
            self.lost(node)
        return False
