"""The directories that are being read."""

from __future__ import annotations

import time

from ..ops import DirBudget
from . import calls
from .client import Client, Credentials
from .nodes import Node

LISTING_BYTES = 64 << 10
"""The size of the answer that a READDIRPLUS asks for."""


class Listing:
    """A directory that is being read: the entries that the server has sent and the kernel has not read yet.

    resumed: an earlier process opened the directory.
    """

    __slots__ = ("_at", "_end", "_lines", "_read_at", "_verifier")

    def __init__(self, *, resumed: bool) -> None:
        self._at = 0
        """The cookie after which `_lines` begin."""
        self._lines: list[calls.Line] = []
        self._end = False
        self._read_at = 0.0
        self._verifier: int | None = None if resumed else 0
        """The cookie verifier; None if it is not known: then the server is asked for it."""

    def after(
        self, client: Client, node: Node, identity: Credentials, offset: int, budget: DirBudget, ttl_s: float
    ) -> list[calls.Line]:
        """Return the entries after this cookie that fit the budget, none of them older than ttl_s."""
        stale = time.monotonic() - self._read_at > ttl_s
        if offset != self._at or stale or (not self._lines and not self._end):
            if self._verifier is None and offset:
                self._verifier = client.call(calls.readdir(node.handle, 0, 0, LISTING_BYTES), identity).verifier
            verifier = self._verifier if offset and self._verifier else 0
            answer = client.call(calls.readdir(node.handle, offset, verifier, LISTING_BYTES), identity)
            self._lines, self._end, self._verifier = answer.lines, answer.end, answer.verifier
            self._at, self._read_at = offset, time.monotonic()
        taken = 0
        while taken < len(self._lines) and budget.take(len(self._lines[taken].name)):
            taken += 1
        return self._lines[:taken]

    def passed(self, lines: list[calls.Line]) -> None:
        """Drop entries that after() returned, when nothing can fail any more: an interrupted caller repeats its cookie,
        and the server is asked again."""
        del self._lines[: len(lines)]
        if lines:
            self._at = lines[-1].cookie
