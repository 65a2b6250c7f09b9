"""`python -m tests.scale`: apply N Datastores, keep M pretended nodes busy, print what each costs.

The API server, etcd, the controller and the S3 server are real, and so is the code with which a node asks for its
volumes (csi.datastores, csi.cluster); nothing is mounted. Processor time is each process's own, so that a busy machine
changes the figures little. The last lines are the table.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from datastore.csi.cluster import Cluster as Asking
from datastore.csi.datastores import Datastores, Refresher
from datastore.kubeclient import of_context
from tests.cluster import cluster as clusters
from tests.cluster.cluster import Cluster
from tests.cluster.controlled import (
    ROOT,
    SYSTEM,
    Controller,
    account_kubeconfig,
    condition,
    controller,
    datastore_of,
    secret_of,
)
from tests.cluster.kube import Kube, Manifest
from tests.servers import Server, make_bucket, run_versitygw

NAMESPACES = 20
BUCKETS = 20
AT_ONCE = 500
"""Datastores that one kubectl applies."""
READY_LIMIT_S = 3600.0
NODE_ACCOUNT = "datastore-node"
PROCESSES = ("controller", "kube-apiserver", "etcd")
LOOK_S = 1.0
"""How often the node plugin sees whose turn it is."""


@dataclass(slots=True)
class Reading:
    """Counters at one moment."""

    at_s: float
    cpu_s: dict[str, float]
    calls: float
    watch_bytes: float
    watch_events: float
    s3_requests: int


@dataclass(slots=True)
class World:
    """What runs. log: the S3 server's, a line for each request."""

    cluster: Cluster
    kube: Kube
    server: Server
    running: Controller
    log: Path

    def read(self) -> Reading:
        used = {name: self._process(name).cpu_times() for name in PROCESSES}
        told = self.kube.kubectl("get", "--raw", "/metrics")
        ours = re.findall(r"^datastore_controller_api_requests_total\S* (\S+)", self.running.metrics(), re.MULTILINE)
        return Reading(
            at_s=time.monotonic(),
            cpu_s={name: each.user + each.system for name, each in used.items()},
            calls=sum(map(float, ours)),
            watch_bytes=_sum(told, "apiserver_watch_events_sizes_sum"),
            watch_events=_sum(told, "apiserver_watch_events_sizes_count"),
            s3_requests=_lines(self.log),
        )

    def memory_mib(self, name: str) -> float:
        return float(self._process(name).memory_info().rss) / 2**20

    def _process(self, name: str) -> psutil.Process:
        if name == "controller":
            return psutil.Process(self.running.pid)
        return next(each for each in self.cluster.processes() if each.name() == name)


def _sum(told: str, metric: str) -> float:
    """Of our group's objects, and of the volumes that we make."""
    kinds = r'resource="(?:datastores|persistentvolumes|persistentvolumeclaims)"'
    return sum(map(float, re.findall(rf"^{metric}{{[^}}]*{kinds}[^}}]*}} (\S+)", told, re.MULTILINE)))


def _lines(path: Path) -> int:
    count = 0
    with path.open("rb") as log:
        while chunk := log.read(1 << 20):
            count += chunk.count(b"\n")
    return count


@dataclass(slots=True)
class Table:
    """What is printed at the end: figures by row."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, figure: str) -> None:
        self.rows.append((what, figure))
        print(f"  {what}: {figure}", flush=True)

    def between(self, phase: str, before: Reading, after: Reading, objects: int) -> None:
        """What a phase took, for each of `objects` or for each second."""
        seconds = after.at_s - before.at_s
        self.add(f"{phase}: seconds", f"{seconds:.0f}")
        for name in before.cpu_s:
            used = after.cpu_s[name] - before.cpu_s[name]
            self.add(f"{phase}: CPU of {name}", f"{used / seconds:.3f} cores, {used / objects * 1000:.2f} ms each")
        calls, stored = after.calls - before.calls, after.s3_requests - before.s3_requests
        self.add(f"{phase}: calls of the controller", f"{calls / seconds:.2f}/s, {calls / objects:.2f} each")
        sent, events = after.watch_bytes - before.watch_bytes, after.watch_events - before.watch_events
        self.add(f"{phase}: watch events", f"{events / objects:.2f} each, {sent / objects:.0f} bytes each")
        self.add(f"{phase}: requests to the store", f"{stored / seconds:.2f}/s, {stored / objects:.2f} each")


@contextmanager
def world() -> Iterator[World]:
    """A fresh cluster without a node, the product on it, and its controller as the manifests start it."""
    cluster = clusters.up(f"scale-{uuid.uuid4().hex[:6]}", api_only=True, owned=True)
    try:
        kube = Kube(cluster.kubeconfig, also=(SYSTEM,))
        kube.apply_folder(ROOT / "manifests")
        with tempfile.TemporaryDirectory(prefix="datastore-scale-") as name:
            folder = Path(name)
            log = folder / "s3.log"
            log.touch()
            account = account_kubeconfig(cluster.kubeconfig, kube, folder)
            with run_versitygw(f"--access-log={log}") as server, controller(account, folder) as running:
                yield World(cluster, kube, server, running, log)
    finally:
        cluster.end()


def manifests(server: Server, count: int) -> dict[str, list[Manifest]]:
    """`count` Datastores over namespaces and buckets."""
    found: dict[str, list[Manifest]] = {f"team-{number}": [] for number in range(NAMESPACES)}
    for number in range(count):
        s3 = {
            "bucket": f"bucket-{number % BUCKETS}",
            "prefix": f"{number}/",
            "endpoint": server.endpoint,
            "credentialsSecret": "keys",
        }
        found[f"team-{number % NAMESPACES}"].append(datastore_of(f"d{number}", {"s3": s3}))
    return found


def apply(world: World, count: int) -> None:
    """All of them; from several namespaces side by side."""
    for number in range(BUCKETS):
        make_bucket(world.server, f"bucket-{number}")
    for name in (found := manifests(world.server, count)):
        world.kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        world.kube.apply(secret_of(world.server), namespace=name)
    for name, wanted in found.items():
        for first in range(0, len(wanted), AT_ONCE):
            world.kube.apply(*wanted[first : first + AT_ONCE], namespace=name)


def ready(world: World) -> int:
    """How many are Ready now."""
    found = (each for name in range(NAMESPACES) for each in world.kube.items("datastores", namespace=f"team-{name}"))
    return sum(condition(each, "Ready").get("status") == "True" for each in found)


def settle(world: World, count: int) -> None:
    """Wait until all of them are Ready."""
    until = time.monotonic() + READY_LIMIT_S
    while (found := ready(world)) < count:
        if time.monotonic() > until:
            raise SystemExit(f"only {found} of {count} Datastores were Ready after {READY_LIMIT_S:.0f} s")
        time.sleep(max(2.0, count / 500))


class Node:
    """The part of a node plugin that asks the API server, with the volumes of this node's pods."""

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        self._asking = Datastores(Asking(of_context({"KUBECONFIG": str(kubeconfig)})), directory)
        self.volumes: list[str] = []
        self._refresher = Refresher(lambda: self.volumes, lambda each: self._asking.again(each) is not None)

    def start(self, volume: str, attributes: Mapping[str, str]) -> float:
        """A pod with this volume starts: staged, then published. Returns the seconds that this took."""
        begun = time.monotonic()
        self._asking.current(volume, attributes, fresh=True)
        self._asking.current(volume, attributes)
        self.volumes.append(volume)
        return time.monotonic() - begun

    def look(self) -> None:
        self._refresher.look(time.monotonic())


def nodes_at_work(world: World, table: Table, count: int, pods: int, rest_s: float) -> None:
    """`pods` pods start on `count` nodes in one minute; then the nodes rest and ask now and then."""
    with tempfile.TemporaryDirectory(prefix="datastore-scale-nodes-") as name:
        folder = Path(name)
        account = account_kubeconfig(world.cluster.kubeconfig, world.kube, folder, NODE_ACCOUNT)
        nodes = [Node(account, folder / str(number)) for number in range(count)]
        volumes = [each["spec"]["csi"] for each in world.kube.items("pv")]
        begun, before = time.monotonic(), world.read()
        with ThreadPoolExecutor(max_workers=16) as pool:
            waits = []
            for number in range(pods):
                time.sleep(max(0.0, begun + 60.0 * number / pods - time.monotonic()))
                csi = volumes[number % len(volumes)]
                waits.append(pool.submit(nodes[number % count].start, csi["volumeHandle"], csi["volumeAttributes"]))
            took = sorted(each.result() for each in waits)
        table.between("pods start", before, world.read(), pods)
        table.add("pods start: wait for the API server, p50", f"{took[len(took) // 2] * 1000:.0f} ms")
        table.add("pods start: wait for the API server, p99", f"{took[int(len(took) * 0.99)] * 1000:.0f} ms")

        stop = threading.Event()

        def resting(mine: Sequence[Node]) -> None:
            while not stop.wait(LOOK_S):
                for node in mine:
                    node.look()

        with ThreadPoolExecutor(max_workers=4) as pool:
            for number in range(4):
                pool.submit(resting, nodes[number::4])
            before = world.read()
            time.sleep(rest_s)
            after = world.read()
            stop.set()
        table.between("nodes at rest", before, after, pods)


def rotate(world: World, table: Table, count: int) -> None:
    """One team's key is renewed: all of its Datastores are looked at again."""
    mine = len(world.kube.items("datastores", namespace="team-0"))
    before = world.read()
    world.kube.apply(secret_of(world.server, RENEWED="yes"), namespace="team-0")
    time.sleep(30.0)
    table.between(f"one Secret of {mine} Datastores changes", before, world.read(), mine)
    table.add("Datastores in all", str(count))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument("--datastores", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--pods", type=int, default=1000, help="that start in one minute")
    parser.add_argument("--rest", type=float, default=300.0, help="seconds in which nothing changes")
    chosen = parser.parse_args()
    logging.getLogger("datastore.csi").setLevel(logging.WARNING)
    table = Table()
    with world() as here:
        empty = {name: here.memory_mib(name) for name in PROCESSES}
        before = here.read()
        apply(here, chosen.datastores)
        table.add("apply: seconds until the API server has them all", f"{time.monotonic() - before.at_s:.0f}")
        settle(here, chosen.datastores)
        table.between("apply to Ready", before, here.read(), chosen.datastores)
        for name, at_first in empty.items():
            more = here.memory_mib(name) - at_first
            each = more * 1024 / chosen.datastores
            table.add(f"memory of {name}", f"{at_first:.0f} MiB empty, {more:.0f} more, {each:.1f} KiB each")
        size = len(here.kube.kubectl("get", "datastore", "d0", "--namespace=team-0", "--output=json"))
        table.add("one Datastore as JSON", f"{size} bytes")
        before = here.read()
        time.sleep(chosen.rest)
        table.between("at rest", before, here.read(), chosen.datastores)
        rotate(here, table, chosen.datastores)
        nodes_at_work(here, table, chosen.nodes, chosen.pods, chosen.rest)
    print(f"\n{chosen.datastores} Datastores, {chosen.nodes} nodes, {chosen.pods} pods")
    for what, figure in table.rows:
        print(f"| {what} | {figure} |")


if __name__ == "__main__":
    main()
