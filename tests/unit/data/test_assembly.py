"""Assembly: bodies in parts that have whole pieces of a version become these pieces, once each."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.errors import CorruptBody, PreconditionFailed
from datastore.fuse.data.assembly import Assembly, runs
from datastore.fuse.data.pieces import Piece
from datastore.fuse.store.base import Body, ETag, ObjectInfo, ObjectVersion

BODY = random.Random(1).randbytes(10_000)
VERSION = ObjectVersion("k", ETag("e"), len(BODY))


def info(etag: str = "e") -> ObjectInfo:
    return ObjectInfo(key="k", size=len(BODY), etag=ETag(etag), mtime_ns=0, server_time_ns=0)


def pieces(*edges: int) -> list[Piece]:
    return [Piece(VERSION, start, stop) for start, stop in pairwise(edges)]


def collected(run: list[Piece]) -> tuple[Assembly, list[tuple[int, bytes]]]:
    found: list[tuple[int, bytes]] = []

    def done(piece: Piece, body: Body) -> None:
        found.append((piece.start, bytes(body)))

    return Assembly(run, done), found


def feed(assembly: Assembly, body: bytes, step: int) -> None:
    for start in range(0, len(body), step):
        assembly.take(info(), start, body[start : start + step])


@given(st.sets(st.integers(1, 9_999), max_size=8), st.sets(st.integers(0, 7)))
def test_parts_of_some_pieces_give_every_piece_once(cuts: set[int], together: set[int]) -> None:
    edges = [0, *sorted(cuts), len(BODY)]
    assembly, found = collected(pieces(*edges))
    ends = [edge for number, edge in enumerate(edges) if number not in together or edge in (0, len(BODY))]
    for start, stop in pairwise(ends):
        assembly.take(info(), start, BODY[start:stop])
    assembly.check()
    assert b"".join(body for _, body in found) == BODY
    assert len(found) == len(cuts) + 1


def test_a_repeated_attempt_gives_only_what_was_missing() -> None:
    assembly, found = collected(pieces(0, 4000, 8000, len(BODY)))
    feed(assembly, BODY[:4000], 4000)
    assert [piece.start for piece in assembly.missing] == [4000, 8000]
    feed(assembly, BODY, 4000)
    assert [start for start, _ in found] == [0, 4000, 8000]
    assert b"".join(body for _, body in found) == BODY


def test_bodies_of_a_wrong_length_are_refused() -> None:
    assembly, _ = collected(pieces(0, 4000, 8000))
    with pytest.raises(CorruptBody, match="longer"):
        feed(assembly, BODY, 4000)
    assembly, _ = collected(pieces(0, 4000, 8000))
    feed(assembly, BODY[:7000], 4000)
    with pytest.raises(CorruptBody, match="too early"):
        assembly.check()


def test_another_version_is_refused_before_any_byte_of_it_is_taken() -> None:
    assembly, found = collected(pieces(0, 4000))
    with pytest.raises(PreconditionFailed):
        assembly.take(info("other"), 0, BODY)
    assert found == []


def test_runs_are_adjoining_and_bounded() -> None:
    made = pieces(0, 10, 20, 30) + pieces(40, 50)
    assert [[piece.start for piece in run] for run in runs(made, 20)] == [[0, 10], [20], [40]]
    assert list(runs([], 20)) == []
