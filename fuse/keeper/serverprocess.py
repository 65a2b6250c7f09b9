"""One process of the mount server, as its keeper sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from socket import socketpair

from .channel import Channel

KILLED_TIMEOUT_S = 5.0
WAIT_STEP_S = 0.005


class ServerProcess:
    """Started when it is made; it waits for what the channel brings. Its output goes to the log."""

    def __init__(self, builder: str, log_path: Path) -> None:
        ours, theirs = socketpair()
        with theirs, log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "datastore.fuse", "--server", str(theirs.fileno()), "--builder", builder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                # from any directory, the same modules as ours; and no directory is kept busy
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                cwd="/",
                start_new_session=True,
            )
        self.channel = Channel(ours)
        self.pid = self._process.pid

    def code(self) -> int | None:
        """Its exit code, None while it lives.

        A thread of it may be stuck in the kernel, waiting for an answer that only the next server can give (an
        invalidation waits for the directory that a caller has locked). Then it can't be reaped yet, but serves nobody.
        """
        code = self._process.poll()
        return -9 if code is None and self._is_zombie() else code

    def _is_zombie(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
        except (OSError, IndexError):
            return False

    def reaped(self) -> bool:
        """Whether nothing is left of it."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, None when it lives on after timeout_s. It looks again: wait(2) may not tell an end."""
        end = time.monotonic() + timeout_s
        while (code := self.code()) is None and time.monotonic() < end:
            time.sleep(WAIT_STEP_S)
        return code

    def signal(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        """Ask it to end; kill it after timeout_s."""
        if self.code() is None:
            self._process.terminate()
            if self.wait(timeout_s) is None:
                self.kill()

    def kill(self) -> None:
        """End it at once, and wait for that as long as a thread of it may take."""
        self._process.kill()
        self.wait(KILLED_TIMEOUT_S)
