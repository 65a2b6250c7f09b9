"""One process of the mount server, as its supervisor sees it. The module imports little, because the first server is
started before anything else is imported. The messages (datastore/frames.py) go over a socketpair:

supervisor -> server   {"prepare": true}      import your code; answered by {"prepared": true}
supervisor -> server   {"spec": document, "resumed": bool, "restarts": n, "builder": module:function, "log": path}
                                              with the memory of passthrough opens, for a mount that has it
server -> supervisor   {"probed": true}  or  {"error": line, "kind": name of the error's class}
supervisor -> server   {"serve": true, "negotiated": null or what INIT settled before}
                                              with the device's descriptor, and a clone of it for this server alone
server -> supervisor   {"negotiated": {...}}  from now on the mount answers
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from datastore import frames, ourprocess
from datastore.errors import MountFailed

BUILDERS = {
    "s3": "datastore.fuse.vfs.build:build_mount",
    "nfs": "datastore.fuse.nfs.build:build_mount",
    "sftp": "datastore.fuse.sftp.build:build_mount",
}
"""The code that serves each kind of source (datastore.api.source), as module:function."""
KILLED_TIMEOUT_S = 5.0
LAST_THREAD_S = 5.0
"""How long code() waits for the last thread of a process that ended by itself; after that the code counts as -9."""
WAIT_STEP_S = 0.005
STANDBY_AFTER_S = 1.0
"""How long a server must have served before a standby is started: a restart is busy enough without one."""
STANDBY_AGAIN_S = 60.0
"""How long no other standby is started after one that died or could not be started."""
_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
}
"""Settings of glibc's malloc (mallopt(3)), with which answers of the store are received into memory that is used again.
Fresh pages for every MiB took a tenth of the CPU time of a sequential read. Memory that malloc holds free goes
back to the system when the memory limit is near."""


class ServerProcess:
    """A server process. The constructor starts it: it imports its code, sends {"prepared": true} and waits.
    log_path: the file for its output; None: not known yet, and the output goes to our standard error until then.
    confined: the mount's state directory, if the server is to confine itself (see confinement.py).
    Errors: MountFailed when the system has no room for a process or a descriptor."""

    def __init__(self, builder: str, log_path: Path | None, *, confined: Path | None = None) -> None:
        arguments = ("--builder", builder, *(("--confined", str(confined)) if confined else ()))
        try:
            self._process, self.channel = ourprocess.start(
                "datastore.fuse", "--server", arguments, log_path=log_path, environment=_MALLOC
            )
        except OSError as error:
            raise MountFailed(f"the system starts no mount server: {error}") from error
        self.pid = self._process.pid
        self._half_gone_since: float | None = None
        with suppress(frames.PeerGone):  # reading its answer will report that it is dead
            frames.send(self.channel, {"prepare": True})

    def code(self) -> int | None:
        """Return the exit code; None while the process lives. A thread of a killed process may be stuck in the kernel,
        waiting for an answer that only the next server can give (an invalidation waits for a directory that a caller
        has locked). That process can't be reaped yet (Popen does so when the next process is started), but it serves
        nobody, so it counts as dead. A process that ended in order a moment ago looks the same."""
        code = self._process.poll()
        status = self._zombie_status() if code is None else None
        if status is None:
            return code
        if status:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if self._half_gone_since is None:
            self._half_gone_since = now
        return -9 if now - self._half_gone_since > LAST_THREAD_S else None

    def _zombie_status(self) -> int | None:
        """Return the wait status of a process whose first thread has ended (proc(5), exit_code); None while it runs."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            return int(fields[49]) if fields[0] == b"Z" else None
        except (OSError, IndexError, ValueError):
            return None

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code; None if it lives on after timeout_s. Polls code(): wait(2) may not report the end."""
        end = time.monotonic() + timeout_s
        while (code := self.code()) is None and time.monotonic() < end:
            time.sleep(WAIT_STEP_S)
        return code

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        """Ask the process to end; kill it after timeout_s."""
        if self.code() is None:
            self._process.terminate()
            if self.wait(timeout_s) is None:
                self.kill()

    def kill(self) -> None:
        """Kill the process, and wait for its end, at most KILLED_TIMEOUT_S: a thread may be stuck in the kernel."""
        self.channel.close()
        self._process.kill()
        self.wait(KILLED_TIMEOUT_S)


class Standby:
    """Holds a standby: a server that has imported its code and waits, so that a restart need not wait for Python. A
    standby costs about 35 MB of memory (20 MB of its own), and saves two thirds of the CPU time of a restart. It
    ends when the supervisor does, because its channel breaks then. start: starts a server's process."""

    def __init__(self, start: Callable[[], ServerProcess], waiting: ServerProcess | None = None) -> None:
        self._start = start
        self._waiting = waiting
        self._next_at = 0.0

    def keep(self, served_s: float) -> None:
        """Start a standby if there is none and a server has served for long enough. Call this from time to time."""
        now = time.monotonic()
        if self._waiting is not None and self._waiting.code() is not None:
            self.end()
            self._next_at = now + STANDBY_AGAIN_S
        if self._waiting is None and served_s > STANDBY_AFTER_S and now >= self._next_at:
            try:
                self._waiting = self._start()
            except MountFailed:
                self._next_at = now + STANDBY_AGAIN_S

    def take(self) -> ServerProcess | None:
        """Return the standby if it lives, else None, and release it."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.code() is not None:
            waiting.kill()
            return None
        return waiting

    def end(self) -> None:
        """End the standby, for example because its code is old. Idempotent."""
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting = None


def first(arguments: Sequence[str]) -> ServerProcess | None:
    """Start a server before the mount's specification is known, so that it imports its code while we import ours.
    Without --builder it is one for S3, as most mounts are. Return None when it can't be started: the supervisor tries
    again, and reports why it can't."""
    named = [word for flag, word in pairwise((*arguments, "")) if flag == "--builder"]
    with suppress(MountFailed):
        return ServerProcess(named[-1] if named else BUILDERS["s3"], None)
    return None
