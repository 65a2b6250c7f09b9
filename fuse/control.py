"""The mount server's control socket: one JSON request per line, one or more JSON lines back, the last one with `ok`.

    {"op": "status", "brief": false}  -> {"ok": true, ...}; `dirty` lists the files that are not uploaded, and `unsent`
                                      counts them; a brief answer has no `dirty`
    {"op": "flush"}                   -> {"ok": true, "errors": []}; ok is false when something is not in the storage
    {"op": "discard", "path": "f"}    -> {"ok": true, "discarded": 1}
    {"op": "warm", "path": "d"}       -> {"progress": {...}} lines, then {"ok": true, ...}
    {"op": "settings", "spec": text}  -> {"ok": true, "later": []}; later: MountSpec's fields that need a new server;
                                      "refused" says why the storage refuses new credentials, if it does
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


class ControlServer(UnixListener):
    """The control socket of one mount, in the mount's state directory.
    operations: what start() begins to answer requests with, by name, each with its timeout in seconds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / SOCKET, self._answer, clients=CLIENTS)
        self.operations: Mapping[str, tuple[Operation, float]] = {}

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(IDLE_S)
        with client.makefile("rwb") as stream:
            while self.listening and (line := stream.readline(LINE_LIMIT)):
                for answer in self._answers(line):
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()

    def _answers(self, line: bytes) -> Iterator[Answer]:
        """Yield the lines that answer one request, as the operation makes them."""
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        name = request.get("op") if isinstance(request, dict) else None
        if not isinstance(name, str) or name not in self.operations:
            known = ", ".join(sorted(self.operations))
            yield failed(f"not a request: a line of JSON with op, one of {known}, is expected")
            return
        operation, deadline_s = self.operations[name]
        lines: SimpleQueue[Answer] = SimpleQueue()
        threading.Thread(target=_run, args=(operation, request, lines), name="control-operation", daemon=True).start()
        end = time.monotonic() + deadline_s
        while True:
            try:
                answer = lines.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                yield {**failed(f"{name} took longer than {deadline_s:.0f} s"), "late": True}
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
