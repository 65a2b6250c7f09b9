"""Keeps nodes in step with the store.

Lists, asks, and takes in what another client did (docs/SEMANTICS.md S-28 to S-33).
"""

from __future__ import annotations

import errno
import stat
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from datastore.api.names import MARKER
from datastore.errors import KeyTooLong, NotFound, PreconditionFailed, StoreError

from ...ops import FSError
from ...store.base import ETag, ListPage, ObjectInfo, ObjectVersion, Shown
from ..tree import facts
from ..tree.attrs import stands_for_directory
from ..tree.core import Core
from ..tree.growth import grew
from ..tree.listing import NO_ETAG, Listed, Listing, claim, show_as_directories
from ..tree.names import LINK_SUFFIX, segment_of
from ..tree.nodes import Directory, Node
from .pages import Pages

FIRST_PAGES = 4
"""So many pages are asked for at once; a directory with more entries is large."""
_SLOW_LISTING = 2.0
"""A directory is believed for so many times as long as it took to list it, if that is more than the time to live."""
AGAIN_MAX = 100
"""So often is asked again what renames of directories made useless."""
_GUESSED_COST = 4
"""A large directory is taken to cost so many times its first pages until it was listed whole."""
UNLINKED = ".datastore.unlinked/"
"""Below the mount's root, not shown: copies of large files that were removed while open."""
HIDDEN = frozenset((UNLINKED, MARKER))
"""Not shown in the mount's root, and not made there."""
_BEGUN_MAX = 64
"""First pages that nobody has used yet."""
FAR_S = 0.005
"""A directory of the usual size is listed faster by a store that is near."""
_LAST = 4
_TOLD = 2
"""One listing may have taken long for another reason: it was tried again, or this machine was busy."""


_Learn = Callable[[ObjectInfo], None]
_AskedAs = tuple[tuple[int, ...], ETag, int]
"""See Node.asked_as."""


class _Begun(NamedTuple):
    """The first page of a directory that had not been listed yet. took_s: how long it took."""

    page: ListPage | None
    started: float
    took_s: float
    seen: tuple[tuple[int, ...], int]


class Remote:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._begun: dict[int, _Begun] = {}
        self.took_s: deque[float] = deque(maxlen=_LAST)
        """What the last listings took, seconds."""

    @property
    def is_far(self) -> bool:
        """Whether waiting for one more answer of the store costs more than asking for what may not be wanted."""
        return len(self.took_s) >= _TOLD and min(self.took_s) >= FAR_S

    async def begin(self, directory: Directory) -> None:
        """Ask for the entries of a directory that is soon read; of one that turns out to be large, the first page. One
        request after the other: known pages are left to who reads them, side by side. StoreError, FSError.
        """
        core = self._core
        whole = directory.listing is not None and len(directory.listing.spans) <= 1
        if directory.listing is None:
            seen, started = directory.listed_as, core.clock.monotonic()
            page = await core.store.list_page(directory.key, delimiter="/")
            whole, too_old = page.next_token is None, started - core.settings.metadata_ttl_s
            begun = [(ino, one) for ino, one in self._begun.items() if one.started > too_old]
            self._begun = dict(begun[1 - _BEGUN_MAX :])
            self._begun[directory.ino] = _Begun(page, started, core.clock.monotonic() - started, seen)
        if whole:
            await self.read_directory(directory, whole=False)

    async def read_directory(self, directory: Directory, *, whole: bool) -> Listing:
        """Ask for the directory's entries and take them in; whole False stops after the first pages of a large one.
        What was listed while the directory was renamed, or while an entry's old name went, is asked for again.
        """
        for _ in range(AGAIN_MAX):
            listing = await self._read(directory, whole=whole)
            if listing is not None:
                return listing
        raise FSError(errno.EBUSY, f"'{directory.key}' is renamed again and again")

    async def _read(self, directory: Directory, *, whole: bool) -> Listing | None:
        core, seen, had, now = self._core, directory.listed_as, directory.listing, self._core.clock.monotonic()
        begun = self._begun.pop(directory.ino, None)
        if begun is None or begun.seen != seen or had is not None or not self.is_fresh(directory, begun.started):
            begun = _Begun(None, now, 0.0, seen)
        started, hidden = begun.started, HIDDEN if directory is core.nodes.root else frozenset[str]()
        listing = await Pages(core, directory, begun.page).read(started, hidden, None if whole else FIRST_PAGES)
        took_s = core.clock.monotonic() - now + begun.took_s
        self.took_s.append(took_s)
        if directory.listed_as != seen:
            return None
        if listing is None:  # the store shows what it showed before
            if had is None or directory.listing is not had or not all(span.digest for span in had.spans):
                return None
            had.confirmed(started)
            directory.list_s, directory.probe_s = took_s, 0.0
            return had
        newer = directory.listing
        if newer is not None and newer.listed_at > started:
            return newer  # a walk told of it meanwhile, and what we did before that is not kept apart any more
        directory.large = listing.pages > FIRST_PAGES or not listing.complete
        directory.list_s = took_s if listing.complete else took_s * _GUESSED_COST
        directory.probe_s = 0.0
        directory.marker = listing.marker
        if listing.complete:
            await self.settle(self.install(directory, listing), listing.listed_at)
        return listing

    async def settle(self, suspects: list[tuple[Node, Listed]], listed_at: float) -> None:
        """Take in objects of which another client wrote a version while an earlier one is open."""
        for node, listed in suspects:
            if await self._accept(node, listed):
                facts.listed(self._core, node, listed, listed_at)

    def install(self, directory: Directory, listing: Listing) -> list[tuple[Node, Listed]]:
        """Make a listing the directory's own; returns open files that were replaced."""
        if self._core.settings.full_attributes and directory.checked_at <= listing.listed_at:
            facts.listed_itself(self._core, directory, listing)
        show_as_directories(listing.entries, directory.stand_ins)
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
        """What we did after the listing was begun, and what the store has not seen, is right all the same."""
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
            # The kernel may have given up the node of what we made.
            own = child.as_listed() if child is not None else changed[name].listed
            listing.edit(*(one.tail for one in (own, entries.get(name)) if one is not None))
            if own is not None:
                claim(entries, name, own)
            else:
                entries.pop(name, None)

    def lost(self, node: Node) -> None:
        """The store does not have the node's name any more, or has something else there."""
        if node.gone:
            # Removed by ourselves while the store was asked: nobody may give it its name back.
            return
        parent = node.parent
        if parent is not None and node.nlookup:
            self._core.notifier.inval_entry(parent.ino, node.name)
        node.lost = True
        self._core.nodes.detach(node)

    # -- single nodes and names

    async def probe(self, parent: Directory, name: bytes) -> Listed | None:
        """What a name of one_key() is, without listing the directory: a directory before a file before a link."""
        place = parent.place
        kinds = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK)
        found = await self._core.each(partial(self._probe_kind, parent, segment_of(name)), kinds)
        if parent.place != place:
            return await self.probe(parent, name)
        return next((listed for listed in found if listed is not None), None)

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
        if stands_for_directory(key, info.size, info.content_type):
            parent.stand_ins[tail] = (info.etag, info.mtime_ns // 1_000_000_000)
            return Listed(stat.S_IFDIR, tail + "/")
        return Listed(kind, tail, info.size, info.etag, info.mtime_ns)

    async def head(self, node: Node) -> bool:
        """Ask for a node's version and attributes; False when it is gone (it is detached then): a directory without a
        marker lives while objects are below.
        """
        if not node.key:
            return True  # the root of a whole bucket is no object, and a HEAD of '' would be one of the bucket
        for _ in range(AGAIN_MAX):
            was, learn = node.asked_as, self._core.known.asking()
            answer: ObjectInfo | StoreError
            try:
                answer = await self._core.store.head(node.key)
            except NotFound as error:
                answer = error
            lives = await self._settled(node, was, answer, learn)
            if lives is not None:
                return lives and not (node.gone and node.parent is not None and node.tail in node.parent.stand_ins)
        return not node.gone

    async def head_many(self, nodes: list[Node]) -> None:
        """The same of up to 1,000, side by side. The first error is raised after all were asked for."""
        if len(nodes) == 1:
            await self.head(nodes[0])
            return
        for _ in range(AGAIN_MAX):
            if not nodes:
                break
            nodes = await self._head_many(nodes)

    async def _head_many(self, nodes: list[Node]) -> list[Node]:
        """Once; those that were renamed or sent meanwhile."""
        # Of a directory only its entries are listed, not what its own object is.
        shown = [Shown(node.key, NO_ETAG if isinstance(node, Directory) else node.etag) for node in nodes]
        asked = [(node, node.asked_as) for node in nodes]
        learn, again = self._core.known.asking(), list[Node]()
        later: list[tuple[Node, _AskedAs, ObjectInfo | StoreError]] = []
        """What needs the store for more."""

        def take(number: int, answer: ObjectInfo | StoreError) -> None:
            node, was = asked[number]
            if isinstance(answer, ObjectInfo) and node.asked_as == was and not self.is_replaced(node, answer):
                self._take(node, answer, learn)
            else:
                later.append((node, was, answer))

        async def settle(told: tuple[Node, _AskedAs, ObjectInfo | StoreError]) -> None:
            if await self._settled(*told, learn) is None:
                again.append(told[0])

        await self._core.store.head_many(shown, take)
        await self._core.each(settle, later)
        return again

    async def _settled(self, node: Node, was: _AskedAs, answer: ObjectInfo | StoreError, learn: _Learn) -> bool | None:
        """As head, of what the store said; None: the node was renamed or sent meanwhile, which may be newer."""
        if isinstance(answer, NotFound):
            return await self._missing(node, was)
        if isinstance(answer, StoreError):
            raise answer
        if node.asked_as == was and self.is_replaced(node, answer) and not await self._accept(node, answer):
            return False
        if node.asked_as != was:
            return None
        self._take(node, answer, learn)
        return True

    def _take(self, node: Node, info: ObjectInfo, learn: _Learn) -> None:
        """What the store says of a node's object now, which nobody has open as another version."""
        learn(info)
        if node.dirty:
            return
        if node.parent is not None and stands_for_directory(node.tail, info.size, info.content_type):
            node.parent.stand_ins[node.tail] = (info.etag, info.mtime_ns // 1_000_000_000)
            node.parent.forget_listing()
            self.lost(node)
        else:
            facts.headed(self._core, node, info)

    async def _missing(self, node: Node, was: _AskedAs) -> bool | None:
        """As _settled, when the store has no object of the key."""
        core = self._core
        if node.asked_as != was:
            return None
        if node.dirty:
            return True
        if not isinstance(node, Directory):
            self.lost(node)
            return False
        if node.stood_in():
            with suppress(NotFound):
                info = await core.store.head(node.key[:-1])
                if node.asked_as != was:
                    return None
                if stands_for_directory(info.key, info.size, info.content_type):
                    facts.headed(core, node, info)
                    return True
        shown_at = core.clock.monotonic() if node.parent is None else self.shown_at(node)
        if shown_at is None:
            page = await core.store.list_page(node.key, max_keys=1)
            if node.asked_as != was:
                return None
            if not (page.objects or page.common_prefixes or node.holds_unsent()):
                self.lost(node)
                return False
            shown_at = core.clock.monotonic()
        facts.without_marker(core, node, shown_at)
        return True

    def shown_at(self, node: Node) -> float | None:
        """When the believed listing above showed a node as it is here, whatever its attributes; None: it does not."""
        told = self.believed(node.parent, node.name) if node.parent is not None else None
        listed = told[0].entries.get(node.name) if told is not None else None
        if told is None or listed is None or listed.tail != node.tail:
            return None
        return told[1] if isinstance(node, Directory) or listed.etag == node.etag else None

    def believed(self, directory: Directory, name: bytes) -> tuple[Listing, float] | None:
        """The listing, if it is believed of this name, and when the store last showed that."""
        listing = directory.listing
        if listing is None:
            return None
        oldest = self._core.clock.monotonic() - self.ttl(directory)
        told_at = listing.listed_at if listing.listed_at > oldest else listing.told_at(name)
        return (listing, told_at) if told_at > oldest else None

    def is_fresh(self, directory: Directory, when: float) -> bool:
        """Whether what the store said of its entries then (monotonic seconds) is still believed."""
        return self._core.clock.monotonic() - when < self.ttl(directory)

    def fresh_listing(self, directory: Directory) -> Listing | None:
        """The whole listing of a directory, if it is fresh."""
        listing = directory.listing
        return listing if listing is not None and self.is_fresh(directory, listing.listed_at) else None

    def ttl(self, directory: Directory) -> float:
        """How long entries are believed: a listing that takes longer than that would be stale on arrival."""
        ttl = self._core.settings.metadata_ttl_s
        return ttl if directory.listing is None else max(ttl, _SLOW_LISTING * directory.list_s)

    def is_replaced(self, node: Node, seen: Listed | ObjectInfo) -> bool:
        """Whether another client wrote an object of which we hold a version open."""
        if seen.etag == node.etag or not node.etag or isinstance(node, Directory) or node.dirty:
            return False
        in_use = node.handles > 0 or node.staged is not None or self._core.settings.open_less
        # Another size would leave the kernel, and who asked for the size before he reads, with a part or with zeros.
        free = node.staged is None and not node.pinned and seen.size == node.size
        return in_use and not free

    async def _accept(self, node: Node, seen: Listed | ObjectInfo) -> bool:
        """Another client wrote an object that we have open. True: it only grew, and the node goes on as the newer one;
        else it keeps its version and loses its name, as a file does that is replaced by a rename.
        """
        old = node.version()
        # Who writes goes on from what he opened: at which end of it he appends the kernel decides.
        followable = node.staged is None and not node.writers and 0 < old.size < seen.size
        new = ObjectVersion(old.key, seen.etag, seen.size)
        if followable and await grew(self._core, old, new):
            if not self._core.notifier.is_local(node.ino):
                return True
            with suppress(PreconditionFailed, NotFound):  # who reads from a local file has to see what was appended
                if await self._core.passthrough.grow(node.ino, new, self._core.reader.fetch):
                    return True
        if not node.gone:
            self.lost(node)
        return False
