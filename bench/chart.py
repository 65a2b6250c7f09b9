"""The chart: a small panel for each metric, with a bar for each subject and dashed lines at the goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from bench.bars import LOCAL, NOT_PEERS, Against, Verdict
from bench.metrics import Metric, Results

COLUMNS = 4
OURS_COLOUR, BASE_COLOUR, PEER_COLOUR = "#1b7f5c", "#8a8f98", "#c9a66b"
BASES = frozenset({"native", "local"})


def _colour(name: str) -> str:
    if name in BASES:
        return BASE_COLOUR
    return OURS_COLOUR if name in NOT_PEERS else PEER_COLOUR


def _wanted(metric: Metric, verdicts: Iterable[Verdict]) -> list[float]:
    """Return the goals of a metric as absolute values."""
    return [
        verdict.reference if verdict.bar.against is Against.LIMIT else verdict.reference * verdict.bar.factor
        for verdict in verdicts
        if verdict.bar.metric == metric.id and verdict.who
    ]


def _shown(metric: Metric, results: Results, verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Return the figures to draw. The local disk dwarfs the others: it is left out where all goals refer to others."""
    against = {verdict.bar.against for verdict in verdicts if verdict.bar.metric == metric.id}
    hidden = {LOCAL} if against - {Against.SUCCESS} and Against.LOCAL not in against else set()
    return {
        name: figure.value
        for name in results.subjects(metric.id)
        if name not in hidden and (figure := results.get(name, metric.id)) is not None and not figure.error
    }


def _panel(axes: Axes, metric: Metric, found: Mapping[str, float], wanted: Sequence[float]) -> None:
    axes.barh(list(found), list(found.values()), color=[_colour(name) for name in found])
    for value in wanted:
        axes.axvline(value, color="#b3261e", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    arrow = "more is better" if metric.better == "higher" else "less is better"
    axes.set_title(f"{metric.workload} {metric.title}\n{metric.unit}, {arrow}", fontsize=8)
    axes.tick_params(labelsize=7)


def draw(results: Results, verdicts: Sequence[Verdict], file: Path) -> None:
    """Write the chart as a PNG; write nothing when there are no figures."""
    metrics = results.metrics()
    if not metrics:
        return
    rows = -(-len(metrics) // COLUMNS)
    drawing = Drawing(figsize=(4.6 * COLUMNS, 2.4 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(drawing)
    for place, metric in enumerate(metrics, 1):
        axes = drawing.add_subplot(rows, COLUMNS, place)
        _panel(axes, metric, _shown(metric, results, verdicts), _wanted(metric, verdicts))
    drawing.savefig(file, dpi=80)
