"""The mount server's control socket: one JSON request per line, one or more JSON lines back, the last one with `ok`.

    {"op": "status", "brief": false}  -> {"ok": true, ...}; `dirty` lists the files that are not uploaded, and `unsent`
                                      counts them; a brief answer has no `dirty`
    {"op": "flush"}                   -> {"ok": true, "errors": []}; ok is false when something is not in the storage
    {"op": "discard", "path": "f"}    -> {"ok": true, "discarded": 1}
    {"op": "warm", "path": "d"}       -> {"progress": {...}} lines, then {"ok": true, ...}
    {"op": "settings", "spec": text}  -> {"ok": true, "later": []}; later: MountSpec's fields that need a new server
    {"op": "stop", "force": false, "detach": false, "withinSeconds": 600, "asked": 1.5}
                                      -> {"ok": true, "errors": []}; ok is false when not all was uploaded in this time,
                                      or when the mount is busy. With detach a busy mount is detached (a lazy unmount),
                                      and "detached" names its users. "elsewhere" names who has the mount in another
                                      mount namespace: it continues there. asked: CLOCK_MONOTONIC at which the time
                                      begins; without it the time begins when the request is read

The socket has mode 0600, its directory 0700. Every operation has a deadline, after which the answer is not ok and says
"late": true; the operation continues. CLIENTS may be connected at a time.
Threads: those of UnixListener, and one for each operation.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue

from datastore.controlclient import SOCKET, Answer
from datastore.errors import DatastoreError
from datastore.listening import UnixListener

log = logging.getLogger(__name__)

CLIENTS = 16
LINE_LIMIT = 1 << 20
"""The longest request, in bytes; a mount specification may contain certificates."""
IDLE_S = 30.0
ERRORS_TOLD = 50

Progress = Callable[[Answer], None]


Operation = Callable[[Answer, Progress], Answer]
"""operation(request, progress) returns the fields of the answer, and may call progress(fields) before that."""


def first_of(errors: list[str]) -> list[str]:
    """Return at most ERRORS_TOLD errors, and how many more there are: a deleted bucket gives one for each file."""
    return errors if len(errors) <= ERRORS_TOLD else [*errors[:ERRORS_TOLD], f"and {len(errors) - ERRORS_TOLD:,} more"]


def failed(*errors: str) -> Answer:
    """Return the answer for an operation that failed."""
    return {"ok": False, "errors": list(errors)}


def parse(line: bytes) -> Answer | None:
    """Return the request in a line, or None when the line is not a request."""
    try:
        request = json.loads(line)
    except ValueError:
        return None
    return request if isinstance(request, dict) and isinstance(request.get("op"), str) else None


class ControlServer:
    """The control socket of one mount, in the mount's state directory."""

    def __init__(self, directory: Path) -> None:
        self._operations: Mapping[str, tuple[Operation, float]] = {}
        self._listener = UnixListener(directory / SOCKET, self._serve, clients=CLIENTS)

    def bind(self) -> None:
        """Listen; requests are answered only after start(). Errors: MountFailed."""
        self._listener.bind()

    def start(self, operations: Mapping[str, tuple[Operation, float]]) -> None:
        """Answer requests, by these operations, each with its timeout in seconds. Errors: MountFailed."""
        self._operations = operations
        self._listener.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take no more clients, and wait up to timeout_s until the present ones have their answer. Idempotent."""
        self._listener.stop(timeout_s)

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(IDLE_S)
        with client.makefile("rwb") as stream:
            while self._listener.listening and (line := stream.readline(LINE_LIMIT)):
                for answer in self._answers(line):
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()

    def _answers(self, line: bytes) -> Iterator[Answer]:
        """Yield the lines that answer one request, as the operation makes them."""
        request = parse(line)
        if request is None or request["op"] not in self._operations:
            known = ", ".join(sorted(self._operations))
            yield failed(f"not a request: a line of JSON with op, one of {known}, is expected")
            return
        operation, deadline_s = self._operations[request["op"]]
        lines: SimpleQueue[Answer] = SimpleQueue()
        threading.Thread(target=_run, args=(operation, request, lines), name="control-operation", daemon=True).start()
        end = time.monotonic() + deadline_s
        while True:
            try:
                answer = lines.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                yield {**failed(f"{request['op']} took longer than {deadline_s:.0f} s"), "late": True}
                return
            yield answer
            if "ok" in answer:
                return


def _run(operation: Operation, request: Answer, lines: SimpleQueue[Answer]) -> None:
    try:
        answer = operation(request, lambda step: lines.put({"progress": step}))
        lines.put({"ok": True, **answer})
    except (DatastoreError, OSError) as error:
        lines.put(failed(str(error)))
    except Exception as error:  # the thread's outermost level: a client always gets an answer
        log.exception("a control operation failed")
        lines.put(failed(f"{request['op']} failed: {error!r}"))
