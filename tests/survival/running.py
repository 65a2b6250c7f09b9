"""Starts the load's processes on a mount, kills servers under them, and collects what they saw."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.mount.mounts import CommandMount, Mount
from tests.patience import eventually
from tests.survival.load import KINDS

CHECKOUT = Path(__file__).resolve().parents[2]
END_S = 300.0
NEW_SERVER_S = 120.0
PROGRESS_S = 120.0


@dataclass
class Loads:
    """The processes of a load. control: the directory in which they count and report."""

    mount: CommandMount
    control: Path
    kinds: Sequence[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *, halt_on_error: bool = False) -> None:
        """Start them, and wait until each has done something."""
        self.control.mkdir(exist_ok=True)
        for number, kind in enumerate(self.kinds):
            directory = self.mount.path / kind
            directory.mkdir(exist_ok=True)
            halt = "halt" if halt_on_error else "go on"
            self.processes[kind] = subprocess.Popen(
                [sys.executable, "-m", "tests.survival.load", kind, directory, self.control, str(number), halt],
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
            )
        eventually(lambda: all(self.counts().values()), "every process of the load works", PROGRESS_S)

    def counts(self) -> dict[str, int]:
        """Return the number of operations so far, by process."""
        return {kind: _number(self.control / f"{kind}.count") for kind in self.kinds}

    def progress(self) -> None:
        """Wait until every process has done more. Errors: AssertionError that names the processes that hang."""
        before = self.counts()

        def stuck() -> dict[str, int | None]:
            now = self.counts()
            return {kind: self.processes[kind].poll() for kind in self.kinds if now[kind] == before[kind]}

        def ended() -> bool:
            return any(process.poll() is not None for process in self.processes.values())

        with contextlib.suppress(AssertionError):
            eventually(lambda: ended() or not stuck(), "progress", PROGRESS_S)
        moved = not ended() and not stuck()
        assert moved, f"no progress within {PROGRESS_S:.0f} s after a kill (exit codes): {stuck()}\n{self.log()}"

    def log(self) -> str:
        """Return the end of the log of the mount's processes."""
        (state_dir,) = (self.mount.folder / "state/kube-datastore/mounts").iterdir()
        return (state_dir / "mount.log").read_text()[-6000:]

    def finish(self) -> dict[str, dict[str, Any]]:
        """Let the processes end, return their reports. Errors: AssertionError that names the processes that hang."""
        (self.control / "stop").touch()
        end = time.monotonic() + END_S
        hanging = []
        for kind, process in self.processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                hanging.append(kind)
        assert not hanging, f"these never ended: {hanging}"
        return {kind: json.loads((self.control / f"{kind}.json").read_text()) for kind in self.kinds}

    def end(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def load(
    mount: CommandMount, control: Path, kinds: Sequence[str] = tuple(KINDS), *, halt: bool = False
) -> Iterator[Loads]:
    """Start the processes of a load, and end them with the block."""
    loads = Loads(mount, control, kinds)
    try:
        loads.start(halt_on_error=halt)
        yield loads
    finally:
        loads.end()


def server_pid(mount: CommandMount) -> int:
    """Return the id of the supervisor's current server; 0 while no record says it."""
    (state_dir,) = (mount.folder / "state/kube-datastore/mounts").iterdir()
    try:
        return int(json.loads((state_dir / "mount.json").read_text())["serverPid"])
    except FileNotFoundError:
        return 0


def kill_server(mount: CommandMount, chance: random.Random) -> None:
    """Kill the server with SIGKILL at a random moment, and wait for the next one."""
    old = eventually(lambda: server_pid(mount), "a server")
    time.sleep(chance.random() * 0.4)
    with contextlib.suppress(ProcessLookupError):  # the record may name a successor that died early
        os.kill(old, signal.SIGKILL)
    eventually(lambda: server_pid(mount) not in (0, old), "a new server", NEW_SERVER_S)
    mount.pids = [mount.pids[0], server_pid(mount)]


def kill_pair(mount: CommandMount, chance: random.Random) -> None:
    """Kill the server at once with SIGKILL, and a moment later its successor, at any age, and the standby process."""
    old = eventually(lambda: server_pid(mount), "a server")
    killed = {old, 0}
    with contextlib.suppress(ProcessLookupError):
        os.kill(old, signal.SIGKILL)
    time.sleep(chance.random() ** 2 * 0.6)
    for process in psutil.Process(mount.pids[0]).children():
        killed.add(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: server_pid(mount) not in killed, "a new server", NEW_SERVER_S)
    mount.pids = [mount.pids[0], server_pid(mount)]


def _number(path: Path) -> int:
    try:
        return int(path.read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def without_faults(loads: Loads) -> dict[str, dict[str, Any]]:
    """End a load and return its reports. Errors: AssertionError with the faults that its processes saw."""
    reports = loads.finish()
    print({kind: report["operations"] for kind, report in reports.items()})
    faults = {kind: report["errors"] + report["wrong"] for kind, report in reports.items()}
    seen = {kind: lines for kind, lines in faults.items() if lines}
    assert not seen, f"{json.dumps(seen, indent=1)}\n{loads.log()}"
    return reports


def ends_well(mount: Mount, loads: Loads) -> None:
    """Check that there was no error and no wrong byte, and that another tool finds in the bucket what was left."""
    reports = without_faults(loads)
    assert mount.umount().returncode == 0
    for kind, report in reports.items():
        keys = [key for key in mount.objects.keys(f"{kind}/") if not key.endswith("/")]
        found = {key[len(kind) + 1 :]: hashlib.sha256(mount.objects.get(key)).hexdigest() for key in keys}
        assert found == report["content"]
