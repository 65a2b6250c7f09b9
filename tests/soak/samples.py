"""What a soak watches over time, and when it counts as growth. The judging is pure."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the mount server; sizes in bytes. pending: unfinished multipart uploads, -1 when not asked.

    descriptors: without those of cache files, of which it holds up to a limit of its own as the cache fills.
    """

    at_s: float
    operations: int = 0
    server_pid: int = 0
    server_age_s: float = 0.0
    rss: int = 0
    supervisor_rss: int = 0
    descriptors: int = 0
    threads: int = 0
    state: int = 0
    cache: int = 0
    pending: int = -1
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """How much more a figure may be at the end than early on: a share of it, and so much besides."""

    share: float
    more: float


PEAK = Limit(0.15, 24 * MIB)
LIMITS = {
    "supervisor_rss": Limit(0.1, 4 * MIB),
    "descriptors": Limit(0.2, 40),
    "threads": Limit(0.1, 16),
    "state": Limit(0.2, 24 * MIB),
}
RESTING = {
    "rss": Limit(0.2, 24 * MIB),
    "supervisor_rss": Limit(0.1, 4 * MIB),
    "descriptors": Limit(0.2, 24),
    "threads": Limit(0.1, 16),
    "state": Limit(0.2, 4 * MIB),
}
"""At rest, after the load was stopped, the figures are steadier."""
CACHE_SLACK = 0.05
GROWN_UP_S = 5.0
"""A new server has not got its threads and memory yet."""
FILLING = 256 * MIB
"""What one whose caches fill reaches within some minutes."""


class Sampler(threading.Thread):
    """Looks every period_s, from start() to stop()."""

    def __init__(self, look: Callable[[], Sample | None], period_s: float) -> None:
        super().__init__(name="sampler", daemon=True)
        self.samples: list[Sample] = []
        self._look, self._period_s = look, period_s
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End."""
        self._stopping.set()
        self.join(60)

    def run(self) -> None:
        """Until stop()."""
        while not self._stopping.wait(self._period_s):
            sample = self._look()
            if sample is not None:
                self.samples.append(sample)


def look_at(supervisor_pid: int, state: Path, cache: Path, began: float) -> Sample | None:
    """The processes and directories of one mount; None while no server lives."""
    try:
        supervisor = psutil.Process(supervisor_pid)
        server = serving(supervisor)
        if server is None:
            return None
        with server.oneshot():
            return Sample(
                at_s=time.monotonic() - began,
                server_pid=server.pid,
                server_age_s=time.time() - server.create_time(),
                rss=server.memory_info().rss,
                supervisor_rss=supervisor.memory_info().rss,
                descriptors=descriptors_but(server.pid, cache),
                threads=server.num_threads(),
                state=disk_bytes(state),
                cache=disk_bytes(cache),
            )
    except (psutil.Error, FileNotFoundError):
        return None


def descriptors_but(pid: int, directory: Path) -> int:
    """How many descriptors a process has that are of no file below the directory."""
    count = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += not os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"{directory}/")
    return count


def serving(supervisor: psutil.Process) -> psutil.Process | None:
    """The child that serves: the one that waits to take its place has a single thread."""
    found = None
    for child in supervisor.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.num_threads() > 1:
                found = child
    return found


def disk_bytes(directory: Path) -> int:
    """What a directory takes on the disk."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def growth(samples: Sequence[Sample], filling: int = 0) -> list[str]:
    """What grew while the load ran: the last quarter beside the second, medians; a line each.

    The server's memory grows into its caches for minutes, and a killed one begins anew: of that the
    highest of each half. filling: what a server's memory may be at any time, for a soak that ends before they are full.
    """
    if not samples:
        return ["too few samples to judge growth"]
    grown_up = [sample for sample in samples if sample.server_age_s >= GROWN_UP_S] or samples
    begin_s, end_s = samples[0].at_s, samples[-1].at_s
    quarter_s = (end_s - begin_s) / 4
    early = [sample for sample in grown_up if begin_s + quarter_s <= sample.at_s < begin_s + 2 * quarter_s]
    late = [sample for sample in grown_up if sample.at_s >= end_s - quarter_s]
    if not early or not late:
        # Kills followed on each other there: the whole halves.
        early = [sample for sample in grown_up if sample.at_s < begin_s + 2 * quarter_s]
        late = [sample for sample in grown_up if sample.at_s >= begin_s + 2 * quarter_s]
    if not early or not late:
        return ["too few samples to judge growth"]
    lines = [
        _grew(name, limit, _median(early, name), _median(late, name), "second quarter", "last quarter")
        for name, limit in LIMITS.items()
    ]
    half_s = begin_s + 2 * quarter_s
    halves = [sample for sample in grown_up if sample.at_s < half_s], [s for s in grown_up if s.at_s >= half_s]
    highest = [float(max(sample.rss for sample in half)) for half in halves]
    lines.append(
        _grew("rss", PEAK, max(highest[0], filling), highest[1], "highest of the first half", "highest of the second")
    )
    return [line for line in lines if line]


def resting(before: Sample, after: Sample, cache_limit: int, filling: int = 0) -> list[str]:
    """What is more at rest at the end than at rest at the start, or is left over; a line each. filling: of growth."""
    before = replace(before, rss=max(before.rss, filling))
    found = [
        line
        for name, limit in RESTING.items()
        if (line := _grew(name, limit, getattr(before, name), getattr(after, name), "at rest first", "at the end"))
    ]
    if after.pending > 0:
        found.append(f"{after.pending} multipart uploads are left")
    if after.unsent:
        found.append(f"{after.unsent} files are not sent")
    if after.cache > cache_limit * (1 + CACHE_SLACK):
        found.append(f"the cache takes {after.cache / MIB:.0f} MiB of {cache_limit / MIB:.0f}")
    return found


def _median(samples: Sequence[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


def _grew(name: str, limit: Limit, early: float, late: float, when: str, then: str) -> str:
    allowed = early * (1 + limit.share) + limit.more
    return f"{name}: {early:.0f} ({when}), {late:.0f} ({then})" if late > allowed else ""
