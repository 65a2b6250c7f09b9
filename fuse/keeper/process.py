"""The keeper's process: checks the storage through a server, mounts, hands over, replaces a server that died.

    python -m datastore.fuse [--builder module:function] [--guard FD] < mount specification

It writes one JSON line to standard output, {"ready": true, ...} or {"error": line, "kind": class}, and stays. Nothing
is mounted when it says error. A server that dies is replaced at once: the kernel keeps the requests, the new server
answers them. Only an asked-for end unmounts. It imports little, and does nothing but wait: it must not be what fails.
Signals: SIGTERM, SIGINT and SIGHUP end the mount in order. All waiting is in _wait, where they are taken synchronously.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from datastore import logs
from datastore.api.mountspec import MountSpec, from_json
from datastore.errors import DatastoreError, MountFailed
from datastore.logs import fields

from ..kernel import device
from ..kernel.passthrough import TABLE_BYTES
from .channel import Channel, ChannelClosed
from .guard import Adopted, Guard

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 30.0  # the builder promises 5 s; importing and local recovery come on top
READY_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 60.0
STABLE_S = 1.0
"""A server that served longer than this is replaced at once."""
QUICK_DEATHS = 3
"""So many that served shorter, one after the other, are replaced at once too; then the pause doubles."""
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 5.0
TICK_S = 0.1
LOG_CHECK_S = 60.0
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
EXIT_ERROR = 1
MAX_SPEC_BYTES = 8 << 20


def pause_after(quick_deaths: int) -> float:
    """Seconds to wait before the next server."""
    late = quick_deaths - QUICK_DEATHS
    return 0.0 if late <= 0 else min(BACKOFF_FIRST_S * 2 ** min(late - 1, 10), BACKOFF_LAST_S)


class Interrupted(DatastoreError):
    """Someone asked for the end while the mount was being made."""


class Keeper:
    """One mount. states: no server -> probed -> mounted -> serving (and again, after a death) -> ended."""

    def __init__(self, spec: MountSpec, builder: str, guard: Guard | None = None) -> None:
        self.spec = spec
        self.builder = builder
        self.guard = guard
        self.state_dir = Path(spec.state_dir)
        self.log_path = self.state_dir / "mount.log"
        self.server: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.device_fd = -1
        self.opens_fd = -1
        self.negotiated: dict[str, Any] | None = None
        self.restarts = 0
        self.mounted = False
        self.ending = False

    # -- making the mount

    def open(self) -> None:
        """Probe, mount, serve. Errors: DatastoreError; then nothing is left behind."""
        self._claim()
        options = self._options()
        device.check_mountpoint(options)
        if self.spec.transport == "kernel":
            device.check_device()
            self.opens_fd = os.memfd_create("opens")
            os.ftruncate(self.opens_fd, TABLE_BYTES)
        try:
            self._start(resumed=False)
            self._expect("probed", PROBE_TIMEOUT_S)
            if self.spec.transport == "kernel":
                self.device_fd = device.mount(options)
            self.mounted = True
            self._hand_over()
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Give the guard, if there is one, its copies. Errors: MountFailed; then nothing is left behind."""
        if self.guard is not None and self.negotiated is not None:
            try:
                self.guard.give(Adopted(self.device_fd, self.opens_fd, self.negotiated))
            except BaseException:
                self.close()
                raise

    def adopt(self, held: Adopted) -> None:
        """Go on with a mount that another keeper made; keep() starts its server. Errors: DatastoreError."""
        self._claim()
        self.device_fd, self.opens_fd, self.negotiated = held.device_fd, held.opens_fd, held.negotiated
        self.mounted = True

    def close(self) -> None:
        """Undo open(): end the server, unmount, remove the files that say it lives. Idempotent."""
        if self.server is not None:
            self._end_server()
        if self.device_fd >= 0:
            os.close(self.device_fd)
            self.device_fd = -1
        if self.mounted:
            self.mounted = False
            try:
                device.unmount(self.spec.mountpoint, lazy=True)
            except MountFailed as error:
                log.error(str(error))
        self._remove_files()

    def _options(self) -> device.MountOptions:
        return device.MountOptions(
            mountpoint=self.spec.mountpoint,
            name=self.spec.name,
            read_only=self.spec.read_only,
            allow_other=self.spec.allow_other,
        )

    def _claim(self) -> None:
        """Take the state directory: one keeper per directory."""
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.state_dir.chmod(0o700)
            self._lock = (self.state_dir / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MountFailed(f"{self.spec.name} is mounted already: another process holds {self.state_dir}") from None
        except OSError as error:
            raise MountFailed(f"can't use the state directory {self.state_dir}: {error.strerror}") from error

    def _start(self, *, resumed: bool) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as output:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "datastore.fuse", "--server", str(theirs.fileno()), "--builder", self.builder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                # from any directory, the same modules as ours; and no directory is kept busy
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                cwd="/",
                start_new_session=True,
            )
        self.channel = Channel(ours)
        self.channel.send({"spec": self.spec.to_json(), "resumed": resumed, "restarts": self.restarts}, self.opens_fd)

    def _expect(self, key: str, timeout_s: float) -> Any:
        """The server's next message, which has to hold `key`."""
        channel = self._open_channel()
        end = time.monotonic() + timeout_s
        while not self._wait(channel, min(TICK_S, max(0.0, end - time.monotonic()))):
            if self.ending:
                raise Interrupted("interrupted before the mount was ready")
            if time.monotonic() >= end:
                raise MountFailed(f"the mount server gave no answer in {timeout_s:.0f} s; see {self.log_path}")
        try:
            message, _ = channel.receive(timeout_s)
        except ChannelClosed:
            raise MountFailed(f"the mount server ended while it started; see {self.log_path}") from None
        if "error" in message:
            raise _remote_error(message)
        return message.get(key)

    def _hand_over(self) -> None:
        self._open_channel().send({"serve": True, "negotiated": self.negotiated}, self.device_fd)
        settled = self._expect("negotiated", READY_TIMEOUT_S)
        if self.negotiated is None:
            self.negotiated = settled
            device.tune_read_ahead(self.spec.mountpoint)
        self._write_files()

    def _open_channel(self) -> Channel:
        if self.channel is None:
            raise MountFailed("the mount server is not running")
        return self.channel

    # -- keeping it

    def keep(self) -> int:
        """Wait for the end, replacing servers that die; the exit code."""
        quick_deaths = 0
        checked = started = time.monotonic()
        while True:
            self._wait(None, pause_after(quick_deaths) if self.server is None else LOG_CHECK_S / 60)
            now = time.monotonic()
            if now - checked > LOG_CHECK_S:
                checked = now
                logs.trim(self.log_path)
            if self.ending:
                return self._end()
            self._take_news()
            if self.server is None:
                self._restart()
                started = time.monotonic()
                continue
            code = self.server.poll()
            if code is None:
                continue
            if code == 0 or self.spec.transport != "kernel":
                return self._ended(code)
            quick_deaths = 0 if now - started > STABLE_S else quick_deaths + 1
            log.error("the mount server died; it is replaced", extra=fields(code=code, after_s=round(now - started, 1)))
            self._forget_server()

    def _take_news(self) -> None:
        document = self.guard.news() if self.guard else None
        if document is not None:
            self.spec = from_json(document)

    def _restart(self) -> None:
        self.restarts += 1
        try:
            self._start(resumed=True)
            self._expect("probed", PROBE_TIMEOUT_S)
            self._hand_over()
            log.warning("a new mount server serves", extra=fields(pid=self.server.pid if self.server else 0))
        except DatastoreError as error:
            log.error("a new mount server could not start", extra=fields(error=error))
            if self.server is not None:
                self.server.kill()  # keep() sees it dead and pauses

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
            self.server.terminate()
            with suppress(subprocess.TimeoutExpired):
                code = self.server.wait(STOP_TIMEOUT_S)
                self.mounted = code != 0
        self.close()
        return 0

    def _end_server(self) -> None:
        server = self.server
        if server is not None and server.poll() is None:
            server.terminate()
            try:
                server.wait(5.0)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._forget_server()

    def _forget_server(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.server = self.channel = None

    def _wait(self, channel: Channel | None, timeout_s: float) -> bool:
        """Until the channel is readable, a signal comes or the time is over; True when readable."""
        if channel is None:
            taken = signal.sigtimedwait(ENDING | {signal.SIGCHLD}, timeout_s)
            self.ending |= taken is not None and taken.si_signo in ENDING
            return False
        ready, _, _ = select.select([channel], [], [], timeout_s)
        if ENDING & signal.sigpending():
            self.ending = True
        return bool(ready)

    # -- what others see

    def report(self) -> dict[str, object]:
        """The ready line."""
        return {
            "ready": True,
            "keeperPid": os.getpid(),
            "serverPid": self.server.pid if self.server else 0,
            "mountpoint": self.spec.mountpoint,
        }

    def _write_files(self) -> None:
        described = {**self.spec.without_secrets(), **self.report(), "started": time.time()}
        temporary = self.state_dir / "mount.json.new"
        temporary.write_text(json.dumps(described, indent=1))
        temporary.chmod(0o600)
        temporary.replace(self.state_dir / "mount.json")

    def _remove_files(self) -> None:
        for name in ("mount.json", "control.sock"):
            (self.state_dir / name).unlink(missing_ok=True)


def _remote_error(message: dict[str, Any]) -> DatastoreError:
    """The server's error, under the name of its class."""
    error: type[DatastoreError] = type(str(message.get("kind", "DatastoreError")), (DatastoreError,), {})
    return error(str(message["error"]))


def _say(line: dict[str, object]) -> None:
    """The one line on standard output. Errors: OSError when nobody reads it any more."""
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def _detach(keeper: Keeper) -> None:
    """Leave the terminal and the caller: our output goes to the log."""
    fd = os.open(keeper.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)
    os.chdir("/")


def run(text: str, builder: str, guard: Guard | None = None) -> int:
    """Make the mount and keep it; the exit code."""
    keeper = None
    try:
        keeper = Keeper(from_json(text), builder, guard)
        held = guard.adopted() if guard else None
        if held is not None:
            keeper.adopt(held)
        else:
            keeper.open()
            keeper.share()
    except DatastoreError as error:
        with suppress(OSError):
            _say({"error": str(error), "kind": type(error).__name__})
        return EXIT_ERROR
    try:
        _say(keeper.report())
    except OSError:  # who asked for the mount is gone: nobody would ever unmount it
        keeper.close()
        return EXIT_ERROR
    _detach(keeper)
    return keeper.keep()


def main(arguments: list[str]) -> NoReturn:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m datastore.fuse")
    parser.add_argument("--builder", default="datastore.fuse.vfs.build:build_mount", help="module:function")
    parser.add_argument("--guard", type=int, default=-1, help="descriptor of a channel; keeper/guard.py")
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING | {signal.SIGCHLD})
    with suppress(OSError):  # already the leader of a session or a group
        os.setsid()
    os.umask(0o077)
    logs.setup()
    guard = Guard(options.guard) if options.guard >= 0 else None
    sys.exit(run(sys.stdin.read(MAX_SPEC_BYTES), options.builder, guard))
