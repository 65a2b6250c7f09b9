"""A versitygw that a test stops, makes read-only and starts again, at the same address over the same objects.

A process of its own starts it, made before any mount. A child of a process that has a changed file of the mount open
closes its copy of that before it is versitygw, which sends the changes - and so waits for the store that it is to be.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from tests.authority import Identity
from tests.servers import START_TIMEOUT_S, STOP_TIMEOUT_S, Server, free_port, run_versitygw

Run = Callable[..., contextlib.AbstractContextManager[Server]]

_FORK = multiprocessing.get_context("fork")
_ANSWER_S = START_TIMEOUT_S + 2 * STOP_TIMEOUT_S


class Breakable:
    """States: running, refusing writes (403 at once), frozen (accepts and says nothing), gone (connection refused)."""

    def __init__(self, data_dir: str, identity: Identity | None = None) -> None:
        self._asking, answering = _FORK.Pipe()
        run = partial(run_versitygw, port=free_port(), data_dir=data_dir, identity=identity)
        self._starter = _FORK.Process(target=_start_and_stop, args=(run, answering, self._asking))
        self._starter.start()
        answering.close()
        self._frozen = False
        self.server = self.run()

    def run(self, *options: str) -> Server:
        """Run (again). Errors: RuntimeError."""
        self.stop()
        server = self._ask(options)
        assert isinstance(server, Server)
        self.server = server
        return server

    def refuse_writes(self) -> None:
        """Every change is AccessDenied."""
        self.run("--readonly")

    def stop(self) -> None:
        """End it."""
        self.thaw()
        self._ask(None)

    def end(self) -> None:
        """End it for good."""
        self.thaw()
        self._asking.close()
        self._starter.join(2 * STOP_TIMEOUT_S)
        self._starter.kill()

    def freeze(self) -> None:
        """SIGSTOP: connections are made, nothing answers.

        Returns when all threads have stopped: on a busy machine they go on for some 0.1 s, which is several requests.
        """
        os.kill(self.server.pid, signal.SIGSTOP)
        self._frozen = True
        deadline = time.monotonic() + START_TIMEOUT_S
        while (states := thread_states(self.server.pid)) != {"T"}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"versitygw was sent SIGSTOP, and its threads are in {sorted(states)}")
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        if self._frozen:
            os.kill(self.server.pid, signal.SIGCONT)
            self._frozen = False

    def _ask(self, options: tuple[str, ...] | None) -> Server | None:
        self._asking.send(options)
        if not self._asking.poll(_ANSWER_S):
            raise RuntimeError(f"versitygw was neither started nor ended within {_ANSWER_S:.0f} s")
        answer: Server | Exception | None = self._asking.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def thread_states(pid: int) -> set[str]:
    """The letters of proc(5) for what the threads of a process do; T: stopped by a signal."""
    seen = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            seen.add(stat.read_text().rpartition(")")[2].split()[0])
    return seen


def _start_and_stop(run: Run, requests: Connection, other_end: Connection) -> None:
    """The starter: options start a server, None ends it, the end of the pipe ends both."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.ExitStack() as running:
        while True:
            try:
                options = requests.recv()
            except EOFError:
                return
            answer: Server | Exception | None = None
            try:
                if options is None:
                    running.close()
                else:
                    answer = running.enter_context(run(*options))
            except Exception as error:  # told to who asked
                answer = error
            requests.send(answer)


@contextlib.contextmanager
def breakable(data_dir: str, identity: Identity | None = None) -> Iterator[Breakable]:
    """A running server over a directory, ended at the end. identity: of one that speaks TLS."""
    made = Breakable(data_dir, identity)
    try:
        yield made
    finally:
        made.end()
