"""The attributes of many nodes at once: one call of the store for all, then what single ones need besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from datastore.errors import NotFound, StoreError

from ...store.base import ETag, ObjectInfo, Shown
from ...store.limits import MAX_HEAD_KEYS
from ..tree import facts
from ..tree.core import Core
from ..tree.nodes import Directory, Node
from .prefetcher import Prefetcher
from .remote import AGAIN_MAX, Remote, Was, was_of
from .walks import Walks

_MANY = 256
"""Who wants the attributes of more at once looks through a whole directory."""


async def make_exact(
    core: Core, remote: Remote, prefetcher: Prefetcher, walks: Walks, inexact: Callable[[], list[Node]]
) -> None:
    """Fetch the attributes of nodes of one directory, in its order. inexact: of which they are not known yet."""
    wanted = inexact()
    if await walks.confirm([node for node in wanted if isinstance(node, Directory)]):
        wanted = inexact()
    files = [node for node in wanted if not isinstance(node, Directory)]
    if len(files) > _MANY:
        parent = files[-1].parent
        if parent is not None:
            prefetcher.looked_through(parent, files[-1].name)
    told = await prefetcher.told(files)
    if told:
        for node in told:
            facts.recalled(core, node)
        wanted = inexact()
    if len(wanted) == 1:
        await remote.head(wanted[0])
    elif wanted:
        await head_many(core, remote, wanted)


async def head_many(core: Core, remote: Remote, nodes: Sequence[Node]) -> None:
    """Remote.head() of each. The first error is raised after all were asked for."""
    for first in range(0, len(nodes), MAX_HEAD_KEYS):
        left = list(nodes[first : first + MAX_HEAD_KEYS])
        for _ in range(AGAIN_MAX):
            left = await _Asked(core, remote, left).ask()
            if not left:
                break


class _Asked:
    """Nodes as they were when the store was asked."""

    def __init__(self, core: Core, remote: Remote, nodes: Sequence[Node]) -> None:
        self._core = core
        self._remote = remote
        self._nodes: list[tuple[Node, str, Was]] = [(node, node.key, was_of(node)) for node in nodes]
        self._again: list[Node] = []
        self._later: list[tuple[int, ObjectInfo | None]] = []
        self._failure: StoreError | None = None
        self._learn = core.known.asking()

    async def ask(self) -> list[Node]:
        """Take in what the store says; those that were renamed or sent meanwhile. StoreError, when all have ended."""
        shown = [_shown(node, key) for node, key, _ in self._nodes]
        await self._core.store.head_many(shown, self._take)
        await self._core.each(self._settle, self._later)
        if self._failure is not None:
            raise self._failure
        return self._again

    def _take(self, number: int, answer: ObjectInfo | StoreError) -> None:
        """What needs the store for more waits until all answers are here."""
        if isinstance(answer, NotFound):
            self._later.append((number, None))
            return
        if isinstance(answer, StoreError):
            self._failure = self._failure or answer
            return
        node, _, was = self._nodes[number]
        applied = self._remote.found_now(node, answer, was)
        if applied is None:
            self._again.append(node)
        elif applied:
            self._learn(answer)
        else:
            self._later.append((number, answer))

    async def _settle(self, one: tuple[int, ObjectInfo | None]) -> None:
        number, info = one
        node, key, was = self._nodes[number]
        if info is None:
            lives = await self._remote.missing(node, key, was)
        else:
            lives = await self._remote.found(node, info, was)
        if lives is None:
            self._again.append(node)
        elif lives and info is not None:
            self._learn(info)


def _shown(node: Node, key: str) -> Shown:
    """Of a directory only its entries are listed, not what its own object is."""
    return Shown(key, ETag("") if isinstance(node, Directory) else node.etag)
