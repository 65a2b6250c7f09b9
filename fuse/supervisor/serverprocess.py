"""One process of the mount server, as its supervisor sees it. Imports little: the first is started before all else.

Their messages (datastore/frames.py) go over a socketpair:

supervisor -> server   {"prepare": true}      import your code; answered by {"prepared": true}
supervisor -> server   {"spec": document, "resumed": bool, "restarts": n, "builder": module:function, "log": path}
                                              with memory that outlives the server, where there is some
server -> supervisor   {"probed": true}  or  {"error": line, "kind": name of the error's class}
supervisor -> server   {"serve": true, "negotiated": null or what INIT settled before}     with the device's descriptor
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
"""The code of a process that ended by itself is known when its last thread is gone: so long is waited for that."""
WAIT_STEP_S = 0.005
STANDBY_AFTER_S = 1.0
"""It is started when a server has served for so long: a restart is busy enough."""
STANDBY_AGAIN_S = 60.0
"""One that died, or could not be started, is replaced no sooner."""
_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
}
"""glibc (mallopt(3)): what comes from the store is received into memory that is used again. Fresh pages for every MiB
took a tenth of the processor time of a sequential read. What is held free goes back when the memory limit is near."""


class ServerProcess:
    """Started when it is made: it imports its code, says {"prepared": true} and waits. Its output goes to the log.

    confined: the state directory of the mount whose server this is to be, confined (see confinement.py).
    log_path None: the log is not known yet, and its output goes where our errors go until it learns of it.
    Errors: MountFailed when the system has no room for a process or a descriptor.
    """

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
        with suppress(frames.PeerGone):  # who reads its answer learns that it is dead
            frames.send(self.channel, {"prepare": True})

    def code(self) -> int | None:
        """Its exit code, None while it lives.

        A thread of it may be stuck in the kernel, waiting for an answer that only the next server can give (an
        invalidation waits for the directory that a caller has locked). Then it can't be reaped yet, but serves nobody.
        One that has ended in order a moment ago looks the same.
        """
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
        """The wait status of a process whose first thread has ended (proc(5), exit_code); None while it runs."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            return int(fields[49]) if fields[0] == b"Z" else None
        except (OSError, IndexError, ValueError):
            return None

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
        self.channel.close()
        self._process.kill()
        self.wait(KILLED_TIMEOUT_S)


class Standby:
    """A server that has imported its code and waits, so that the next one answers sooner than Python starts.

    It costs about 35 MB of memory (20 MB of its own), and saves two thirds of the processor time of a restart. It ends
    when the supervisor does: its channel breaks then. start: makes a server's process.
    """

    def __init__(self, start: Callable[[], ServerProcess], waiting: ServerProcess | None = None) -> None:
        self._start = start
        self._waiting = waiting
        self._next_at = 0.0

    def keep(self, served_s: float) -> None:
        """Called now and then: have one, if a server has served for long enough."""
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
        """The one that waits, if it lives."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.code() is not None:
            waiting.kill()
            return None
        return waiting

    def end(self) -> None:
        """End it, e.g. because its code is old. Idempotent."""
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting = None


def first(arguments: Sequence[str]) -> ServerProcess | None:
    """A server for a mount that nobody has described yet; its code is imported while ours is. Most are of S3.

    None when it can't be started: the supervisor tries again, and says why it can't.
    """
    named = [word for flag, word in pairwise((*arguments, "")) if flag == "--builder"]
    with suppress(MountFailed):
        return ServerProcess(named[-1] if named else BUILDERS["s3"], None)
    return None
