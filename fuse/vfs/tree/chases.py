"""Opens that lost their file to a rename, and come back for the name.

An open reaches us as a LOOKUP and an OPEN. When a rename replaced the file in between, the answer is ESTALE, upon which
Linux walks the path again, once (do_filp_open). Should the name be replaced again in that moment, the program would see
ESTALE from open(2): so whoever replaces or removes a name lets those pass that are on their way to it.
"""

from __future__ import annotations

from ...loop import Loop
from ...ops import Ino
from .nodes import Node

PATIENCE_S = 1.0
"""Longest wait for an open on its way; the kernel comes back at once, if it comes."""
_LOOK_S = 0.002
"""How often it is looked whether it was there: hardly ever is anybody waited for."""


class Chases:
    """Of one mount. A thread is one of the program that opens."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._chased: dict[tuple[int, bytes], dict[int, float]] = {}
        """By name, the threads that are on their way to it, and until when (the loop's clock) they are waited for."""

    def lost(self, node: Node, thread: int) -> None:
        """An open of this node is sent back. Of a name that nobody has now it is not waited."""
        if node.parent is not None and node.name in node.parent.children:
            chased = self._chased.setdefault((node.parent.ino, node.name), {})
            chased[thread] = self._loop.clock() + PATIENCE_S

    def comes_back(self, node: Node, thread: int) -> bool:
        """Whether this thread was sent back from this name a moment ago."""
        if not self._chased or not thread or node.parent is None:
            return False
        return self._loop.clock() < self._chased.get((node.parent.ino, node.name), {}).get(thread, 0.0)

    def caught(self, node: Node, thread: int) -> None:
        """An open of this node succeeds."""
        if self._chased and node.parent is not None:
            threads = self._chased.get((node.parent.ino, node.name), {})
            if threads.pop(thread, None) is not None and not threads:
                del self._chased[node.parent.ino, node.name]

    async def let_pass(self, parent: Ino, name: bytes) -> None:
        """Wait until those that are on their way to a name have opened it, or their time is over."""
        while max(self._chased.get((parent, name), {}).values(), default=0.0) > self._loop.clock():
            await self._loop.sleep(_LOOK_S)
        self._chased.pop((parent, name), None)
