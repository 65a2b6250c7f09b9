"""The mount server's control socket: one JSON request per line, one or more JSON lines back, the last one with `ok`.

    {"op": "status", "brief": false}  -> {"ok": true, ...}; `dirty` lists the files that are not uploaded, and `unsent`
                                      counts them; a brief one only counts
    {"op": "flush"}                   -> {"ok": true, "errors": []}; ok false when something is not in S3
    {"op": "discard", "path": "f"}    -> {"ok": true, "discarded": 1}
    {"op": "warm", "path": "d"}       -> {"progress": {...}} lines, then {"ok": true, ...}
    {"op": "settings", "spec": text}  -> {"ok": true, "later": []}; fields of MountSpec that only a next server takes
    {"op": "stop", "force": false, "detach": false, "withinSeconds": 600, "asked": 1.5}
                                      -> {"ok": true, "errors": []}; ok false when not in S3 in this time, or busy. With
                                      detach a busy mount leaves the tree; "detached" says who goes on using it.
                                      asked: since when the time runs, by CLOCK_MONOTONIC; without it since it is read

The socket is 0600 in a directory of 0700. Every operation has a deadline, and there are at most CLIENTS at a time.
Threads: those of UnixListener, and one that runs each operation.
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
"""A specification holds certificates."""
IDLE_S = 30.0
ERRORS_TOLD = 50

Progress = Callable[[Answer], None]


Operation = Callable[[Answer, Progress], Answer]
"""operation(request, progress) gives the answer's fields."""


def first_of(errors: list[str]) -> list[str]:
    """As many as are told of failures: a bucket that is gone has one for each file."""
    return errors if len(errors) <= ERRORS_TOLD else [*errors[:ERRORS_TOLD], f"and {len(errors) - ERRORS_TOLD:,} more"]


def failed(*errors: str) -> Answer:
    """The answer that says no."""
    return {"ok": False, "errors": list(errors)}


def parse(line: bytes) -> Answer | None:
    """The request on a line, or None."""
    try:
        request = json.loads(line)
    except ValueError:
        return None
    return request if isinstance(request, dict) and isinstance(request.get("op"), str) else None


class ControlServer:
    """Listens in `directory` until stop()."""

    def __init__(self, directory: Path) -> None:
        self._operations: Mapping[str, tuple[Operation, float]] = {}
        self._listener = UnixListener(directory / SOCKET, self._serve, clients=CLIENTS)

    def bind(self) -> None:
        """Listen, and answer after start() only. Errors: MountFailed."""
        self._listener.bind()

    def start(self, operations: Mapping[str, tuple[Operation, float]]) -> None:
        """Answer by these, each with the seconds for which it is waited for. Errors: MountFailed."""
        self._operations = operations
        self._listener.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take no more clients, let the present ones have their answer, bounded. Idempotent."""
        self._listener.stop(timeout_s)

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(IDLE_S)
        with client.makefile("rwb") as stream:
            while self._listener.listening and (line := stream.readline(LINE_LIMIT)):
                for answer in self._answers(line):
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()

    def _answers(self, line: bytes) -> Iterator[Answer]:
        """The lines that answer one request, as they come."""
        request = parse(line)
        if request is None or request["op"] not in self._operations:
            known = ", ".join(sorted(self._operations))
            yield failed(f"not a request; a line of JSON with op, one of {known}, is understood")
            return
        operation, deadline_s = self._operations[request["op"]]
        lines: SimpleQueue[Answer] = SimpleQueue()
        threading.Thread(target=_run, args=(operation, request, lines), name="control-operation", daemon=True).start()
        end = time.monotonic() + deadline_s
        while True:
            try:
                answer = lines.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                yield failed(f"{request['op']} took longer than {deadline_s:.0f} s")
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
    except Exception as error:  # the edge of this thread: a client always gets its line
        log.exception("a control operation failed")
        lines.put(failed(f"{request['op']} failed: {error!r}"))
