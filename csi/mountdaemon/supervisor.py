"""One mount with its supervisor process, and what happens when that dies.

The supervisor (python -m datastore.fuse) replaces its server by itself; here a supervisor that died is replaced by one
which adopts the descriptors. Only an asked-for end unmounts. Threads: start, renew and end are called under the
volume's lock (daemon.py); one thread waits for the process.
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
"""The supervisor gives its server 60 s to probe the storage (5 s of it) and to recover what an earlier one left."""
GONE_TIMEOUT_S = 10.0
REAP_TIMEOUT_S = 2.0
STABLE_S = 10.0
"""A supervisor that ran for longer is replaced at once. Each that starts costs half a second of processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRequest:
    """What is to be mounted. ephemeral: an inline volume of a pod."""

    volume_id: str
    spec: MountSpec
    ephemeral: bool = False


class SupervisedMount:
    """States: started -> serving (and again, after the supervisor's death) -> ended."""

    def __init__(self, request: MountRequest, cgroup: Cgroup, ended: Callable[[SupervisedMount], None]) -> None:
        self.request = request
        self._cgroup = cgroup
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: socket.socket | None = None
        self._telling = threading.Lock()
        """Held while the supervisor is told a specification: the first that it hears says what to mount."""
        self._stop = threading.Event()
        self._launched = threading.Event()
        """It was, or could not be."""
        self.over = threading.Event()
        self.untold = False
        """The server that serves may know an earlier specification, because none could be told of the present one."""
        self.handle: MountHandle | None = None

    @property
    def spec(self) -> MountSpec:
        """What it is mounted with at present."""
        return self.request.spec

    @property
    def supervisor_pid(self) -> int:
        """0 when no supervisor runs just now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def start(self, handle: MountHandle | None = None) -> MountHandle:
        """Mount, or go on with the mount of a handle, which is ours then: as soon as a supervisor can be started.

        Errors: what the supervisor reported; with a handle only that nobody could watch over it.
        """
        watcher = threading.Thread(target=self._watch, name=f"supervisor-{self.request.volume_id[-24:]}", daemon=True)
        try:
            watcher.start()  # first: a supervisor without one would be nobody's
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
        """This specification for the servers to come. The present one is told by its control socket."""
        with self._telling:
            self.request = replace(self.request, spec=spec)
            if self._guard is not None:
                with suppress(DatastoreError):  # the next supervisor is started with it
                    frames.send(self._guard, {"spec": spec.to_json()})
        self._cgroup.raise_to(limit_of(spec.memory_bytes))
        if self.handle is not None:
            self.handle = replace(self.handle, spec=spec)

    def end_server(self) -> bool:
        """Kill the server; the supervisor, if it lives, replaces it by one with the present specification.

        False: there is none, or one that does not serve yet.
        """
        pid = server_pid(self.spec)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)
        return pid != 0

    def replace_server(self) -> None:
        """Have the supervisor put a server with the present specification in the place of the one that serves.

        It does so in order: who reads and writes sees a short pause. Where the kernel can't hand requests over (before
        Linux 6.9), the old one serves on.
        """
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR2)

    def wait_for_end(self, timeout_s: float) -> bool:
        """It is unmounted: its server ends, and its supervisor with it. Whether both have in this time."""
        self._stop.set()
        return self.over.wait(timeout_s)

    def kill(self) -> None:
        """End supervisor and server at once; nothing is unmounted, and nobody replaces them."""
        self._stop.set()
        # The supervisor first: it would replace the server. A server that it has just started ends without it.
        if self._process is not None:
            ourprocess.end(self._process)
        self.end_server()
        self.over.wait(GONE_TIMEOUT_S)

    def _launch(self, handle: MountHandle | None) -> MountHandle:
        """Start a supervisor, and wait until the mount is made, or a handle's mount is taken over."""
        self._cgroup.make()
        state_dir = Path(self.spec.state_dir)
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            log_path = state_dir / "supervisor.log"
            process, guard = ourprocess.start("datastore.fuse", "--guard", log_path=log_path)
        except OSError as error:
            raise MountFailed(f"the system starts no supervisor: {error}") from error
        try:
            # Before it is told anything, so that the server which it starts is born there.
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
        """Until the mount ends: replace a supervisor that died."""
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
        """Go on with the mount of our handle. Where that fails there is no process, or a dead one."""
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
    """The pid of a mount's server; 0: none that is known."""
    return controlclient.server_pid(Path(spec.state_dir), "datastore.fuse", "--server", spec.state_dir)


def _reap(pid: int) -> None:
    """Wait for a server that lost its supervisor: the first process of a container inherits it. Bounded."""
    end = time.monotonic() + REAP_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
