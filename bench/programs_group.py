"""W12 as a group of the bench: bench.w12 measures, with servers and mounts of its own."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from pathlib import Path

from bench import w12
from bench.cell import Cell, Group
from bench.w12_inputs import Inputs, make_inputs


@cache
def _inputs(folder: Path) -> Inputs:
    folder.mkdir()
    return make_inputs(folder)


def run_programs(cell: Cell) -> None:
    """Run all parts on one subject."""
    inputs = _inputs(cell.bench.folder / "inputs")
    with contextlib.redirect_stdout(sys.stderr):
        found = w12.measure(cell.subject.name, list(w12.PARTS), inputs)
    for number, part in enumerate(w12.PARTS, 1):
        if found[part].error:
            cell.fail(f"W12.{number}", RuntimeError(found[part].error))
        else:
            cell.record(f"W12.{number}", found[part].seconds)


_METRICS = tuple(f"W12.{number}" for number in range(1, len(w12.PARTS) + 1))
GROUPS = (
    Group(("W12",), run_programs, _METRICS, needs_data=False, writes=True, only=frozenset(w12.OPENERS), once=True),
)
