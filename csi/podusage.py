"""Measures the resource usage of this node's TrainingJob pods, for the training controller: CPU, memory, network, GPUs.

A pod requests this with the volume USAGE_VOLUME (podrequests.py). Everything is read from outside the pod: its cgroup,
the network namespace that its processes share, and NVML. The figures go into one ConfigMap in the driver's namespace,
which no tenant may read and only this node's plugin may write.

Sources: proc(5), cgroups(7); the kubelet names a pod's cgroup by the pod's uid, with '_' for '-' under systemd.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from datastore import nvml
from datastore.api.names import USAGE_VOLUME
from datastore.cgroupfiles import Places
from datastore.errors import DatastoreError
from datastore.logs import fields
from datastore.metering import Meter, Sample, load

from .podrequests import requests, uid_of

log = logging.getLogger(__name__)

INTERVAL_S = 2.5
REPORT_S = 10.0
"""The time between two reports; only the last figures of a pod are reported at once."""
LATE_S = 120.0
"""How long the figures of a pod are still reported after its end."""
PODS_MAX = 250
"""The most pods in one report: more than a kubelet runs."""
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")

Send = Callable[[Mapping[str, str]], None]
Recall = Callable[[], Mapping[str, str]]


@dataclass(slots=True)
class _Pod:
    """A pod's figures. pid: the host's pid of one of its processes; gone_s: when the pod ended (wall clock)."""

    meter: Meter = field(default_factory=Meter)
    pid: int = 0
    places: Places = field(default_factory=Places)
    network: tuple[int, int] | None = None
    gone_s: float | None = None


class PodUsage:
    """Measures all pods of this node that request it. pods: the kubelet's directory of pods; proc, cgroups: the host's.

    recall: returns the last report, of an earlier plugin; send: sends a new one. Errors of both: DatastoreError.
    """

    def __init__(self, pods: Path, proc: Path, cgroups: Path, recall: Recall, send: Send) -> None:
        self._pods, self._proc, self._cgroups = pods, proc, cgroups
        self._recall, self._send = recall, send
        self._known: dict[str, _Pod] = {}
        self._lock = threading.Lock()
        self._begun = False
        self._told_s = 0.0
        self._urgent = False
        self._refused = ""

    def look(self) -> None:
        """Take one sample of each pod, and send a report if one is due. Call this every INTERVAL_S."""
        there = requests(self._pods, USAGE_VOLUME).keys()
        now = time.time()
        try:
            if there and not self._begun:
                self._go_on(self._recall(), there)
            with self._lock:
                self._sample(there, now)
                seen = {uid: pod.meter.dump() for uid, pod in self._known.items() if pod.meter.last is not None}
                due = self._urgent or (bool(there) and now - self._told_s >= REPORT_S)
                self._urgent = False
            if due and self._begun:
                self._told_s = now
                newest = list(seen.items())[-PODS_MAX:]
                self._send({uid: json.dumps(figures, separators=(",", ":")) for uid, figures in newest})
            self._refused = ""
        except DatastoreError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("what pods use is not told to the controller", extra=fields(reason=error))

    def finish(self, target: str) -> None:
        """Take the last sample of the pod whose volume at this path is unmounted; its processes have ended."""
        with self._lock:
            pod = self._known.get(uid_of(self._pods, target))
            if pod is not None and pod.gone_s is None:
                self._measure(pod, None)
                self._urgent = True

    def _go_on(self, before: Mapping[str, str], there: Collection[str]) -> None:
        for uid, text in before.items():
            with suppress(ValueError):
                self._known[uid] = _Pod(meter=load(json.loads(text)), gone_s=None if uid in there else time.time())
        self._begun = True

    def _sample(self, there: Collection[str], now: float) -> None:
        for uid in list(self._known):
            pod = self._known[uid]
            if uid in there:
                pod.gone_s = None
            elif pod.gone_s is None:
                pod.gone_s, self._urgent = now, True
            elif now - pod.gone_s > LATE_S:
                del self._known[uid]
        for uid in there:
            self._known.setdefault(uid, _Pod())
        if lost := {uid for uid in there if self._uid_of(self._known[uid].pid) != uid}:
            self._find(lost)
        gpus = self._gpus()
        for uid in there:
            self._measure(self._known[uid], gpus.get(uid))

    def _find(self, wanted: Collection[str]) -> None:
        """Find a process of each of these pods, and the pods' cgroups."""
        for entry in os.scandir(self._proc):
            pid = int(entry.name) if entry.name.isdigit() else 0
            uid = self._uid_of(pid)
            if uid in wanted:
                self._known[uid].pid = pid
                with suppress(OSError):
                    self._known[uid].places = _places(self._cgroups, (self._proc / str(pid) / "cgroup").read_text())

    def _uid_of(self, pid: int) -> str:
        """Return the uid of a process's pod; '' for a process of no pod, or that has ended."""
        try:
            found = _POD.search((self._proc / str(pid) / "cgroup").read_text()) if pid else None
        except OSError:
            return ""
        return found[1].replace("_", "-") if found else ""

    def _measure(self, pod: _Pod, gpu: tuple[float, int] | None) -> None:
        # Each sample has a time of its own: on a busy node seconds may pass between the first pod and the last.
        cpu_s, at_s, memory_bytes = pod.places.cpu_s(), time.time(), pod.places.memory_bytes()
        if cpu_s is None or memory_bytes is None:
            return  # the pod has not begun, or its cgroup is gone
        pod.network = self._traffic(pod.pid) or pod.network
        pod.meter.add(
            Sample(
                at_s=at_s,
                cpu_s=cpu_s,
                memory_bytes=memory_bytes,
                received_bytes=pod.network[0] if pod.network else None,
                sent_bytes=pod.network[1] if pod.network else None,
                gpu_percent=gpu[0] if gpu else None,
                gpu_memory_bytes=gpu[1] if gpu else None,
            )
        )

    def _traffic(self, pid: int) -> tuple[int, int] | None:
        """Return the bytes received and sent in a pod's network namespace; None if that is the node's, or has ended."""
        try:
            if (self._proc / str(pid) / "ns" / "net").stat().st_ino == os.stat("/proc/self/ns/net").st_ino:
                return None
            lines = (self._proc / str(pid) / "net" / "dev").read_text().splitlines()[2:]
        except OSError:
            return None
        counted = [line.partition(":") for line in lines]
        numbers = [[int(each) for each in rest.split()] for name, _, rest in counted if name.strip() != "lo"]
        return sum(each[0] for each in numbers), sum(each[8] for each in numbers)

    def _gpus(self) -> dict[str, tuple[float, int]]:
        """Return, by pod, the use (percent) and the memory (bytes) of all GPUs on which it has a process, from NVML."""
        found: dict[str, tuple[float, int]] = {}
        with nvml.driver() as driver:
            for index in range(driver.nvmlDeviceGetCount() if driver else 0):
                with suppress(driver.NVMLError):
                    handle = driver.nvmlDeviceGetHandleByIndex(index)
                    percent = float(driver.nvmlDeviceGetUtilizationRates(handle).gpu)
                    used = nvml.memory_used(driver, handle)
                    # NVML's pids are the host's.
                    for uid in {self._uid_of(each.pid) for each in driver.nvmlDeviceGetComputeRunningProcesses(handle)}:
                        before = found.get(uid, (0.0, 0))
                        found[uid] = (before[0] + percent, before[1] + used)
        return found


def _places(root: Path, text: str) -> Places:
    """Return a pod's cgroups, from the /proc/PID/cgroup of one of its processes."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        of_pod = _POD.search(path)
        if of_pod:
            end = path.find("/", of_pod.end())
            whole = path if end < 0 else path[:end]
            found |= {name: whole.lstrip("/") for name in controllers.split(",")}
    if "memory" in found:
        accounting = root / "cpuacct" / found["cpuacct"] if "cpuacct" in found else None
        return Places(accounting=accounting, memory=root / "memory" / found["memory"])
    return Places(unified=root / found[""]) if "" in found else Places()
