"""The rows and lines that show jobs to people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from datastore.training.driver import Observed
from datastore.training.evidence import ReplicaEvidence
from datastore.units import format_count, format_duration, format_size

LIST = ("NAME", "FRAMEWORK", "PHASE", "ROLES", "RESTARTS", "DURATION", "FREED", "WHERE")
REPLICAS = (
    "REPLICA",
    "STATE",
    "EXIT",
    "RESTARTS",
    "DURATION",
    "CPU",
    "CPU PEAK",
    "MEMORY",
    "MEM PEAK",
    "RECEIVED",
    "SENT",
    "GPUS",
)
TOP = ("REPLICA", "CPU", "MEMORY", "RECEIVED/s", "SENT/s", "GPU", "GPU MEMORY")


def list_row(observed: Observed, now: datetime) -> list[str]:
    """Return a job's row under LIST."""
    status = observed.status
    return [
        observed.job.name,
        observed.job.spec.framework,
        status.phase or "-",
        roles(observed),
        str(status.restarts or 0),
        duration(status.start_time, status.completion_time or now),
        "-" if status.freed_seconds is None else f"{status.freed_seconds:.2f} s",
        observed.where,
    ]


def roles(observed: Observed) -> str:
    """Return how many replicas of each role run or have succeeded: 'master 1/1, worker 2/2'."""
    counted = observed.status.roles or []
    return ", ".join(f"{each.role} {each.active + each.succeeded}/{each.replicas}" for each in counted)


def duration(start: datetime | None, end: datetime | None) -> str:
    """Return the time between two times in whole seconds, for people; '-' if one is unknown."""
    if start is None or end is None:
        return "-"
    return format_duration(max(0, int((end - start).total_seconds())))


def replica_row(replica: ReplicaEvidence) -> list[str]:
    """Return a replica's row under REPLICAS, with means and peaks of its usage."""
    usage = replica.usage
    code = "-" if replica.exit_code is None else str(replica.exit_code)
    row = [
        replica.name,
        replica.state.value,
        f"{code} ({replica.reason})" if replica.reason else code,
        str(replica.restarts),
        duration(replica.started_at, replica.ended_at or datetime.now(UTC)),
    ]
    if usage is None:
        return [*row, *["-"] * 6, gpus(replica)]
    return [
        *row,
        f"{usage.cpu.mean:.2f}",
        f"{usage.cpu.peak:.2f}",
        format_size(round(usage.memory.mean)),
        format_size(round(usage.memory.peak)),
        size_or_dash(usage.received_bytes),
        size_or_dash(usage.sent_bytes),
        gpus(replica),
    ]


def gpus(replica: ReplicaEvidence) -> str:
    """Return the numbers of a replica's GPUs, or '-'."""
    return ", ".join(each.partition(" ")[0] for each in replica.gpus) or "-"


def top_row(metrics: Mapping[str, Any]) -> list[str]:
    """Return a row under TOP, of an item of Driver.metrics()."""
    percent = metrics.get("gpu")
    return [
        f"{metrics['role']}-{metrics['index']}",
        f"{metrics['cpu']:.2f}" if "cpu" in metrics else "-",
        size_or_dash(metrics.get("memory")),
        size_or_dash(metrics.get("received")),
        size_or_dash(metrics.get("sent")),
        "-" if percent is None else f"{percent:.0f}%",
        size_or_dash(metrics.get("gpuMemory")),
    ]


def size_or_dash(size: float | None) -> str:
    return "-" if size is None else format_size(round(size))


def progress(observed: Observed, now: datetime) -> str:
    """Return one line about what the whole job does."""
    status = observed.status
    parts = [observed.job.name, status.phase or "Pending", duration(status.start_time, status.completion_time or now)]
    parts += [roles(observed)] if status.roles else []
    parts += [format_count(status.restarts, "restart")] if status.restarts else []
    parts += [status.message] if status.message else []
    return " · ".join(part for part in parts if part != "-")
