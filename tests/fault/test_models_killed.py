"""kill -9 of a save before each of its steps: never half a version, the retry completes, and gc leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.promises import promise
from tests.servers import Server

LEAST_STEPS = 20


@promise("S-376")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("where", "source"), [("directory", "disk"), ("versitygw", "disk"), ("versitygw", "bucket"), ("minio", "disk")]
)
def test_a_save_is_killed_before_each_step(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, source: str
) -> None:
    home = where
    if where != "directory":
        server: Server = request.getfixturevalue(where)
        home = json.dumps(asdict(server))
    command = [sys.executable, "-m", "tests.fault.modelkills", home, source, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1150, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= LEAST_STEPS
