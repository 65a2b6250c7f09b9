"""Assembles the pieces of an object version from a body that arrives in parts of any size. Pure; for one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from datastore.errors import CorruptBody, PreconditionFailed

from ..store.base import Body, ObjectInfo, ObjectVersion
from .pieces import Piece


@dataclass(eq=False, repr=False)
class Assembly:
    """The sink (store/base.py) of one GET for adjoining pieces; done(piece, body) is called once for each, in order."""

    missing: list[Piece]
    """The pieces for which done() was not called yet, in this attempt of the GET or an earlier one."""
    _done: Callable[[Piece, Body], None]
    _buffer: bytearray | None = None
    """The bytes of the first missing piece, if they come in several parts."""

    def __post_init__(self) -> None:
        self._version = self.missing[0].version
        self._start, self._stop = self.missing[0].start, self.missing[-1].stop

    def take(self, info: ObjectInfo, offset: int, body: Body) -> None:
        """Take a part of the body; offset 0 (the start of the range) begins a new attempt.
        Errors: PreconditionFailed when the answer is of another version, CorruptBody when the body is too long."""
        check_version(self._version, info, part=self._stop - self._start < self._version.size)
        at, view = self._start + offset, memoryview(body)
        if at + len(view) > self._stop:
            raise self._wrong_length("is longer than asked for")
        while self.missing:
            piece = self.missing[0]
            at, view = max(at, piece.start), view[max(piece.start - at, 0) :]
            part = view[: piece.stop - at]
            whole: Body = part  # the sink owns these bytes: a part that is exactly one piece is not copied
            if not part:
                return
            if len(part) < piece.size or len(part) < len(view):
                whole = self._buffer = self._buffer or bytearray(piece.size)
                whole[at - piece.start : at - piece.start + len(part)] = part
            at, view = at + len(part), view[len(part) :]
            if at < piece.stop:
                return
            self._buffer, self.missing = None, self.missing[1:]
            self._done(piece, whole)

    def check(self) -> None:
        """Check that the body is complete. Errors: CorruptBody when it ended too early."""
        if self.missing:
            raise self._wrong_length("ended too early")

    def _wrong_length(self, what: str) -> CorruptBody:
        key = self._version.key
        return CorruptBody(f"bytes {self._start}-{self._stop - 1} of '{key}': the body {what}", key=key)


def check_version(version: ObjectVersion, info: ObjectInfo, *, part: bool) -> None:
    """Check that an answer is of this version. part: it has a part of the object, and so says the size of the whole.
    Errors: PreconditionFailed if not: the server has ignored If-Match, or said another size of the ETag before."""
    if (info.etag and info.etag != version.etag) or (part and info.size != version.size):
        raise PreconditionFailed(f"'{version.key}' was replaced while it was read", key=version.key)


def runs(pieces: Iterable[Piece], limit_bytes: int) -> Iterator[list[Piece]]:
    """Yield ascending pieces in lists of adjoining pieces; a list has at most limit_bytes, or is a single piece."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (run[-1].stop != piece.start or piece.stop - run[0].start > limit_bytes):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
