"""Starts the supervisor of a mount. `mount` does so first of all, so that both import their code at the same time.

The supervisor learns from a pipe what to mount (mountserver.py), and ends if it is told nothing. This module imports
little, so that the supervisor starts early.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from datastore.linuxfds import memfd

_MAX_SAID_BYTES = 64 << 10
_begun: list[Launched] = []


@dataclass(frozen=True, slots=True)
class Launched:
    """A supervisor that waits to be told what to mount. errors: its standard error until it detaches itself."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def said(self) -> bytes:
        """Return the end of what the supervisor wrote to `errors`."""
        self.errors.seek(max(0, os.fstat(self.errors.fileno()).st_size - _MAX_SAID_BYTES))
        return self.errors.read()


def command() -> list[str]:
    """Return the command line of a supervisor."""
    return [sys.executable, "-m", "datastore.fuse"]


def begin(arguments: Sequence[str]) -> None:
    """Start a supervisor if these are the arguments of a command that will mount."""
    if arguments[:1] == ["mount"] and not {"-h", "--help"} & set(arguments):
        with suppress(OSError):  # take() tries again, and raises
            _begun.append(_start())


def take(*arguments: str) -> Launched:
    """Return the supervisor that begin() started, or start one with these arguments. Errors: OSError."""
    return _begun.pop() if _begun else _start(*arguments)


def _start(*arguments: str) -> Launched:
    errors = _nameless_file()
    try:
        process = subprocess.Popen(
            [*command(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
            start_new_session=True,
        )
    except OSError:
        errors.close()
        raise
    return Launched(process, errors)


def _nameless_file() -> IO[bytes]:
    if os.uname().sysname == "Linux":
        return os.fdopen(memfd("errors"), "w+b")
    import tempfile  # imported here: it takes 5 ms, and is not needed on Linux

    return tempfile.TemporaryFile()


def _environment() -> dict[str, str]:
    """Return our environment, but with no imports from the current directory, and a bare checkout on PYTHONPATH."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if os.path.basename(root) not in {"site-packages", "dist-packages"}:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root + (os.pathsep + before if before else "")
    return environment
