"""Bind mounts and unmounts by mount(8) and umount(8), each a process group that is killed at its deadline.

A system call on a dead mount can hang its thread for good; a process can be killed. -c keeps both programs from looking
at the paths, -i from helpers. Places are found in mountinfo, never by stat.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from datastore import mountinfo
from datastore.errors import MountFailed

from .errors import CommandTimeout

TIMEOUT_S = 15.0
KILLED_TIMEOUT_S = 1.0
LAYERS = 16
"""Mounts on one place that are taken away; more were made by a loop somewhere."""


def bind(source: str, target: str, *, read_only: bool) -> None:
    """Show what is mounted at `source` also at `target`, an existing directory. Errors: MountFailed, CommandTimeout."""
    run(["mount", "-c", "-n", "--bind", "--", source, target])
    if read_only:
        try:
            # A bind mount takes its flags only when it is remounted (mount(2), MS_BIND).
            run(["mount", "-c", "-n", "-o", "remount,bind,ro", "--", target])
        except (MountFailed, CommandTimeout):
            unmount_all(target)
            raise


def unmount_all(path: str) -> None:
    """Take away what is mounted there, all layers, also a dead mount or one in use; nothing there is success.

    Errors: MountFailed, CommandTimeout.
    """
    for _ in range(LAYERS):
        if mountinfo.read().at(path) is None:
            return
        run(["umount", "-c", "-n", "-l", "--", path])
    raise MountFailed(f"{path}: there is always another mount")


def make_directory(path: str) -> None:
    """Create it with its parents, for root only; one that is there stays, and is not looked into."""
    if mountinfo.read().at(path) is not None:
        return
    parent = Path(path).parent
    try:
        parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o750)
    except OSError as error:
        raise MountFailed(f"can't make the directory {path}: {error.strerror}") from error


def remove_directory(path: str) -> None:
    """Remove the empty directory; one that is gone is success. Errors: MountFailed."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
    except OSError as error:
        raise MountFailed(f"can't remove {path}: {error.strerror}") from error


def run(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
    """Errors: MountFailed with what it said; CommandTimeout, its process group killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
    )
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # in the kernel's hands still: not ours to wait for
            process.communicate(timeout=KILLED_TIMEOUT_S)
        raise CommandTimeout(f"{' '.join(command)} took longer than {timeout_s:.0f} s") from None
    if process.returncode:
        reason = said.decode(errors="replace").strip().splitlines()
        raise MountFailed(f"{' '.join(command)}: {reason[-1] if reason else f'exit code {process.returncode}'}")
