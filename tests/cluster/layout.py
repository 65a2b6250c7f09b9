"""Where a test cluster keeps its things, and what is known of a running one. Nothing here starts or ends anything."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.servers import tools_dir

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_NAME = "e2e"
NODE_IP = "10.250.0.1"
"""Of the first node, where the control plane is."""
API_SERVICE_IP = "10.96.0.1"
DNS_SERVICE_IP = "10.96.0.10"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
"""In the cluster's own /run."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = ("blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids", "systemd")


def node_root() -> Path:
    """The folder into which Debian's containerd, runc and network plugins were unpacked."""
    return tools_dir().parent / "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The paths of the cluster called `name`, and of one of its nodes; several clusters may run side by side."""

    name: str
    node: int = 1
    """The first has the control plane."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", self.name):
            raise ValueError(f"{self.name!r} can't name a cluster: use up to 32 of a-z, 0-9 and '-'")

    @property
    def folder(self) -> Path:
        """Everything the cluster writes is below it."""
        return tools_dir().parent / "clusters" / self.name

    @property
    def state(self) -> Path:
        """Everything this node writes is below it; the first one's is the cluster's."""
        return self.folder if self.node == 1 else self.folder / self.node_name

    @property
    def node_name(self) -> str:
        return f"node-{self.node}"

    @property
    def node_ip(self) -> str:
        return f"10.250.0.{self.node}"

    @property
    def dns_ip(self) -> str:
        """Where its pods ask for names: kube-proxy forwards nothing to an address of services that has no Service."""
        return DNS_SERVICE_IP if self.node == 1 else NODE_IP

    @property
    def pod_range(self) -> str:
        return f"10.244.{self.node - 1}.0/24"

    @property
    def credentials(self) -> str:
        """What the names of this node's certificates and kubeconfigs end with."""
        return "" if self.node == 1 else f"-{self.node}"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def pids(self) -> Path:
        """One file a component: its process id inside the cluster."""
        return self.state / "pids"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; good inside and outside of the cluster's namespaces."""
        return self.pki / "admin.kubeconfig"

    @property
    def record(self) -> Path:
        return self.state / "cluster.json"

    @property
    def cgroup(self) -> str:
        """The path of its folder in every cgroup hierarchy."""
        return f"datastore-{self.name}" if self.node == 1 else f"datastore-{self.name}/{self.node_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `up` and `join` leave for `down`, `enter` and the tests: one for each node.

    init_pid and init_started tell its first process, seen from outside; api_port is a port of 127.0.0.1, the same on
    both sides. owner_pid: the session of tests that it is for, or 0 for a cluster that stays until `down`.
    """

    name: str
    node: int = 1
    api_only: bool
    api_port: int
    init_pid: int = 0
    init_started: float = 0.0
    forward_pid: int = 0
    forward_started: float = 0.0
    owner_pid: int = 0
    owner_started: float = 0.0

    def save(self) -> None:
        """Replace the file in one step."""
        layout = Layout(name=self.name, node=self.node)
        fresh = layout.record.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(layout.record)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process has this file locked, and lock it; several tiers of tests run at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def recorded() -> list[Record]:
    """All clusters that were started and not ended by `down`."""
    names = [path.parent.name for path in Layout(name=DEFAULT_NAME).folder.parent.glob("*/cluster.json")]
    return [record for record in map(load_record, names) if record]


def load_record(name: str, node: int = 1) -> Record | None:
    """The record of a cluster's node that was started, or None."""
    try:
        return Record(**json.loads(Layout(name=name, node=node).record.read_text()))
    except FileNotFoundError:
        return None


def tool_path() -> str:
    """PATH for what runs in the cluster."""
    unpacked = node_root()
    folders = (tools_dir(), unpacked / "usr/bin", unpacked / "usr/sbin")
    return os.pathsep.join([*map(str, folders), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
