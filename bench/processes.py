"""Child processes of the bench, which are always ended by their id and get no Ctrl-C; mount points and page cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_TIMEOUT_S = 30.0
POLL_S = 0.01
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_CPUCLOCK_SCHED = 2


class NotReady(Exception):
    """A process or a mount did not come up; the text says why."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running program and the file with its output."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> None:
        """Check that the process runs. Errors: NotReady with its last line of output when it has ended."""
        if self.process.poll() is not None:
            said = self.log.read_text(errors="replace").strip().splitlines() or ["said nothing"]
            raise NotReady(f"ended with exit code {self.process.returncode}: {said[-1][-300:]}")

    def listens(self, port: int) -> Callable[[], bool]:
        """Return a check for wait_for: whether a server accepts connections on the port. It raises as alive() does."""

        def answers() -> bool:
            self.alive()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        return answers


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Child]:
    """Start a program; end it with the block. In a session of its own it does not get the terminal's Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="bench-child-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield Child(process, log)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL when the process does not end within STOP_TIMEOUT_S."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def wait_for(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until ready(). Errors: NotReady after timeout_s seconds."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise NotReady(f"{what} within {timeout_s:.0f} s")
        time.sleep(POLL_S)


def is_mounted(target: Path) -> bool:
    """Whether the directory is a mount point, without a call to the mount itself, which could hang."""
    with open("/proc/self/mountinfo") as file:
        return any(line.split(" ")[4] == str(target) for line in file)


def unmount(target: Path) -> None:
    """Unmount a FUSE mount, lazily if it is busy; do nothing when it is not mounted."""
    for options in (["-u"], ["-u", "-z"]):
        if is_mounted(target):
            subprocess.run(
                ["fusermount3", *options, str(target)], capture_output=True, timeout=STOP_TIMEOUT_S, check=False
            )


def fresh(folder: Path) -> Path:
    """Replace a folder by an empty one. There must be no mount below it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def can_drop_caches() -> bool:
    """Whether the page cache can be dropped: only as root."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches() -> None:
    """Write out and drop the page cache, if allowed."""
    if can_drop_caches():
        os.sync()
        DROP_CACHES.write_text("3\n")


def processor_s(pid: int) -> float:
    """The processor time that all threads of a process have used, in seconds. Errors: OSError when it is gone.

    Source: clock_getcpuclockid(3), MAKE_PROCESS_CPUCLOCK in Linux.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def peak_rss_mib(pid: int) -> float:
    """The most memory a process has had, MiB. Errors: OSError when it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)
