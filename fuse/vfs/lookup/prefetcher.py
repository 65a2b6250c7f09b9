"""Guesses what a process will ask for next in a directory: it goes through the names in the order of the listing.

A data loader opens one small file after the other: the next ones are fetched before they are asked for, and a GET
brings the attributes along. A process that only looks names up gets the next attributes by HEADs side by side. Only
names of a fresh listing are guessed at, and only files that the reader takes by one GET are fetched whole.

A loader that shuffles its list looks up a file and opens it: one GET then brings what a HEAD and a GET would (S-152).
Who only looks at files gets HEADs again after a few of them.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from datastore.errors import StoreError

from ...data.smallfiles import SmallFileFetcher
from ...loop import Future
from ...ops import Ino
from ...store.base import ObjectInfo, ObjectVersion, Shown
from ..tree.core import Core
from ..tree.listing import Listed, Listing
from ..tree.nodes import Directory, Node

_DIRECTORIES = 64
"""Directories in which a run is followed at once."""
_ENTRIES_MAX = 100_000
"""Larger listings are not followed: their index would cost more than it saves."""
_JITTER = 32
"""How far ahead of all others an open of a run may be: several threads share one loader's order."""
_BEHIND = 1024
"""How far behind the first of its threads the last one may be."""
_STALLED = 64
"""So many steps behind the furthest one, and none beyond it: that one was no step of this run."""
_STREAK = 3
"""So many steps in order make a run."""
_AHEAD = 64
"""Files, or attributes, fetched ahead at most."""
_CHUNK = 16
"""Asked for together, so that not every open begins a task."""
_BYTES_AHEAD = 48 << 20
_ASKED_MAX = 4096
"""Attributes on their way at most."""
_SHARE = 1000
"""Of a large directory that is looked through."""
_RACY_NS = 1_500_000_000
_ENOUGH = 8
"""So many in a row were opened before the next one is fetched whole."""
PENDING_MAX = 32
"""Asked for and not opened yet: more are nobody's who reads. Several threads look up before they open."""


class _Run:
    """How far a process came in one listing. last: the furthest; horizon: up to where things are under way."""

    __slots__ = ("behind", "horizon", "index", "last", "listing", "names", "streak")

    def __init__(self, listing: Listing) -> None:
        self.names: list[bytes] = []
        self.index: dict[bytes, int] = {}
        self.last = self.horizon = -1
        self.streak = 0
        self.behind = 0
        """Steps since it last came further: of a run by several threads, few."""
        self.follow(listing)

    def follow(self, listing: Listing) -> None:
        """The directory was listed anew: the place in it stays, by name."""
        last = self.names[self.last] if self.last >= 0 else b""
        self.listing = listing
        self.names = sorted(listing.entries)
        self.index = {name: at for at, name in enumerate(self.names)}
        self.horizon = self.last = self.index.get(last, -1)

    def step(self, name: bytes) -> range:
        """The positions to fetch ahead of this one."""
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
        if target - self.horizon <= _CHUNK < target - self.last and target < len(self.names):
            return range(0)
        ahead = range(max(self.horizon, self.last) + 1, target)
        self.horizon = max(self.horizon, target - 1)
        return ahead


class Prefetcher:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._opens: OrderedDict[int, _Run] = OrderedDict()
        self._lookups: OrderedDict[int, _Run] = OrderedDict()
        self._asked: dict[str, Future[bool]] = {}
        """By key, the attributes that are on their way; whether they came."""
        self._files = SmallFileFetcher(core.reader)
        self._pending: OrderedDict[Ino, None] = OrderedDict()
        """Files whose attributes were asked for one by one, and that were not opened since."""
        self._row = 0
        """So many in a row were opened to be read: the next one is likely to be, too."""

    def opened(self, node: Node, *, kept: bool = False) -> None:
        """A file was opened for reading: fetch the next ones of its run. kept: the kernel has its pages."""
        if node.ino in self._pending:
            del self._pending[node.ino]
            self._row += 1
        directory = node.parent
        run = self._run(self._opens, directory) if directory is not None and node.etag and not kept else None
        if run is None or directory is None or not (ahead := run.step(node.name)):
            return
        prefix, wanted, room = directory.key, [], _BYTES_AHEAD - self._files.bytes
        for at in ahead:
            listed = run.listing.entries.get(run.names[at])
            if listed is not None and self._is_small(listed.kind, listed.size) and listed.size <= room:
                room -= listed.size
                wanted.append(ObjectVersion(prefix + listed.tail, listed.etag, listed.size))
        self._files.add(wanted)

    def looked_up(self, directory: Directory, name: bytes) -> None:
        """A name was looked up: ask for the attributes of the next ones, unless their content is on its way anyway."""
        reads = self._opens.get(directory.ino)
        if not self._core.settings.full_attributes or (reads is not None and reads.streak >= _STREAK):
            return
        run = self._run(self._lookups, directory)
        if run is None or not (ahead := run.step(name)):
            return
        # So many names are looked up before one of them is opened, by who reads what he looks up.
        before_opens = PENDING_MAX if self._row >= _ENOUGH else 1
        if run.streak - (reads.streak if reads is not None else 0) > before_opens:
            self._expect(directory, run, run.names[ahead.start : ahead.stop])
        else:
            run.horizon = run.last

    def looked_through(self, directory: Directory, name: bytes) -> None:
        """The entries up to a name are looked at in their order: ask for the attributes of those behind it."""
        run = self._run(self._lookups, directory)
        if run is not None:
            behind = run.index.get(name, len(run.names)) + 1
            self._expect(directory, run, run.names[behind : behind + _SHARE])

    def _expect(self, directory: Directory, run: _Run, names: Sequence[bytes]) -> None:
        entries = run.listing.entries
        self.coming(directory.key, (entries[name] for name in names if name in entries))

    def coming(self, prefix: str, entries: Iterable[Listed]) -> None:
        """Somebody is about to look at these entries of a directory: ask for the attributes that are not known."""
        if not self._core.settings.full_attributes:
            return
        wanted = list[Shown]()
        for listed in entries:
            if listed.kind == stat.S_IFDIR or listed.said is not None or self._may_change(listed.mtime_ns):
                continue
            key = prefix + listed.tail
            if key not in self._asked and self._core.known.known(key, listed.etag, listed.mtime_ns) is None:
                wanted.append(Shown(key, listed.etag))
        wanted = wanted[: max(0, min(_ASKED_MAX - len(self._asked), _SHARE))]
        if wanted:
            futures = [Future[bool]() for _ in wanted]
            self._asked.update(zip((shown.key for shown in wanted), futures, strict=True))
            self._core.loop.background(self._bring(wanted, futures))

    async def told(self, nodes: Iterable[Node]) -> list[Node]:
        """Wait for the attributes of nodes that are on their way; those."""
        waiting = [(node, future) for node in nodes if (future := self._asked.get(node.key)) is not None]
        for _, future in waiting:
            await future
        return [node for node, _ in waiting]

    async def arrive(self, node: Node) -> None:
        """Wait for the attributes of a file, alone or with its content, if they are on their way or likely worth it."""
        future = self._asked.get(node.key)
        if await (self._files.awaited(node.key) if future is None else future):
            return
        self._pending[node.ino] = None
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)
            self._row = 0
        soon = self._row >= _ENOUGH and not self._may_change(node.mtime_ns)
        small = node.etag != "" and self._is_small(node.listed_kind, node.size)
        if soon and small:
            await self._files.brought(node.version())

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

    def _is_small(self, kind: int, size: int) -> bool:
        return kind == stat.S_IFREG and 0 < size <= self._core.reader.settings.whole_bytes

    def _may_change(self, mtime_ns: int) -> bool:
        """What changed a moment ago may change again within that second: an answer could not be kept."""
        return mtime_ns > self._core.clock.time_ns() - _RACY_NS

    async def _bring(self, wanted: Sequence[Shown], futures: Sequence[Future[bool]]) -> None:
        """Ask for attributes; who waits for one is told of it when it is here."""
        learn = self._core.known.asking()

        def ended(number: int, answer: ObjectInfo | StoreError | None = None) -> None:
            if isinstance(answer, ObjectInfo):
                learn(answer)
            if not futures[number].done:
                self._asked.pop(wanted[number].key, None)
                futures[number].set_result(isinstance(answer, ObjectInfo))

        try:
            with suppress(StoreError):  # whoever wants one of them asks again, and is told
                await self._core.store.head_many(wanted, ended)
        finally:
            for number in range(len(wanted)):
                ended(number)
