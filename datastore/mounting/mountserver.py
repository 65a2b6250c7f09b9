"""Starts a mount server: it gets the specification by a pipe, answers with one line of JSON, and then runs on its own.

Whatever goes wrong before that line, signals included, nothing stays mounted and no process stays behind.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from datastore import beneath, controlclient, ourprocess
from datastore.api.mountspec import MountSpec
from datastore.errors import DatastoreError, MountFailed, error_named
from datastore.mounting import launch, mounttable
from datastore.mounting.places import make_private
from datastore.mounting.records import is_server, read_record
from datastore.mounting.signals import SignalWatch

READY_TIMEOUT_S = 100.0
"""Longer than each timeout of the supervisor, which reports what it waited for; this timeout only ends a hang."""
STOP_TIMEOUT_S = 5.0
KILLED_TIMEOUT_S = 10.0
LOG_FILE = "server.log"
MAX_LOG_BYTES = 8 << 20
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ready:
    """The server's answer when the mount is made."""

    supervisor_pid: int
    server_pid: int


def start(spec: MountSpec, watch: SignalWatch, *, ends_with_us: bool = False) -> Ready:
    """Mount. ends_with_us: the mount ends when this process does, also by kill -9. Errors: what the server reported;
    MountFailed when it did not answer; Interrupted when a signal came."""
    state_dir = Path(spec.state_dir)
    make_private(state_dir)
    watch.check()
    launched = launch.take(*(["--ends-with-parent"] if ends_with_us else []))
    conversation = _Conversation(launched.process, watch)
    try:
        answer = conversation.ask(spec.to_json().encode())
        ready = _ready(answer, launched.said())
    except BaseException:
        conversation.abort(spec)
        raise
    finally:
        _note(state_dir, launched.said())
        launched.errors.close()
    conversation.release()
    return ready


class _Conversation:
    """The exchange with a new supervisor, whose process it owns until the mount is ready or the process is gone."""

    def __init__(self, process: subprocess.Popen[bytes], watch: SignalWatch) -> None:
        self._process = process
        self._watch = watch
        self._received = b""

    def ask(self, document: bytes) -> dict[str, Any] | None:
        """Send the specification and wait for the answer; None when the server ended without one."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        self._send(document, deadline)
        while not self._complete():
            self._watch.check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise MountFailed(f"the mount server did not answer within {READY_TIMEOUT_S:.0f} s")
            if self._watch.wait([self._out.fileno()], left_s) and not self._read():
                return None
        self._watch.check()
        return self._answer()

    def abort(self, spec: MountSpec) -> None:
        """End the server, and undo a mount that it may have made. Never raises for a server that is gone."""
        if "error" not in (self._answer() or {}):
            self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not self._complete() and (left_s := deadline - time.monotonic()) > 0:
            # A signal changes nothing now: we are stopping already.
            self._watch.take()
            if self._watch.wait([self._out.fileno()], left_s) and not self._read():
                break
        if (self._answer() or {}).get("ready"):
            _stop_by_control(spec)
            deadline = time.monotonic() + STOP_TIMEOUT_S  # the server now ends by itself and removes its files
        self._end_process(deadline)
        _end_leftovers(spec)
        self._close_pipes()

    def release(self) -> None:
        """Let the server live on without us."""
        self._close_pipes()
        ourprocess.let_go(self._process)

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _send(self, document: bytes, deadline: float) -> None:
        """Write the specification to the pipe, which takes 64 KiB at once; with a caBundle it can be longer."""
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        os.set_blocking(fd, False)
        while document and (left_s := deadline - time.monotonic()) > 0:
            writable = select.select([self._watch.wait_fd], [fd], [], left_s)[1]
            self._watch.check()
            try:
                document = document[os.write(fd, document) :] if writable else document
            except BrokenPipeError:
                # The supervisor ended early; its answer about that is read next.
                break
        self._process.stdin.close()

    def _read(self) -> bool:
        chunk = os.read(self._out.fileno(), 1 << 16)
        self._received += chunk
        return bool(chunk) and len(self._received) <= _MAX_LINE_BYTES

    def _complete(self) -> bool:
        return b"\n" in self._received

    def _answer(self) -> dict[str, Any] | None:
        try:
            answer = json.loads(self._received.partition(b"\n")[0])
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _end_process(self, deadline: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        self._process.wait(KILLED_TIMEOUT_S)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()


def _ready(answer: dict[str, Any] | None, errors: bytes) -> Ready:
    if answer is None:
        said = ourprocess.last_words(errors)
        raise MountFailed(f"the mount server ended without an answer{f': {said}' if said else ''}")
    if answer.get("ready") is not True:
        text = answer.get("error")
        raise error_named(
            str(answer.get("kind", "")), text if isinstance(text, str) else "the mount server gave no reason"
        )
    return Ready(_number(answer.get("supervisorPid")), _number(answer.get("serverPid")))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _stop_by_control(spec: MountSpec) -> None:
    try:
        with controlclient.connected(Path(spec.state_dir)) as connection:
            connection.send({"op": "stop", "force": True})
            connection.receive(STOP_TIMEOUT_S)
    except DatastoreError:
        # _end_leftovers() kills the server.
        pass


def _end_leftovers(spec: MountSpec) -> None:
    record = read_record(Path(spec.state_dir))
    for pid in record.pids if record else []:
        end_server(pid)
    at = mounttable.mounted_at(spec.mountpoint)
    if at and at.fstype.startswith("fuse"):
        mounttable.detach(spec.mountpoint)
    beneath.restore(spec.mountpoint, Path(spec.state_dir) / beneath.NOTE_FILE)


def end_server(pid: int) -> None:
    """Kill a mount server if it lives. What it has not uploaded stays in its state directory."""
    if is_server(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _note(state_dir: Path, said: bytes) -> None:
    """Append what a supervisor wrote to standard error at its start to a log; mount.log has what it wrote later."""
    if not said:
        return
    path = state_dir / LOG_FILE
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as log:
        log.write(said)
