"""Commands with a deadline: mount(8), umount(8), and whatever else touches a mount that may be dead.

A system call on a dead mount can hang its thread for good; a process is left behind instead. It is killed with its
group, and nearly always that ends it: what waits for an NFS or a mount server is killable. One that the kernel does not
let go of (state D) is counted, and as long as it lives no other command is run for the same place. The commands are
told not to look at the paths (-c) and to run no helpers (-i). Places are found in mountinfo, never by stat.
Threads: any.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from datastore import mountinfo
from datastore.errors import MountFailed

from .errors import CommandTimeout

TIMEOUT_S = 15.0
KILLED_TIMEOUT_S = 1.0
REMOVE_S = 600.0
LAYERS = 16
"""Mounts on one place that are taken away; more were made by a loop somewhere."""


def remove_tree(path: Path) -> None:
    """Remove what can be of a directory that a mount server writes to: if somebody took it over, very deep ones too."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        command = ["rm", "-rf", "--one-file-system", "--", str(path)]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=REMOVE_S, check=False)


class _LeftBehind(NamedTuple):
    process: subprocess.Popen[bytes]
    place: str


class Commands:
    """INVARIANT: `_left` has every process of ours that outlived its SIGKILL, and none that has ended since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[_LeftBehind] = []

    def left_behind(self, place: str = "") -> int:
        """How many processes hang in the kernel although they were killed; with a place those that work on it."""
        with self._lock:
            self._left = [each for each in self._left if each.process.poll() is None]
            return sum(not place or each.place == place for each in self._left)

    def run(
        self,
        command: Sequence[str],
        *,
        place: str,
        given: bytes = b"",
        timeout_s: float = TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> bytes:
        """Its standard output. place: what it works on; given: its input; environment: more of it.

        Errors: MountFailed with what it said; CommandTimeout, its process group killed, or when an earlier one still
        hangs at the same place.
        """
        if self.left_behind(place):
            raise CommandTimeout(f"{place}: an earlier command still hangs there in the kernel, and can't be ended")
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **(environment or {})},
        )
        try:
            output, said = process.communicate(given, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._end(process, place)
            raise CommandTimeout(f"{' '.join(command)} took longer than {timeout_s:.0f} s") from None
        if process.returncode:
            reason = said.decode(errors="replace").strip().splitlines()
            raise MountFailed(f"{' '.join(command)}: {reason[-1] if reason else f'exit code {process.returncode}'}")
        return output

    def _end(self, process: subprocess.Popen[bytes], place: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.communicate(timeout=KILLED_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            with self._lock:
                self._left.append(_LeftBehind(process, place))

    def bind(self, source: str, target: str, *, read_only: bool) -> None:
        """Show what is mounted at `source` also at `target`, an existing directory.

        Errors: MountFailed, CommandTimeout.
        """
        self.run(["mount", "-c", "-i", "-n", "--bind", "--", source, target], place=target)
        if read_only:
            try:
                # A bind mount takes its flags only when it is remounted (mount(2), MS_BIND).
                self.run(["mount", "-c", "-i", "-n", "-o", "remount,bind,ro", "--", target], place=target)
            except (MountFailed, CommandTimeout):
                self.unmount_all(target)
                raise

    def unmount(self, path: str) -> None:
        """Take away what is mounted there, unless it is in use; nothing there is success.

        Errors: MountFailed, CommandTimeout.
        """
        if mountinfo.read().at(path) is None:
            return
        try:
            self.run(["umount", "-c", "-i", "-n", "--", path], place=path)
        except MountFailed:
            if mountinfo.read().at(path) is not None:  # else its own server took it away meanwhile
                raise

    def unmount_all(self, path: str) -> None:
        """Take away what is mounted there, all layers, also a dead mount or one in use; nothing there is success.

        It is lazy: the place is free at once. What the kernel does for the last user of a mount comes after that, and
        may take as long as its server is away; that is nobody's to wait for. Errors: MountFailed, CommandTimeout.
        """
        for _ in range(LAYERS):
            layers = mountinfo.read().count(path)
            if not layers:
                return
            try:
                self.run(["umount", "-c", "-i", "-n", "-l", "--", path], place=path)
            except (MountFailed, CommandTimeout):
                if mountinfo.read().count(path) >= layers:  # else it, or somebody else, has taken it away
                    raise
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
