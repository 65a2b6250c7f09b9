"""Two runs of a cell become one figure, and figures become a table and a chart."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.bars import BARS, judge
from bench.chart import draw
from bench.metrics import Figure, Results
from bench.report import cell_text, markdown, number


def kept(metric: str, *figures: Figure) -> Figure:
    results = Results()
    for figure in figures:
        results.add("ours", metric, figure)
    found = results.get("ours", metric)
    assert found is not None
    return found


@pytest.mark.parametrize(("metric", "stays"), [("W1.read", 2.0), ("W8.flat_cold", 1.0), ("W10.walk", 2.0)])
def test_the_better_run_stands_and_for_memory_the_worse(metric: str, stays: float) -> None:
    assert kept(metric, Figure(1.0), Figure(2.0)).value == stays
    assert kept(metric, Figure(2.0), Figure(1.0)).value == stays


def test_a_run_that_worked_stands_before_one_that_failed() -> None:
    assert kept("W1.read", Figure(error="broke"), Figure(1.0)).value == 1.0
    assert kept("W1.read", Figure(1.0), Figure(error="broke")).value == 1.0
    assert kept("W1.read", Figure(error="broke"), Figure(error="broke again")).error == "broke again"


def test_a_metric_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        Results().add("ours", "W99.read", Figure(1.0))


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1234"), (99.44, "99.4"), (1.0, "1.00"), (0.01234, "0.0123"), (0, "0")]
)
def test_numbers_have_the_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_a_cell_says_what_kind_of_figure_it_is() -> None:
    assert cell_text(None) == ""
    assert cell_text(Figure(12.0, late=True, partial=True)) == "12.0*~"
    assert cell_text(Figure(error="a | b")) == "ERR a / b"


def sample() -> Results:
    results = Results()
    for subject, value in {"ours": 500.0, "native": 800.0, "s3fs": 400.0}.items():
        results.add(subject, "W1.read", Figure(value, load=1.5))
    results.add("ours", "W10.walk", Figure(100.0))
    return results


def test_the_document_has_the_figures_the_verdicts_and_the_count_last() -> None:
    results = sample()
    lines = markdown(results, judge(BARS, results), ["today"]).splitlines()
    assert "| W1 sequential read, cold, MB/s | 500 | 800 | 400 | 1.5-1.5 |" in lines
    assert "| W1 sequential read, cold, MB/s | ours | 500 | native 800 | 0.625 | >= 0.5 x native | met |" in lines
    assert (
        "| W1 sequential read, cold, MB/s | ours | 500 | s3fs 400 | 1.25 | >= 1.3 x best peer | **missed** |" in lines
    )
    assert lines[-1] == "2 met, 1 missed"


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    results = sample()
    draw(results, judge(BARS, results), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
