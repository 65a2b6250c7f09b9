"""The directory of a job: one launcher at a time (S-331)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from datastore.training.local.records import JobDirectory
from tests.promises import promise


@promise("S-331")
def test_a_launcher_starts_while_somebody_looks_whether_one_lives(tmp_path: Path) -> None:
    """A reader holds the lock for a moment; a second launcher is refused."""
    directory = JobDirectory(tmp_path)
    (tmp_path / "lock").touch()
    looks = directory.lock()
    assert looks is not None
    threading.Timer(0.2, os.close, (looks,)).start()
    launcher = directory.lock(timeout_s=60.0)
    assert launcher is not None
    assert directory.alive
    began = time.monotonic()
    assert directory.lock(timeout_s=0.1) is None
    assert time.monotonic() - began >= 0.1
    os.close(launcher)
    assert not directory.alive
