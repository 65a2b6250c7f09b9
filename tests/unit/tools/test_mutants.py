"""`make mutants` (tests/mutants.py), without Cosmic Ray, which `make setup` does not install."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WAITS_FOR_EVER = """
import runpy, sys, time
from unittest.mock import MagicMock

def init(*_):
    print("looks for mutations", flush=True)
    while True:
        time.sleep(0.05)

for name in ("", ".commands", ".commands.init", ".mutating", ".testing", ".work_db", ".work_item"):
    sys.modules["cosmic_ray" + name] = MagicMock()
sys.modules["cosmic_ray.commands.init"].init = init
sys.argv = ["mutants"]
runpy.run_module("tests.mutants", run_name="__main__")
"""


def test_sigterm_leaves_no_copies(tmp_path: Path) -> None:
    """As Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_EVER],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        said, there = process.stdout.readline(), len(list(tmp_path.iterdir()))
        process.send_signal(signal.SIGTERM)
    assert (said, there) == (b"looks for mutations\n", 1)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []
