"""What the supervisor does: checks the storage through a server, mounts, hands over, replaces a server that died.

A server that dies is replaced at once: the kernel keeps the requests, the new server answers them. Only an asked-for
end unmounts. It imports little, and does nothing but wait: it must not be what fails.
Signals: SIGTERM, SIGINT and SIGHUP end the mount in order, SIGUSR2 replaces the server by one of the code that is
installed now. All waiting is in _wait, where they are taken synchronously; supervisor/command.py blocks them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any

from datastore import beneath, frames, logs
from datastore.api.mountspec import MountSpec, from_json
from datastore.controlclient import MOUNT_FILE, SOCKET
from datastore.errors import DatastoreError, MountFailed, error_named
from datastore.frames import PeerGone
from datastore.logs import fields

from ..kernel import abi, device
from ..kernel.negotiate import Negotiated
from ..kernel.passthrough import TABLE_BYTES
from .guard import Adopted, Guard
from .outage import Outage, Refusal
from .serverprocess import ServerProcess, Standby

log = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 60.0
"""The builder promises 5 s; local recovery comes on top."""
RESUME_TIMEOUT_S = 300.0
"""A new server first ends the renames that the old one began."""
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 15.0
END_TIMEOUT_S = 5.0
DOWN_LIMIT_S = 60.0
"""Callers wait for a new server for so long; then they get EIO, until one serves."""
WATCH_S = 0.5
"""A server whose death the system does not tell (ServerProcess.code) is found after so long."""
TICK_S = 0.1
LOG_CHECK_S = 60.0
UPGRADE = signal.SIGUSR2
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
EXIT_ERROR = 1


class Supervisor:
    """One mount. states: no server -> probed -> mounted -> serving (and again, after a death) -> ended."""

    def __init__(
        self,
        spec: MountSpec,
        builder: str,
        guard: Guard | None = None,
        down_limit_s: float = DOWN_LIMIT_S,
        first: ServerProcess | None = None,
    ) -> None:
        """first: the server that is to serve first; it was told to prepare."""
        self.spec = spec
        self.builder = builder
        self.guard = guard
        self.outage = Outage(down_limit_s, time.monotonic())
        self.state_dir = Path(spec.state_dir)
        self.log_path = self.state_dir / "mount.log"
        self.file_trouble = ""
        """Why mount.json is older than what was to be written last, such as a full disk; '' when it is not."""
        self.server: ServerProcess | None = None
        self.undead: list[ServerProcess] = []
        """Servers that died, until nothing is left of them."""
        self.refusal: Refusal | None = None
        self.upgrading = False
        self.standby = Standby(self._process, first)
        self.device_fd = -1
        self.opens_fd = -1
        self.negotiated: dict[str, Any] | None = None
        self.restarts = 0
        self.mounted = False
        self.ending = False

    def _process(self) -> ServerProcess:
        """A new one; on a cluster's node, where somebody guards us, with fewer rights than ours."""
        return ServerProcess(self.builder, self.log_path, confined=self.state_dir if self.guard else None)

    # -- making the mount

    def open(self) -> None:
        """Make the mount. Errors: DatastoreError; then nothing is left behind."""
        self._claim()
        mountpoint, note = self.spec.mountpoint, self.state_dir / beneath.NOTE_FILE
        if not device.is_mounted(mountpoint):
            beneath.restore(mountpoint, note)  # of a mount that crashed
        device.check_mountpoint(mountpoint)
        if self.spec.transport == "kernel":
            device.check_device()
        try:
            beneath_fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._make()
            # a guard's host removes the directory itself when a crash is cleared up
            beneath.protect(beneath_fd, note, immutable=self.guard is None)
            os.close(beneath_fd)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        """Mount, and have it served."""
        if self.spec.transport == "kernel":
            self.opens_fd = os.memfd_create("opens")
            os.ftruncate(self.opens_fd, TABLE_BYTES)
        self._serve()
        if self.file_trouble:
            raise MountFailed(f"can't write to the state directory {self.state_dir}: {self.file_trouble}")

    def adopt(self, held: Adopted) -> None:
        """Go on with a mount that another supervisor made; keep() starts its server. Errors: DatastoreError."""
        self._claim()
        self.device_fd, self.opens_fd, self.negotiated = held.device_fd, held.opens_fd, held.negotiated
        self.mounted = True

    def close(self) -> None:
        """Undo open(): end the server, unmount, remove the files that say it lives. Idempotent."""
        self.standby.end()
        if self.server is not None:
            self.server.end(END_TIMEOUT_S)
            self._forget_server()
        if self.device_fd >= 0:
            os.close(self.device_fd)
            self.device_fd = -1
        if self.mounted:
            self.mounted = False
            try:
                device.unmount(self.spec.mountpoint, lazy=True)
            except MountFailed as error:
                log.error(str(error))
        if not device.is_mounted(self.spec.mountpoint):
            beneath.restore(self.spec.mountpoint, self.state_dir / beneath.NOTE_FILE)
        for name in (MOUNT_FILE, SOCKET):
            (self.state_dir / name).unlink(missing_ok=True)

    def _claim(self) -> None:
        """Take the state directory: one supervisor per directory."""
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.state_dir.chmod(0o700)
            self._lock = (self.state_dir / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MountFailed(f"{self.spec.name} is mounted already: another process holds {self.state_dir}") from None
        except OSError as error:
            raise MountFailed(f"can't use the state directory {self.state_dir}: {error.strerror}") from error

    def _serve(self, server: ServerProcess | None = None) -> None:
        """Have a server ask the storage, mount unless it is mounted, and hand it over. Errors: DatastoreError.

        server: one that has said that it is prepared; None: the one that stands by, or a new one.
        """
        resumed = self.mounted
        self.server = server or self.standby.take() or self._process()
        channel = self.server.channel
        if server is None:
            self._expect(channel, "prepared", IMPORT_TIMEOUT_S)
        mount = {"spec": self.spec.to_json(), "builder": self.builder, "log": str(self.log_path)}
        wanted = {**mount, "resumed": resumed, "restarts": self.restarts}
        frames.send(channel, wanted, () if self.opens_fd < 0 else (self.opens_fd,))
        self._expect(channel, "probed", RESUME_TIMEOUT_S if resumed else PROBE_TIMEOUT_S)
        spec = self.spec
        if not self.mounted and spec.transport == "kernel":
            self.device_fd = device.mount(
                spec.mountpoint, spec.name, read_only=spec.read_only, allow_other=spec.allow_other
            )
        self.mounted = True
        handed = {"serve": True, "negotiated": self.negotiated}
        frames.send(channel, handed, () if self.device_fd < 0 else (self.device_fd,))
        settled = self._expect(channel, "negotiated", READY_TIMEOUT_S)
        self.outage.served = time.monotonic()
        if self.negotiated is None:
            self.negotiated = settled
            device.tune_read_ahead(self.spec.mountpoint)
        self._note()

    def _expect(self, channel: socket, key: str, timeout_s: float) -> Any:
        """The next message of a server, which has to hold `key`. Errors: what it says; MountFailed."""
        end = time.monotonic() + timeout_s
        while not select.select([channel], [], [], TICK_S)[0]:
            self.ending |= bool(ENDING & signal.sigpending())
            if self.ending:
                raise MountFailed("interrupted before the mount was ready")
            if time.monotonic() >= end:
                raise MountFailed(f"the mount server gave no answer in {timeout_s:.0f} s; see {self.log_path}")
        try:
            message, _ = frames.receive(channel, timeout_s)
        except PeerGone:
            raise MountFailed(f"the mount server ended while it started; see {self.log_path}") from None
        if "error" in message:
            raise error_named(str(message.get("kind")), str(message["error"]), MountFailed)
        return message.get(key)

    # -- keeping it

    def keep(self) -> int:
        """Wait for the end, replacing servers that die; the exit code."""
        outage = self.outage
        outage.started = checked = time.monotonic()
        while True:
            if self.server is not None:
                self._wait(WATCH_S)
            elif not self._pause(outage.backoff.pause_s()):
                return self._ended(0)
            now = time.monotonic()
            if now - checked > LOG_CHECK_S:
                checked = now
                logs.trim(self.log_path)
            if self.ending:
                return self._end()
            self._take_news()
            self.undead = [each for each in self.undead if not each.reaped()]
            if self.upgrading:
                self._upgrade()
            if self.server is None:
                self._restart()
                continue
            code = self.server.code()
            lived_s = outage.lives(now)
            if code is None:
                if self.file_trouble:
                    self._note()
                if self._can_resend():
                    self.standby.keep(lived_s)
            elif code == 0 or self.spec.transport != "kernel":
                return self._ended(code)
            else:
                outage.died(now)
                log.error("the mount server died; it is replaced", extra=fields(code=code, after_s=round(lived_s, 1)))
                self._forget_server()

    def _take_news(self) -> None:
        document = self.guard.news() if self.guard else None
        if document is not None:
            self.spec = from_json(document)

    def _pause(self, pause_s: float) -> bool:
        """Before another server is tried; callers must not hang meanwhile. False: somebody has unmounted by force."""
        patience_s = self.outage.patience_s(time.monotonic(), resend=self._can_resend())
        if patience_s is None:
            self.refusal = None
        elif pause_s and self.device_fd >= 0:
            if self.refusal is None:
                log.error("no mount server lives; who has waited for long is refused")
                self.refusal = Refusal(self.device_fd, resend=self._can_resend())
            if not self.refusal.answer(pause_s, older_than_s=patience_s):
                return False
            pause_s = 0.0
        self._wait(pause_s)
        return True

    def _restart(self, server: ServerProcess | None = None) -> None:
        """Have another server serve; server: see _serve()."""
        self.restarts += 1
        try:
            self._serve(server)
            log.warning("a new mount server serves", extra=fields(pid=self.server.pid if self.server else 0))
        except DatastoreError as error:
            log.error("a new mount server could not start", extra=fields(error=error))
            self._note(trouble=f"no mount server can be started: {error}")
            if self.server is not None:
                self.server.kill()  # keep() sees it dead and pauses
            else:
                self.outage.backoff.ended(0.0)
        self.outage.started = time.monotonic()

    def _upgrade(self) -> None:
        """Let a new server, of the code that is installed now, go on in the place of the one that serves."""
        self.upgrading = False
        old = self.server
        if old is None:
            return  # one is about to be started
        self.standby.end()  # its code is as old as the server's
        new = None
        try:
            if not self._can_resend():
                raise MountFailed("the kernel can't hand requests from one server to the next (Linux 6.9 can)")
            new = self._process()
            self._expect(new.channel, "prepared", IMPORT_TIMEOUT_S)
        except DatastoreError as error:
            if new is not None:
                new.kill()
            log.error("the mount server is not replaced", extra=fields(error=error))
            self._note(refused=f"the new mount server does not start, the old one serves on: {error}")
            return
        old.signal(signal.SIGUSR2)
        if old.wait(LEAVE_TIMEOUT_S) is None:
            old.kill()
        log.warning("the mount server has left its place to a new one", extra=fields(old=old.pid, new=new.pid))
        self._forget_server()
        self._restart(new)

    def _can_resend(self) -> bool:
        return Negotiated(**self.negotiated).has(abi.HAS_RESEND) if self.negotiated else False

    def _ended(self, code: int) -> int:
        """The server is done; after a clean end it has unmounted.

        A libfuse mount that crashed can't be served again, and stays dead: it answers with errors, which is better than
        an empty directory.
        """
        self.mounted = False
        if code:
            # mount.json stays: `list` and `umount` have to know of what is left.
            log.error("the mount server died; unmount and mount again", extra=fields(code=code))
            return EXIT_ERROR
        self.close()
        return 0

    def _end(self) -> int:
        """Asked to end: the server flushes, unmounts and exits; if it can't, we unmount."""
        if self.server is not None:
            self.server.signal(signal.SIGTERM)
            self.mounted = self.server.wait(STOP_TIMEOUT_S) != 0
        self.close()
        return 0

    def _forget_server(self) -> None:
        if self.server is not None:
            self.server.channel.close()
            self.undead.append(self.server)
        self.server = None

    def _wait(self, timeout_s: float) -> None:
        """Until a signal comes or the time is over."""
        taken = signal.sigtimedwait(ENDING | {signal.SIGCHLD, UPGRADE}, timeout_s)
        if taken is not None:
            self.ending |= taken.si_signo in ENDING
            self.upgrading |= taken.si_signo == UPGRADE

    # -- what others see

    def report(self) -> dict[str, object]:
        """The ready line."""
        return {
            "ready": True,
            "supervisorPid": os.getpid(),
            "serverPid": self.server.pid if self.server else 0,
            "mountpoint": self.spec.mountpoint,
        }

    def _note(self, **more: object) -> None:
        """Bring mount.json up to date, which tells others of the mount, without a secret. Failures: file_trouble.

        more: what went wrong, until the next server serves.
        """
        described = {**self.spec.without_secrets(), **self.report(), "started": time.time(), **more}
        described["upgradable"] = self._can_resend()
        temporary = self.state_dir / f"{MOUNT_FILE}.new"
        try:
            temporary.write_text(json.dumps(described, indent=1))
            temporary.chmod(0o600)
            temporary.replace(self.state_dir / MOUNT_FILE)
            self.file_trouble = ""
        except OSError as error:
            if not self.file_trouble:
                log.error("mount.json can't be written; it is tried again", extra=fields(error=error))
            self.file_trouble = error.strerror or str(error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
