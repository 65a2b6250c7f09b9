"""The report in Markdown: the table of figures, the bars with their verdicts, and the last line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bench.bars import Verdict, last_line
from bench.metrics import Figure, Metric, Results


def number(value: float) -> str:
    """Format a value with three significant digits and never an exponent; nan becomes ''."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "inf"
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def cell_text(figure: Figure | None) -> str:
    """The value with its marks, or the error."""
    if figure is None:
        return ""
    if figure.error:
        return "ERR " + figure.error.replace("|", "/")[:60]
    return number(figure.value) + ("*" if figure.late else "") + ("~" if figure.partial else "")


def _loads(figures: Iterable[Figure]) -> str:
    known = [figure.load for figure in figures if not math.isnan(figure.load)]
    return f"{min(known):.1f}-{max(known):.1f}" if known else ""


def _row(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def _label(metric: Metric) -> str:
    return f"{metric.workload} {metric.title}, {metric.unit}"


def figures_table(results: Results) -> Iterator[str]:
    """Yield the table of figures: a row for each metric, a column for each subject, and the load average."""
    subjects = results.subjects()
    yield _row(["", *subjects, "load"])
    yield "|---" * (len(subjects) + 2) + "|"
    for metric in results.metrics():
        cells = (cell_text(results.get(name, metric.id)) for name in subjects)
        yield _row([_label(metric), *cells, _loads(results.row(metric.id))])


def bars_table(verdicts: Iterable[Verdict], labels: Results) -> Iterator[str]:
    """Yield the table of the bars: a row for each."""
    titles = {metric.id: _label(metric) for metric in labels.metrics()}
    yield _row(["bar", "whose", "figure", "compared with", "ratio", "wanted", ""])
    yield "|---" * 7 + "|"
    for verdict in verdicts:
        bar = verdict.bar
        reference = f"{verdict.who} {number(verdict.reference)}" if verdict.who else verdict.why.replace("|", "/")[:80]
        wanted = str(bar)
        if verdict.asked not in (bar.factor, 1.0) and not math.isnan(verdict.asked):
            wanted += f" (here {number(verdict.asked)})"
        words = [titles[bar.metric], bar.subject, number(verdict.figure), reference, number(verdict.ratio), wanted]
        yield _row([*words, f"**{verdict.word}**" if verdict.met is False else verdict.word])


def markdown(results: Results, verdicts: Sequence[Verdict], about: Sequence[str]) -> str:
    """The whole document; its last line is `N met, M missed`."""
    legend = (
        "`*` S3 did not have it yet when the last call had returned. `~` ended early by the time limit of a cell; "
        "the figure is for the part that was done. The better of the runs stands, for memory the worse."
    )
    parts = [
        "# Bench",
        *about,
        "## Figures",
        "\n".join(figures_table(results)),
        legend,
        "## Bars",
        "\n".join(bars_table(verdicts, results)),
        last_line(verdicts),
    ]
    return "\n\n".join(parts) + "\n"
