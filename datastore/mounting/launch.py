"""Starts the process that keeps a mount. `mount` does so first of all: it imports its code while the command does.

What is to be mounted is told by a pipe (mountserver); a process that is told nothing ends by itself. For the same
reason this module imports little.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

_MAX_SAID_BYTES = 64 << 10
_begun: list[Launched] = []


@dataclass(frozen=True, slots=True)
class Launched:
    """A supervisor that waits to be told what to mount. errors: what it writes to standard error until it is alone."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def said(self) -> bytes:
        """The end of that."""
        self.errors.seek(max(0, os.fstat(self.errors.fileno()).st_size - _MAX_SAID_BYTES))
        return self.errors.read()


def command() -> list[str]:
    """How the mount server is started."""
    return [sys.executable, "-m", "datastore.fuse"]


def begin(arguments: Sequence[str]) -> None:
    """Start a supervisor if these are the arguments of a command that will mount."""
    if arguments[:1] == ["mount"] and not {"-h", "--help"} & set(arguments):
        with suppress(OSError):  # take() tells
            _begun.append(_start())


def take() -> Launched:
    """The one that was begun, or a new one."""
    return _begun.pop() if _begun else _start()


def _start() -> Launched:
    errors = _nameless_file()
    try:
        process = subprocess.Popen(
            command(),
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
    in_memory = getattr(os, "memfd_create", None)  # Linux
    if in_memory is not None:
        return os.fdopen(in_memory("errors"), "w+b")
    import tempfile  # here: 5 ms that Linux saves

    return tempfile.TemporaryFile()


def _environment() -> dict[str, str]:
    """Ours, with two changes: the directory we stand in is no place to import from; a bare checkout is."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if os.path.basename(root) not in {"site-packages", "dist-packages"}:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root + (os.pathsep + before if before else "")
    return environment
