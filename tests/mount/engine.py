"""Mounts of tests.memfs for the engine's tests: in this process, or through the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datastore import beneath
from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location
from datastore.fuse.kernel import device
from datastore.fuse.kernel.session import Session, Settings
from tests.memfs import MemFs
from tests.patience import eventually

CHECKOUT = Path(__file__).resolve().parents[2]
BUILDER = "tests.memfs:build"
TIMEOUT_S = 90.0
"""Only ends a hang: longer than a supervisor takes to end a server that does not."""


@dataclass
class Mounted:
    """A file system of this process, mounted."""

    path: Path
    filesystem: MemFs
    session: Session


@contextlib.contextmanager
def mounted(path: Path, filesystem: MemFs, settings: Settings | None = None) -> Iterator[Mounted]:
    """Serve `filesystem` at `path` from a thread; unmounted, and checked to have ended well, at the end.

    No memory maps of its files in this process: a page fault holds the interpreter's lock, which the answer needs.
    """
    path.mkdir(exist_ok=True)
    fd = device.mount(str(path), "memory")
    ready = threading.Event()
    session = Session(fd, filesystem, settings or Settings(), ready=lambda _: ready.set())
    ends: list[str] = []
    thread = threading.Thread(target=lambda: ends.append(session.serve()), name="session")
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S), "INIT was not settled"
        yield Mounted(path, filesystem, session)
    finally:
        unmount(path)
        thread.join(TIMEOUT_S)
        os.close(fd)
    assert ends == ["unmounted"], ends
    assert filesystem.stopped == 1


def unmount(path: Path) -> None:
    """The tests' own files may take a moment to be released; whatever is left is detached."""

    def gone() -> bool:
        try:
            device.unmount(str(path))
        except device.Busy:
            return False
        return True

    try:
        eventually(gone, "nothing uses the mount", patience_s=3.0)
    except AssertionError:
        device.unmount(str(path), lazy=True)


def spec(base: Path, **changes: Any) -> MountSpec:
    """A mount of tests.memfs below `base`."""
    place = base / "m"
    place.mkdir(exist_ok=True)
    fixed: dict[str, Any] = {
        "name": "memory",
        "mountpoint": str(place),
        "source": S3Location(bucket="none"),
        "state_dir": str(base / "state"),
        "cache_dir": str(base / "cache"),
    }
    return MountSpec(**{**fixed, **changes})


class Supervisor:
    """A supervisor's process. said: its one line. options: of its command."""

    def __init__(self, wanted: MountSpec, *options: str) -> None:
        self.spec = wanted
        self.path = Path(wanted.mountpoint)
        self.state = Path(wanted.state_dir)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "datastore.fuse", "--builder", BUILDER, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=CHECKOUT,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(wanted.to_json().encode())
        self.process.stdin.close()
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline() or b"{}")
        self.process.stdout.close()

    def described(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads((self.state / "mount.json").read_text())
        return described

    def server_pid(self) -> int:
        return int(self.described()["serverPid"])

    def kill_server(self) -> int:
        """The pid of the one that was killed."""
        pid = self.server_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A client of the control socket, through the directory's descriptor: its path may be over 107 bytes."""
        directory_fd = os.open(self.state, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(TIMEOUT_S)
                client.connect(f"/proc/self/fd/{directory_fd}/control.sock")
                yield client
        finally:
            os.close(directory_fd)

    def ask(self, **request: object) -> list[dict[str, Any]]:
        """The lines a control request gets."""
        with self.connected() as client:
            client.sendall(json.dumps(request).encode() + b"\n")
            lines: list[dict[str, Any]] = []
            with client.makefile("rb") as stream:
                while not lines or "ok" not in lines[-1]:
                    lines.append(json.loads(stream.readline()))
            return lines

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def log(self) -> str:
        return (self.state / "mount.log").read_text()


@contextlib.contextmanager
def kept(wanted: MountSpec, *options: str, mounted_after: bool = False) -> Iterator[Supervisor]:
    """A mount through the supervisor; ended by SIGTERM if the test has not ended it."""
    supervisor = Supervisor(wanted, *options)
    try:
        yield supervisor
    finally:
        if supervisor.process.poll() is None:
            supervisor.process.send_signal(signal.SIGTERM)
            try:
                supervisor.wait()
            except subprocess.TimeoutExpired:
                supervisor.process.kill()
                supervisor.wait()
                device.unmount(wanted.mountpoint, lazy=True)
                beneath.restore(wanted.mountpoint, Path(wanted.state_dir) / beneath.NOTE_FILE)
                raise
    assert os.path.ismount(wanted.mountpoint) == mounted_after
