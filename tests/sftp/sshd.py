"""An SSH server of OpenSSH on loopback, of whoever runs the tests: nobody but he can log in if he is not root."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.patience import eventually

READY_S = 60.0
ANSWER_S = 10.0
PORTS = range(20_000, 30_000)
"""None that the system gives to outgoing connections: those could take ours while the server is away."""
CONFIGURATION = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/id.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
{more}
"""


def obstacle() -> str:
    """Why there is no SSH server here, or ''."""
    return "" if program() else "sshd is missing: apt-get install openssh-server"


def program() -> str:
    """Of sshd, '' without one; it wants to be called by its whole path."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


class SSHServer:
    """directory: its keys and its log; the key of who may log in is `id`. more: lines of sshd_config(5)."""

    def __init__(self, directory: Path, more: str = "Subsystem sftp internal-sftp") -> None:
        self.directory = directory
        self.user = getpass.getuser() if os.getuid() else "root"
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        for name in ("host_key", "id"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(directory / name)]
            subprocess.run(command, check=True)

    @property
    def known_hosts(self) -> str:
        """The line with its key."""
        return f"[127.0.0.1]:{self.port} {(self.directory / 'host_key.pub').read_text()}"

    @property
    def private_key(self) -> str:
        """Of who may log in."""
        return (self.directory / "id").read_text()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        configuration = self.directory / "sshd_config"
        configuration.write_text(CONFIGURATION.format(port=self.port, directory=self.directory, more=self._more))
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([program(), "-D", "-e", "-f", configuration], stderr=log)
        eventually(self._answers, f"sshd answers; see {self.directory / 'log'}", READY_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), ANSWER_S) as connection:
            return connection.recv(4) == b"SSH-"
        return False

    def stop(self) -> None:
        """End it with all its connections."""
        if self._process is not None:
            self._signal(signal.SIGSTOP, [psutil.Process(self._process.pid)])  # so that no session is begun meanwhile
            self._signal(signal.SIGKILL, [psutil.Process(self._process.pid), *self._sessions()])
            self._process.wait()
            self._process = None

    def break_connections(self) -> None:
        """End what serves those who are logged in; it goes on listening."""
        self._signal(signal.SIGKILL, self._sessions())

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It takes what comes and does not answer."""
        assert self._process is not None
        processes = [psutil.Process(self._process.pid), *self._sessions()]
        self._signal(signal.SIGSTOP, processes)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT, processes)

    def _sessions(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    @staticmethod
    def _signal(number: int, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _free_port() -> int:
    while True:
        port = PORTS[secrets.randbelow(len(PORTS))]
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def running(home: Path, more: str = "Subsystem sftp internal-sftp") -> Iterator[SSHServer]:
    """A server, ended at the end."""
    server = SSHServer(Path(tempfile.mkdtemp(prefix="sshd-", dir=home)), more)
    try:
        server.start()
        yield server
    finally:
        server.stop()
