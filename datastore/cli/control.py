"""Talking to a mount server over `<state dir>/control.sock`: one JSON document a line, each wait bounded."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datastore.cli.records import SOCKET
from datastore.cli.signals import SignalWatch
from datastore.errors import DatastoreError

CONNECT_TIMEOUT_S = 2.0
STATUS_TIMEOUT_S = 3.0
_MAX_LINE_BYTES = 64 << 20
"""A status names every file that is not uploaded; a line beyond this is no answer."""

Answer = dict[str, Any]


class NotAnswering(DatastoreError):
    """The server is gone, hangs, or speaks another language."""


class Control:
    """One connection; ask, then receive lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = b""

    def send(self, request: Mapping[str, Any]) -> None:
        """Send one request. Errors: NotAnswering."""
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NotAnswering("the mount server does not answer") from error

    def receive(self, timeout_s: float, watch: SignalWatch | None = None) -> Answer | None:
        """The next line; None when a signal came first. Errors: NotAnswering at timeout_s or the end."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotAnswering(f"the mount server did not answer within {timeout_s:.0f} s")
            if not self._readable(left_s, watch):
                if watch and watch.pending:
                    return None
                continue
            self._read()
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise NotAnswering("the mount server sent no JSON") from error
        if not isinstance(answer, dict):
            raise NotAnswering("the mount server sent no JSON object")
        return answer

    def _readable(self, timeout_s: float, watch: SignalWatch | None) -> bool:
        if watch:
            return bool(watch.wait([self._connection.fileno()], timeout_s))
        return bool(select.select([self._connection], [], [], timeout_s)[0])

    def _read(self) -> None:
        try:
            chunk = self._connection.recv(1 << 16)
        except OSError as error:
            raise NotAnswering("the connection to the mount server broke") from error
        if not chunk or len(self._pending) > _MAX_LINE_BYTES:
            raise NotAnswering("the mount server ended the connection")
        self._pending += chunk


@contextmanager
def connected(state_dir: Path) -> Iterator[Control]:
    """A connection to the server of a mount. Errors: NotAnswering."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            _connect(connection, state_dir)
        except OSError as error:
            raise NotAnswering("no mount server is listening") from error
        yield Control(connection)


def status(state_dir: Path) -> Answer:
    """What the server says of itself. Errors: NotAnswering."""
    with connected(state_dir) as control:
        control.send({"op": "status"})
        return control.receive(STATUS_TIMEOUT_S) or {}


def _connect(connection: socket.socket, state_dir: Path) -> None:
    if not sys.platform.startswith("linux"):
        connection.connect(str(state_dir / SOCKET))
        return
    # A socket's address holds 107 bytes (unix(7)), less than many a path; this way it is short.
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.close(directory)
