"""The first process inside a node's namespaces: `python -m tests.cluster.node_init NAME NODE`.

It makes the node (mounts, network, cgroups), starts the components and starts again what ends; its end ends everything
on the node. Being process 1 of its PID namespace it reaps every orphan, so nothing else here waits for a child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.cluster.components import first_components, later_components
from tests.cluster.layout import (
    CGROUP_CONTROLLERS,
    CGROUP_ROOT,
    DNS_SERVICE_IP,
    NODE_IP,
    REPOSITORY,
    Layout,
    Record,
    load_record,
    tool_path,
)
from tests.cluster.readyz import ready
from tests.servers import tools_dir

FOREIGN = ("/tmp", "/mnt", "/media", "/run")
"""Where other programs mount things; the clone of the mount table would keep those busy. FUSE is foreign anywhere."""
MNT_DETACH = 2
"""Of umount2(2)."""
PRIVATE_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""The kubelet sets these for the whole machine; here it finds private files that hold what it wants."""
RESTART_DELAY_S = 0.5
API_TIMEOUT_S = 170.0
LINK_TIMEOUT_S = 120.0


def run(*argv: str) -> None:
    """Run a command that makes a part of the node. Errors: CalledProcessError."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=120)


def drop_foreign_mounts(needed: Iterable[Path]) -> None:
    """Let go of what others mounted, in this mount namespace only; what `needed` stands on stays."""
    kept = {str(parent) for path in needed for parent in (path, *path.parents)}
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        point = line.split(" ")[4].encode().decode("unicode_escape")
        fuse = line.partition(" - ")[2].startswith("fuse")
        if point not in kept and (fuse or any(point.startswith(f"{folder}/") for folder in FOREIGN)):
            # Not umount(8), which asks the file system first: one whose server hangs would never answer.
            ctypes.CDLL(None).umount2(point.encode("latin-1"), MNT_DETACH)


def make_mounts(layout: Layout) -> None:
    """A /run, /var/lib and /var/log of its own, on a root whose mounts pods may share."""
    run("mount", "--make-rprivate", "/")
    drop_foreign_mounts((layout.state, tools_dir(), REPOSITORY, Path(sys.prefix)))
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for folder in ("lib", "log"):
        own = layout.state / "var" / folder
        own.mkdir(parents=True, exist_ok=True)  # after a reboot the node has its disk still
        run("mount", "--bind", str(own), f"/var/{folder}")
    for name, value in PRIVATE_SYSCTLS.items():
        own = layout.state / "sysctl" / name
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"{value}\n")
        run("mount", "--bind", str(own), f"/proc/sys/{name}")
    # Kubernetes's mountPropagation: Bidirectional needs a shared root.
    run("mount", "--make-rshared", "/")
    Path("/var/lib/kubelet").mkdir(exist_ok=True)


def make_network(layout: Layout) -> None:
    """The node's address on one end of a pair of interfaces. The other end leads nowhere on the first node; that of
    another is on the first, and whoever started this process makes the pair."""
    run("ip", "link", "set", "lo", "up")
    first = layout.node == 1
    if first:
        run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node0-peer")
        run("ip", "link", "set", "node0-peer", "up")
        run("ip", "address", "add", f"{DNS_SERVICE_IP}/32", "dev", "lo")
    else:
        _wait_for_link("node0")
    run("ip", "address", "add", f"{layout.node_ip}/24", "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    # Without a default route the addresses of services have none.
    run("ip", "route", "add", "default", *(() if first else ("via", NODE_IP)), "dev", "node0", "src", layout.node_ip)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")


def _wait_for_link(name: str) -> None:
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while name not in (each for _, each in socket.if_nameindex()):
        if time.monotonic() > deadline:
            sys.exit(f"no interface {name} within {LINK_TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def make_cgroups(name: str) -> None:
    """The pods' folder in every hierarchy, with all processors and memory nodes."""
    for controller in CGROUP_CONTROLLERS:
        if (CGROUP_ROOT / controller).is_dir():
            (CGROUP_ROOT / controller / name).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        (CGROUP_ROOT / "cpuset" / name / file).write_text((CGROUP_ROOT / "cpuset" / file).read_text())


class Supervisor:
    """Starts components and starts again, after a moment, those that end."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._commands: dict[str, list[str]] = {}
        self._names: dict[int, str] = {}
        self._due: dict[str, float] = {}

    def start(self, commands: Mapping[str, list[str]]) -> None:
        """Start all."""
        self._commands.update(commands)
        for name in commands:
            self._spawn(name)

    def _spawn(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(self._layout.logs / f"{name}.log"), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        argv = self._commands[name]
        # An empty mask: this process's blocked SIGCHLD is not for them to inherit.
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=files, setsigmask=())
        self._names[pid] = name
        fresh = self._layout.pids / f"{name}.new"
        fresh.write_text(f"{pid}\n")
        fresh.replace(self._layout.pids / name)

    def reap(self) -> None:
        """Take leave of what ended, without waiting, and start again what is due."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if name := self._names.pop(pid, ""):
                print(f"{name} ended with status {status:#x}; it is started again", flush=True)
                self._due[name] = time.monotonic() + RESTART_DELAY_S
        for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
            del self._due[name]
            self._spawn(name)

    def forever(self) -> None:
        """Supervise. Children that end wake it; the time limit is for those that are due."""
        while True:
            self.reap()
            signal.sigtimedwait({signal.SIGCHLD}, RESTART_DELAY_S if self._due else 60.0)


def main(record: Record) -> None:
    """Make the node and supervise it; returns never."""
    layout = Layout(name=record.name, node=record.node)
    # A signal that arrives between a look and the wait for it stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    # The tools are found from HOME otherwise.
    os.environ["KUBE_DATASTORE_TOOLS"] = str(tools_dir().parent)
    os.environ["PATH"] = tool_path()
    os.environ["HOME"] = str(layout.state)
    os.chdir(layout.state)
    socket.sethostname(layout.node_name)
    make_network(layout)
    make_mounts(layout)
    if not record.api_only:
        make_cgroups(layout.cgroup)
    supervisor = Supervisor(layout)
    supervisor.start(first_components(layout, record.api_port, api_only=record.api_only))
    deadline = time.monotonic() + API_TIMEOUT_S
    while record.node == 1 and not ready(layout.pki, record.api_port):
        if time.monotonic() > deadline:
            sys.exit(f"the API server did not answer within {API_TIMEOUT_S:.0f} s; see {layout.logs}")
        supervisor.reap()
        time.sleep(0.05)
    supervisor.start(later_components(layout, api_only=record.api_only))
    supervisor.forever()


if __name__ == "__main__":
    found = load_record(sys.argv[1], int(sys.argv[2]))
    if found is None:
        sys.exit(f"no cluster named {sys.argv[1]} with a node {sys.argv[2]}")
    main(found)
