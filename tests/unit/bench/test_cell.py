"""What one cell records."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cell as cells
from bench.cell import Cell
from bench.metrics import Results
from bench.processes import processor_s
from bench.sizes import SHORT
from bench.subjects import Opened


def cell(pid: int | None) -> Cell:
    """On a mount whose server is this process."""

    @contextlib.contextmanager
    def opened() -> Iterator[Opened]:
        yield Opened(Path("/nowhere"), pid=lambda: pid)

    bench: Any = SimpleNamespace(sizes=SHORT, results=Results(), say=lambda _: None)
    subject: Any = SimpleNamespace(name="ours", opened=opened)
    return Cell(bench, subject, "tag")


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes 0.2 s of processor time for 100 files."""

    def work(*_: object, **__: object) -> dict[str, float]:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        return {"count": 100, "seconds": 0.5}

    monkeypatch.setattr(cells, "run_work", work)


def values(measured: Cell) -> dict[str, float]:
    found = {metric.id: measured.bench.results.get("ours", metric.id) for metric in measured.bench.results.metrics()}
    return {name: figure.value for name, figure in found.items() if figure is not None}


@pytest.mark.usefixtures("busy")
def test_the_processor_time_of_a_mounts_server_stands_beside_its_rate() -> None:
    measured = cell(os.getpid())
    with measured.opened():
        for metric in ("W5.one", "W2.read"):
            measured.rate(metric, measured.work("filework.any"))
    found = values(measured)
    assert (found["W5.one"], found["W2.read"]) == (200.0, 200.0)
    assert 2.0 <= found["W5.one_cpu"] < 20, "2 ms for each file, and what else runs in here"
    assert "W2.read_cpu" not in found, "it is no row"


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("pid", [None, 2**22 + 1])
def test_without_a_running_server_there_is_no_processor_time(pid: int | None) -> None:
    measured = cell(pid)
    with contextlib.suppress(OSError), measured.opened():
        measured.rate("W5.one", measured.work("filework.any"))
    assert {name for name in values(measured) if name != "W10.any"} == {"W5.one"}


def test_processor_time_is_that_of_all_threads() -> None:
    before, found, after = time.process_time(), processor_s(os.getpid()), time.process_time()
    assert before <= found <= after
