"""What is measured, and the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bench.w12 import PARTS


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. id: begins with the workload, as in `W5.one`. keep: which of several runs is kept."""

    id: str
    title: str
    unit: str
    better: Literal["higher", "lower"] = "higher"
    keep: Literal["best", "worst"] = "best"

    @property
    def workload(self) -> str:
        """The name of the workload, as `W5`."""
        return self.id.partition(".")[0]


META_OPERATIONS = {
    "mkdir": "mkdir",
    "rmdir": "rmdir",
    "create": "create an empty file",
    "stat": "stat",
    "rename": "rename a file",
    "symlink": "symlink",
    "readlink": "readlink",
    "unlink": "unlink",
}
EXPORT_FIGURES = {
    "write": ("sequential write until it is committed", "MB/s"),
    "read": ("sequential read, cold", "MB/s"),
    "create_one": ("create files of 100 KiB until committed, 1 thread", "/s"),
    "create_sixteen": ("create files of 100 KiB until committed, 16 threads", "/s"),
    "read_one": ("read files of 100 KiB, cold, 1 thread", "/s"),
    "read_sixteen": ("read files of 100 KiB, cold, 16 threads", "/s"),
}
PROCESSOR = "_cpu"
"""Suffix of the id of the processor time that a mount's server used for a metric; other load disturbs it least."""


def _with_processor(metric: Metric, unit: Literal["s/GiB", "ms each"]) -> tuple[Metric, Metric]:
    return metric, Metric(f"{metric.id}{PROCESSOR}", f"{metric.title}: processor time of the mount", unit, "lower")


METRICS = (
    *_with_processor(Metric("W1.read", "sequential read, cold", "MB/s"), "s/GiB"),
    Metric("W2.read", "sequential read again", "MB/s"),
    *_with_processor(Metric("W3.write", "sequential write until it is in S3", "MB/s"), "s/GiB"),
    Metric("W4.random_4k", "random reads of 4 KiB, cold", "/s"),
    Metric("W4.random_128k", "random reads of 128 KiB, cold", "/s"),
    Metric("W4.streams", "4 streams, cold", "MB/s"),
    *_with_processor(Metric("W5.one", "read files of 100 KiB, cold, 1 thread", "/s"), "ms each"),
    *_with_processor(Metric("W5.sixteen", "read files of 100 KiB, cold, 16 threads", "/s"), "ms each"),
    *_with_processor(Metric("W6.one", "read them again, 1 thread", "/s"), "ms each"),
    *_with_processor(Metric("W6.sixteen", "read them again, 16 threads", "/s"), "ms each"),
    *_with_processor(Metric("W7.one", "create files of 100 KiB until in S3, 1 thread", "/s"), "ms each"),
    *_with_processor(Metric("W7.sixteen", "create files of 100 KiB until in S3, 16 threads", "/s"), "ms each"),
    *_with_processor(Metric("W8.tree_cold", "walk and stat folders, cold", "s", "lower"), "ms each"),
    Metric("W8.tree_warm", "walk and stat folders again", "s", "lower"),
    *_with_processor(Metric("W8.flat_cold", "walk and stat one large folder, cold", "s", "lower"), "ms each"),
    Metric("W8.flat_warm", "walk and stat one large folder again", "s", "lower"),
    *(Metric(f"W9.{name}", title, "/s") for name, title in META_OPERATIONS.items()),
    Metric("W9.rename_dir", "rename a folder of files", "s", "lower"),
    Metric("W10.walk", "most memory while walking generated keys", "MiB", "lower", "worst"),
    Metric("W10.stream", "most memory while streaming", "MiB", "lower", "worst"),
    Metric("W10.open", "most memory with many open files", "MiB", "lower", "worst"),
    Metric("W10.any", "most memory in any other cell", "MiB", "lower", "worst"),
    Metric("W11.first_byte", "from `mount` to the first byte of a file", "s", "lower"),
    Metric("W11.restart", "from kill -9 of the server to the next answer", "s", "lower"),
    *(Metric(f"W12.{number}", part, "s", "lower") for number, part in enumerate(PARTS, 1)),
    Metric("M1.large_disk", "save a model of 20 large files from the disk", "s", "lower"),
    Metric("M1.small_disk", "save a model of small files from the disk", "s", "lower"),
    Metric("M1.large_bucket", "save a model of 20 large files from a bucket beside it", "s", "lower"),
    Metric("M1.small_bucket", "save a model of small files from a bucket beside it", "s", "lower"),
    *(Metric(f"N1.{name}", f"export: {title}", unit) for name, (title, unit) in EXPORT_FIGURES.items()),
)
BY_ID = {metric.id: metric for metric in METRICS}
WORKLOADS = tuple(dict.fromkeys(metric.workload for metric in METRICS))


@dataclass(frozen=True, slots=True)
class Figure:
    """The value of one cell. error: why there is none. late: S3 did not yet have the data when the last call returned.
    partial: the time limit ended it early. load: the machine's 1-minute load average when the cell began."""

    value: float = math.nan
    error: str = ""
    late: bool = False
    partial: bool = False
    load: float = math.nan


def chosen(metric: Metric, old: Figure, new: Figure) -> Figure:
    """Return which of two runs is kept: one without an error, then the better (or worse: Metric.keep) value."""
    if old.error or new.error:
        return new if old.error else old
    higher = (metric.better == "higher") == (metric.keep == "best")
    return new if (new.value > old.value) == higher else old


class Results:
    """Figures by subject and metric, in the order in which they were added."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], Figure] = {}

    def add(self, subject: str, metric_id: str, figure: Figure) -> None:
        """Add a run of a cell. Errors: KeyError for a metric that is not in METRICS."""
        metric = BY_ID[metric_id]
        old = self._figures.get((subject, metric_id))
        self._figures[subject, metric_id] = figure if old is None else chosen(metric, old, figure)

    def get(self, subject: str, metric_id: str) -> Figure | None:
        """What was measured, or None."""
        return self._figures.get((subject, metric_id))

    def subjects(self, metric_id: str | None = None) -> list[str]:
        """The subjects that have figures (of this metric)."""
        return list(dict.fromkeys(name for name, id_ in self._figures if metric_id in (None, id_)))

    def metrics(self) -> list[Metric]:
        """The metrics that have figures, in the order of the table."""
        known = {id_ for _, id_ in self._figures}
        return [metric for metric in METRICS if metric.id in known]

    def row(self, metric_id: str) -> Iterable[Figure]:
        """The figures of one metric."""
        return [figure for (_, id_), figure in self._figures.items() if id_ == metric_id]
