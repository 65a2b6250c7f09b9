"""Checks of the invariants of what fuse/data keeps in memory, and a way to drop that memory."""

from __future__ import annotations

from itertools import pairwise

from datastore.fuse.data.extents import Extents
from datastore.fuse.data.pieces import PieceTable
from datastore.fuse.data.readahead import FIRST_BYTES, MAX_BYTES, ReadAhead
from datastore.fuse.data.reader import Reader


def check_extents(extents: Extents) -> None:
    """Errors: AssertionError when an invariant is broken."""
    edges = [edge for pair in zip(extents._starts, extents._stops, strict=True) for edge in pair]
    if any(left >= right for left, right in pairwise(edges)):
        raise AssertionError(f"ranges out of order, empty or touching: {edges}")


def check_pieces(table: PieceTable) -> None:
    """Errors: AssertionError when an invariant is broken."""
    total = 0
    for pieces in table._by_version.values():
        total += sum(piece.size for piece in pieces)
        if any(left.stop > right.start for left, right in pairwise(pieces)):
            raise AssertionError("pieces overlap")
    if (total, sum(piece.size for piece in table._settled)) != (table.held_bytes, table._settled_bytes):
        raise AssertionError(f"{total} bytes held, {table.held_bytes} counted")
    if table._settled and table.held_bytes > table._limit_bytes:
        raise AssertionError("over the limit with something to let go of")


def check_readahead(ahead: ReadAhead) -> None:
    """Errors: AssertionError when an invariant is broken."""
    for run in (ahead.present, *ahead._others):
        if run.ahead_until not in (ahead._up(run.ahead_until), ahead._size):
            raise AssertionError(f"window ends unaligned at {run.ahead_until}")
        if run.window_bytes and not FIRST_BYTES <= run.window_bytes <= MAX_BYTES:
            raise AssertionError(f"window of {run.window_bytes} bytes")


def forget(reader: Reader) -> None:
    """Drop the content that a reader holds in memory, as if there had been no room for it."""
    limit_bytes = 2 * reader.table.half_bytes
    reader.table.limit(0)
    reader.table.limit(limit_bytes)
