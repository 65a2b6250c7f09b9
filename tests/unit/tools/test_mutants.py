"""`make mutants` (tests/mutants.py), on a module and tests of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODE = """
def at_most_three(number, told):
    if number > 3:
        told.append(number)
        return 3
    return number


def unused():
    raise ValueError
"""
TESTS = """
import pathlib, sys, time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "code"))
from code_of_ours import at_most_three


def test_it():
    told = []
    assert (at_most_three(2, told), at_most_three(5, told)) == (2, 3)
"""
WAITS = """
    pathlib.Path(__file__).with_name("waits").touch()
    time.sleep(600)
"""


def mutants_run(folder: Path, tests: str) -> subprocess.Popen[str]:
    """Start a run on the code above. What it makes, it makes in folder/tmp."""
    for name in ("code", "tests", "tmp"):
        (folder / name).mkdir()
    (folder / "code/code_of_ours.py").write_text(CODE)
    (folder / "tests/test_it.py").write_text(tests)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.mutants", folder / "code", "--tests", folder / "tests"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_no_test_notices_is_told(tmp_path: Path) -> None:
    with mutants_run(tmp_path, TESTS) as process:
        said, _ = process.communicate(timeout=120)
    told = {line.split(": ", 1)[1] for line in said.splitlines() if "code_of_ours.py:" in line}
    assert told == {
        "number > 3   =>   number >= 3   (1 tests do not notice)",
        "told.append(number)   =>   pass   (1 tests do not notice)",
        "raise ValueError   =>   pass   (no test comes here)",
    }
    assert said.splitlines()[-1].endswith(": 4 of 4 mutants tried, 1 noticed, 3 not")
    assert process.returncode == 1


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    """As Ctrl-C, neither files nor processes."""
    with mutants_run(tmp_path, TESTS + WAITS) as process:
        while not (tmp_path / "tests/waits").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)  # also the end of its child, which has its standard error
    assert process.returncode != 0
    assert list((tmp_path / "tmp").iterdir()) == []
