"""Follow a job: show log lines as they come, the replicas' states as they change, and one line of progress."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live
from rich.text import Text

from datastore.cli.console import note, one_line
from datastore.cli.job.shown import progress
from datastore.errors import DatastoreError, Unreachable
from datastore.kubeclient import Outage
from datastore.mounting.signals import SignalWatch
from datastore.training.driver import Driver, LogLine, Observed
from datastore.training.policy import State

_POLL_S, _AWAY_POLL_S = 0.2, 1.0
_QUEUE = 256
"""The most log lines that wait to be printed; while the queue is full, the thread that reads them waits."""


class Detached(Exception):
    """Ctrl-C or another signal ended the following, or nobody reads the output any more; the job continues."""


def follow(driver: Driver, name: str, namespace: str, watch: SignalWatch) -> Observed:
    """Show a job until it has finished or is suspended, and return its state then. Errors: Detached; DatastoreError.
    A log that can't be read is reported, and does not end this."""
    lines: queue.Queue[LogLine | None] = queue.Queue(_QUEUE)
    threading.Thread(target=_read, args=(driver, name, namespace, lines), daemon=True).start()
    before: dict[str, State] = {}
    reading, told = True, ""
    outage = Outage()
    with _shown() as show:
        while True:
            observed = _observed(driver, name, namespace, outage)
            if observed is None:
                watch.wait([], _AWAY_POLL_S)
                if watch.take() is not None:
                    raise Detached
                continue
            for replica in observed.evidence.replicas:
                if before.get(replica.name) != replica.state:
                    code = "" if replica.exit_code is None else f", exit code {replica.exit_code}"
                    note(f"{replica.name}: {replica.state.value}{code}")
                    before[replica.name] = replica.state
            for each in observed.status.conditions or []:
                if each.type == "Saved" and not observed.finished and each.message != told:
                    told = each.message
                    note(f"its result is not saved yet: {told}")
            show(observed)
            ended = observed.finished or observed.status.phase == "Suspended"
            try:
                reading = reading and _print(lines)
                while ended and reading and watch.take() is None:
                    reading = _print(lines, wait=True)
            except BrokenPipeError:
                if not ended:
                    raise Detached from None
            if ended:
                return observed
            if watch.take() is not None:
                raise Detached
            if lines.empty():
                watch.wait([], _POLL_S)


def _observed(driver: Driver, name: str, namespace: str, outage: Outage) -> Observed | None:
    """Return the job's state; None while the API server is away. Errors: Unreachable when that lasts OUTAGE_S."""
    try:
        observed = driver.observe(name, namespace)
    except Unreachable as error:
        if outage.bear(error):
            note(f"{error}; the job continues, and is shown again when it answers")
        return None
    outage.over()
    return observed


def print_line(line: LogLine, alone: bool = False) -> None:
    """Print a line of a log on standard output, with its replica's name unless `alone`: only one replica is shown."""
    sys.stdout.write(f"{line.text}\n" if alone else f"[{line.role}-{line.index}] {line.text}\n")


def _read(driver: Driver, name: str, namespace: str, lines: queue.Queue[LogLine | None]) -> None:
    try:
        for line in driver.logs(name, namespace, follow=True):
            lines.put(line)
    except (DatastoreError, OSError) as error:
        note(f"{error}; the log is not shown from here on; the job is not affected")
    finally:
        lines.put(None)


def _print(lines: queue.Queue[LogLine | None], wait: bool = False) -> bool:
    """Print the lines that are there, for _POLL_S at most; return False after the last line of the log. wait: wait
    _POLL_S for a line."""
    until = time.monotonic() + _POLL_S
    try:
        while (line := lines.get(timeout=_POLL_S if wait else 0)) is not None:
            print_line(line)
            if time.monotonic() > until:
                return True
        return False
    except queue.Empty:
        return True
    finally:
        sys.stdout.flush()


@contextmanager
def _shown() -> Iterator[Callable[[Observed], None]]:
    """Yield a function that shows progress as a terminal's last line; elsewhere it prints new messages of the job."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        told = ""

        def tell(observed: Observed) -> None:
            nonlocal told
            status = observed.status
            if not observed.finished and status.message and status.message != told:
                told = status.message
                note(f"{observed.job.name}: {status.phase}: {told}")

        yield tell
        return
    console = Console(stderr=True)
    with Live(Text(""), console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True) as live:

        def draw(observed: Observed) -> None:
            line = one_line(progress(observed, datetime.now(UTC)))
            live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

        yield draw
