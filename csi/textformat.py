"""Prometheus' text format 0.0.4, as far as gauges and counters need it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Sample = tuple[str, Mapping[str, str], float]
"""A sample: the metric's name, its labels, its value."""


class Family(NamedTuple):
    """A metric: its name, its kind ('gauge' or 'counter'), and its description."""

    name: str
    kind: str
    help: str


def rendered(families: Sequence[Family], samples: Iterable[Sample]) -> str:
    """Return the page for a scrape; samples of one name are grouped, as the format requires."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        by_name.setdefault(name, []).append(f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}")
    lines: list[str] = []
    for family in families:
        if family.name in by_name:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += by_name[family.name]
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
