"""What a mount did between two readings of its counters, which are those of `status -o json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastore.histogram import added, quantile_s
from datastore.mounting.silence import state_words
from datastore.units import format_size

Seen = Mapping[str, Any]
COLUMNS = (
    *("NAME", "MOUNTPOINT", "OPS/s", "READ/s", "WRITE/s", "HITS", "UNSENT", "ERRORS", "P50", "P99", "RSS"),
    "STATE",
)


def rates(before: Seen | None, after: Seen, seconds: float) -> dict[str, Any]:
    """Return one row of `top`. If before is None or of another server, the counters of `after` began at 0.

    hitRate, p50Seconds and p99Seconds are None when nothing was measured; errors counts since the server started.
    """
    base: Seen = before if before is not None and before.get("serverPid") == after.get("serverPid") else {}

    def grown(*path: str) -> int:
        return max(0, _number(after, path) - _number(base, path))

    ops = _total(after, "requests") - _total(base, "requests")
    hits, misses = grown("cache", "hits"), grown("cache", "misses")
    buckets = _difference(_buckets(after), _buckets(base))
    dirty = after.get("dirty") or []
    return {
        "name": after["name"],
        "mountpoint": after["mountpoint"],
        "state": after["state"],
        "storage": after.get("storage", {}),
        "opsPerSecond": round(max(0, ops) / seconds, 1),
        "readBytesPerSecond": round(grown("readBytes") / seconds),
        "writtenBytesPerSecond": round(grown("writtenBytes") / seconds),
        "hitRate": round(hits / (hits + misses), 3) if hits + misses else None,
        "dirtyFiles": len(dirty),
        "dirtyBytes": sum(each["bytes"] for each in dirty if isinstance(each.get("bytes"), int)),
        "errors": _total(after, "errors"),
        "p50Seconds": quantile_s(buckets, 0.5),
        "p99Seconds": quantile_s(buckets, 0.99),
        "rssBytes": _number(after, ("process", "rssBytes")),
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row for people, in the order of COLUMNS."""
    hit_rate = row["hitRate"]
    dirty = f"{row['dirtyFiles']} ({format_size(row['dirtyBytes'])})" if row["dirtyFiles"] else "0"
    return [
        row["name"],
        row["mountpoint"],
        f"{row['opsPerSecond']:.0f}",
        format_size(row["readBytesPerSecond"]),
        format_size(row["writtenBytesPerSecond"]),
        "-" if hit_rate is None else f"{hit_rate:.0%}",
        dirty,
        str(row["errors"]),
        short_time(row["p50Seconds"]),
        short_time(row["p99Seconds"]),
        format_size(row["rssBytes"]) if row["rssBytes"] else "-",
        state_words(row),
    ]


def short_time(seconds: float | None) -> str:
    """Return a latency for people: '12 us', '3.4 ms', '2.1 s', or '-' if it is unknown."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            count = seconds / size
            return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"
    return "-"


def _number(seen: Seen, path: tuple[str, ...]) -> int:
    found: Any = seen
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else 0


def _total(seen: Seen, key: str) -> int:
    counts = seen.get(key)
    return sum(counts.values()) if isinstance(counts, Mapping) else 0


def _buckets(seen: Seen) -> list[int]:
    total: list[int] = []
    latency = seen.get("latency")
    for row in latency.values() if isinstance(latency, Mapping) else ():
        total = added(total, row["buckets"]) if total else list(row["buckets"])
    return total


def _difference(after: list[int], before: list[int]) -> list[int]:
    if not before:
        return after
    return [max(0, now - then) for now, then in zip(after, before, strict=True)]
