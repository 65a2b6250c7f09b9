"""Reports a soak as a table and as a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.disturb import Event
from tests.soak.load import Log
from tests.soak.samples import MIB, Sample

ROWS = 12
OPERATIONS_PER_HOUR = 36_000
"""How many operations count as an hour of ordinary work: ten a second."""
_PANELS = (
    ("rss", "memory of the server, MiB", MIB),
    ("descriptors", "open descriptors of the server", 1),
    ("threads", "threads of the server", 1),
    ("state", "state directory, MiB", MIB),
    ("cache", "cache directory, MiB", MIB),
    ("pending", "unfinished multipart uploads", 1),
)


@dataclass
class Outcome:
    """The results of one soak. wrong: what was wrong, a line each."""

    seconds: float
    about: str
    log: Log
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    resting: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def markdown(outcome: Outcome) -> str:
    """Return the table and the findings."""
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: Outcome) -> Iterator[str]:
    log, events = outcome.log, outcome.events
    total = log.operations
    kills = sum(event.kind == "kill" for event in events)
    away = [event for event in events if event.kind != "kill"]
    yield f"# Soak: {outcome.seconds / 60:.1f} minutes, {'flat' if not outcome.wrong else 'NOT FLAT'}"
    yield ""
    yield outcome.about
    yield ""
    yield (
        f"{total} operations ({total / OPERATIONS_PER_HOUR:.1f} hours' worth at ten a second), {log.failed} failed; "
        f"{kills} kills of the server, {len(away)} outages of the store ({sum(event.lasted_s for event in away):.0f} s "
        f"in all); the slowest operation took {log.slowest_s:.1f} s ({log.slowest})."
    )
    yield ""
    yield "| at | operations | memory MiB | descriptors | threads | state MiB | cache MiB | uploads | kills | outages |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for sample in _thinned(outcome.samples):
        past = [event for event in events if event.at_s <= sample.at_s]
        killed = sum(event.kind == "kill" for event in past)
        yield f"| {sample.at_s:.0f} s {_figures(sample)} | {killed} | {len(past) - killed} |"
    for name, sample in zip(("at rest, start", "at rest, end"), outcome.resting, strict=False):
        yield f"| {name} {_figures(sample)} | | |"
    yield ""
    yield "Operations: " + ", ".join(f"{count} {name}" for name, count in log.done.most_common()) + "."
    yield ""
    yield from (f"- wrong: {line}" for line in outcome.wrong)
    yield from (f"- failed: {line}" for line in log.failures)


def _figures(sample: Sample) -> str:
    pending = "-" if sample.pending < 0 else str(sample.pending)
    return (
        f"| {sample.operations} | {sample.rss / MIB:.0f} | {sample.descriptors} | {sample.threads} "
        f"| {sample.state / MIB:.1f} | {sample.cache / MIB:.0f} | {pending}"
    )


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    if len(samples) <= ROWS:
        return list(samples)
    return [samples[round(index * (len(samples) - 1) / (ROWS - 1))] for index in range(ROWS)]


def draw(outcome: Outcome, file: Path) -> None:
    """Draw the chart: a panel over time for each figure; kills are lines, outages are grey areas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(drawing)
    panels = drawing.subplots(2, 3, sharex=True).flatten()
    for axes, (name, title, unit) in zip(panels, _PANELS, strict=True):
        shown = [sample for sample in outcome.samples if getattr(sample, name) >= 0]
        axes.plot(
            [sample.at_s for sample in shown],
            [getattr(sample, name) / unit for sample in shown],
            color="#1b7f5c",
            linewidth=1,
        )
        for event in outcome.events:
            if event.kind == "kill":
                axes.axvline(event.at_s, color="#c0392b", linewidth=0.5, alpha=0.5)
            else:
                axes.axvspan(event.at_s, event.at_s + event.lasted_s, color="#8a8f98", alpha=0.3, linewidth=0)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
    for axes in panels[3:]:
        axes.set_xlabel("seconds (red: kill of the server; grey: the store is away)", fontsize=7)
    drawing.savefig(file, dpi=110)
