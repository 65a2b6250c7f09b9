"""Start, end and enter a cluster of one node, which another may join.

Each node lives in network, mount, PID, IPC and UTS namespaces of its own; ending its first process ends every
container, mount and interface in it, and what remains are a folder and cgroups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.cluster.archive import pause_archive
from tests.cluster.components import node_files
from tests.cluster.layout import (
    CGROUP_ROOT,
    CONTAINERD_SOCKET,
    NODE_IP,
    REPOSITORY,
    Layout,
    Record,
    load_record,
    locked,
    node_root,
    recorded,
    tool_path,
)
from tests.cluster.pki import make_pki
from tests.cluster.readyz import fetch, ready
from tests.servers import tools_dir

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 180.0
NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--uts")
BUILT = ("kube", "coredns", "pause")
CAP_SYS_ADMIN = 21


class ClusterError(Exception):
    """What could not be done with a cluster, and where to look."""


def obstacle(*, api_only: bool = False) -> str:
    """Why no cluster can run on this machine, or ''."""
    if os.getuid() != 0 or not _has_capability(CAP_SYS_ADMIN):
        return "needs root with CAP_SYS_ADMIN, or KUBECONFIG of a cluster to use"
    missing = [name for name in BUILT if not os.access(tools_dir() / name, os.X_OK)]
    if missing:
        return f"{', '.join(missing)} missing from {tools_dir()} (make cluster-tools builds them)"
    if api_only:
        return ""
    if not (node_root() / "usr/bin/containerd").exists():
        return f"containerd is not in {node_root()} (make cluster-tools unpacks it)"
    if not (CGROUP_ROOT / "memory").is_dir() or not (CGROUP_ROOT / "cpuset").is_dir():
        return f"no cgroup v1 in {CGROUP_ROOT}, all that the bundled node knows; set KUBECONFIG to a cluster to use"
    missing = [name for name in ("ip", "nft", "nsenter", "unshare") if not shutil.which(name)]
    return f"{', '.join(missing)} missing (make cluster-tools installs them)" if missing else ""


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> number & 1)


def started_at(pid: int) -> float:
    """When the process started, which tells it from a later one of the same number; 0.0 for none.

    In ticks since the machine started (proc(5)): the wall clock may be set while a cluster runs.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return 0.0 if words[0] in "ZX" else float(words[19])


def wait_until(what: str, limit_s: float, done: Callable[[], bool]) -> None:
    """Ask every 50 ms until done. Errors: ClusterError naming `what`."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.05)


class Cluster:
    """A running cluster of ours, by one of its nodes: the first, or one that joined. Errors of every method:
    ClusterError."""

    def __init__(self, record: Record, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.record = record
        self.layout = Layout(name=record.name, node=record.node)
        self.children = children

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def entering(self, *argv: str) -> list[str]:
        """The command line that runs `argv` inside the cluster's namespaces."""
        return ["nsenter", "--target", str(self.record.init_pid), *NAMESPACES, f"--wd={os.getcwd()}", "--", *argv]

    def environment(self) -> dict[str, str]:
        """This process's environment with kubectl, its configuration and the node's programs."""
        paths = {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self.layout.state / "kubectl-cache")}
        sockets = {"CONTAINERD_ADDRESS": CONTAINERD_SOCKET, "CONTAINERD_NAMESPACE": "k8s.io"}
        return {**os.environ, **paths, **sockets, "PATH": f"{tool_path()}:{os.environ.get('PATH', '')}"}

    def run(self, *argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What the command printed inside the cluster's namespaces."""
        done = subprocess.run(
            self.entering(*argv),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def load(self, archive: Path) -> None:
        """Give the node an image from a docker or OCI archive; pods name it with imagePullPolicy: Never."""
        self.run("ctr", "images", "import", str(archive), timeout_s=300)

    @contextmanager
    def exposing(self, port: int) -> Iterator[str]:
        """Give pods a server that listens on 127.0.0.1:port of this machine: yields its host and port for them."""
        where = [str(self.record.init_pid), "out", str(port), "127.0.0.1", str(port)]
        argv = [sys.executable, "-m", "tests.cluster.forward", *where]
        process = _spawn(argv, self.layout.logs / f"forward-{port}.log", cwd=REPOSITORY)
        try:
            wait_until(f"port {port} in the cluster", STOP_TIMEOUT_S, lambda: self._listens(process, port))
            yield f"{NODE_IP}:{port}"
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)

    def _listens(self, process: subprocess.Popen[bytes], port: int) -> bool:
        said = (self.layout.logs / f"forward-{port}.log").read_text()
        if process.poll() is not None:
            raise ClusterError(f"port {port} can't be carried into the cluster: {said.strip()}")
        return "ready" in said

    def component_pid(self, name: str) -> int:
        """The component's process id inside the cluster."""
        return int((self.layout.pids / name).read_text())

    def restart(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a component ('kubelet', 'kube-apiserver', ...); returns when its successor runs."""
        before = self.component_pid(name)
        self.run("kill", f"-{int(number)}", str(before))
        wait_until(f"restart of {name}", STOP_TIMEOUT_S, lambda: self.component_pid(name) != before)

    def alive(self) -> bool:
        return self.record.init_pid != 0 and started_at(self.record.init_pid) == self.record.init_started

    def processes(self) -> list[psutil.Process]:
        """The node's first process and all that runs under it."""
        init = psutil.Process(self.record.init_pid)
        return [init, *init.children(recursive=True)]

    def end(self) -> None:
        """End it and remove what it wrote: of the first node the whole cluster."""
        if self.record.node == 1:
            down(self.record.name)
        else:
            _end_node(self.record)
        self.reap()

    def reap(self) -> None:
        """Wait for the processes that this one has started for it."""
        for child in self.children:
            child.wait(STOP_TIMEOUT_S)

    def node_ready(self) -> bool:
        """Whether the node says that pods can run, and the default service account is there for them."""
        node = fetch(self.layout.pki, self.record.api_port, f"/api/v1/nodes/{self.layout.node_name}")
        conditions = (node or {}).get("status", {}).get("conditions", [])
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            return False
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        return fetch(self.layout.pki, self.record.api_port, account) is not None

    def log_tails(self, lines: int = 8) -> str:
        """The ends of every component's log."""
        parts = []
        for path in sorted(self.layout.logs.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"-- {path.name}", *tail]))
        return "\n".join(parts)


def find(name: str, node: int = 1) -> Cluster | None:
    """The running cluster of that name, by this node."""
    record = load_record(name, node)
    cluster = Cluster(record) if record else None
    return cluster if cluster and cluster.alive() else None


def up(name: str, *, api_only: bool = False, owned: bool = False) -> Cluster:
    """Start a fresh cluster; returns when its node is ready (api_only: when the API answers).

    What a cluster of that name left when the machine stopped is removed first. owned: it is this process's, and `sweep`
    ends it when this process died before it could. Errors: ClusterError.
    """
    reason = obstacle(api_only=api_only)
    if reason:
        raise ClusterError(reason)
    if find(name):
        raise ClusterError(f"cluster {name} is up already; make cluster-down ends it")
    down(name)
    layout = Layout(name=name)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    with listener:
        record = Record(name=name, api_only=api_only, api_port=listener.getsockname()[1])
        if owned:
            record = dataclasses.replace(record, owner_pid=os.getpid(), owner_started=started_at(os.getpid()))
        _write_state(layout, record)
        try:
            return _start(layout, record, listener)
        except BaseException as error:
            tails = Cluster(record).log_tails()
            down(name)
            if isinstance(error, ClusterError):
                raise ClusterError(f"{error}\n{tails}") from error
            raise


def join(cluster: Cluster) -> Cluster:
    """Start a second node of a running cluster; returns when it is ready. Its end() is a power cut: its Node object and
    its pods stay behind, and are its owner's to delete. Errors: ClusterError."""
    name = cluster.record.name
    layout = Layout(name=name, node=2)
    if find(name, layout.node):
        raise ClusterError(f"cluster {name} has its second node already")
    record = dataclasses.replace(cluster.record, node=layout.node, init_pid=0, forward_pid=0, forward_started=0.0)
    _write_state(layout, record)
    return _boot(cluster, record)


def reboot(cluster: Cluster, node: Cluster, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    """End a node that joined the cluster, as a power cut does, and start it again with its disk, but with an empty /run
    and no mounts, processes and cgroups; returns when it is ready. meanwhile: called while it is off. Errors:
    ClusterError."""
    _end(node.record.init_pid, node.record.init_started)
    node.reap()
    _remove_cgroups(node.layout.cgroup)
    meanwhile()
    again = _boot(cluster, node.record)
    node.record, node.children = again.record, again.children


def _boot(cluster: Cluster, record: Record) -> Cluster:
    """Start a node whose state is there, and connect it to the first one."""
    try:
        record, init = _start_init(Layout(name=record.name, node=record.node), record)
        _link(cluster, record)
        node = Cluster(record, (init,))
        wait_until("containerd", READY_TIMEOUT_S, _while_alive(node, lambda: _containerd_answers(node)))
        node.load(pause_archive(node.layout.state))
        wait_until("a ready node", READY_TIMEOUT_S, _while_alive(node, node.node_ready))
    except BaseException as error:
        tails = Cluster(record).log_tails()
        _end_node(record)
        if isinstance(error, ClusterError):
            raise ClusterError(f"{error}\n{tails}") from error
        raise
    return node


def _link(cluster: Cluster, node: Record) -> None:
    """A pair of interfaces between the first node and this one. It goes with the node."""
    layout, end = Layout(name=node.name, node=node.node), f"to-{node.node}"
    for words in (
        ("link", "add", end, "type", "veth", "peer", "name", "node0", "netns", str(node.init_pid)),
        ("link", "set", end, "up"),
        ("route", "add", f"{layout.node_ip}/32", "dev", end, "src", NODE_IP),
        ("route", "add", layout.pod_range, "via", layout.node_ip, "dev", end, "onlink"),
    ):
        # The network's namespace alone: the number of the other node's process is this machine's.
        command = ["nsenter", "--target", str(cluster.record.init_pid), "--net", "--", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise ClusterError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _end_node(record: Record) -> None:
    """End what joined, at once, and remove what it wrote. Idempotent."""
    layout = Layout(name=record.name, node=record.node)
    _end(record.init_pid, record.init_started)
    _remove_cgroups(layout.cgroup)
    if layout.state.exists():
        shutil.rmtree(layout.state)


def _write_state(layout: Layout, record: Record) -> None:
    for folder in (layout.state, layout.logs, layout.pids):
        folder.mkdir(parents=True)
    if layout.node == 1:
        make_pki(layout.pki, layout.name, record.api_port)
    for path, text in node_files(layout).items():
        target = layout.state / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    record.save()


def _start(layout: Layout, record: Record, listener: socket.socket) -> Cluster:
    record, init = _start_init(layout, record)
    record, forward = _start_forward(layout, record, listener)
    cluster = Cluster(record, (init, forward))
    still = functools.partial(_while_alive, cluster)
    if not record.api_only:
        wait_until("containerd", READY_TIMEOUT_S, still(lambda: _containerd_answers(cluster)))
        cluster.load(pause_archive(layout.state))
    wait_until("the API server", READY_TIMEOUT_S, still(lambda: ready(layout.pki, record.api_port)))
    if not record.api_only:
        wait_until("a ready node", READY_TIMEOUT_S, still(cluster.node_ready))
    return cluster


def _while_alive(cluster: Cluster, done: Callable[[], bool]) -> Callable[[], bool]:
    def check() -> bool:
        if not cluster.alive():
            raise ClusterError("the node's first process ended")
        return done()

    return check


def _start_init(layout: Layout, record: Record) -> tuple[Record, subprocess.Popen[bytes]]:
    """Start process 1 of the new namespaces. --kill-child: it can't outlive unshare, whose only child it is."""
    flags = [*NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    argv = ["unshare", *flags, sys.executable, "-m", "tests.cluster.node_init", record.name, str(record.node)]
    process = _spawn(argv, layout.logs / "init.log", cwd=REPOSITORY)
    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []

    def forked() -> bool:
        if process.poll() is not None:
            raise ClusterError("unshare: " + (layout.logs / "init.log").read_text().strip())
        children[:] = parent.children()
        return bool(children)

    wait_until("new namespaces", STOP_TIMEOUT_S, forked)
    init = children[0]
    record = dataclasses.replace(record, init_pid=init.pid, init_started=started_at(init.pid))
    record.save()
    return record, process


def _start_forward(layout: Layout, record: Record, listener: socket.socket) -> tuple[Record, subprocess.Popen[bytes]]:
    """Make the API's port reachable from outside: it listens on 127.0.0.1 here and connects to 127.0.0.1 there."""
    listener.set_inheritable(True)
    where = [str(record.init_pid), "in", str(listener.fileno()), "127.0.0.1", str(record.api_port)]
    argv = [sys.executable, "-m", "tests.cluster.forward", *where]
    process = _spawn(argv, layout.logs / "forward.log", cwd=REPOSITORY, pass_fds=(listener.fileno(),))
    record = dataclasses.replace(record, forward_pid=process.pid, forward_started=started_at(process.pid))
    record.save()
    return record, process


def _spawn(
    argv: Sequence[str], log_path: Path, *, cwd: Path, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def _containerd_answers(cluster: Cluster) -> bool:
    try:
        cluster.run("ctr", "version")
    except ClusterError:
        return False
    return True


def down(name: str) -> None:
    """End the cluster and remove what it wrote. Without one there is nothing to do. Errors: ClusterError."""
    layout = Layout(name=name)
    if other := load_record(name, 2):
        _end_node(other)
    record = load_record(name)
    if record:
        _end(record.init_pid, record.init_started)
        _end(record.forward_pid, record.forward_started)
    _remove_cgroups(layout.cgroup)
    if any(str(layout.state) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        raise ClusterError(f"something is mounted below {layout.state}; unmount it first")
    if layout.state.exists():
        shutil.rmtree(layout.state)


def sweep() -> None:
    """End the clusters of test sessions that were killed. Errors: ClusterError."""
    with locked(tools_dir().parent / "sweep.lock"):
        for record in recorded():
            if record.owner_pid and started_at(record.owner_pid) != record.owner_started:
                down(record.name)


def _end(pid: int, started: float) -> None:
    """Kill the process if it is still the one that we started, and wait for its end."""
    if not pid or started_at(pid) != started:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(f"end of process {pid}", STOP_TIMEOUT_S, lambda: started_at(pid) != started)


def _remove_cgroups(name: str) -> None:
    def removed() -> bool:
        for root in CGROUP_ROOT.glob(f"*/{name}"):
            for folder, _folders, _files in os.walk(root, topdown=False):
                # Busy for a moment while the kernel takes leave of the last process.
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        return not list(CGROUP_ROOT.glob(f"*/{name}"))

    wait_until(f"removal of the cgroups {name}", STOP_TIMEOUT_S, removed)
