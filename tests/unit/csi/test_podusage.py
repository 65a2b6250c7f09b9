"""datastore.csi.podusage: the usage of pods on a simulated host; tests/cluster has a real one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from datastore.api.names import USAGE_VOLUME
from datastore.csi import podusage
from datastore.csi.podusage import LATE_S, PodUsage
from datastore.errors import Unreachable
from datastore.metering import Meter, load
from tests.promises import promise

UID = "11111111-2222-3333-4444-555555555555"
OTHER = "99999999-2222-3333-4444-555555555555"
V1 = "9:cpuacct,cpu:/kube/kubepods/burstable/pod{uid}/main\n4:memory:/kube/kubepods/burstable/pod{uid}/main\n0::/\n"
V2 = "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice/cri-containerd-1.scope\n"
NETWORK = "Inter-| Receive\n face |bytes\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0: {} 0 0 0 0 0 0 0 {} 0\n"


class Host:
    """The files of a node with two pods: process 7 belongs to one that requests it, process 8 to one that does not."""

    def __init__(self, root: Path, cgroup: str) -> None:
        self.root, self.now = root, 1000.0
        self.reports: list[Mapping[str, str]] = []
        self.before: dict[str, str] = {}
        self.fails = False
        self.volume = root / "pods" / UID / "volumes" / "kubernetes.io~downward-api" / USAGE_VOLUME
        self.volume.mkdir(parents=True)
        for pid, uid in ((7, UID), (8, OTHER)):
            process = root / "proc" / str(pid)
            (process / "net").mkdir(parents=True)
            (process / "ns").mkdir()
            (process / "ns" / "net").touch()
            (process / "cgroup").write_text(cgroup.format(uid=uid, under=uid.replace("-", "_")))
        (root / "proc" / "self").symlink_to("8")
        self.v1 = "memory" in cgroup
        self.usage = self.plugin()

    def plugin(self) -> PodUsage:
        """A plugin that was just started."""
        pods, proc, cgroups = (self.root / name for name in ("pods", "proc", "cgroup"))
        return PodUsage(pods, proc, cgroups, lambda: self.before, self.tell)

    def tell(self, data: Mapping[str, str]) -> None:
        if self.fails:
            raise Unreachable("no answer")
        self.reports.append(data)

    def uses(self, cpu_s: float, memory: int, traffic: int) -> None:
        """Set what the whole pod has used so far."""
        if self.v1:
            of_pod = f"kube/kubepods/burstable/pod{UID}"
            files = {
                f"cpuacct/{of_pod}/cpuacct.usage": str(int(cpu_s * 1e9)),
                f"memory/{of_pod}/memory.usage_in_bytes": str(memory + 5),
                f"memory/{of_pod}/memory.stat": "inactive_file 1\ntotal_inactive_file 5\n",
            }
        else:
            under = UID.replace("-", "_")
            of_pod = f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice"
            files = {
                f"{of_pod}/cpu.stat": f"usage_usec {int(cpu_s * 1e6)}\n",
                f"{of_pod}/memory.current": str(memory + 5),
                f"{of_pod}/memory.stat": "inactive_file 5\n",
            }
        for name, text in files.items():
            path = self.root / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self.root / "proc" / "7" / "net" / "dev").write_text(NETWORK.format(traffic, 2 * traffic))

    def look(self, after_s: float) -> None:
        self.now += after_s
        self.usage.look()

    def told(self) -> Meter:
        """Return the figures of our pod, the only ones reported."""
        assert list(self.reports[-1]) == [UID]
        return load(json.loads(self.reports[-1][UID]))


@pytest.fixture(params=[V1, V2], ids=["v1 cgroupfs", "v2 systemd"])
def host(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path, request.param)
    monkeypatch.setattr(podusage.time, "time", lambda: made.now)  # type: ignore[attr-defined]
    return made


@promise("S-359")
def test_only_pods_that_request_it_are_measured(host: Host) -> None:
    """CPU, memory and network are reported every 10 s."""
    host.uses(1.0, 1000, 500)
    host.look(0)
    host.uses(6.0, 3000, 1500)
    host.look(5)
    assert len(host.reports) == 1, "the next one is due after 10 s"
    host.look(5)
    found = host.told().usage()
    assert found is not None
    assert found.received is not None
    assert found.sent is not None
    assert (found.cpu.peak, found.cpu.mean, found.cpu_seconds) == (1.0, 0.5, 6.0)
    assert found.memory.peak == 3000
    assert (found.received.peak, found.sent.peak, found.received_bytes) == (200, 400, 1500)


@promise("S-359")
def test_the_last_sample_is_taken_at_unpublish_and_reported_for_a_while(host: Host) -> None:
    """Its processes have ended by then, and their usage is still counted."""
    host.uses(1.0, 1000, 500)
    host.look(0)
    (host.root / "proc" / "7" / "cgroup").unlink()
    (host.root / "proc" / "7" / "net" / "dev").unlink()
    host.uses(9.0, 10, 0)
    (host.root / "proc" / "7" / "net" / "dev").unlink()
    host.now += 2
    host.usage.finish(str(host.root / "pods" / UID / "volumes" / "kubernetes.io~csi" / "pv" / "mount"))
    host.look(0)
    found = host.told().usage()
    assert found is not None
    assert (found.cpu_seconds, found.received_bytes) == (9.0, 500)
    os.rmdir(host.volume)
    host.look(1)
    host.look(LATE_S - 2)
    assert host.told().usage() == found
    host.look(10)
    assert host.usage._known == {}


@promise("S-359")
def test_a_new_plugin_continues_the_figures_and_a_failed_report_is_retried(host: Host) -> None:
    host.uses(1.0, 5000, 0)
    host.look(0)
    host.before, host.usage = dict(host.reports[-1]), host.plugin()
    host.uses(3.0, 10, 0)
    host.fails = True
    host.look(2)
    host.fails = False
    host.look(10)
    found = host.told().usage()
    assert found is not None
    assert (found.memory.peak, found.cpu.peak, found.cpu_seconds) == (5000, 1.0, 3.0)


@promise("S-359")
def test_the_nodes_own_traffic_is_counted_for_no_pod(host: Host) -> None:
    """A pod in the node's network namespace."""
    host.uses(1.0, 1000, 500)
    (host.root / "proc" / "7" / "ns" / "net").unlink()
    (host.root / "proc" / "7" / "ns" / "net").symlink_to("/proc/self/ns/net")
    host.look(0)
    assert host.told().usage().received_bytes is None  # type: ignore[union-attr]
