"""Whether the files whose attributes are asked for one by one are read next, in whatever order (S-152).

A loader that shuffles its list looks up a file and opens it: one GET then brings what a HEAD and a GET would. Whoever
only looks at files gets HEADs again after a few of them. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from ...ops import Ino

_ENOUGH = 8
"""So many in a row were opened before the next one is fetched whole."""
PENDING_MAX = 32
"""Asked for and not opened yet: more are nobody's who reads. Several threads look up before they open."""


class Openings:
    """What became of the last ones."""

    def __init__(self) -> None:
        self._pending: OrderedDict[Ino, None] = OrderedDict()
        self._row = 0

    @property
    def before_opens(self) -> int:
        """So many names are looked up before one of them is opened, by who reads what he looks up."""
        return PENDING_MAX if self._row >= _ENOUGH else 1

    def asked(self, ino: Ino) -> bool:
        """The attributes of a file are asked for; whether it will be read, as far as one can tell."""
        self._pending[ino] = None
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)
            self._row = 0
        return self._row >= _ENOUGH

    def opened(self, ino: Ino) -> None:
        """It was opened to be read."""
        if ino in self._pending:
            del self._pending[ino]
            self._row += 1
