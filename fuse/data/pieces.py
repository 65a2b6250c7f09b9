"""The ranges of objects that memory holds or that are on their way, each fetched once whoever asks.

A piece is registered by whoever first wants its range, and has to be fetched from then on: whoever registers it begins
that at once, and it is finished or failed in the end. All who want it await it. A failed piece is gone from the table
before its waiters learn of it. Does no I/O. On the loop; what a lane may look at of a piece never changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from operator import attrgetter

from ..loop import Future
from ..store.base import Body, ObjectVersion
from .extents import on_grid


class Piece(Future[memoryview]):
    """One range [start, stop) of a version; `await` it for its bytes, or for what its fetch failed with."""

    def __init__(self, version: ObjectVersion, start: int, stop: int) -> None:
        self.version = version
        self.start = start
        self.stop = stop
        self.size = stop - start
        self.kept = False

    def set_kept(self) -> None:
        """The disk cache has it as well."""
        self.kept = True


class PieceTable:
    """INVARIANT: the pieces of a version are sorted and disjoint.
    INVARIANT: held_bytes is the sum of the sizes of all its pieces, _settled_bytes of those that have arrived.
    INVARIANT: after each call, held_bytes exceeds the limit only by unsettled pieces.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        """Held and on their way."""
        self._settled_bytes = 0
        self._by_version: dict[ObjectVersion, list[Piece]] = {}
        self._settled: OrderedDict[Piece, None] = OrderedDict()
        """Least recently used first."""

    def find(self, version: ObjectVersion, start: int, stop: int) -> memoryview | bytes | None:
        """The bytes of [start, stop) when memory has them all; without copying when one piece has them."""
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
        """(pieces that together cover [start, stop), those of them that are new); both ascending.

        Gaps become new pieces, for the caller to fetch, cut at multiples of `step` bytes.
        """
        pieces, at = self._covering(version, start, stop), start
        gaps = list[tuple[int, int]]()
        for piece in pieces:
            gaps += on_grid(at, piece.start, step)
            at = piece.stop
        fresh = [Piece(version, *gap) for gap in (*gaps, *on_grid(at, stop, step))]
        self._insert(version, fresh)
        return sorted(pieces + fresh, key=_stop), fresh

    def claim(self, version: ObjectVersion) -> Piece | None:
        """A whole version as a new piece, the caller's to finish; None: some of it is there or on its way."""
        if version in self._by_version:
            return None
        piece = Piece(version, 0, version.size)
        self._insert(version, [piece])
        return piece

    def has_room(self, size_bytes: int) -> bool:
        """Whether another `size_bytes` on their way leave half of the memory to what has arrived."""
        return self.held_bytes - self._settled_bytes + size_bytes <= self.half_bytes

    def finish(self, piece: Piece, body: Body) -> None:
        """The piece, which is neither finished nor failed yet, has arrived."""
        piece.set_result(memoryview(body))
        self._settled[piece] = None
        self._settled_bytes += piece.size
        self._shrink()

    def fail(self, piece: Piece, error: BaseException) -> None:
        """A piece that has not arrived could not be fetched: the next who wants it starts anew."""
        self._take_out(piece)
        piece.set_error(error)

    def passed(self, version: ObjectVersion, start: int, stop: int) -> None:
        """A reader in sequence has [start, stop) behind it: let go of what the disk cache has as well."""
        for piece in self._covering(version, start, stop):
            if piece.kept and piece.stop <= stop:
                self._let_go(piece)

    def limit(self, limit_bytes: int) -> None:
        """Another limit from now on."""
        self._limit_bytes = limit_bytes
        self._shrink()

    @property
    def half_bytes(self) -> int:
        """Half of the memory."""
        return self._limit_bytes // 2

    def _covering(self, version: ObjectVersion, start: int, stop: int) -> list[Piece]:
        """The pieces that share a byte with [start, stop), ascending."""
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
        """Take out one that has arrived; whoever has it can still await it."""
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
    """[start, stop) out of settled, adjoining pieces that cover it; not copied when one piece is enough."""
    parts = [piece.result()[max(start - piece.start, 0) : stop - piece.start] for piece in pieces]
    return parts[0] if len(parts) == 1 else b"".join(parts)


_stop = attrgetter("stop")
