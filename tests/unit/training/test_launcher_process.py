"""The process of a launcher that fails when the command has had its answer (S-333). The launcher itself is made up."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore import frames
from datastore.api.manifest import parse
from datastore.training.local.driver import LocalDriver
from datastore.training.local.records import JobDirectory, LocalState, directory_of
from tests.promises import promise
from tests.unit.training.jobs import job

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, time
from datastore.training.local import __main__ as process

class MadeUp(process.Launcher):
    def prepare(self):
        pass

    def run(self):
        if "fails" in sys.argv:
            raise OSError(5, "the disk is broken")
        while True:
            time.sleep(0.05)

    def close(self):
        pass

process.Launcher = MadeUp
sys.exit(process.main(sys.argv[1:4]))
"""


@pytest.fixture
def directory() -> Iterator[JobDirectory]:
    """Of a job that runs, as its launcher has written."""
    found = directory_of("digits", "default")
    found.make(job("command: [sh]", framework="none"), parse("", "digits.yaml", wanted=""))
    found.write_state(LocalState.model_validate({"status": {"phase": "Running"}, "evidence": {"replicas": []}}))
    yield found
    found.remove()


def end_of_launcher(directory: JobDirectory, how: str) -> tuple[int, str]:
    """Start one, have it killed unless it fails by itself, and give its exit code and its log."""
    ours, theirs = socket.socketpair()
    with ours, directory.launcher_log.open("ab") as log:
        with theirs:
            arguments = ["--channel", str(theirs.fileno()), str(directory.path), how]
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments], stderr=log, cwd=ROOT, pass_fds=(theirs.fileno(),)
            )
        with process:
            try:
                frames.send(ours, {"environment": {}, "directory": "/", "container": False})
                assert frames.receive(ours, 60.0)[0] == {"ready": True}
            finally:
                if how != "fails":
                    process.kill()
    return process.returncode, directory.launcher_log.read_text()


@promise("S-333")
def test_the_log_ends_with_what_failed_and_the_job_says_it(directory: JobDirectory) -> None:
    code, said = end_of_launcher(directory, "fails")
    assert code == 1
    assert said.count("Traceback") == 1
    assert said.splitlines()[-1] == "OSError: [Errno 5] the disk is broken"
    status = LocalDriver().observe("digits", "default").status
    assert (status.phase, status.message) == (
        "Failed",
        "its launcher failed: [Errno 5] the disk is broken; what it had written to its Datastores is there",
    )
    assert {each.reason for each in status.conditions or []} == {"LauncherFailed"}


@promise("S-333")
def test_what_failed_is_not_told_of_a_later_launcher_that_was_killed(directory: JobDirectory) -> None:
    end_of_launcher(directory, "fails")
    code, _ = end_of_launcher(directory, "runs")
    assert code == -signal.SIGKILL
    status = LocalDriver().observe("digits", "default").status
    assert status.phase == "Failed"
    assert str(status.message).startswith("its launcher was killed, or this machine went down; ")
    assert {each.reason for each in status.conditions or []} == {"LauncherLost"}
