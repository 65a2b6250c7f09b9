"""The bars: the goal for each metric, absolute or relative to another subject, and how figures are judged by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from bench.metrics import BY_ID, EXPORT_FIGURES, META_OPERATIONS, Figure, Results
from bench.w12 import PARTS

OURS, READ_ONLY, WRITE_BACK, NATIVE, LOCAL = "ours", "ours-ro", "ours-wb", "native", "local"
NOT_PEERS = frozenset({OURS, READ_ONLY, WRITE_BACK, NATIVE, LOCAL})


class Against(Enum):
    """What a figure is compared with."""

    PEER = "best peer"
    DURABLE_PEER = "best peer whose close is durable"
    LAZY_PEER = "best peer whose close is not durable"
    NATIVE = "native"
    LOCAL = "local"
    LIMIT = "limit"
    SUCCESS = "it succeeds"


@dataclass(frozen=True, slots=True)
class Bar:
    """A goal: the figure of `subject` is `direction` `factor` x that of `against`; for LIMIT the factor is the limit.

    reached: the factor that a short run reaches on the two cores of CI where it misses the bar (docs/BENCH.md says
    why). A short run then asks for half of that factor, so that a change for the worse is noticed.
    """

    metric: str
    direction: Literal[">=", "<="]
    factor: float
    against: Against
    subject: str = OURS
    reached: float = math.nan

    def asked(self, allowance: float) -> float:
        """Return the factor to judge by: the bar's own, or in a short run (allowance below 1) a weaker one."""
        if allowance == 1.0:
            return self.factor
        factor = self.factor if math.isnan(self.reached) else self.reached
        return factor * allowance if self.direction == ">=" else factor / allowance

    def __str__(self) -> str:
        if self.against is Against.SUCCESS:
            return str(self.against.value)
        unit = f" {BY_ID[self.metric].unit}" if self.against is Against.LIMIT else f" x {self.against.value}"
        return f"{self.direction} {self.factor:g}{unit}"


BARS = (
    Bar("W1.read", ">=", 1.3, Against.PEER),
    Bar("W1.read", ">=", 0.5, Against.NATIVE),
    Bar("W2.read", ">=", 0.8, Against.LOCAL),
    Bar("W3.write", ">=", 1.1, Against.PEER),
    Bar("W3.write", ">=", 0.85, Against.NATIVE),
    Bar("W4.random_4k", ">=", 1.3, Against.PEER),
    Bar("W4.random_128k", ">=", 1.3, Against.PEER),
    Bar("W4.streams", ">=", 1.3, Against.PEER),
    Bar("W5.one", ">=", 1.3, Against.PEER),
    Bar("W5.sixteen", ">=", 1.3, Against.PEER),
    Bar("W5.sixteen", ">=", 0.5, Against.NATIVE, reached=0.28),
    Bar("W6.one", ">=", 3.0, Against.PEER),
    Bar("W6.sixteen", ">=", 3.0, Against.PEER),
    Bar("W6.one", ">=", 0.5, Against.LOCAL, READ_ONLY),
    Bar("W6.sixteen", ">=", 0.5, Against.LOCAL, READ_ONLY),
    Bar("W7.one", ">=", 0.7, Against.NATIVE),
    Bar("W7.sixteen", ">=", 0.7, Against.NATIVE, reached=0.34),
    Bar("W7.one", ">=", 1.5, Against.DURABLE_PEER),
    Bar("W7.sixteen", ">=", 1.5, Against.DURABLE_PEER),
    Bar("W7.one", ">=", 1.0, Against.LAZY_PEER, WRITE_BACK),
    Bar("W7.sixteen", ">=", 1.0, Against.LAZY_PEER, WRITE_BACK),
    Bar("W8.tree_cold", "<=", 1.5, Against.NATIVE, reached=2.6),
    Bar("W8.flat_cold", "<=", 1.5, Against.NATIVE, reached=2.8),
    Bar("W8.tree_cold", "<=", 1.0, Against.PEER),
    Bar("W8.flat_cold", "<=", 1.0, Against.PEER),
    # At least half as fast as local.
    Bar("W8.tree_warm", "<=", 2.0, Against.LOCAL, reached=12),
    Bar("W8.flat_warm", "<=", 2.0, Against.LOCAL, reached=15),
    Bar("W8.tree_warm", "<=", 2.0, Against.LOCAL, READ_ONLY),
    Bar("W8.flat_warm", "<=", 2.0, Against.LOCAL, READ_ONLY),
    *(Bar(f"W9.{name}", ">=", 1.0, Against.DURABLE_PEER) for name in META_OPERATIONS),
    Bar("W9.rename_dir", "<=", 1.0, Against.DURABLE_PEER),
    Bar("W10.walk", "<=", 512, Against.LIMIT),
    Bar("W10.stream", "<=", 512, Against.LIMIT),
    Bar("W10.open", "<=", 512, Against.LIMIT),
    Bar("W11.first_byte", "<=", 1.0, Against.LIMIT),
    Bar("W11.restart", "<=", 1.0, Against.LIMIT),
    *(Bar(f"W12.{number}", "<=", math.inf, Against.SUCCESS) for number in range(1, len(PARTS) + 1)),
    # Processor time of the mount's server over http; with --tls a small file may take 0.6 ms.
    Bar("W1.read_cpu", "<=", 1.2, Against.LIMIT),
    *(Bar(f"{each}_cpu", "<=", 0.45, Against.LIMIT) for each in ("W5.one", "W5.sixteen", "W7.one")),
    Bar("W6.one_cpu", "<=", 0.05, Against.LIMIT),
    Bar("M1.large_disk", "<=", 1.0, Against.PEER),
    Bar("M1.small_disk", "<=", 1.0, Against.PEER),
    Bar("M1.large_bucket", "<=", 0.5, Against.PEER),
    Bar("M1.small_bucket", "<=", 0.5, Against.PEER),
    *(Bar(f"N1.{name}", ">=", 0.6, Against.NATIVE) for name in EXPORT_FIGURES),
)
SHORT_AGAINST = frozenset({Against.NATIVE, Against.LOCAL})
SHORT_ALLOWANCE = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a bar was judged. met: None if there was nothing to compare with. who: the subject of the reference. ratio:
    figure / reference. why: the reason, if the bar is missed or void without a ratio. asked: the factor that counts."""

    bar: Bar
    met: bool | None
    figure: float = math.nan
    reference: float = math.nan
    who: str = ""
    ratio: float = math.nan
    why: str = ""
    asked: float = math.nan

    @property
    def word(self) -> str:
        """What is printed beside the bar."""
        return "not compared" if self.met is None else "met" if self.met else "missed"


def judge(bars: Iterable[Bar], results: Results, allowance: float = 1.0) -> list[Verdict]:
    """Return a verdict for every bar whose metric has a figure of any subject. allowance: 0.5 asks for half as much."""
    return [_judge_one(bar, results, allowance) for bar in bars if results.subjects(bar.metric)]


def last_line(verdicts: Iterable[Verdict]) -> str:
    """`N met, M missed`."""
    words = [verdict.met for verdict in verdicts]
    return f"{words.count(True)} met, {words.count(False)} missed"


def _judge_one(bar: Bar, results: Results, allowance: float) -> Verdict:
    own = results.get(bar.subject, bar.metric)
    if own is None or own.error:
        return Verdict(bar, False, why=own.error if own else f"{bar.subject} was not measured")
    if bar.against is Against.SUCCESS:
        return Verdict(bar, True, own.value)
    if bar.against is Against.DURABLE_PEER and own.late:
        return Verdict(bar, False, own.value, why="S3 did not have it when the call returned")
    factor = bar.asked(allowance)
    if bar.against is Against.LIMIT:
        who, reference, factor = "limit", bar.factor, 1.0
    else:
        who, reference = _reference(bar, results)
    if not who:
        return Verdict(bar, None, own.value, why=f"no {bar.against.value} in this run")
    ratio = own.value / reference if reference else math.inf
    met = ratio >= factor if bar.direction == ">=" else ratio <= factor
    return Verdict(bar, met, own.value, reference, who, ratio, asked=factor)


def _reference(bar: Bar, results: Results) -> tuple[str, float]:
    """Return the subject to compare with and its figure; ('', nan) when no subject qualifies."""
    if bar.against in (Against.NATIVE, Against.LOCAL):
        names = [bar.against.value]
        fits: Callable[[Figure], bool] = _any
    else:
        names = [name for name in results.subjects(bar.metric) if name not in NOT_PEERS]
        fits = {Against.DURABLE_PEER: _durable, Against.LAZY_PEER: _late}.get(bar.against, _any)
    found = {
        name: figure.value
        for name in names
        if (figure := results.get(name, bar.metric)) is not None and not figure.error and fits(figure)
    }
    if not found:
        return "", math.nan
    best = max if bar.direction == ">=" else min
    name = best(found, key=lambda each: found[each])
    return name, found[name]


def _any(_figure: Figure) -> bool:
    return True


def _durable(figure: Figure) -> bool:
    return not figure.late


def _late(figure: Figure) -> bool:
    return figure.late
