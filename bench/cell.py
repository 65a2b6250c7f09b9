"""One cell of the table: one workload on one subject. An error is recorded in place of the figure."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.bucket import BUCKET, Bucket, NotInS3
from bench.metrics import BY_ID, PROCESSOR, Figure, Results
from bench.processes import NotReady, peak_rss_mib, processor_s
from bench.sizes import GIB, Sizes
from bench.subjects import Opened, Subject
from bench.worker import WorkFailed, run_work
from tests.servers import Server

MB = 1_000_000
BIG, SMALL, TREE, FLAT = "big", "small", "tree", "flat"
"""Where the prepared data is: the key of the large object, and the prefixes of the small ones."""
ANY_RSS = "W10.any"

Answer = dict[str, float]
EXPECTED = (WorkFailed, NotReady, NotInS3, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells share."""

    server: Server
    bucket: Bucket
    sizes: Sizes
    folder: Path
    results: Results
    say: Callable[[str], None]

    @property
    def store(self) -> dict[str, str]:
        """The arguments for nativework.open_store."""
        server = self.server
        return {
            "endpoint": server.endpoint,
            "region": server.region,
            "bucket": BUCKET,
            "access_key": server.access_key,
            "secret_key": server.secret_key,
            "ca_bundle": server.ca_bundle,
        }


@dataclass(slots=True)
class Cell:
    """A workload on a subject. tag: the prefix of what this cell writes. server: the pid that serves the open mount."""

    bench: Bench
    subject: Subject
    tag: str
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    server: int | None = None
    spent_s: float = math.nan
    """Processor time of the server in the last work(), in seconds; nan without a server."""

    @property
    def sizes(self) -> Sizes:
        return self.bench.sizes

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Open the subject with cold caches; record the peak memory of its process before that ends."""
        with self.subject.opened() as found:
            self.server = found.pid()
            try:
                yield found
            finally:
                self.server = None
            pid = found.pid()
            if pid is not None:
                self.record(ANY_RSS, peak_rss_mib(pid))

    def work(self, work: str, **arguments: Any) -> Answer:
        """Run a function of bench in a worker process, for at most sizes.cell_s seconds. Errors: WorkFailed."""
        before = self._processor_s()
        answer = run_work(work, self.sizes.cell_s, **arguments)
        self.spent_s = self._processor_s() - before
        return answer

    def _processor_s(self) -> float:
        """Return the server's processor time so far, in seconds; nan without a server, or when it has ended."""
        with contextlib.suppress(OSError):
            return math.nan if self.server is None else processor_s(self.server)
        return math.nan

    def native_work(self, work: str, **arguments: Any) -> Answer:
        """Run a function of nativework, that is the plain client, in a worker process. Errors: WorkFailed."""
        return self.work(f"nativework.{work}", store=self.bench.store, **arguments)

    def record(self, metric: str, value: float, *, late: bool = False, partial: bool = False) -> None:
        self._add(metric, Figure(value, late=late, partial=partial, load=self.load))

    def rate(self, metric: str, answer: Answer) -> None:
        """Add a figure in MB/s (if the answer counts bytes) or calls/s, and that of the processor time."""
        amount = answer["bytes"] / MB if "bytes" in answer else answer["count"]
        self.record(metric, amount / max(answer["seconds"], 1e-9), partial=bool(answer.get("partial")))
        self.processor(metric, answer)

    def processor(self, metric: str, answer: Answer) -> None:
        """Add the server's processor time in the last work, for metrics that have this figure: s/GiB, or ms each."""
        if metric + PROCESSOR in BY_ID and not math.isnan(self.spent_s):
            amount = answer["bytes"] / GIB if "bytes" in answer else answer["count"] / 1000
            self.record(metric + PROCESSOR, self.spent_s / amount, partial=bool(answer.get("partial")))

    def fail(self, metric: str, error: BaseException) -> None:
        """Record that a figure could not be measured."""
        text = " ".join(str(error).split()) or type(error).__name__
        self._add(metric, Figure(math.nan, error=text[-300:], load=self.load))

    @contextlib.contextmanager
    def measuring(self, *metrics: str) -> Iterator[None]:
        """Record an expected error of the block as the error of these metrics."""
        try:
            yield
        except EXPECTED as error:
            for metric in metrics:
                self.fail(metric, error)

    def _add(self, metric: str, figure: Figure) -> None:
        self.bench.results.add(self.subject.name, metric, figure)
        if metric != ANY_RSS:
            self.bench.say(f"{self.subject.name:>14}  {metric:<16} {figure.error or format(figure.value, '.4g')}")


Work = Callable[[Cell], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Workloads that share a mount. native: the work of the plain client. metrics: the ids of the figures.

    needs_data: the subject must show the prepared objects. writes: it must be writable. only: the names of the
    subjects to measure; empty for all that fit. never: the names of those to leave out. once: it is not run again.
    """

    workloads: tuple[str, ...]
    work: Work
    metrics: tuple[str, ...]
    native: Work | None = None
    needs_data: bool = True
    writes: bool = False
    only: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    once: bool = False

    def fits(self, subject: Subject) -> bool:
        """Whether the group can be measured on the subject."""
        if (self.only and subject.name not in self.only) or subject.name in self.never:
            return False
        if subject.native:
            return self.native is not None
        return (subject.plain or not self.needs_data) and (subject.writable or not self.writes)

    def run(self, cell: Cell) -> None:
        """Measure a cell. An error that ends the work is recorded for each metric without a figure."""
        work = self.native if cell.subject.native and self.native is not None else self.work
        try:
            work(cell)
        except EXPECTED as error:
            missing = [each for each in self.metrics if cell.bench.results.get(cell.subject.name, each) is None]
            for metric in missing:
                cell.fail(metric, error)
            if not missing:
                cell.bench.say(f"{cell.subject.name:>14}  ended badly: {error}")
