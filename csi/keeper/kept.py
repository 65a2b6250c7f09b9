"""One mount that the host keeps: its keeper process, the descriptors, and what happens when the keeper dies.

The keeper (python -m datastore.fuse) replaces its server by itself; here a keeper that died is replaced by one which
adopts the descriptors. Only an asked-for end unmounts. Threads: start, renew and end are called under the volume's
lock (host.py); one thread waits for the process.
"""

from __future__ import annotations

import json
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
from typing import Any

from datastore import ourprocess
from datastore.api.mountspec import MountSpec
from datastore.errors import DatastoreError, MountFailed
from datastore.logs import fields

from .. import frames
from ..errors import error_named
from ..held import Held
from .cgroups import Cgroup

log = logging.getLogger(__name__)

START_TIMEOUT_S = 35.0
"""The keeper gives its server 30 s to probe the storage (5 s of it) and to recover what an earlier one left."""
GUARD_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 10.0
REAP_TIMEOUT_S = 2.0
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 5.0
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a mount is started with. cgroup: where its processes live, with the ceiling of their memory."""

    volume_id: str
    spec: MountSpec
    ephemeral: bool = False


class KeptMount:
    """States: started -> serving (and again, after the keeper's death) -> ended."""

    def __init__(self, setting: Setting, cgroup: Cgroup, ended: Callable[[KeptMount], None]) -> None:
        self.setting = setting
        self._cgroup = cgroup
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: socket.socket | None = None
        self._stop = threading.Event()
        self._launched = threading.Event()
        """It was, or could not be."""
        self.over = threading.Event()
        self.held: Held | None = None

    @property
    def spec(self) -> MountSpec:
        """What it is mounted with at present."""
        return self.setting.spec

    @property
    def keeper_pid(self) -> int:
        """0 when no keeper runs just now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def start(self, held: Held | None = None) -> Held:
        """Mount, or go on with what is held, which is ours then: as soon as a keeper can be started.

        Errors: what the keeper reported; of what is held only that nobody could watch over it.
        """
        watcher = threading.Thread(target=self._watch, name=f"keeper-{self.setting.volume_id[-24:]}", daemon=True)
        _begin(watcher)  # first: a keeper without one would be nobody's
        try:
            if held is None:
                self.held = self._launch(None)
            else:
                self.held = held
                self._relaunch(0.0)
        finally:
            self._launched.set()
        return self.held

    def renew(self, spec: MountSpec) -> None:
        """This specification for the servers to come. The present one is told by its control socket."""
        self.setting = replace(self.setting, spec=spec)
        if self.held is not None:
            self.held = replace(self.held, spec=spec)
        if self._guard is not None:
            with suppress(DatastoreError):  # the next keeper is started with it
                frames.send(self._guard, {"spec": spec.to_json()})

    def end_server(self) -> bool:
        """Kill the server; the keeper, if it lives, replaces it by one with the present specification.

        False: there is none, or one that does not serve yet.
        """
        pid = server_pid(self.spec)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)
        return pid != 0

    def expect_end(self, timeout_s: float = GONE_TIMEOUT_S) -> bool:
        """The server was asked to stop: wait for its keeper; True when it is gone."""
        self._stop.set()
        return self.over.wait(timeout_s)

    def cancel_end(self) -> None:
        """It does not stop after all: watch over it again."""
        self._stop.clear()

    def kill(self) -> None:
        """End keeper and server at once; nothing is unmounted, and nobody replaces them."""
        self._stop.set()
        # The keeper first: it would replace the server. A server that it has just started ends without it.
        if self._process is not None:
            _end_group(self._process)
        self.end_server()
        self.over.wait(GONE_TIMEOUT_S)

    def _launch(self, held: Held | None) -> Held:
        self._cgroup.make()
        state_dir = Path(self.spec.state_dir)
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            process, ours = ourprocess.start("datastore.fuse", "--guard", log_path=state_dir / "keeper.log", piped=True)
        except OSError as error:
            raise MountFailed(f"the system starts no keeper: {error}") from error
        deadline = threading.Timer(START_TIMEOUT_S, _end_group, (process,))
        try:
            _begin(deadline)
            # Before it is told anything, so that the server which it starts is born there.
            self._cgroup.add(process.pid)
            self._process, self._guard = process, ours
            return self._converse(process, ours, held)
        except BaseException:
            _end_group(process)
            process.wait()
            ours.close()
            raise
        finally:
            deadline.cancel()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()

    def _converse(self, process: subprocess.Popen[bytes], guard: socket.socket, held: Held | None) -> Held:
        if held is None:
            frames.send(guard, {"adopt": None})
        else:
            frames.send(guard, {"adopt": held.negotiated}, (held.device_fd,))
            frames.send(guard, {"opens": True}, (held.opens_fd,))
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it ended early; what it said about that is read next
            process.stdin.write(self.spec.to_json().encode())
            process.stdin.close()
        answer = _parsed(process.stdout.readline(MAX_LINE_BYTES))
        if answer.get("ready") is not True:
            said = answer.get("error") or f"the keeper gave no answer; see keeper.log in {self.spec.state_dir}"
            raise error_named(str(answer.get("kind", "MountFailed")), str(said))
        if held is not None:
            return held
        message, (device_fd,) = frames.receive(guard, GUARD_TIMEOUT_S)
        try:
            _, (opens_fd,) = frames.receive(guard, GUARD_TIMEOUT_S)
        except BaseException:
            os.close(device_fd)  # else who uses the mount would wait for ever
            raise
        return Held(
            volume_id=self.setting.volume_id,
            spec=self.spec,
            ephemeral=self.setting.ephemeral,
            negotiated=message["mounted"],
            device_fd=device_fd,
            opens_fd=opens_fd,
        )

    def _watch(self) -> None:
        """Until the mount ends: replace a keeper that died."""
        self._launched.wait()
        if self.held is None:
            return
        pause_s = 0.0
        while True:
            process = self._process
            code = process.wait() if process is not None else None
            if code == 0 or self._stop.is_set():
                break
            if code is not None:
                log.error("a keeper died; it is replaced", extra=fields(volume=self.setting.volume_id, code=code))
            self.end_server()
            if self._stop.wait(pause_s):
                break
            pause_s = self._relaunch(pause_s)
        self._finish()

    def _relaunch(self, pause_s: float) -> float:
        """Seconds to wait before the next try, if this keeper dies as well."""
        try:
            self._launch(self.held)
        except DatastoreError as error:
            log.error("a keeper could not start", extra=fields(volume=self.setting.volume_id, error=error))
        return min(max(BACKOFF_FIRST_S, pause_s * 2), BACKOFF_LAST_S)

    def _finish(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self.held is not None:
            self.held.close()
        self._cgroup.remove()
        self.over.set()
        self._ended(self)


def _begin(thread: threading.Thread) -> None:
    """Errors: MountFailed."""
    try:
        thread.start()
    except RuntimeError as error:
        raise MountFailed(f"the system starts no thread: {error}") from error


def server_pid(spec: MountSpec) -> int:
    """The pid of a mount's server by the file that its keeper writes, if that is one; else 0."""
    try:
        written = json.loads((Path(spec.state_dir) / "mount.json").read_bytes())
        pid = int(written["serverPid"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if b"datastore.fuse" in command and b"--server" in command else 0


def _reap(pid: int) -> None:
    """Wait for a server that lost its keeper: the first process of a container inherits it. Bounded."""
    end = time.monotonic() + REAP_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the keeper; it leads a session, and its servers lead others."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(answer, dict):
        raise MountFailed("the keeper spoke no JSON object")
    return answer
