"""Extents against the plainest model there is: a set of byte positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from datastore.fuse.data.extents import Extents
from tests.datachecks import check_extents

SPACE = 40
edges = st.integers(0, SPACE)
steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "truncate"]), edges, edges), max_size=30)


def runs(positions: set[int]) -> list[tuple[int, int]]:
    """The maximal runs of a set of positions."""
    found: list[tuple[int, int]] = []
    for position in sorted(positions):
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


def build(program: list[tuple[str, int, int]]) -> tuple[Extents, set[int]]:
    extents, model = Extents(), set[int]()
    for name, start, stop in program:
        if name == "add":
            extents.add(start, stop)
            model |= set(range(start, stop))
        elif name == "remove":
            extents.remove(start, stop)
            model -= set(range(start, stop))
        else:
            extents.truncate(start)
            model = {position for position in model if position < start}
        check_extents(extents)
        assert list(extents) == runs(model)
    return extents, model


@given(steps, edges, edges)
def test_questions_are_answered_as_a_set_of_positions_would(
    program: list[tuple[str, int, int]], start: int, stop: int
) -> None:
    extents, model = build(program)
    asked = set(range(start, stop))
    assert extents.total == len(model)
    assert bool(extents) == bool(model)
    assert len(extents) == len(runs(model))
    assert extents.contains(start, stop) == (asked <= model)
    assert extents.overlaps(start, stop) == bool(asked & model)
    assert extents.missing(start, stop) == runs(asked - model)


@given(steps)
def test_a_set_is_made_of_another_ones_ranges_and_independent(program: list[tuple[str, int, int]]) -> None:
    extents, model = build(program)
    twin = Extents(extents)
    assert list(twin) == list(extents)
    twin.add(SPACE + 1, SPACE + 2)
    check_extents(twin)
    assert list(extents) == runs(model)
