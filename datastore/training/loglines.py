"""Splits what a replica wrote into lines, as it comes. A carriage return ends a line, too, because a progress bar
writes no other end until it is full."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in several, since a program may never end it."""
_LINE_END = re.compile(rb"(\r*\n|\r+)")


class LineSplitter:
    """Yields the lines of the output of one replica, which is given in parts."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._after_return = False
        """Whether the line before ended with a carriage return, so that a newline that follows is of that end."""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that this part of the output ends."""
        if self._after_return:
            chunk = chunk.lstrip(b"\r")
            self._after_return = not chunk
            chunk = chunk.removeprefix(b"\n")
        *parts, rest = _LINE_END.split(chunk)
        for text, end in zip(parts[::2], parts[1::2], strict=True):
            self._rest += text
            if self._rest or end.endswith(b"\n"):
                yield self._rest.decode(errors="replace")
                self._after_return = not rest and not end.endswith(b"\n")
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > _MAX_LINE_BYTES:
            yield from self.end()

    def end(self) -> Iterator[str]:
        """Yield what follows the last end of a line, if anything does."""
        if self._rest:
            yield self._rest.decode(errors="replace")
            self._rest.clear()
