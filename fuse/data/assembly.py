"""Splits the body of a GET, which arrives in parts, into the pieces of an object version. Pure; for one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from datastore.errors import CorruptBody, PreconditionFailed

from ..store.base import Body, ObjectInfo, ObjectVersion
from .pieces import Piece


class Assembly:
    """The sink (store/base.py) of one GET for adjoining pieces; done(piece, body) is called once for each, in order.
    A part of the body has whole pieces: both end at whole MiB of the object, or where the range ends."""

    def __init__(self, run: list[Piece], done: Callable[[Piece, Body], None]) -> None:
        self.missing = run
        """The pieces for which done() was not called yet, in this attempt of the GET or an earlier one."""
        self._done = done
        self._version, self._start, self._stop = run[0].version, run[0].start, run[-1].stop

    def take(self, info: ObjectInfo, offset: int, body: Body) -> None:
        """Take a part of the body; offset 0 (the start of the range) begins a new attempt.
        Errors: PreconditionFailed when the answer is of another version, CorruptBody when the body is too long."""
        check_version(self._version, info, part=self._stop - self._start < self._version.size)
        at = self._start + offset
        end = at + len(body)
        if end > self._stop:
            raise self._wrong_length("is longer than asked for")
        while self.missing and self.missing[0].stop <= end:
            piece, self.missing = self.missing[0], self.missing[1:]
            self._done(piece, memoryview(body)[piece.start - at : piece.stop - at])

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
