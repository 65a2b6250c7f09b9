"""The supervisor of a GlusterFS volume: it runs the native client, and replaces one that died.

The client (glusterfs(8)) speaks to the kernel itself, so nothing of a mount can be handed to the next client: programs
that had files open there get ENOTCONN, and open them again. What is opened by path after the replacement works.

A client mounts at a place that nobody sees. Only when the volume answers there it is bound to the mount point, over a
dead one if there is one, so that no program ever finds an empty directory in its place.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from datastore.api.mountspec import MountSpec
from datastore.api.source import GlusterFSLocation
from datastore.controlclient import Answer, server_pid
from datastore.errors import (
    AccessDenied,
    DatastoreError,
    InvalidManifest,
    MountFailed,
    NotFound,
    Unreachable,
    Unsupported,
)
from datastore.logs import fields
from datastore.ourprocess import Backoff

from ..control import ControlServer, Operation, Progress, failed
from ..kernel import device
from .guard import Adopted, Guard
from .process import WATCH_S, Supervisor
from .serverprocess import ServerProcess

log = logging.getLogger(__name__)

PROGRAM = "glusterfs"
CLIENT_LOG = "client.log"
HIDDEN = "client"
"""Below the state directory: where a client mounts."""
MOUNT_TIMEOUT_S = 15.0
"""For the volume's file from one of the servers, and for its bricks. The command gives a mount 20 s."""
LOOK_S = 5.0
"""How often the volume is looked at, for `status`; and how long a look may take before it counts as none."""
KILLED_TIMEOUT_S = 5.0
POLL_S = 0.02
CONTROL_TIMEOUT_S = 60.0
_TOLD = 8 << 10
"""Of the end of a client's log, what may say why it ended."""


def command(spec: MountSpec, place: Path) -> list[str]:
    """The client's command line. No shell and no list of options sees what a user wrote."""
    location = _location(spec)
    words = [PROGRAM, "--no-daemon", "--process-name=fuse", *(f"--volfile-server={each}" for each in location.servers)]
    words += [f"--volfile-id={location.volume}", f"--log-file={Path(spec.state_dir, CLIENT_LOG)}", "--log-level=INFO"]
    if location.path.strip("/"):
        words.append(f"--subdir-mount={location.path.rstrip('/')}")
    if spec.read_only:
        words.append("--read-only")
    ttl_s = int(spec.metadata_ttl_s)
    words += [f"--attribute-timeout={ttl_s}", f"--entry-timeout={ttl_s}", "--fuse-mountopts=nosuid,nodev"]
    return [*words, str(place)]


class GlusterSupervisor(Supervisor):
    """One mount by the native client. Threads: the supervisor's one, those of its control socket, one that looks."""

    def __init__(self, spec: MountSpec, guard: Guard | None = None, first: ServerProcess | None = None) -> None:
        super().__init__(spec, "", guard, first=first)
        self.standby.end()
        self._hidden = self.state_dir / HIDDEN
        self._client: subprocess.Popen[bytes] | None = None
        self._client_pid = 0
        self._stopping = False
        self._began = time.monotonic()
        self._silent: dict[str, Any] | None = None
        self._control = ControlServer(self.state_dir)

    # -- making the mount

    def open(self) -> None:
        """See Supervisor."""
        if os.geteuid() != 0:
            raise MountFailed("a GlusterFS volume is mounted by its own client, which needs root: use sudo")
        super().open()

    def _make(self) -> None:
        # A guard is given descriptors that stand for none: there is nothing that the next client could go on with.
        self.device_fd = self.opens_fd = os.memfd_create("none")
        self.negotiated = {}
        self._begin()
        self.mounted = True
        self._attend()

    def adopt(self, held: Adopted) -> None:
        """See Supervisor: a client of an earlier supervisor that lives goes on; keep() replaces any other."""
        super().adopt(held)
        self._client_pid = self._living_client()
        self._attend()

    def close(self) -> None:
        """See Supervisor."""
        self._control.stop()
        self._end_client()
        if self.mounted:
            _take_away(self.spec.mountpoint)
        self.mounted = False
        super().close()

    def _begin(self) -> None:
        """Start a client and show it at the mount point. Errors: why it can't be mounted; then nothing is left."""
        if shutil.which(PROGRAM) is None:
            raise MountFailed(f"{PROGRAM} is missing: apt-get install glusterfs-client")
        self._hidden.mkdir(mode=0o700, exist_ok=True)
        _take_away(str(self._hidden))
        mark = self._log_size()  # now: a client that can't mount may have ended before we go on
        try:
            with self.log_path.open("ab") as output:
                self._client = subprocess.Popen(
                    command(self.spec, self._hidden),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            raise MountFailed(f"the system starts no {PROGRAM}: {error}") from error
        self._client_pid = self._client.pid
        try:
            self._until_it_is_shown(mark)
        except BaseException:
            self._end_client()
            raise
        finally:
            _take_away(str(self._hidden))
        self._note()

    def _until_it_is_shown(self, mark: int) -> None:
        """Wait until the volume answers, and bind it to the mount point. mark: where this client's log begins.

        Errors: why it does not.

        By a descriptor: a client mounts for a moment even where the volume has no such directory, and the empty
        directory below must be neither asked nor bound in its place.
        """
        end = time.monotonic() + MOUNT_TIMEOUT_S
        root_fd = -1
        looked: _Look | None = None
        try:
            while True:
                if self._client is not None and self._client.poll() is not None:
                    raise _told(_location(self.spec), self._said(mark))
                if looked is None and (root_fd := self._open_root()) != -1:
                    looked = _Look(Path(f"/proc/self/fd/{root_fd}"))
                if looked is not None and looked.done.is_set():
                    if not looked.error:
                        device.bind(f"/proc/self/fd/{root_fd}", self.spec.mountpoint)
                        return
                    os.close(root_fd)
                    root_fd, looked = -1, None  # its bricks are connected one by one
                if time.monotonic() >= end:
                    raise Unreachable(
                        f"{self.spec.source}: no answer within {MOUNT_TIMEOUT_S:.0f} s: are its servers and bricks up?"
                        f" See {self.state_dir / CLIENT_LOG}"
                    )
                self._wait(POLL_S)
                if self.ending:
                    raise MountFailed("interrupted before the mount was ready")
        finally:
            if root_fd != -1:
                os.close(root_fd)

    def _open_root(self) -> int:
        """A descriptor of what the client has mounted; -1 while it has not."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        root_fd, below_fd = os.open(self._hidden, flags), os.open(self.state_dir, flags)
        mounted = _mount_id(root_fd) != _mount_id(below_fd)
        os.close(below_fd)
        if not mounted:
            os.close(root_fd)
        return root_fd if mounted else -1

    def _end_client(self) -> None:
        """At once; what it had not sent is lost, so that this is only for one whose mount nobody can reach.

        With what it has forked: the process that mounts for it can outlive it, and would mount afterwards.
        """
        if self._client is not None:
            end = time.monotonic() + KILLED_TIMEOUT_S
            with suppress(ProcessLookupError):
                while time.monotonic() < end:
                    os.killpg(self._client.pid, signal.SIGKILL)
                    self._client.poll()
                    time.sleep(POLL_S)
            if self._client.poll() is None:
                log.warning("a client that was killed has not ended yet", extra=fields(pid=self._client.pid))
        self._client = None
        self._client_pid = 0

    # -- keeping it

    def keep(self) -> int:
        """See Supervisor: a client that died is replaced as soon as the volume answers."""
        backoff, began, lived_s = Backoff(), time.monotonic(), 0.0
        while True:
            self._wait(WATCH_S)
            if self.ending:
                return self._end()
            self._take_news()
            if self._lives():
                lived_s = time.monotonic() - began
                continue
            if self._stopping or not device.is_mounted(self.spec.mountpoint):
                self.close()
                return 0
            log.error("the client died; it is replaced", extra=fields(pid=self._client_pid))
            backoff.ended(lived_s)
            self._wait(backoff.pause_s())
            self.restarts += 1
            try:
                self._begin()
                log.warning("a new client serves", extra=fields(pid=self._client_pid))
            except DatastoreError as error:
                log.error("a new client could not start", extra=fields(error=error))
                self._note(trouble=f"the client died, and no other can be started: {error}")
            began, lived_s = time.monotonic(), 0.0

    def _end(self) -> int:
        """Asked to end by a signal: unmount, whoever uses it."""
        self._flush({}, lambda _: None)
        _take_away(self.spec.mountpoint)
        if self._client is not None:
            try:
                self._client.wait(CONTROL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("programs still used the mount when it ended")
        self.close()
        return 0

    def _lives(self) -> bool:
        if self._client is not None:
            return self._client.poll() is None
        return bool(self._client_pid) and self._client_pid == self._living_client()

    def _living_client(self) -> int:
        """The pid of a client that an earlier supervisor started from this state directory; 0: none lives."""
        return server_pid(self.state_dir, str(self._hidden))

    # -- what others see

    def report(self) -> dict[str, object]:
        """See Supervisor."""
        return {**super().report(), "serverPid": self._client_pid}

    def _attend(self) -> None:
        operations: dict[str, Operation] = {
            "status": self._status,
            "flush": self._flush,
            "discard": lambda _request, _progress: {"discarded": 0},
            "warm": self._warm,
            "settings": lambda _request, _progress: {"later": []},
            "stop": self._stop,
        }
        self._control.start({name: (operation, CONTROL_TIMEOUT_S) for name, operation in operations.items()})
        threading.Thread(target=self._look_now_and_then, name="look", daemon=True).start()

    def _look_now_and_then(self) -> None:
        """Whether the volume answers. A look that hangs is left behind, and is the only one."""
        since = 0.0
        while True:
            looked, done = _Look(Path(self.spec.mountpoint)), False
            while not done:
                done = looked.done.wait(LOOK_S)
                error = looked.error if done else f"no answer within {LOOK_S:.0f} s"
                since = (since or time.time()) if error else 0.0
                self._silent = {"since": since, "lastAsked": time.time(), "error": error} if error else None
            time.sleep(LOOK_S)

    def _status(self, _request: Answer, _progress: Progress) -> Answer:
        return {
            "name": self.spec.name,
            "mountpoint": self.spec.mountpoint,
            "location": str(self.spec.source),
            "transport": self.spec.transport,
            "serverPid": self._client_pid,
            "supervisorPid": os.getpid(),
            "uptimeSeconds": round(time.monotonic() - self._began, 1),
            "restarts": self.restarts,
            "detached": not device.is_mounted(self.spec.mountpoint),
            "dirty": [],
            "store": {},
            "storage": self._silent,
        }

    def _flush(self, _request: Answer, _progress: Progress) -> Answer:
        """What the client has behind it goes to the bricks."""
        try:
            fd = os.open(self.spec.mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            return failed(f"{self.spec.mountpoint}: {error.strerror}")
        return {"errors": []}

    def _warm(self, _request: Answer, _progress: Progress) -> Answer:
        raise Unsupported("a GlusterFS mount keeps no files on this machine's disk, so there is nothing to fetch ahead")

    def _stop(self, request: Answer, _progress: Progress) -> Answer:
        force, detach = request.get("force") is True, request.get("detach") is True
        self._stopping = True  # before the client ends, which is not to be replaced
        try:
            used = device.unmount_or_detach(self.spec.mountpoint, force=force, detach=detach)
        except MountFailed:
            self._stopping = False
            raise
        _take_away(self.spec.mountpoint)  # dead mounts below the one that served
        return {"errors": [], **({"detached": used} if used and detach else {})}

    def _log_size(self) -> int:
        log_path = self.state_dir / CLIENT_LOG
        return log_path.stat().st_size if log_path.exists() else 0

    def _said(self, mark: int) -> str:
        with suppress(OSError), (self.state_dir / CLIENT_LOG).open("rb") as file:
            file.seek(max(mark, self._log_size() - _TOLD))
            return file.read(_TOLD).decode(errors="replace")
        return ""


class _Look:
    """One look at a directory by a thread that nobody has to wait for. error: why it failed, or ''."""

    def __init__(self, place: Path) -> None:
        self.done = threading.Event()
        self.error = ""
        threading.Thread(target=self._run, args=(place,), name="look-once", daemon=True).start()

    def _run(self, place: Path) -> None:
        try:
            os.statvfs(place)
            os.stat(place)
        except OSError as error:
            self.error = error.strerror or str(error)
        self.done.set()


def _take_away(place: str) -> None:
    """All that is mounted there, from its tree."""
    while device.is_mounted(place):
        device.unmount(place, lazy=True)


def _mount_id(fd: int) -> str:
    """Of the mount that a descriptor is in, without asking its file system: proc(5), fdinfo."""
    about = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return next(line for line in about.splitlines() if line.startswith("mnt_id:"))


def _location(spec: MountSpec) -> GlusterFSLocation:
    if not isinstance(spec.source, GlusterFSLocation):
        raise InvalidManifest(f"{spec.source} is no GlusterFS volume")
    return spec.source


def _told(location: GlusterFSLocation, said: str) -> DatastoreError:
    """Why a client ended, from its log."""
    names = ", ".join(location.servers)
    if "is not found" in said and "subdirectory" in said:
        return NotFound(f"volume {location.volume} has no directory {location.path}: make it there first")
    if "authentication failed" in said or "AUTH_FAILED" in said:
        return AccessDenied(f"the bricks of {location.volume} refuse this machine (auth.allow of the volume)")
    if "failed to fetch volume file" in said:
        return NotFound(f"{names}: there is no volume {location.volume}, or it is not started")
    if "connect" in said:
        return Unreachable(f"none of the servers {names} answers on port 24007")
    return MountFailed(f"the GlusterFS client ended; its last words: {said.strip()[-300:] or 'none'}")
