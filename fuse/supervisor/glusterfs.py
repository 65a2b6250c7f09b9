"""The supervisor of a GlusterFS volume: it runs the native client, and replaces a client that died.

The client (glusterfs(8)) speaks to the kernel itself, so its mount can't be handed over to the next client: programs
that had files open there get ENOTCONN and have to open them again. Files opened by path after the replacement work.

A client mounts at a hidden place. Only when the volume answers there, the supervisor bind-mounts that at the mount
point, over a dead mount if there is one, so that no program ever finds an empty directory there.
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

from datastore import logs
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
from datastore.linuxfds import memfd
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
"""The directory below the state directory where a client mounts."""
MOUNT_TIMEOUT_S = 15.0
"""How long a client may take to get the volume's file from a server and to reach the bricks. `mount` waits 20 s."""
LOOK_S = 5.0
"""How often the volume is checked for `status`, and how long a check may take before it counts as failed."""
KILLED_TIMEOUT_S = 5.0
POLL_S = 0.02
CONTROL_TIMEOUT_S = 60.0
_TOLD = 8 << 10
"""How many bytes at the end of a client's log are searched for why the client ended."""


def command(spec: MountSpec, place: Path) -> list[str]:
    """Return the client's command line. What a user wrote gets into no shell command and no list of mount options."""
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
    """A mount by the native client. Threads: the supervisor's, the control socket's, and one that checks the volume."""

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
        if os.geteuid() != 0:
            raise MountFailed("a GlusterFS volume is mounted by its own client, which needs root: use sudo")
        super().open()

    def _make(self) -> None:
        # The guard expects descriptors, and gets these, which mean nothing: no later client can take over a mount.
        self.device_fd = self.opens_fd = memfd("none")
        self.negotiated = {}
        self._begin()
        self.mounted = True
        self._attend()

    def adopt(self, held: Adopted) -> None:
        """See Supervisor: a living client of an earlier supervisor is kept; keep() replaces a dead one."""
        super().adopt(held)
        self._client_pid = self._living_client()
        self._attend()

    def close(self) -> None:
        self._control.stop()
        self._end_client()
        if self.mounted:
            _take_away(self.spec.mountpoint)
        self.mounted = False
        super().close()

    def _begin(self) -> None:
        """Start a client and show its mount at the mount point. Errors: why that failed, with nothing left behind."""
        if shutil.which(PROGRAM) is None:
            raise MountFailed(f"{PROGRAM} is missing: apt-get install glusterfs-client")
        self._hidden.mkdir(mode=0o700, exist_ok=True)
        _take_away(str(self._hidden))
        logs.trim(self.state_dir / CLIENT_LOG, 0)  # what an earlier client said is in client.log.1
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
            self._until_it_is_shown()
        except BaseException:
            self._end_client()
            raise
        finally:
            _take_away(str(self._hidden))
        self._note()

    def _until_it_is_shown(self) -> None:
        """Wait until the volume answers, and bind-mount it at the mount point. Errors: why it does not answer.
        The client's mount is used by a descriptor of its root: a client mounts for a moment even where the volume has
        no such directory, and the empty directory beneath must not be taken for it."""
        end = time.monotonic() + MOUNT_TIMEOUT_S
        root_fd = -1
        looked: _Look | None = None
        try:
            while True:
                if self._client is not None and self._client.poll() is not None:
                    raise _told(_location(self.spec), self._said())
                if looked is None and (root_fd := self._open_root()) != -1:
                    looked = _Look(Path(f"/proc/self/fd/{root_fd}"))
                if looked is not None and looked.done.is_set():
                    if not looked.error:
                        device.bind(f"/proc/self/fd/{root_fd}", self.spec.mountpoint)
                        return
                    os.close(root_fd)
                    root_fd, looked = -1, None  # try again: the client connects to its bricks one by one
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
        """Return a descriptor of the root of the client's mount; -1 while the client has not mounted."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        root_fd, below_fd = os.open(self._hidden, flags), os.open(self.state_dir, flags)
        mounted = _mount_id(root_fd) != _mount_id(below_fd)
        os.close(below_fd)
        if not mounted:
            os.close(root_fd)
        return root_fd if mounted else -1

    def _end_client(self) -> None:
        """Kill the client. What it has not sent is lost, so this is only for a client whose mount nobody can reach.
        The processes that it forked are killed too: the one that mounts for it can outlive it, and would mount then."""
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
        """End the mount after a signal: flush, and detach it even if it is in use."""
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
        """Return the pid of a client that an earlier supervisor started from this state directory; 0: none lives."""
        return server_pid(self.state_dir, str(self._hidden))

    # -- what others see

    def report(self) -> dict[str, object]:
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
        self._control.operations = {name: (operation, CONTROL_TIMEOUT_S) for name, operation in operations.items()}
        self._control.start()
        threading.Thread(target=self._look_now_and_then, name="look", daemon=True).start()

    def _look_now_and_then(self) -> None:
        """Check whether the volume answers, every LOOK_S, forever; while a check hangs, no other is begun."""
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
        """Have the client send what it holds for write-behind to the bricks."""
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
        self._stopping = True  # set before the client ends, so that keep() does not replace it
        try:
            used = device.unmount_or_detach(self.spec.mountpoint, force=force, detach=detach)
        except MountFailed:
            self._stopping = False
            raise
        _take_away(self.spec.mountpoint)  # dead mounts beneath the one that served
        return {"errors": [], **({"detached": used} if used and detach else {})}

    def _said(self) -> str:
        """Return the end of the client's log."""
        with suppress(OSError):
            return (self.state_dir / CLIENT_LOG).read_bytes()[-_TOLD:].decode(errors="replace")
        return ""


class _Look:
    """Checks once whether a directory answers, in a thread that nobody has to wait for. error: why it failed, or ''."""

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
    """Detach everything that is mounted there."""
    while device.is_mounted(place):
        device.unmount(place, lazy=True)


def _mount_id(fd: int) -> str:
    """Return the id of the mount that a descriptor is in, without asking its file system: proc(5), fdinfo."""
    about = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return next(line for line in about.splitlines() if line.startswith("mnt_id:"))


def _location(spec: MountSpec) -> GlusterFSLocation:
    if not isinstance(spec.source, GlusterFSLocation):
        raise InvalidManifest(f"{spec.source} is no GlusterFS volume")
    return spec.source


def _told(location: GlusterFSLocation, said: str) -> DatastoreError:
    """Return the error that says why a client ended, from `said`, the end of its log."""
    names = ", ".join(location.servers)
    if "is not found" in said and "subdirectory" in said:
        return NotFound(f"volume {location.volume} has no directory {location.path}: make it there first")
    if "authentication failed" in said or "AUTH_FAILED" in said:
        return AccessDenied(f"the bricks of {location.volume} refuse this machine (auth.allow of the volume)")
    if "failed to fetch volume file" in said:
        return NotFound(f"{names}: there is no volume {location.volume}, or it is not started")
    if "connect" in said:
        return Unreachable(f"none of the servers {names} answers on port 24007: check spec.glusterfs.servers")
    return MountFailed(f"the GlusterFS client ended; its last words: {said.strip()[-300:] or 'none'}")
