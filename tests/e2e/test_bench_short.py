"""The short bench: it measures, its contents are right, and no ratio is under half of its bar."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 400.0

pytestmark = [pytest.mark.fuse, pytest.mark.e2e_laptop, pytest.mark.slow, pytest.mark.timeout(int(TIME_LIMIT_S) + 60)]


def test_the_short_bench_meets_half_of_every_bar(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--short", "--out", str(tmp_path / "short")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.splitlines()[-1].endswith(" met, 0 missed")
    assert (tmp_path / "short.md").read_text() == done.stdout
    assert (tmp_path / "short.png").stat().st_size > 0
