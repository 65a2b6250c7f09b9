"""Commands with a timeout: mount(8), umount(8), and all others that touch a mount whose server may be dead.

A system call on a dead mount can hang its thread forever, so a child process makes it. After the timeout this is
killed with its process group, which nearly always ends it, because a wait for an NFS or mount server is killable. A
process that the kernel does not let go (state D) is counted, and while it lives no other command is run for the same
path. The commands do not resolve paths (-c) and run no helpers (-i). Mounts are found in mountinfo, never by stat.
Any thread may call.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
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
"""How many mounts on one path are unmounted; more of them suggest a program that mounts in a loop."""


def remove_tree(path: Path) -> None:
    """Remove a directory that a mount server writes to, as far as possible; never what is mounted below it.

    shutil.rmtree would remove what is mounted there, and fails at directories that a hacked server nests very deeply.
    """
    command = ["rm", "-rf", "--one-file-system", "--", str(path)]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, stderr=subprocess.DEVNULL, timeout=REMOVE_S, check=False)


class _LeftBehind(NamedTuple):
    process: subprocess.Popen[bytes]
    place: str


class Commands:
    """Runs commands. INVARIANT: `_left` has all processes that outlived their SIGKILL; those that end are removed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[_LeftBehind] = []

    def left_behind(self, place: str = "") -> int:
        """Return how many killed processes still hang in the kernel; with a path as `place`, those that work on it."""
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
        """Return a command's standard output. place: the path it works on; given: its input; environment: additions.

        Errors: MountFailed with the last line of its standard error; CommandTimeout when its process group was killed,
        or when an earlier command still hangs at the same place.
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
        """Bind-mount `source` at `target`, an existing directory. Errors: MountFailed, CommandTimeout."""
        if not read_only:
            self._bind(source, target)
            return
        # A bind mount takes its flags only when it is remounted (mount(2), MS_BIND), and a remount does not propagate
        # to the node, where the kubelet would make a missing subPath. So it is remounted at a place of our own; the
        # target is a copy of that, with its flags.
        try:
            place = tempfile.mkdtemp(prefix="read-only-")
        except OSError as error:
            raise MountFailed(f"can't make a directory for the mount of {target}: {error}") from error
        try:
            self._bind(source, place)
            self.run(["mount", "-c", "-i", "-n", "-o", "remount,bind,ro", "--", place], place=target)
            self._bind(place, target)
        finally:
            self.unmount_all(place)
            os.rmdir(place)

    def _bind(self, source: str, target: str) -> None:
        self.run(["mount", "-c", "-i", "-n", "--bind", "--", source, target], place=target)

    def unmount(self, path: str) -> None:
        """Unmount what is mounted at the path, if anything. Errors: CommandTimeout; MountFailed when it is in use."""
        if mountinfo.read().at(path) is None:
            return
        try:
            self.run(["umount", "-c", "-i", "-n", "--", path], place=path)
        except MountFailed:
            if mountinfo.read().at(path) is not None:  # else the mount's own server has unmounted it
                raise

    def unmount_all(self, path: str) -> None:
        """Unmount all mounts at the path, if there are any, even those that are dead or in use.

        The unmount is lazy: the path is free at once, and the kernel ends the mount after its last user, which may take
        until its server is back; nobody waits for that. Errors: MountFailed, CommandTimeout.
        """
        for _ in range(LAYERS):
            layers = mountinfo.read().count(path)
            if not layers:
                return
            try:
                self.run(["umount", "-c", "-i", "-n", "-l", "--", path], place=path)
            except (MountFailed, CommandTimeout):
                if mountinfo.read().count(path) >= layers:  # else this or another process has unmounted it
                    raise
        raise MountFailed(f"{path}: there is always another mount")


def make_directory(path: str) -> None:
    """Create a directory and its parents, private to root; a mount point is left alone and never touched."""
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
    """Remove an empty directory, or a file, if it is there. Errors: MountFailed."""
    try:
        with suppress(FileNotFoundError):
            try:
                os.rmdir(path)
            except NotADirectoryError:
                os.unlink(path)
    except OSError as error:
        raise MountFailed(f"can't remove {path}: {error.strerror}") from error
