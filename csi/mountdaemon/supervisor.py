"""One mount with its supervisor process, which is replaced when it dies.

The supervisor (python -m datastore.fuse) replaces its own server; this module replaces a supervisor that died by one
that takes over the descriptors. A mount is unmounted only on request. Threads: the caller of start(), renew() and the
methods that end processes holds the volume's lock (daemon.py); one thread waits for the process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from datastore import controlclient, ourprocess
from datastore.api.mountspec import MountSpec
from datastore.errors import DatastoreError, MountFailed
from datastore.logs import fields
from datastore.ourprocess import Backoff

from .. import frames
from ..errors import NotAnswering, error_named
from ..handle import MountHandle
from .cgroups import Cgroup, limit_of

log = logging.getLogger(__name__)

START_TIMEOUT_S = 65.0
"""The supervisor gives its server 60 s: 5 s to probe the storage, the rest to recover what an earlier server left."""
GONE_TIMEOUT_S = 10.0
REAP_TIMEOUT_S = 2.0
STABLE_S = 10.0
"""A supervisor that ran for longer is replaced at once. Each start takes half a second of CPU time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRequest:
    """A volume to be mounted. ephemeral: whether it is a pod's inline volume."""

    volume_id: str
    spec: MountSpec
    ephemeral: bool = False


class SupervisedMount:
    """A mount and its supervisor. States: started -> serving (again after each supervisor's death) -> ended."""

    def __init__(self, request: MountRequest, cgroup: Cgroup, ended: Callable[[SupervisedMount], None]) -> None:
        self.request = request
        self._cgroup = cgroup
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: socket.socket | None = None
        self._telling = threading.Lock()
        """Held while a specification is sent to the supervisor: the first one that it receives says what to mount."""
        self._stop = threading.Event()
        self._launched = threading.Event()
        """Set when start() has launched the supervisor, or has failed to."""
        self.over = threading.Event()
        self.untold = False
        """The running server may have an earlier specification, because no server could be told the present one."""
        self.handle: MountHandle | None = None

    @property
    def spec(self) -> MountSpec:
        """The present specification."""
        return self.request.spec

    @property
    def supervisor_pid(self) -> int:
        """The supervisor's pid; 0 while no supervisor runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    @property
    def oom_kills(self) -> int:
        """How many of the mount's processes the kernel has killed because of its memory limit."""
        return self._cgroup.oom_kills()

    def start(self, handle: MountHandle | None = None) -> MountHandle:
        """Mount; with a handle, own it and continue its mount, even if a supervisor can be started only later.

        Errors: whatever the supervisor reports; with a handle only MountFailed when the watching thread can't start.
        """
        watcher = threading.Thread(target=self._watch, name=f"supervisor-{self.request.volume_id[-24:]}", daemon=True)
        try:
            watcher.start()  # first, because a supervisor must not run unwatched
        except RuntimeError as error:
            raise MountFailed(f"the system starts no thread: {error}") from error
        try:
            if handle is None:
                self.handle = self._launch(None)
            else:
                self.handle = handle
                self._relaunch()
        finally:
            self._launched.set()
        return self.handle

    def renew(self, spec: MountSpec) -> None:
        """Set the specification for future servers. The present server has to be told over its control socket."""
        with self._telling:
            self.request = replace(self.request, spec=spec)
            if self._guard is not None:
                with suppress(DatastoreError):  # the next supervisor is started with it
                    frames.send(self._guard, {"spec": spec.to_json()})
        self._cgroup.raise_to(limit_of(spec.memory_bytes))
        if self.handle is not None:
            self.handle = replace(self.handle, spec=spec)

    def end_server(self) -> bool:
        """Kill the server; the supervisor, if it lives, starts one with the present specification in its place.

        Return False when no server is known: there is none, or it does not serve yet.
        """
        pid = server_pid(self.spec)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)
        return pid != 0

    def replace_server(self) -> None:
        """Have the supervisor replace the running server, without errors, by one with the present specification.

        Programs see a short pause (docs/SEMANTICS.md, S-59).
        """
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR2)

    def wait_for_end(self, timeout_s: float) -> bool:
        """After the unmount: wait until the server and with it the supervisor have ended; return whether they have."""
        self._stop.set()
        return self.over.wait(timeout_s)

    def kill(self) -> None:
        """Kill the supervisor and the server; they are not replaced, and nothing is unmounted."""
        self._stop.set()
        # The supervisor first, as it would replace the server. A server that it has just started ends without it.
        if self._process is not None:
            ourprocess.end(self._process)
        self.end_server()
        self.over.wait(GONE_TIMEOUT_S)

    def _launch(self, handle: MountHandle | None) -> MountHandle:
        """Start a supervisor, and wait until it has made the mount, or has taken over the handle's mount."""
        self._cgroup.make()
        state_dir = Path(self.spec.state_dir)
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            log_path = state_dir / "supervisor.log"
            process, guard = ourprocess.start("datastore.fuse", "--guard", log_path=log_path)
        except OSError as error:
            raise MountFailed(f"the system starts no supervisor: {error}") from error
        try:
            # Before it is sent anything, so that the server which it starts is in the cgroup from its start.
            self._cgroup.add(process.pid)
            self._process = process
            if self._stop.is_set():  # kill() may have come before it could see this process
                raise MountFailed("the mount was ended while its supervisor started")
            settled, given = (handle.negotiated, handle.descriptors) if handle else (None, ())
            with self._telling:
                spec = self.spec
                frames.send(guard, {"spec": spec.to_json(), "adopt": settled}, given, timeout_s=START_TIMEOUT_S)
                if self._guard is not None:
                    self._guard.close()
                self._guard = guard
            try:
                answer, received = frames.receive(guard, START_TIMEOUT_S)
            except NotAnswering:
                raise MountFailed(f"the supervisor gave no answer; see supervisor.log in {state_dir}") from None
            if "error" in answer:
                raise error_named(str(answer.get("kind")), str(answer["error"]))
        except BaseException:
            ourprocess.end(process)
            guard.close()
            raise
        if handle is not None:
            return handle
        device_fd, opens_fd = received
        return MountHandle(
            volume_id=self.request.volume_id,
            spec=spec,
            ephemeral=self.request.ephemeral,
            negotiated=answer["mounted"],
            device_fd=device_fd,
            opens_fd=opens_fd,
        )

    def _watch(self) -> None:
        """Replace each supervisor that dies, until the mount ends."""
        self._launched.wait()
        if self.handle is None:
            return
        backoff = Backoff(STABLE_S)
        while True:
            started, process = time.monotonic(), self._process
            code = process.wait() if process is not None else None
            if code == 0 or self._stop.is_set():
                break
            if code is not None:
                log.error("a supervisor died; it is replaced", extra=fields(volume=self.request.volume_id, code=code))
            backoff.ended(time.monotonic() - started)
            self.end_server()
            if self._stop.wait(backoff.pause_s()):
                break
            self._relaunch()
        self._finish()

    def _relaunch(self) -> None:
        """Start a supervisor that takes over the mount; if that fails there is no process, or a dead one."""
        try:
            self._launch(self.handle)
        except DatastoreError as error:
            log.error("a supervisor could not start", extra=fields(volume=self.request.volume_id, error=error))

    def _finish(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self.handle is not None:
            self.handle.close()
        self._cgroup.remove()
        self.over.set()
        self._ended(self)


def server_pid(spec: MountSpec) -> int:
    """Return the pid of a mount's server; 0 if none is known."""
    return controlclient.server_pid(Path(spec.state_dir), "datastore.fuse", "--server", spec.state_dir)


def _reap(pid: int) -> None:
    """Wait, for up to REAP_TIMEOUT_S, for an orphaned server, which the first process of the container inherits."""
    end = time.monotonic() + REAP_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
