"""The figures that a soak watches over time, and pure functions that judge whether they grew."""

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
    """The figures of the mount server at one time; sizes in bytes. pending: unfinished multipart uploads, -1 if not
    asked. descriptors: without those of cache files, of which a filling cache has more, up to a limit of its own."""

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
    """How much larger a figure may be at the end than early on: by a share of the early figure plus `more`."""

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
"""The limits at rest, after the load was stopped, when the figures are steadier."""
CACHE_SLACK = 0.05
GROWN_UP_S = 5.0
"""The age from which a server's samples count; a newer one does not yet have all its threads and memory."""
FILLING = 256 * MIB
"""The memory that a server reaches within some minutes while its caches fill."""


class Sampler(threading.Thread):
    """Takes a sample every period_s, from start() to stop()."""

    def __init__(self, look: Callable[[], Sample | None], period_s: float) -> None:
        super().__init__(name="sampler", daemon=True)
        self.samples: list[Sample] = []
        self._look, self._period_s = look, period_s
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)

    def run(self) -> None:
        while not self._stopping.wait(self._period_s):
            sample = self._look()
            if sample is not None:
                self.samples.append(sample)


def look_at(supervisor_pid: int, state: Path, cache: Path, began: float) -> Sample | None:
    """Return a sample of the processes and directories of one mount; None while no server lives."""
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
    """Return how many descriptors a process has, without those of files below the directory."""
    count = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += not os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"{directory}/")
    return count


def serving(supervisor: psutil.Process) -> psutil.Process | None:
    """Return the child that serves; the standby process, which waits to take its place, has a single thread."""
    found = None
    for child in supervisor.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.num_threads() > 1:
                found = child
    return found


def disk_bytes(directory: Path) -> int:
    """Return how many bytes a directory takes on the disk."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def growth(samples: Sequence[Sample], filling: int = 0) -> list[str]:
    """Return a line for each figure that grew while the load ran: the medians of the last and the second quarter count.

    As the server's memory grows with its caches for minutes, and anew after a kill, the highest of each half counts for
    it. filling: the memory that is always allowed, for a soak that ends before the caches are full.
    """
    if not samples:
        return ["too few samples to judge growth"]
    grown_up = [sample for sample in samples if sample.server_age_s >= GROWN_UP_S] or samples
    begin_s, end_s = samples[0].at_s, samples[-1].at_s
    quarter_s = (end_s - begin_s) / 4
    early = [sample for sample in grown_up if begin_s + quarter_s <= sample.at_s < begin_s + 2 * quarter_s]
    late = [sample for sample in grown_up if sample.at_s >= end_s - quarter_s]
    if not early or not late:
        # A quarter has no sample, as kills followed each other: compare the whole halves.
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
    """A line for each figure that grew between two looks at rest, and for each leftover. filling: see growth()."""
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
