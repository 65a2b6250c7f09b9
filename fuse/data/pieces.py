"""The ranges of objects ("pieces") that are in memory or being fetched; all readers of a range share one fetch.

The caller that first requests a range gets new pieces for it. It begins to fetch them at once, and each is finished or
failed in the end; every reader of the range awaits the same pieces. A failed piece is taken out of the table before its
waiters get the error. Does no I/O. For the event loop's thread; a pool thread (lane) reads only a piece's range and
version, and its bytes once it is done, none of which change.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter

from ..loop import Future
from ..store.base import Body, ObjectVersion
from .extents import on_grid


class Piece(Future[memoryview]):
    """The range [start, stop) of a version. Awaiting it gives its bytes, or raises the error of its fetch."""

    def __init__(self, version: ObjectVersion, start: int, stop: int) -> None:
        self.version = version
        self.start = start
        self.stop = stop
        self.size = stop - start
        self.kept = False

    def set_kept(self) -> None:
        """Note that the disk cache has the piece too."""
        self.kept = True


class PieceTable:
    """All pieces, within a limit of memory. INVARIANT: the pieces of a version are sorted and disjoint.

    INVARIANT: held_bytes is the sum of the sizes of all pieces, _settled_bytes that of the pieces that have arrived.
    INVARIANT: after each call, held_bytes exceeds the limit only if no piece in the table has arrived.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        """The bytes of all pieces, whether they have arrived or are being fetched."""
        self._settled_bytes = 0
        self._by_version: dict[ObjectVersion, list[Piece]] = {}
        self._settled: OrderedDict[Piece, None] = OrderedDict()
        """The pieces that have arrived, the least recently used first."""

    def find(self, version: ObjectVersion, start: int, stop: int) -> memoryview | bytes | None:
        """Return the bytes of [start, stop) if all have arrived, else None. A piece that has them all is not copied."""
        pieces, at = self._covering(version, start, stop), start
        for piece in pieces:
            if piece.start > at or not piece.done:
                return None
            at = piece.stop
        if at < stop:
            return None
        for piece in pieces:
            self._settled.move_to_end(piece)
        return cut(pieces, start, stop)

    def request(self, version: ObjectVersion, start: int, stop: int, step: int) -> tuple[list[Piece], list[Piece]]:
        """Return (the pieces that together cover [start, stop), the new ones among them), both ascending.
        New pieces fill the gaps, cut at multiples of `step` bytes; the caller has to fetch them."""
        pieces, at = self._covering(version, start, stop), start
        gaps = list[tuple[int, int]]()
        for piece in pieces:
            gaps += on_grid(at, piece.start, step)
            at = piece.stop
        fresh = [Piece(version, *gap) for gap in (*gaps, *on_grid(at, stop, step))]
        self._insert(version, fresh)
        return sorted(pieces + fresh, key=_stop), fresh

    def claim(self, version: ObjectVersion) -> Piece | None:
        """Return a new piece of the whole version, which the caller has to fetch; None if any piece of it exists."""
        if version in self._by_version:
            return None
        piece = Piece(version, 0, version.size)
        self._insert(version, [piece])
        return piece

    def has_room(self, size_bytes: int) -> bool:
        """Whether a fetch of another `size_bytes` would leave half of the memory to pieces that have arrived."""
        return self.held_bytes - self._settled_bytes + size_bytes <= self.half_bytes

    def finish(self, piece: Piece, body: Body) -> None:
        """Give a piece its bytes; it is neither finished nor failed yet."""
        piece.set_result(memoryview(body))
        self._settled[piece] = None
        self._settled_bytes += piece.size
        self._shrink()

    def fail(self, piece: Piece, error: BaseException) -> None:
        """Take out a piece that could not be fetched, and give its waiters the error; the next reader fetches again."""
        self._take_out(piece)
        piece.set_error(error)

    def passed(self, version: ObjectVersion, start: int, stop: int) -> None:
        """Drop the pieces of [start, stop) that the disk cache has too, because a sequential reader is past them."""
        for piece in self._covering(version, start, stop):
            if piece.kept and piece.stop <= stop:
                self._let_go(piece)

    def limit(self, limit_bytes: int) -> None:
        """Set another limit."""
        self._limit_bytes = limit_bytes
        self._shrink()

    @property
    def half_bytes(self) -> int:
        """Half of the limit."""
        return self._limit_bytes // 2

    def _covering(self, version: ObjectVersion, start: int, stop: int) -> list[Piece]:
        """Return the pieces that share a byte with [start, stop), ascending."""
        pieces = self._by_version.get(version)
        if not pieces:
            return []
        first = bisect_right(pieces, start, key=_stop)
        last = first
        while last < len(pieces) and pieces[last].start < stop:
            last += 1
        return pieces[first:last]

    def _insert(self, version: ObjectVersion, fresh: list[Piece]) -> None:
        if not fresh:
            return
        pieces = self._by_version.setdefault(version, [])
        for piece in fresh:
            pieces.insert(bisect_right(pieces, piece.start, key=_stop), piece)
            self.held_bytes += piece.size
        self._shrink()

    def _shrink(self) -> None:
        while self.held_bytes > self._limit_bytes and self._settled:
            self._let_go(next(iter(self._settled)))

    def _let_go(self, piece: Piece) -> None:
        """Take out a piece that has arrived; a caller that has the piece can still await it."""
        del self._settled[piece]
        self._settled_bytes -= piece.size
        self._take_out(piece)

    def _take_out(self, piece: Piece) -> None:
        pieces = self._by_version[piece.version]
        del pieces[bisect_left(pieces, piece.stop, key=_stop)]
        if not pieces:
            del self._by_version[piece.version]
        self.held_bytes -= piece.size


def cut(pieces: list[Piece], start: int, stop: int) -> memoryview | bytes:
    """Return the bytes of [start, stop) from arrived, adjoining pieces that cover it; one piece is not copied."""
    parts = [piece.result()[max(start - piece.start, 0) : stop - piece.start] for piece in pieces]
    return parts[0] if len(parts) == 1 else b"".join(parts)


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


_stop = attrgetter("stop")
