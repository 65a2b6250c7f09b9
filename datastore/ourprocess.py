"""Processes of ours: starts one that talks to us over a socketpair, ends one, says when one that died is started again.

Imports little: the first process is started before all else.
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
"""What was killed is waited for so long: the kernel may hold a thread of it."""
STABLE_S = 0.3
"""A process that ran longer than this is started again at once: one that dies of what it is asked does so sooner."""
QUICK_ENDS = 3
"""So many that ran shorter, one after the other, are replaced at once too; then the pause doubles."""
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 5.0


def start(
    module: str,
    flag: str,
    arguments: Sequence[str] = (),
    *,
    log_path: Path | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], socket]:
    """`python -m module flag FD arguments`, in a session of its own, and our end of the channel whose other end is FD.

    log_path: takes its output and its errors; None: where our errors go. environment: what it has besides ours, where
    we say nothing of that. OSError; then nothing is left behind.
    """
    ours, theirs = socketpair()
    try:
        with theirs, log_path.open("ab") if log_path else os.fdopen(os.dup(2), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, flag, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                # from any directory, the same modules as ours; and no directory is kept busy
                env={**(environment or {}), **os.environ, "PYTHONPATH": module_path()},
                cwd="/",
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def module_path() -> str:
    """PYTHONPATH for a process that is to find the same modules as this one."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def end(process: subprocess.Popen[bytes], timeout_s: float = 0.0) -> None:
    """Ask a process that leads a session to end, and kill it with its group after timeout_s; 0: at once."""
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
    """It is meant to outlive us: Popen would warn about a child that was not waited for."""
    process.returncode = process.poll() or 0


def last_words(said: bytes) -> str:
    """The last line of what a process said that has any words; '' when none has."""
    return next((line.strip() for line in reversed(said.decode(errors="replace").split("\n")) if line.strip()), "")


class Backoff:
    """How soon a process that ended is started again. stable_s: one that ran for longer did not end for its start."""

    def __init__(self, stable_s: float = STABLE_S) -> None:
        self._stable_s = stable_s
        self._quick_ends = 0

    def ended(self, after_s: float) -> None:
        """One ran for so long; 0: it could not even be started."""
        self._quick_ends = 0 if after_s > self._stable_s else self._quick_ends + 1

    def pause_s(self) -> float:
        """Seconds to wait before the next one."""
        late = self._quick_ends - QUICK_ENDS
        return 0.0 if late <= 0 else min(BACKOFF_FIRST_S * 2 ** min(late - 1, 10), BACKOFF_LAST_S)
