"""Starts and ends processes that talk to this one over a socketpair, and decides when to restart a dead one.

The module imports little, because the first process is started before anything else is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket, socketpair

KILLED_TIMEOUT_S = 10.0
"""How long a killed process is waited for: the kernel may hold one of its threads."""
STABLE_S = 0.3
"""A process that ran longer is restarted at once: a process that dies of its first requests does so sooner."""
QUICK_ENDS = 3
"""How many processes in a row that ran shorter are replaced at once too; then there are pauses, each twice the last."""
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 5.0
_PR_SET_PDEATHSIG = 1


def start(
    module: str,
    flag: str,
    arguments: Sequence[str] = (),
    *,
    log_path: Path | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], socket]:
    """Start `python -m module flag FD arguments` in a new session; return the process, and our end of the socketpair
    whose other end is FD. log_path: the file for its output and errors; None: our standard error. environment: used
    for variables that our own environment does not set. Errors: OSError, with nothing left behind."""
    ours, theirs = socketpair()
    try:
        with theirs, log_path.open("ab") if log_path else os.fdopen(os.dup(2), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, flag, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                # it imports the same modules as we do, and keeps no directory busy
                env={**(environment or {}), **os.environ, "PYTHONPATH": module_path()},
                cwd="/",
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def boot_id() -> str:
    """Return an id that differs after each boot, which loses all that was only in memory; '' where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def module_path() -> str:
    """Return the PYTHONPATH with which another process finds the same modules as this one."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def end(process: subprocess.Popen[bytes], timeout_s: float = 0.0) -> None:
    """Ask a process that leads a session to end; kill it and its group after timeout_s (0: at once, without asking)."""
    if timeout_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_TIMEOUT_S)


def let_go(process: subprocess.Popen[bytes]) -> None:
    """Let a process outlive this one, without Popen's warning that the process was not waited for."""
    process.returncode = process.poll() or 0


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent dies, even by kill -9 (Linux)."""
    import ctypes  # here: it takes 10 ms, and most processes don't need it

    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def last_words(said: bytes) -> str:
    """Return the last line of a process's output that is not blank; '' when there is none."""
    return next((line.strip() for line in reversed(said.decode(errors="replace").split("\n")) if line.strip()), "")


class Backoff:
    """How soon an ended process is restarted. stable_s: a process that ran longer started well."""

    def __init__(self, stable_s: float = STABLE_S) -> None:
        self._stable_s = stable_s
        self._quick_ends = 0

    def ended(self, after_s: float) -> None:
        """Note that a process ended after this time; 0: it could not even be started."""
        self._quick_ends = 0 if after_s > self._stable_s else self._quick_ends + 1

    def pause_s(self) -> float:
        """Return the seconds to wait before the next start."""
        late = self._quick_ends - QUICK_ENDS
        return 0.0 if late <= 0 else min(BACKOFF_FIRST_S * 2 ** min(late - 1, 10), BACKOFF_LAST_S)
