"""Puts a body that comes in pieces of any size together to the pieces of a version. Pure; for one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from datastore.errors import CorruptBody, PreconditionFailed

from ..store.base import Body, ObjectInfo, ObjectVersion
from .pieces import Piece


@dataclass(eq=False, repr=False)
class Assembly:
    """The sink (store/base.py) of one GET for adjoining pieces; done(piece, body) is called once for each, in order."""

    _pieces: list[Piece]
    _done: Callable[[Piece, Body], None]
    _finished: int = 0
    """So many pieces are done, in this attempt or an earlier one."""
    _at: int = 0
    _buffer: bytearray | None = None
    _filled: int = 0

    @property
    def missing(self) -> list[Piece]:
        """The pieces that are not done."""
        return self._pieces[self._finished :]

    def take(self, info: ObjectInfo, offset: int, body: Body) -> None:
        """More of the body; offset 0 begins anew. Errors: PreconditionFailed for another version, CorruptBody."""
        check_version(self._pieces[0].version, info)
        if offset == 0:
            self._at = self._filled = 0
            self._buffer = None
        view = memoryview(body)
        while view:
            view = self._fill(view)

    def check(self) -> None:
        """All has come. Errors: CorruptBody."""
        if self.missing:
            raise _wrong_length(self._pieces, "ended too early")

    def _fill(self, view: memoryview) -> memoryview:
        """Put the beginning of `view` into the present piece; the rest of it."""
        if self._at == len(self._pieces):
            raise _wrong_length(self._pieces, "is longer than asked for")
        piece = self._pieces[self._at]
        part = view[: piece.size - self._filled]
        if len(part) == piece.size and len(part) == len(view):
            self._complete(piece, view)  # cut as we need it: nobody else has it, so it is not copied
            return view[:0]
        if self._buffer is None:
            self._buffer = bytearray(piece.size)
        self._buffer[self._filled : self._filled + len(part)] = part
        self._filled += len(part)
        if self._filled == piece.size:
            body, self._buffer, self._filled = self._buffer, None, 0
            self._complete(piece, body)
        return view[len(part) :]

    def _complete(self, piece: Piece, body: Body) -> None:
        self._at += 1
        if self._at > self._finished:
            self._finished = self._at
            self._done(piece, body)


def check_version(version: ObjectVersion, info: ObjectInfo) -> None:
    """Errors: PreconditionFailed, of a server that ignores If-Match."""
    if info.etag and info.etag != version.etag:
        raise PreconditionFailed(f"'{version.key}' was replaced while it was read", key=version.key)


def runs(pieces: Iterable[Piece], limit_bytes: int) -> Iterator[list[Piece]]:
    """Ascending pieces in lists of adjoining ones, each of at most limit_bytes (or one piece)."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (run[-1].stop != piece.start or piece.stop - run[0].start > limit_bytes):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _wrong_length(pieces: list[Piece], what: str) -> CorruptBody:
    key = pieces[0].version.key
    return CorruptBody(f"bytes {pieces[0].start}-{pieces[-1].stop - 1} of '{key}': the body {what}", key=key)
