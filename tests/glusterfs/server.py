"""A real glusterd with its bricks, in a directory and a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.nfs.host import packages
from tests.nfs.host.network import Network, ip
from tests.patience import eventually

CHECKOUT = Path(__file__).resolve().parents[2]
ADDRESS = "10.97.0.1"
"""glusterd takes no brick at a loopback address."""
COMMAND_TIMEOUT_S = 300.0
NEEDED = {"glusterd": "glusterfs-server", "glusterfs": "glusterfs-client", "ip": "iproute2"}


def obstacle() -> str:
    """Why no glusterd can run here, or ''."""
    if os.geteuid():
        return "glusterd needs root"
    return packages.absent(NEEDED)


@dataclass
class GlusterServer:
    """One server; the volumes have one brick each, below `directory`."""

    directory: Path
    network: Network = field(default_factory=lambda: Network(f"gl-{uuid.uuid4().hex[:8]}"))
    process: subprocess.Popen[bytes] | None = None
    shared: bool = False
    """The network is somebody else's, who made it and removes it."""

    @property
    def address(self) -> str:
        return ADDRESS

    def up(self) -> None:
        """Start it. Errors: AssertionError; then nothing is left."""
        self.directory.mkdir(parents=True)
        for name in ("lib", "run", "bricks"):
            (self.directory / name).mkdir()
        try:
            if not self.shared:
                ip("netns", "add", self.network.name)
                ip("-n", self.network.name, "link", "set", "lo", "up")
            ip("-n", self.network.name, "address", "add", f"{ADDRESS}/32", "dev", "lo")
            self.start()
        except BaseException:
            self.down()
            raise

    def start(self) -> None:
        """Start glusterd, which starts the bricks of its volumes."""
        options = {
            "working-directory": self.directory / "lib",
            "run-directory": self.directory / "run",
            "glusterd-sockfile": self.directory / "run/cli.sock",
            "transport-type": "socket",
            "transport.socket.bind-address": ADDRESS,
        }
        lines = "".join(f"    option {name} {value}\n" for name, value in options.items())
        (self.directory / "glusterd.vol").write_text(f"volume management\n    type mgmt/glusterd\n{lines}end-volume\n")
        files = ("-f", str(self.directory / "glusterd.vol"), "-l", str(self.directory / "glusterd.log"))
        with (self.directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                self.network.command("glusterd", "-N", *files, "-p", str(self.directory / "run/glusterd.pid")),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        eventually(lambda: self._cli("volume", "info").returncode == 0, f"glusterd answers; see {self.directory}")

    def volume(self, name: str) -> Path:
        """Make and start a volume; its brick's directory."""
        brick = self.directory / "bricks" / name
        self.cli("volume", "create", name, f"{ADDRESS}:{brick}", "force")
        self.cli("volume", "start", name)
        return brick

    def cli(self, *words: str) -> str:
        """gluster(8). Errors: AssertionError with what it said."""
        done = self._cli(*words)
        assert done.returncode == 0, f"gluster {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        socket = f"--glusterd-sock={self.directory / 'run/cli.sock'}"
        command = self.network.command("gluster", "--mode=script", socket, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)

    def bricks(self) -> list[psutil.Process]:
        """The processes that serve bricks of ours."""
        here = str(self.directory)
        return [
            each
            for each in psutil.process_iter(["name", "cmdline"])
            if each.info["name"] == "glusterfsd" and any(here in word for word in each.info["cmdline"] or ())
        ]

    def kill(self) -> None:
        """End everything at once."""
        processes = self.bricks()
        if self.process is not None and self.process.poll() is None:
            processes.append(psutil.Process(self.process.pid))
        for each in processes:
            try:
                each.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        if self.process is not None:
            self.process.wait(COMMAND_TIMEOUT_S)
        eventually(lambda: not self.bricks(), "the bricks are gone")

    def down(self) -> None:
        """Leave nothing. Idempotent."""
        self.kill()
        if self.shared:
            ip("-n", self.network.name, "address", "flush", "to", f"{ADDRESS}/32")
        else:
            self.network.remove()
        shutil.rmtree(self.directory, ignore_errors=True)
