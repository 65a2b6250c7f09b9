"""The load of the soak finds what is wrong, and nothing on a plain disk."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.patience import eventually
from tests.soak.load import Log, Worker


def worked(root: Path, operations: int) -> tuple[Worker, Log]:
    log, stopping = Log(), threading.Event()
    worker = Worker(root, 1, log, stopping)
    worker.going.set()
    worker.start()
    eventually(lambda: log.operations >= operations)
    stopping.set()
    worker.join()
    return worker, log


def test_nothing_is_wrong_on_a_disk(tmp_path: Path) -> None:
    worker, log = worked(tmp_path, 400)
    assert log.failures == []
    assert log.operations >= 400
    assert all((worker.root / name).read_bytes() == body for name, body in worker.files.items())


def test_wrong_bytes_and_errors_are_told(tmp_path: Path) -> None:
    worker, log = worked(tmp_path, 100)
    for name in worker.files:
        (worker.root / name).write_bytes(b"something else")
    for _ in range(20):
        worker._do("read", worker._read)
    assert log.failed >= 19  # one file may hold just that
    assert "differ from byte " in log.failures[0]
    name = next(iter(worker.files))
    (worker.root / name).unlink()
    worker.files = {name: worker.files[name]}
    worker._do("stat", worker._stat)
    assert "FileNotFoundError" in log.failures[-1]
