"""The supervisor's work: let a server check the storage, mount, hand the mount over, and replace a server that died.

A server that dies is replaced at once: the kernel keeps the requests, and the new server answers them. The supervisor
unmounts only when it is asked to end. It imports little and mostly waits, because it must not be what fails.
Signals: SIGTERM, SIGINT and SIGHUP end the mount in order; SIGUSR2 replaces the server by one of the code that is
installed now. supervisor/command.py blocks these signals, and _wait() takes them synchronously.
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
from datastore.controlclient import MOUNT_FILE, PROGRAM_END_S, PROGRAM_FILE, SOCKET
from datastore.errors import DatastoreError, MountFailed, error_named
from datastore.frames import PeerGone
from datastore.linuxfds import memfd, pidfd
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
"""How long a new mount's server may take to check the storage (builders promise 5 s) and to recover local state."""
RESUME_TIMEOUT_S = 300.0
"""How long the next server of the mount may take for that: it first ends the renames that the old server began."""
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S, OLD_KERNEL_LEAVE_TIMEOUT_S = 15.0, 75.0
"""More than a server takes to leave (server.py)."""
END_TIMEOUT_S = 5.0
DOWN_LIMIT_S = 60.0
"""How long callers wait for a new server; after that they get EIO until a server serves."""
WATCH_S = 0.5
"""How often the server is checked: the system does not report every death (ServerProcess.code)."""
TICK_S = 0.1
LOG_CHECK_S = 60.0
UPGRADE = signal.SIGUSR2
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
EXIT_ERROR = 1


class Supervisor:
    """One mount. Its states: no server -> probed -> mounted -> serving (and again, after a death) -> ended."""

    def __init__(
        self,
        spec: MountSpec,
        builder: str,
        guard: Guard | None = None,
        down_limit_s: float = DOWN_LIMIT_S,
        first: ServerProcess | None = None,
    ) -> None:
        """first: a server that has been started and told to prepare; it serves first."""
        self.spec = spec
        self.builder = builder
        self.guard = guard
        self.outage = Outage(down_limit_s, time.monotonic())
        self.state_dir = Path(spec.state_dir)
        self.log_path = self.state_dir / "mount.log"
        self.file_trouble = ""
        """Why mount.json could not be written the last time, such as a full disk; '' when it is up to date."""
        self.wrong: dict[str, object] = {}
        """What went wrong and must be in mount.json, so that it gets there even after a disk was full."""
        self.server: ServerProcess | None = None
        self.refusal: Refusal | None = None
        self.upgrading = False
        self.standby = Standby(self._process, first)
        self.device_fd = -1
        self.opens_fd = -1
        self.negotiated: dict[str, Any] | None = None
        self.restarts = 0
        self.mounted = False
        self.ending = False
        self.parent_pid = 0
        """The process with whose death the mount ends, unless it had detached the mount; 0 when there is none."""
        self._program_fd, self._end_by = -1, 0.0
        """The command of that process, after its death, and how long the mount waits for the command's end."""

    def _process(self) -> ServerProcess:
        """Start a server; on a cluster's node, where this supervisor has a guard, with fewer rights than its own."""
        return ServerProcess(self.builder, self.log_path, confined=self.state_dir if self.guard else None)

    # -- making the mount

    def open(self) -> None:
        """Make the mount. Errors: DatastoreError, with nothing left behind."""
        self._claim()
        mountpoint, note = self.spec.mountpoint, self.state_dir / beneath.NOTE_FILE
        if not device.is_mounted(mountpoint):
            beneath.restore(mountpoint, note)  # after a mount that crashed
        device.check_mountpoint(mountpoint)
        if self.spec.transport == "kernel":
            device.check_device()
        try:
            beneath_fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._make()
            # not immutable below a guard, whose host removes the directory when it cleans up after a crash
            beneath.protect(beneath_fd, note, immutable=self.guard is None)
            os.close(beneath_fd)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        """Make the mount with a server that serves it."""
        if self.spec.transport == "kernel":
            self.opens_fd = memfd("opens")
            os.ftruncate(self.opens_fd, TABLE_BYTES)
        self._serve()
        if self.file_trouble:
            raise MountFailed(f"can't write to the state directory {self.state_dir}: {self.file_trouble}")

    def adopt(self, held: Adopted) -> None:
        """Take over a mount that another supervisor made; keep() starts its server. Errors: DatastoreError."""
        self._claim()
        self.device_fd, self.opens_fd, self.negotiated = held.device_fd, held.opens_fd, held.negotiated
        self.mounted = True

    def close(self) -> None:
        """Undo open(): end the server, unmount, and remove the files that say that the mount lives. Idempotent."""
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
        """Lock the state directory, which only one supervisor may use. Errors: MountFailed."""
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
        """Let a server check the storage, mount unless that is done, and hand over the device. Errors: DatastoreError.
        server: a server that has reported that it is prepared; None: the standby server, or a new one."""
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
        if self.device_fd < 0:
            frames.send(channel, handed)
        else:
            own_fd = device.clone(self.device_fd)
            try:
                frames.send(channel, handed, (self.device_fd, own_fd))
            finally:
                os.close(own_fd)
        settled = self._expect(channel, "negotiated", READY_TIMEOUT_S)
        self.outage.served = time.monotonic()
        if self.negotiated is None:
            self.negotiated = settled
            device.tune_read_ahead(self.spec.mountpoint)
        self._note()

    def _expect(self, channel: socket, key: str, timeout_s: float) -> Any:
        """Return what the server's next message has for `key`. Errors: the error that the message reports; MountFailed
        when the server ends, is silent for timeout_s, or the supervisor is asked to end."""
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
        """Wait for the end, replace servers that die, and return the exit code."""
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
            if self.ending or self._program_ended(now):
                return self._end()
            self._take_news()
            if self.upgrading:
                self._upgrade()
            if self.server is None:
                self._restart()
                continue
            code = self.server.code()
            lived_s = outage.lives(now)
            if code is None:
                if self.file_trouble:
                    self._note(**self.wrong)
                if self.negotiated:
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
        """Wait before another server is tried, and refuse callers that waited too long. False: the mount is gone."""
        patience_s = self.outage.patience_s(time.monotonic(), resend=self._can_resend())
        if patience_s is None:
            self.refusal = None
        elif pause_s and self.device_fd >= 0:
            if self.refusal is None:
                log.error("no mount server is running; a caller that waited too long is refused")
                self.refusal = Refusal(self.device_fd, resend=self._can_resend())
            if not self.refusal.answer(pause_s, older_than_s=patience_s):
                return False
            pause_s = 0.0
        self._wait(pause_s)
        return True

    def _restart(self, server: ServerProcess | None = None) -> None:
        """Let another server serve. server: see _serve()."""
        self.restarts += 1
        try:
            self._serve(server)
            log.warning("a new mount server serves", extra=fields(pid=self.server.pid if self.server else 0))
        except DatastoreError as error:
            log.error("a new mount server could not start", extra=fields(error=error))
            self._note(trouble=f"no mount server can be started: {error}")
            if self.server is not None:
                self.server.kill()  # keep() finds it dead and pauses
            else:
                self.outage.backoff.ended(0.0)
        self.outage.started = time.monotonic()

    def _upgrade(self) -> None:
        """Replace the server that serves by a new one, of the code that is installed now."""
        self.upgrading = False
        old = self.server
        if old is None:
            return  # keep() is about to start a server
        self.standby.end()  # the standby's code is as old as the server's
        new = None
        try:
            if not self.negotiated:
                raise MountFailed("its server is not ours, and can't hand over the mount to another one")
            new = self._process()
            self._expect(new.channel, "prepared", IMPORT_TIMEOUT_S)
        except DatastoreError as error:
            if new is not None:
                new.kill()
            log.error("the mount server is not replaced", extra=fields(error=error))
            self._note(refused=f"the new mount server does not start, so the old one keeps serving: {error}")
            return
        old.signal(signal.SIGUSR2)
        if old.wait(LEAVE_TIMEOUT_S if self._can_resend() else OLD_KERNEL_LEAVE_TIMEOUT_S) is None:
            old.kill()
        log.warning("a new mount server has replaced the old one", extra=fields(old=old.pid, new=new.pid))
        self._forget_server()
        self._restart(new)

    def _can_resend(self) -> bool:
        return Negotiated(**self.negotiated).has(abi.HAS_RESEND) if self.negotiated else False

    def _ended(self, code: int) -> int:
        """Finish after the server's end, and return the exit code. A server that ended with code 0 has unmounted. A
        libfuse mount that crashed can't be served again, and stays dead: it answers with errors, which is better than
        an empty directory."""
        self.mounted = False
        if code:
            # mount.json stays, because `list` and `umount` have to know what is left
            log.error("the mount server died; unmount and mount again", extra=fields(code=code))
            return EXIT_ERROR
        self.close()
        return 0

    def _end(self) -> int:
        """End the mount as asked: the server flushes, unmounts and exits; if it can't unmount, close() does."""
        if self.server is not None:
            self.server.signal(signal.SIGTERM)
            self.mounted = self.server.wait(STOP_TIMEOUT_S) != 0
        self.close()
        return 0

    def _forget_server(self) -> None:
        if self.server is not None:
            self.server.channel.close()
        self.server = None

    def _wait(self, timeout_s: float) -> None:
        """Wait until a signal comes or the time is over, and note what the signal asks for."""
        taken = signal.sigtimedwait(ENDING | {signal.SIGCHLD, UPGRADE}, timeout_s)
        if taken is not None:
            if taken.si_signo in ENDING and not self._is_detached_by(taken.si_pid):
                orphaned = taken.si_pid == self.parent_pid != 0
                self.ending |= not (orphaned and self._waits_for_program())
            self.upgrading |= taken.si_signo == UPGRADE

    def _waits_for_program(self) -> bool:
        """Return whether our parent, which has ended, leaves a command; that may still save what it has (S-192)."""
        try:
            self._program_fd = pidfd(int((self.state_dir / PROGRAM_FILE).read_text()))
        except (OSError, ValueError):
            return False
        self._end_by = time.monotonic() + PROGRAM_END_S
        return True

    def _program_ended(self, now: float) -> bool:
        """Return whether a command was waited for, and has ended or takes too long."""
        return self._program_fd >= 0 and (now > self._end_by or bool(select.select([self._program_fd], [], [], 0)[0]))

    def _is_detached_by(self, sender: int) -> bool:
        """Return whether a signal only says that our parent has ended, after it had detached the mount from its users:
        they continue, and the mount ends with the last of them."""
        return sender == self.parent_pid and not device.is_mounted(self.spec.mountpoint)

    # -- what others see

    def report(self) -> dict[str, object]:
        """Return what is reported when the mount is ready, as the line on standard output."""
        return {
            "ready": True,
            "supervisorPid": os.getpid(),
            "serverPid": self.server.pid if self.server else 0,
            "mountpoint": self.spec.mountpoint,
        }

    def _note(self, **more: object) -> None:
        """Write mount.json, which tells other processes of the mount, without secrets; a failure sets file_trouble.
        more: fields that say what went wrong; they stay until mount.json is written again."""
        self.wrong = more
        described = {**self.spec.without_secrets(), **self.report(), "started": time.time(), **more}
        temporary = self.state_dir / f"{MOUNT_FILE}.new"
        try:
            temporary.write_text(json.dumps(described, indent=1))
            temporary.chmod(0o600)
            temporary.replace(self.state_dir / MOUNT_FILE)
            self.file_trouble = ""
        except OSError as error:
            if not self.file_trouble:
                log.error("mount.json can't be written; it will be retried", extra=fields(error=error))
            self.file_trouble = error.strerror or str(error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
