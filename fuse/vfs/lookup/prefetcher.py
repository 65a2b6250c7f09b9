"""Prefetches files or attributes for a process that visits the names of a directory in the order of the listing.

For a data loader that opens one small file after the other, the next files are fetched before they are opened, and a
GET brings the attributes along. For a process that only looks names up, the next attributes are requested by parallel
HEADs. Only names in the directory's listing are prefetched, and whole files only if the reader takes them by one GET.

A loader that shuffles its list looks up a file and opens it: one GET then brings what a HEAD and a GET would (S-152).
For a process that only looks files up this ends after PENDING_MAX of them: HEADs are sent again.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from datastore.errors import StoreError

from ...data import readahead
from ...data.smallfiles import SmallFileFetcher
from ...loop import Future, each
from ...ops import Ino
from ...store.base import ObjectVersion
from ..tree.core import Core
from ..tree.listing import Listed, Listing
from ..tree.names import one_key
from ..tree.nodes import Directory, Node
from .remote import Remote

_DIRECTORIES = 64
"""The number of directories in which runs are followed at the same time."""
_ENTRIES_MAX = 100_000
"""Larger listings are not followed: their index would cost more than it saves."""
_JITTER = 32
"""How many places a step may go beyond the furthest step of a run: the threads of a loader share one order."""
_BEHIND = 1024
"""How many places a step may be behind the furthest step: the slowest thread of the loader."""
_STALLED = 64
"""After this many steps behind the furthest step, and none beyond it, the furthest step was not part of the run."""
_STREAK = 3
"""How many steps in order count as a run."""
_AHEAD = 64
"""The most files, or attributes of files, that are fetched ahead."""
_CHUNK = 16
"""How many are requested together, so that not every open begins a task."""
_BYTES_AHEAD = 48 << 20
_ASKED_MAX = 4096
"""The most files whose attributes are on their way."""
_SHARE = 1000
"""The most attributes that are asked for at once."""
_RACY_NS = 1_500_000_000
_ENOUGH = 8
"""How many files must be opened in a row after their lookup before the next one is fetched whole at its lookup."""
PENDING_MAX = 32
"""How many files may be looked up and not opened yet, as by a reader's threads; with more, they won't be opened."""


class _Run:
    """A run: steps of a process through one listing. last: the furthest place; horizon: the last place prefetched."""

    __slots__ = ("behind", "horizon", "index", "last", "listing", "names", "streak")

    def __init__(self, listing: Listing) -> None:
        self.names: list[bytes] = []
        self.index: dict[bytes, int] = {}
        self.last = self.horizon = -1
        self.streak = 0
        self.behind = 0
        """How many steps in a row were behind the furthest one; few in a run by several threads."""
        self.follow(listing)

    def follow(self, listing: Listing) -> None:
        """Continue in a new listing of the directory, at the name that was the furthest place."""
        last = self.names[self.last] if self.last >= 0 else b""
        self.listing = listing
        self.names = sorted(listing.entries)
        self.index = {name: at for at, name in enumerate(self.names)}
        self.horizon = self.last = self.index.get(last, -1)

    def step(self, name: bytes) -> range:
        """Take a step to a name; return the places to prefetch."""
        at = self.index.get(name)
        if at is None or at == self.last:
            return range(0)
        self.behind = self.behind + 1 if at < self.last else 0
        if self.last - _BEHIND <= at <= self.last + _JITTER and self.behind < _STALLED:
            self.streak += 1
            self.last = max(self.last, at)
        else:
            self.streak, self.behind, self.last, self.horizon = 0, 0, at, at
        if self.streak < _STREAK:
            return range(0)
        target = min(len(self.names), self.last + 1 + min(_AHEAD, 4 * self.streak))
        ahead = range(max(self.horizon, self.last) + 1, target)
        if len(ahead) < _CHUNK < target - self.last and target < len(self.names):
            return range(0)
        self.horizon = max(self.horizon, target - 1)
        return ahead

    def listed(self, places: range) -> Iterator[Listed]:
        """Return the entries at these places, except those that this mount has removed in the meantime."""
        entries = self.listing.entries
        return (entries[name] for name in self.names[places.start : places.stop] if name in entries)


class Prefetcher:
    def __init__(self, core: Core, remote: Remote) -> None:
        self._core = core
        self._remote = remote
        self._opens: OrderedDict[int, _Run] = OrderedDict()
        self._lookups: OrderedDict[int, _Run] = OrderedDict()
        self._asked: dict[str, Future[bool]] = {}
        """By key, a future for attributes that are on their way; its result is whether they came."""
        self._files = SmallFileFetcher(core.reader)
        self._pending: OrderedDict[tuple[Ino, bytes], None] = OrderedDict()
        """Files, by directory and name, that were looked up without attributes on their way, and not opened since."""
        self._row = 0
        """How many of these files were opened in a row: the next one that is looked up is likely to be opened, too."""

    def opened(self, node: Node, *, kept: bool = False) -> None:
        """Note that a file was opened for reading; fetch the next files of its run. kept: the kernel has its pages."""
        directory = node.parent
        if directory is None:
            return
        if (place := (directory.ino, node.name)) in self._pending:
            del self._pending[place]
            self._row += 1
        if kept or (run := self._run(self._opens, directory)) is None:
            return
        prefix, wanted, room = directory.key, [], _BYTES_AHEAD - self._files.bytes
        for listed in run.listed(run.step(node.name)):
            version = ObjectVersion(prefix + listed.tail, listed.etag, listed.size)
            if self._is_small(listed.kind, version) and version.size <= room:
                room -= version.size
                wanted.append(version)
        self._files.add(wanted, self._remote.width)

    def looked_up(self, directory: Directory, name: bytes) -> None:
        """Note that a name was looked up, and ask for the next attributes, unless the content is being prefetched."""
        reads = self._opens.get(directory.ino)
        if not self._core.settings.full_attributes or (reads is not None and reads.streak >= _STREAK):
            return
        run = self._run(self._lookups, directory)
        if run is None or not (ahead := run.step(name)):
            return
        # How many names a process that opens what it looks up may look up before it opens one.
        before_opens = PENDING_MAX if self._row >= _ENOUGH else 1
        if run.streak - (reads.streak if reads is not None else 0) > before_opens:
            self.coming(directory.key, run.listed(ahead))
        else:
            run.horizon = run.last

    def coming(self, prefix: str, entries: Iterable[Listed]) -> None:
        """Ask for unknown attributes of entries of a directory that will be looked at soon. prefix: its key."""
        if not self._core.settings.full_attributes:
            return
        wanted = list[str]()
        for listed in entries:
            if listed.kind == stat.S_IFDIR or listed.said is not None or self._may_change(listed.mtime_ns):
                continue
            key = prefix + listed.tail
            if key not in self._asked and self._core.known.known(key, listed.etag, listed.mtime_ns) is None:
                wanted.append(key)
        wanted = wanted[: max(0, min(_ASKED_MAX - len(self._asked), _SHARE))]
        if wanted:
            futures = [Future[bool]() for _ in wanted]
            self._asked.update(zip(wanted, futures, strict=True))
            self._core.loop.background(self._bring(wanted, futures))

    async def told(self, nodes: Iterable[Node]) -> list[Node]:
        """Wait for the attributes that are on their way; return the nodes that they belong to."""
        waiting = [(node, future) for node in nodes if (future := self._asked.get(node.key)) is not None]
        for _, future in waiting:
            await future
        return [node for node, _ in waiting]

    async def arrive(self, node: Node) -> None:
        """Wait for a file's attributes if they, or its content, are on the way; else fetch it if an open is likely."""
        future = self._asked.get(node.key)
        if await (self._files.awaited(node.key) if future is None else future):
            return
        soon = node.parent is not None and self._opens_soon(node.parent, node.name)
        if soon and not self._may_change(node.mtime_ns) and self._is_small(node.listed_kind, node.version()):
            await self._files.brought(node.version())

    def opens_next(self, directory: Directory, name: bytes) -> Listed | None:
        """Return the entry of a listed file that is looked up, and will probably be opened next; else None."""
        listing = directory.listing
        listed = listing.entries.get(name) if listing is not None and self._core.settings.full_attributes else None
        if listed is None or listed.kind != stat.S_IFREG or not one_key(name):
            return None
        return listed if self._opens_soon(directory, name) else None

    def unread(self, directory: Directory, listed: Listed) -> ObjectVersion | None:
        """Return the version of a listed file that a reader would take by one GET. None: by more, or it is held or on
        its way.
        """
        version = ObjectVersion(directory.key + listed.tail, listed.etag, listed.size)
        if self._may_change(listed.mtime_ns) or not self._is_small(listed.kind, version):
            return None
        coming = version.key in self._files or self._core.reader.held(version, 0, 1) is not None
        return None if coming else version

    def _opens_soon(self, directory: Directory, name: bytes) -> bool:
        """Note that a file is looked up; return whether it will probably be opened next."""
        self._pending[directory.ino, name] = None
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)
            self._row = 0
        return self._row >= _ENOUGH

    def _run(self, runs: OrderedDict[int, _Run], directory: Directory) -> _Run | None:
        listing = directory.listing
        if listing is None or not _JITTER // 4 <= len(listing.entries) <= _ENTRIES_MAX:
            return None
        run = runs.get(directory.ino)
        if run is None:
            run = runs[directory.ino] = _Run(listing)
            if len(runs) > _DIRECTORIES:
                runs.popitem(last=False)
        elif run.listing is not listing:
            run.follow(listing)
        return run

    def _is_small(self, kind: int, version: ObjectVersion) -> bool:
        """Whether a reader would take a version by one GET; not so where it is not in the store yet."""
        small = 0 < version.size <= readahead.WHOLE_BYTES
        return kind == stat.S_IFREG and small and version.etag != ""

    def _may_change(self, mtime_ns: int) -> bool:
        """Whether an object has just changed: it may change again within that second, so no answer could be kept."""
        return mtime_ns > self._core.clock.time_ns() - _RACY_NS

    async def _bring(self, wanted: Sequence[str], futures: Sequence[Future[bool]]) -> None:
        """Ask for attributes, and resolve the future of each object when its answer is here."""
        learn = self._core.known.asking()
        left = dict(zip(wanted, futures, strict=True))

        async def ask(key: str) -> None:
            came = False
            try:
                learn(await self._core.store.head(key))
                came = True
            except StoreError as error:
                if error.transient:
                    raise
            finally:
                del self._asked[key]
                left.pop(key).set_result(came)

        try:
            with suppress(StoreError):  # a lookup that needs an object asks again, and gets the error
                await each(ask, wanted, self._remote.width)
        finally:
            for key, future in left.items():
                del self._asked[key]
                future.set_result(False)
