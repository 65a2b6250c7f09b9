"""The ranges of objects that memory holds or that are on their way, each fetched once whoever asks.

A piece is registered by whoever first wants its range, then claimed by exactly one thread, which fetches it and
finishes or fails it; the others wait. Nobody waits for a piece that no thread has claimed: a waiter claims it and
fetches it itself, so a saturated pool can't deadlock its own waiters. A failed piece is gone from the table before
its waiters learn of it. Safe for threads. Does no I/O. Lock order: the table's lock is a leaf.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import pairwise

from datastore.errors import DeadlineExceeded

from ..store.base import Body, ObjectVersion


class Piece:
    """One range [start, stop) of a version; `body` is set once, when it is there."""

    __slots__ = ("_claimed", "_done", "_error", "body", "kept", "start", "stop", "version")

    def __init__(self, version: ObjectVersion, start: int, stop: int) -> None:
        self.version = version
        self.start = start
        self.stop = stop
        self.body: memoryview | None = None
        self.kept = False
        """The disk cache has it as well."""
        self._error: BaseException | None = None
        self._claimed = threading.Lock()
        self._done = threading.Event()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def claim(self) -> bool:
        """True for one caller only: the one that fetches it."""
        return self._claimed.acquire(blocking=False)

    def settle(self, body: Body | None, error: BaseException | None) -> None:
        """Give the waiters their answer; by the claimer, once."""
        if body is not None:
            self.body = memoryview(body)
        self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> memoryview:
        """The bytes, of a piece that is claimed; what its fetch raised; DeadlineExceeded."""
        if not self._done.wait(timeout_s):
            raise DeadlineExceeded(
                f"bytes {self.start}-{self.stop - 1} of '{self.version.key}' did not arrive in time",
                key=self.version.key,
            )
        if self._error is not None:
            raise self._error
        if self.body is None:
            raise AssertionError("a settled piece has a body or an error")
        return self.body


class PieceTable:
    """INVARIANT: the pieces of a version are sorted and disjoint.
    INVARIANT: _held_bytes is the sum of the sizes of all its pieces, _settled_bytes of those that have arrived.
    INVARIANT: after each call, _held_bytes exceeds the limit only by unsettled pieces.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._settled_bytes = 0
        self._lock = threading.Lock()
        self._by_version: dict[ObjectVersion, list[Piece]] = {}
        self._settled: OrderedDict[Piece, None] = OrderedDict()
        """Least recently used first."""

    def find(self, version: ObjectVersion, start: int, stop: int) -> memoryview | bytes | None:
        """The bytes of [start, stop) when memory has them all; without copying when one piece has them."""
        with self._lock:
            pieces = self._covering(version, start, stop)
            if not pieces or pieces[0].start > start or pieces[-1].stop < stop:
                return None
            if any(piece.body is None for piece in pieces):
                return None
            if any(left.stop != right.start for left, right in pairwise(pieces)):
                return None
            for piece in pieces:
                self._settled.move_to_end(piece)
        return cut(pieces, start, stop)

    def request(self, version: ObjectVersion, start: int, stop: int, step: int) -> tuple[list[Piece], list[Piece]]:
        """(pieces that together cover [start, stop), those of them that are new); both ascending.

        Gaps become new pieces, not yet claimed, cut at multiples of `step` bytes.
        """
        with self._lock:
            pieces, fresh = [], []
            for piece in self._covering(version, start, stop):
                fresh += _split(version, start, piece.start, step)
                pieces.append(piece)
                start = piece.stop
            fresh += _split(version, start, stop, step)
            self._insert(version, fresh)
        return sorted(pieces + fresh, key=_stop), fresh

    def has_room(self, size_bytes: int) -> bool:
        """Whether another `size_bytes` on their way leave half of the memory to what has arrived."""
        with self._lock:
            return self._held_bytes - self._settled_bytes + size_bytes <= self._limit_bytes // 2

    def finish(self, piece: Piece, body: Body) -> None:
        """The claimed piece has arrived."""
        with self._lock:
            piece.settle(body, None)
            if self._index(piece) is not None:
                self._settled[piece] = None
                self._settled_bytes += piece.size
            self._shrink()

    def fail(self, piece: Piece, error: BaseException) -> None:
        """The claimed piece could not be fetched: the next who wants it starts anew."""
        self.discard(piece)
        piece.settle(None, error)

    def discard(self, piece: Piece) -> None:
        """Take a piece out of the table; whoever has it can still claim it or wait for it. Idempotent."""
        with self._lock:
            self._remove(piece)

    def passed(self, version: ObjectVersion, start: int, stop: int) -> None:
        """A reader in sequence has [start, stop) behind it: let go of what the disk cache has as well."""
        with self._lock:
            for piece in self._covering(version, start, stop):
                if piece.kept and piece.stop <= stop:
                    self._remove(piece)

    def forget(self, version: ObjectVersion) -> None:
        """Take out all pieces of a version; idempotent."""
        with self._lock:
            for piece in list(self._by_version.get(version, ())):
                self._remove(piece)

    def limit(self, limit_bytes: int) -> None:
        """Another limit from now on."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._shrink()

    @property
    def held_bytes(self) -> int:
        """Bytes held and on their way."""
        return self._held_bytes

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
            self._held_bytes += piece.size
        self._shrink()

    def _index(self, piece: Piece) -> int | None:
        """Where the piece is among its version's, None when it was taken out."""
        pieces = self._by_version.get(piece.version, [])
        index = bisect_right(pieces, piece.start, key=_stop)
        return index if index < len(pieces) and pieces[index] is piece else None

    def _remove(self, piece: Piece) -> None:
        index = self._index(piece)
        if index is None:
            return
        pieces = self._by_version[piece.version]
        del pieces[index]
        if not pieces:
            del self._by_version[piece.version]
        self._held_bytes -= piece.size
        if piece in self._settled:
            del self._settled[piece]
            self._settled_bytes -= piece.size

    def _shrink(self) -> None:
        while self._held_bytes > self._limit_bytes and self._settled:
            self._remove(next(iter(self._settled)))

    def _check(self) -> None:
        """Raise AssertionError when an invariant is broken (tests call it)."""
        with self._lock:
            total = 0
            for pieces in self._by_version.values():
                total += sum(piece.size for piece in pieces)
                if any(left.stop > right.start for left, right in pairwise(pieces)):
                    raise AssertionError("pieces overlap")
            if (total, sum(piece.size for piece in self._settled)) != (self._held_bytes, self._settled_bytes):
                raise AssertionError(f"{total} bytes held, {self._held_bytes} counted")
            if self._settled and self._held_bytes > self._limit_bytes:
                raise AssertionError("over the limit with something to let go of")


def cut(pieces: list[Piece], start: int, stop: int) -> memoryview | bytes:
    """[start, stop) out of settled, adjoining pieces that cover it; not copied when one piece is enough."""
    parts = []
    for piece in pieces:
        if piece.body is None:
            raise AssertionError("not settled")
        parts.append(piece.body[max(start - piece.start, 0) : stop - piece.start])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _stop(piece: Piece) -> int:
    return piece.stop


def _split(version: ObjectVersion, start: int, stop: int, step: int) -> list[Piece]:
    pieces = []
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        pieces.append(Piece(version, start, end))
        start = end
    return pieces
