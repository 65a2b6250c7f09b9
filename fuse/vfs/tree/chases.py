"""Opens that lost their file to a rename, and come back for the name.

An open reaches us as a LOOKUP and an OPEN. When a rename replaced the file in between, the answer is ESTALE, upon which
Linux walks the path again, once (do_filp_open). Should the name be replaced again in that moment, the program would see
ESTALE from open(2): so whoever replaces or removes a name lets those pass that are on their way to it.
"""

from __future__ import annotations

import threading
import time

from ...ops import Ino
from .nodes import Node

PATIENCE_S = 1.0
"""Longest wait for an open on its way; the kernel comes back at once, if it comes."""
_Name = tuple[int, bytes]


class Chases:
    """Threads: any. Its lock is a leaf, and nobody waits under another one."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._chased: dict[_Name, dict[int, float]] = {}
        """By name, the threads that are on their way to it, and until when (monotonic seconds) they are waited for."""

    def lost(self, node: Node, thread: int) -> None:
        """An open of this node is sent back; the state lock is held. Of a name that nobody has now it is not waited."""
        if node.parent is None or node.name not in node.parent.children:
            return
        with self._arrived:
            self._chased.setdefault((node.parent.ino, node.name), {})[thread] = time.monotonic() + PATIENCE_S

    def comes_back(self, node: Node, thread: int) -> bool:
        """Whether this thread was sent back from this name a moment ago."""
        if not self._chased or not thread or node.parent is None:
            return False
        with self._arrived:
            until = self._chased.get((node.parent.ino, node.name), {}).get(thread, 0.0)
            return time.monotonic() < until

    def caught(self, node: Node, thread: int) -> None:
        """An open of this node succeeds."""
        if not self._chased or node.parent is None:
            return
        with self._arrived:
            threads = self._chased.get((node.parent.ino, node.name), {})
            if threads.pop(thread, None) is not None and not threads:
                del self._chased[node.parent.ino, node.name]
            self._arrived.notify_all()

    def let_pass(self, parent: Ino, name: bytes) -> None:
        """Wait until those that are on their way to a name have opened it, or their time is over."""
        if not self._chased:
            return
        with self._arrived:
            while threads := self._chased.get((parent, name)):
                left_s = max(threads.values()) - time.monotonic()
                if left_s <= 0:
                    del self._chased[parent, name]
                    return
                self._arrived.wait(left_s)
