"""W10 and W11: how much memory the mount server takes at most, and how soon it answers after a start and a crash."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from bench import generated
from bench.bars import LOCAL, NATIVE, OURS, READ_ONLY, WRITE_BACK
from bench.cell import FLAT, SMALL, TREE, Answer, Cell, Group
from bench.processes import peak_rss_mib, wait_for
from bench.subjects import Opened, Ours
from bench.worker import run_work

NEW_SERVER_TIMEOUT_S = 15.0


def use_much(cell: Cell) -> None:
    """Walk a generated listing and stream a generated object, read-only; hold files open on a writable mount."""
    sizes = cell.sizes
    keys = generated.Keys(sizes.keys, sizes.keys_per_folder, sizes.stream)
    entries = sizes.keys + sizes.keys // sizes.keys_per_folder

    def walk(mount: Opened) -> Answer:
        return _long(cell, "walk", top=str(mount.root / "many"), entries=entries)

    def stream(mount: Opened) -> Answer:
        return _long(cell, "read_sequential", path=str(mount.root / generated.STREAM), size=sizes.stream)

    def hold(mount: Opened) -> Answer:
        folders = [str(mount.root / name) for name in (SMALL, TREE, FLAT)]
        return _long(cell, "hold_open", folders=folders, count=sizes.open_files)

    with generated.run_generated(keys) as server:
        other = Ours(READ_ONLY, server, cell.bench.folder / "g", {"readOnly": True}, bucket=generated.BUCKET)
        _peak(cell, "W10.walk", other, walk)
        _peak(cell, "W10.stream", other, stream)
    subject = cell.subject
    assert isinstance(subject, Ours)
    _peak(cell, "W10.open", subject, hold)


def _long(cell: Cell, work: str, **arguments: object) -> Answer:
    limit = cell.sizes.memory_cell_s
    return run_work(f"filework.{work}", limit, cap_s=limit / 2, **arguments)


def _peak(cell: Cell, metric: str, subject: Ours, work: Callable[[Opened], Answer]) -> None:
    """Record the server's peak memory. Errors: RuntimeError when the server died, as its peak is lost then."""
    with cell.measuring(metric), subject.opened() as mount:
        first = mount.pid()
        answer = work(mount)
        pid = mount.pid()
        if pid is None or pid != first:
            raise RuntimeError(f"the server {first} was replaced by {pid} on the way")
        cell.record(metric, peak_rss_mib(pid), partial=bool(answer["partial"]))
        amount = f"{answer.get('bytes', answer.get('count', 0)):.4g}"
        cell.bench.say(f"{cell.subject.name:>14}  {metric:<16} took {answer['seconds']:.1f} s for {amount}")


_STANDBY_S = 3.0
"""Seconds between two kills, in which the supervisor's next server imports its code, as between real crashes."""


def start(cell: Cell) -> None:
    """Record the median time from the mount command to a file's first byte, without the start of a worker."""
    taken = []
    for _ in range(cell.sizes.first_bytes):
        with cell.opened() as mount:
            path = str(mount.root / SMALL / "f00000")
            taken.append(mount.seconds + cell.work("filework.first_byte", path=path)["seconds"])
    cell.record("W11.first_byte", statistics.median(taken))


def crash(cell: Cell) -> None:
    """Kill the server repeatedly with SIGKILL; record the median time to the next answer."""
    subject = cell.subject
    assert isinstance(subject, Ours)
    with cell.opened() as mount:
        taken = []
        for number in range(cell.sizes.kills):
            pid = _server_other_than(subject, None)
            path = str(mount.root / FLAT / f"f{number:05}")
            taken.append(cell.work("filework.kill_and_ask", pid=pid, path=path)["seconds"])
            _server_other_than(subject, pid)
            time.sleep(_STANDBY_S)
        cell.record("W11.restart", statistics.median(taken))


def _server_other_than(subject: Ours, old: int | None) -> int:
    """Wait for a server with another process id than `old` and return its id. Errors: NotReady."""
    found: list[int] = []

    def answers() -> bool:
        pid = subject.server_pid()
        if pid is not None and pid != old:
            found.append(pid)
        return bool(found)

    wait_for(answers, NEW_SERVER_TIMEOUT_S, "no new server")
    return found[0]


GROUPS = (
    Group(("W10",), use_much, ("W10.walk", "W10.stream", "W10.open"), only=frozenset({OURS}), once=True),
    Group(("W11",), start, ("W11.first_byte",), never=frozenset({NATIVE, LOCAL, WRITE_BACK})),
    Group(("W11",), crash, ("W11.restart",), only=frozenset({OURS})),
)
