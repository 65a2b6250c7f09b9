"""Starts a process of ours that talks to us over a socketpair. Imports little: the first one is started before all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import socket, socketpair


def start(
    module: str,
    flag: str,
    arguments: Sequence[str] = (),
    *,
    log_path: Path | None,
    piped: bool = False,
    environment: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], socket]:
    """`python -m module flag FD arguments`, in a session of its own, and our end of the channel whose other end is FD.

    log_path: takes its errors, and its output; None: where our errors go. piped: we write its input and read its output
    instead. environment: what it has besides ours, where we say nothing of that. OSError; then nothing is left behind.
    """
    ours, theirs = socketpair()
    try:
        with theirs, log_path.open("ab") if log_path else os.fdopen(os.dup(2), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, flag, str(theirs.fileno()), *arguments],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
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
