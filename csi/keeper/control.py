"""Asking a mount server over its control socket (fuse/control.py): one JSON line there, the last one back has `ok`."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datastore.api.mountspec import MountSpec, reveal

from ..errors import KeeperAway

SOCKET = "control.sock"
CONNECT_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 64 << 20

Answer = dict[str, Any]


def renewal(spec: MountSpec) -> dict[str, Any]:
    """The request that gives a server the keys of a specification; never to be logged."""
    keys = spec.s3.credentials
    shown = None if keys is None else json.loads(json.dumps(asdict(keys), default=reveal))
    return {"op": "credentials", "keys": shown}


def ask(state_dir: Path, request: Mapping[str, Any], timeout_s: float) -> Answer:
    """The answer. Errors: KeeperAway when the server is gone, hangs or speaks otherwise."""
    end = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            _connect(connection, state_dir)
            connection.sendall(json.dumps(request).encode() + b"\n")
            return _last_line(connection, end)
        except (OSError, ValueError) as error:
            raise KeeperAway(f"the mount server does not answer: {getattr(error, 'strerror', '') or error}") from None


def _connect(connection: socket.socket, state_dir: Path) -> None:
    # A socket's address holds 107 bytes (unix(7)); this way any path fits.
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.close(directory)


def _last_line(connection: socket.socket, end: float) -> Answer:
    """Errors: OSError, ValueError."""
    received = b""
    while True:
        line, found, rest = received.partition(b"\n")
        if found:
            answer = json.loads(line)
            if isinstance(answer, dict) and "ok" in answer:
                return answer
            received = rest
            continue
        connection.settimeout(max(0.001, end - time.monotonic()))
        chunk = connection.recv(1 << 16)
        if not chunk or len(received) > MAX_LINE_BYTES:
            raise ValueError("the connection ended")
        received += chunk
