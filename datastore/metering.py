"""Computes from samples what a task used, as peaks and means. Pure, and the same for every launcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Annotated

from pydantic import Field, WithJsonSchema

from datastore.api.fields import Part
from datastore.api.status import Count

Number = Annotated[float, WithJsonSchema({"type": "number", "minimum": 0})]

Packed = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of a task. at_s: any monotonic clock. cpu_s, received_bytes and sent_bytes are totals so far.
    None: the value can't be read on this machine."""

    at_s: float
    cpu_s: float
    memory_bytes: int
    received_bytes: int | None = None
    sent_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None


class Figure(Part):
    """The peak and the mean of one quantity over the life of a task."""

    peak: Number = Field(0.0, description="Highest sample.")
    mean: Number = Field(0.0, description="Mean over time.")


class Usage(Part):
    """What a task used, as figures in processors, bytes, bytes per second and percent, and as totals."""

    cpu: Figure = Field(description="Processors.")
    memory: Figure = Field(description="Bytes of memory.")
    received: Figure | None = Field(None, description="Bytes received from the network in a second.")
    sent: Figure | None = Field(None, description="Bytes sent in a second.")
    gpu: Figure | None = Field(None, description="Percent of the time in which its GPUs computed.")
    gpu_memory: Figure | None = Field(None, description="Bytes of memory of its GPUs.")
    cpu_seconds: Number = Field(description="Processor seconds in all.")
    received_bytes: Count | None = Field(None, description="Bytes received in all.")
    sent_bytes: Count | None = Field(None, description="Bytes sent in all.")


@dataclass(slots=True)
class _Average:
    """The peak of a quantity, and the sums for its mean, in which each value is weighted by how long it held."""

    peak: float = 0.0
    area: float = 0.0
    seconds: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        self.peak = max(self.peak, value)
        self.area += value * seconds
        self.seconds += seconds

    @property
    def figure(self) -> Figure:
        # dump() rounds, and sums of floats are inexact: without min() a constant's mean could exceed its peak.
        mean = min(self.area / self.seconds, self.peak) if self.seconds else self.peak
        return Figure(peak=round(self.peak, 3), mean=round(mean, 3))


@dataclass(slots=True)
class Meter:
    """Adds up the samples of one task. now: the values in the newest interval, which `top` shows."""

    last: Sample | None = None
    averages: dict[str, _Average] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add a sample. Samples come in the order of their times; a sample no later than the last is ignored."""
        before = self.last
        seconds = sample.at_s - before.at_s if before else 0.0
        if before and seconds <= 0:
            return
        self.last = sample
        held = {
            "memory": sample.memory_bytes,
            "gpu": sample.gpu_percent,
            "gpuMemory": sample.gpu_memory_bytes,
            "cpu": _rate(before.cpu_s if before else None, sample.cpu_s, seconds),
            "received": _rate(before.received_bytes if before else None, sample.received_bytes, seconds),
            "sent": _rate(before.sent_bytes if before else None, sample.sent_bytes, seconds),
        }
        self.now = {name: value for name, value in held.items() if value is not None}
        for name, value in self.now.items():
            self.averages.setdefault(name, _Average()).add(value, seconds)

    def usage(self) -> Usage | None:
        """Return what the task used so far; None before the first sample."""
        if self.last is None:
            return None
        figures = {name: average.figure for name, average in self.averages.items()}
        return Usage.model_validate(
            {
                "cpu": figures.get("cpu", Figure.model_validate({})),
                "memory": figures["memory"],
                **{name: figures[name] for name in ("received", "sent", "gpu", "gpuMemory") if name in figures},
                "cpuSeconds": round(self.last.cpu_s, 3),
                "receivedBytes": self.last.received_bytes,
                "sentBytes": self.last.sent_bytes,
            }
        )

    def dump(self) -> Packed:
        """Return a small form of this Meter for JSON, which load() reads."""
        if self.last is None:
            return {}
        found: dict[str, list[float | None]] = {"last": [*astuple(self.last)]}
        for name, each in self.averages.items():
            found[name] = [each.peak, each.area, each.seconds, self.now.get(name)]
        return {name: [_rounded(each) for each in row] for name, row in found.items()}


def load(packed: Packed) -> Meter:
    """Return the Meter that dump() packed. Errors: ValueError when it is something else."""
    names = [each.name for each in fields(Sample)]
    meter = Meter()
    try:
        for name, row in packed.items():
            if name == "last":
                meter.last = Sample(**dict(zip(names, row, strict=True)))  # type: ignore[arg-type]
                continue
            peak, area, seconds, now = row
            meter.averages[name] = _Average(float(peak or 0), float(area or 0), float(seconds or 0))
            if now is not None:
                meter.now[name] = float(now)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"these are no figures: {error}") from None
    return meter


def together(meters: Iterable[Meter]) -> Meter:
    """Return one Meter for a task that was started several times: the highest peaks, and the sums of all totals."""
    total = Meter()
    for meter in meters:
        for name, each in meter.averages.items():
            average = total.averages.setdefault(name, _Average())
            average.peak = max(average.peak, each.peak)
            average.area += each.area
            average.seconds += each.seconds
        if meter.last is not None:
            total.last = _later(total.last, meter.last)
            total.now = meter.now
    return total


def _later(before: Sample | None, last: Sample) -> Sample:
    if before is None:
        return last

    def summed(one: int | None, other: int | None) -> int | None:
        return one if other is None else other if one is None else one + other

    return replace(
        last,
        cpu_s=before.cpu_s + last.cpu_s,
        received_bytes=summed(before.received_bytes, last.received_bytes),
        sent_bytes=summed(before.sent_bytes, last.sent_bytes),
    )


def _rounded(value: float | None) -> float | None:
    return value if value is None or value == int(value) else round(value, 3)


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    if before is None or after is None or seconds <= 0:
        return None
    return max(0.0, after - before) / seconds
