"""The client for a mount server's `<state dir>/control.sock`: one JSON document per line; every wait has a timeout.

fuse/control.py describes the requests.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from datastore.errors import DatastoreError
from datastore.listening import connect

SOCKET = "control.sock"
MOUNT_FILE = "mount.json"
"""The file in which the supervisor of a mount describes the mount to other processes."""
MOUNT_FILE_BYTES = 1 << 20
PROGRAM_FILE = "program.pid"
"""The file with the pid of the command that `datastore run` has started, for which a mount stays if run is killed."""
PROGRAM_END_S = 45.0
"""How long that command may then take to end."""
CONNECT_TIMEOUT_S = 2.0
STATUS_TIMEOUT_S = 10.0
"""Longer than the server's own deadline for a status, so that the server can report that it missed its own."""
ANSWER_BYTES = 1 << 20
"""The longest line that is accepted as an answer. A compromised server may send anything, and on a cluster's node the
process that asks serves all tenants; real answers have some 10 KiB."""
STATUS_BYTES = 64 << 20
"""The same for the full status of a user's own mount, which names every file that is not uploaded."""

Answer = dict[str, Any]


class NotAnswering(DatastoreError):
    """The server is gone, hangs, or sends something that is not an answer."""


class Watch(Protocol):
    """A signal to the command, which may also end a wait for the server."""

    @property
    def pending(self) -> bool:
        """Whether a signal has come."""
        ...

    def wait(self, fds: Sequence[int], timeout_s: float) -> list[int]:
        """Return which of `fds` are readable; [] after timeout_s, and at once when a signal has come."""
        ...


class Control:
    """One connection to a mount server: send() a request, then receive() the lines of its answer."""

    def __init__(self, connection: socket.socket, limit_bytes: int = ANSWER_BYTES) -> None:
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._pending = bytearray()

    def send(self, request: Mapping[str, Any]) -> None:
        """Send one request. Errors: NotAnswering."""
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NotAnswering("the mount server does not answer") from error

    def receive(self, timeout_s: float, watch: Watch | None = None) -> Answer | None:
        """Return the next line; None when a signal came first. Errors: NotAnswering, also at timeout_s."""
        deadline = time.monotonic() + timeout_s
        while (end := self._pending.find(b"\n")) < 0:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotAnswering(f"the mount server does not answer: nothing came for {timeout_s:.0f} s")
            if self._readable(left_s, watch):
                self._read()
            elif watch and watch.pending:
                return None
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NotAnswering("the mount server sent no JSON") from error
        if not isinstance(answer, dict):
            raise NotAnswering("the mount server sent no JSON object")
        return answer

    def _readable(self, timeout_s: float, watch: Watch | None) -> bool:
        if watch:
            return bool(watch.wait([self._connection.fileno()], timeout_s))
        waiting = select.poll()  # not select(), which fails for descriptors above 1,023
        waiting.register(self._connection, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))

    def _read(self) -> None:
        try:
            chunk = self._connection.recv(1 << 16)
        except OSError as error:
            raise NotAnswering("the connection to the mount server broke") from error
        if not chunk:
            raise NotAnswering("the mount server ended the connection")
        self._pending += chunk
        if len(self._pending) > self._limit_bytes:
            raise NotAnswering(f"the mount server answers with more than {self._limit_bytes >> 20} MiB")


@contextmanager
def connected(state_dir: Path, limit_bytes: int = ANSWER_BYTES) -> Iterator[Control]:
    """Yield a connection to the server of a mount. Errors: NotAnswering."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connect(connection, state_dir / SOCKET)
        except OSError as error:
            raise NotAnswering("no mount server is listening") from error
        yield Control(connection, limit_bytes)


def ask(state_dir: Path, request: Mapping[str, Any], timeout_s: float, limit_bytes: int = ANSWER_BYTES) -> Answer:
    """Send a request; return the last line of its answer. limit_bytes: for each line. Errors: NotAnswering."""
    deadline = time.monotonic() + timeout_s
    with connected(state_dir, limit_bytes) as control:
        control.send(request)
        while "ok" not in (answer := control.receive(deadline - time.monotonic()) or {}):
            pass  # a line that reports progress
        return answer


def status(state_dir: Path, timeout_s: float | None = None) -> Answer:
    """Return the server's status, with each file that is not uploaded. timeout_s: STATUS_TIMEOUT_S by default.
    Errors: NotAnswering."""
    return ask(state_dir, {"op": "status"}, STATUS_TIMEOUT_S if timeout_s is None else timeout_s, STATUS_BYTES)


def brief_status(state_dir: Path, timeout_s: float) -> Answer:
    """Return the server's status, which only counts the files that are not uploaded (`unsent`). Errors: as ask()."""
    return ask(state_dir, {"op": "status", "brief": True}, timeout_s)


def server_pid(state_dir: Path, *words: str) -> int:
    """Return the pid of a mount's server, from MOUNT_FILE; 0 if that process was not started with all these arguments.
    They are checked because a server can write to that file too, and so could name another process."""
    try:
        with (state_dir / MOUNT_FILE).open("rb") as file:
            pid = int(json.loads(file.read(MOUNT_FILE_BYTES))["serverPid"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return pid if set(map(os.fsencode, words)) <= set(command) else 0
