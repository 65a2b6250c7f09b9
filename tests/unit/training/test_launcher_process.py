"""A simulated launcher that fails or ends while the command reads its job (S-325, S-332, S-333)."""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from datastore import frames, ourprocess
from datastore.api.manifest import parse
from datastore.errors import DatastoreError
from datastore.mounting import waiting
from datastore.training.local import cgroups, processes, replica
from datastore.training.local.driver import LocalDriver
from datastore.training.local.isolation import Container
from datastore.training.local.records import (
    JobDirectory,
    LocalState,
    Submitter,
    all_directories,
    directory_of,
)
from datastore.training.local.replica import Replica
from datastore.training.local.starting import start_launcher
from datastore.training.topology import Task
from tests.patience import eventually
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
    """Return the directory of a running job, as its launcher writes it."""
    found = directory_of("digits", "default")
    submitter = Submitter(environment={}, directory="/")
    found.make(job("command: [sh]", framework="none"), parse("", "digits.yaml", wanted=""), submitter)
    found.write_state(LocalState.model_validate({"status": {"phase": "Running"}, "evidence": {"replicas": []}}))
    yield found
    found.remove()


def end_of_launcher(directory: JobDirectory, how: str) -> tuple[int, str]:
    """Start a launcher, kill it unless it fails by itself, and return its exit code and log."""
    ours, theirs = socket.socketpair()
    with ours, directory.launcher_log.open("ab") as log:
        with theirs:
            arguments = ["--channel", str(theirs.fileno()), str(directory.path), how]
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments], stderr=log, cwd=ROOT, pass_fds=(theirs.fileno(),)
            )
        with process:
            try:
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
def test_an_old_failure_is_not_reported_for_a_later_launcher(directory: JobDirectory) -> None:
    end_of_launcher(directory, "fails")
    code, _ = end_of_launcher(directory, "runs")
    assert code == -signal.SIGKILL
    status = LocalDriver().observe("digits", "default").status
    assert status.phase == "Failed"
    assert str(status.message).startswith("its launcher was killed, or this machine went down; ")
    assert {each.reason for each in status.conditions or []} == {"LauncherLost"}


@promise("S-333")
def test_on_a_full_disk_a_lost_job_is_shown_and_one_that_runs_is_told_to_end(directory: JobDirectory) -> None:
    """Not a byte of new room is there. What runs may be what fills the disk, and it is not shown as running."""
    status = {"phase": "Running", "roles": [{"role": "master", "replicas": 1, "active": 1}]}
    evidence = {"replicas": [{"role": "master", "index": 0, "state": "Running"}]}
    directory.write_state(LocalState.model_validate({"status": status, "evidence": evidence}))
    os.close(directory.lock() or -1)  # made, as by its launcher
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, most))
    try:
        with pytest.raises(OSError, match=r"state\.json"):
            directory.write_state(directory.read_state())
        directory.write_wanted("delete")
        found = LocalDriver().observe("digits", "default").status
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert directory.read_wanted() == "delete"
    assert found.phase == "Failed"
    assert [each.active for each in found.roles or []] == [0]
    assert directory.read_state().status.phase == "Running", "it could not be recorded"
    assert [each.name for each in directory.path.iterdir() if each.name.startswith(".")] == []


def test_a_record_that_can_not_be_read_does_not_hide_the_other_jobs(directory: JobDirectory) -> None:
    """It is damaged, or of another version."""
    other = directory_of("other", "default")
    other.make(
        job("command: [sh]", framework="none", name="other"),
        parse("", "x", wanted=""),
        Submitter(environment={}, directory="/"),
    )
    directory.job_file.write_text("kind: TrainingJob\nspec: {}\n")
    said: list[str] = []
    try:
        assert [each.job.name for each in LocalDriver(say=said.append).observe_all()] == ["other"]
    finally:
        other.remove()
    (line,) = said
    assert line.startswith("TrainingJob digits: its record can't be read: ")
    assert line.endswith("; `datastore job delete digits` removes it")


@promise("S-326", "S-333")
@pytest.mark.parametrize("verb", ["observe", "free"])
def test_a_schedule_that_nothing_runs_is_not_said_to_run(directory: JobDirectory, verb: str) -> None:
    """Its launcher was killed, as by a restart of the machine, or ended by `free`."""
    status = {"phase": "Scheduled", "lastRun": "digits-2603281200", "nextRun": "2026-03-28T13:00:00Z"}
    directory.write_state(LocalState.model_validate({"status": status, "evidence": {"replicas": []}}))
    driver = LocalDriver()
    if verb == "free":
        launcher = directory.lock()
        assert launcher is not None
        assert driver.observe("digits", "default").status.phase == "Scheduled"
        freeing = threading.Thread(target=driver.free, args=("digits", "default"))
        freeing.start()
        eventually(lambda: directory.read_wanted())
        os.close(launcher)
        freeing.join()
    found = driver.observe("digits", "default").status
    assert (found.phase, found.last_run, found.next_run) == ("Suspended", "digits-2603281200", None)
    assert found.message == ("its schedule was ended, or this machine went down; `datastore job resume` lets it run")


def play_launcher(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run this program in place of the launcher; its arguments are the channel and the job's directory."""

    def start(
        module: str, flag: str, arguments: Sequence[str], *, log_path: Path
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            command = [sys.executable, "-c", program, str(theirs.fileno()), *arguments]
            return subprocess.Popen(command, stderr=log, pass_fds=(theirs.fileno(),)), ours

    monkeypatch.setattr(ourprocess, "start", start)


@promise("S-333")
def test_the_last_words_of_a_launcher_are_waited_for(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel is closed before the interpreter prints the error."""
    program = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(0.5); sys.exit('the disk is broken')"
    play_launcher(monkeypatch, program)
    with pytest.raises(DatastoreError, match="ended without an answer: the disk is broken"):
        start_launcher(directory)


MOUNTS_AND_FAILS = """
import subprocess, sys
from pathlib import Path

mountpoint = Path(sys.argv[2], "mounts", "data")
mountpoint.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mountpoint], check=True)
(mountpoint / "weights").write_text("of the user")
sys.exit("it was killed")
"""


@promise("S-332")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_mount_that_a_dead_launcher_left_keeps_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says why the job did not start, and what is mounted; the job is deleted once that is unmounted."""
    play_launcher(monkeypatch, MOUNTS_AND_FAILS)
    mountpoint = directory_of("digits", "default").mountpoint("data")
    left = f"TrainingJob digits: {mountpoint} is still mounted: `datastore umount --force {mountpoint}` unmounts it"
    driver = LocalDriver()
    try:
        with pytest.raises(DatastoreError) as raised:
            driver.create(job("command: [sh]", framework="none"), parse("", "digits.yaml", wanted=""))
        assert (mountpoint / "weights").read_text() == "of the user"
        assert "it was killed; " + left in str(raised.value)
        with pytest.raises(DatastoreError, match=re.escape(left)):
            driver.delete("digits", "default")
        assert (mountpoint / "weights").read_text() == "of the user"
    finally:
        subprocess.run(["umount", mountpoint], check=True)
    driver.delete("digits", "default")
    assert list(all_directories()) == []


@promise("S-332")
def test_a_job_that_can_not_start_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    play_launcher(monkeypatch, "import sys; sys.exit('it was killed')")
    with pytest.raises(DatastoreError, match=r"it was killed$"):
        LocalDriver().create(job("command: [sh]", framework="none"), parse("", "digits.yaml", wanted=""))
    assert list(all_directories()) == []


@promise("S-332")
@pytest.mark.parametrize("written", [0, 1])
def test_a_suspended_job_that_can_not_be_written_down_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The disk is full after this many writes of the state."""
    states = itertools.count()
    write = JobDirectory.write_state

    def until_full(directory: JobDirectory, state: LocalState) -> None:
        if next(states) >= written:
            raise OSError(28, "No space left on device")
        write(directory, state)

    monkeypatch.setattr(JobDirectory, "write_state", until_full)
    suspended = job("command: [sh], suspend: true", framework="none")
    with pytest.raises((DatastoreError, OSError), match="No space left"):
        LocalDriver().create(suspended, parse("", "digits.yaml", wanted=""))
    assert list(all_directories()) == []


@promise("S-332")
def test_the_record_that_can_not_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobDirectory, "write_job", full)
    place = directory_of("digits", "default").path
    said = f"TrainingJob digits: its record {place} can't be written: No space left on device"
    with pytest.raises(DatastoreError, match=re.escape(said)):
        LocalDriver().create(job("command: [sh]", framework="none"), parse("", "digits.yaml", wanted=""))
    assert list(all_directories()) == []


def write_phase(directory: JobDirectory, phase: str) -> None:
    directory.write_state(LocalState.model_validate({"status": {"phase": phase}, "evidence": {"replicas": []}}))


@promise("S-325")
def test_a_job_that_has_finished_is_not_suspended_while_its_launcher_ends(directory: JobDirectory) -> None:
    write_phase(directory, "Succeeded")
    launcher = directory.lock()
    assert launcher is not None
    with pytest.raises(DatastoreError, match="has finished"):
        LocalDriver().suspend("digits", "default", suspended=True)
    os.close(launcher)
    assert not directory.read_wanted()


@promise("S-325")
def test_a_job_that_finishes_while_it_is_to_be_suspended_has_finished(directory: JobDirectory) -> None:
    launcher = directory.lock()
    assert launcher is not None

    def finish() -> None:
        eventually(lambda: directory.read_wanted())
        write_phase(directory, "Succeeded")
        os.close(launcher)

    finishing = threading.Thread(target=finish)
    finishing.start()
    with pytest.raises(DatastoreError, match="has finished"):
        LocalDriver().suspend("digits", "default", suspended=True)
    finishing.join()
    assert directory.read_state().status.phase == "Succeeded"
    assert not directory.load_job().spec.suspend


@promise("S-331")
def test_all_processes_with_the_jobs_variable_are_ended() -> None:
    """This includes processes with another parent; all are gone when the call returns."""
    environment = {**os.environ, "OF_THIS_TEST": "yes"}
    with subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"], env=environment) as started:
        eventually(lambda: len(processes.with_variable("OF_THIS_TEST", "yes")) == 3)
        processes.end_with_variable("OF_THIS_TEST", "yes", 60.0)
        assert processes.with_variable("OF_THIS_TEST", "yes") == []
    assert started.returncode == -signal.SIGKILL


@promise("S-333")
def test_a_job_whose_launcher_is_about_to_start_is_not_lost(directory: JobDirectory) -> None:
    """The jobs are listed during the submission. A job that was submitted long ago is lost."""
    write_phase(directory, "Pending")
    assert LocalDriver().observe("digits", "default").status.phase == "Pending"
    os.utime(directory.job_file, (0, 0))
    assert LocalDriver().observe("digits", "default").status.phase == "Failed"


@promise("S-325")
def test_a_long_wait_for_a_job_is_reported(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    launcher = directory.lock()
    assert launcher is not None
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        os.close(launcher)

    LocalDriver(say=say).suspend("digits", "default", suspended=True)
    (line,) = said
    assert re.fullmatch(r"waits for TrainingJob digits to end, until \d\d:\d\d:\d\d at the latest: its .*", line)


@promise("S-331")
def test_a_progress_bar_is_followed(directory: JobDirectory) -> None:
    launcher = directory.lock()
    assert launcher is not None
    with directory.log("master-0").open("ab", buffering=0) as log:
        lines = LocalDriver().logs("digits", "default", follow=True)
        log.write(b"begin\r\n\r 10%\r 20%\r")
        assert [next(lines).text for _ in range(3)] == ["begin", " 10%", " 20%"]
        log.write(b"\n\n100%\r")
        os.close(launcher)
        assert [each.text for each in lines] == ["", "100%"]


@promise("S-331")
def test_a_slow_follower_is_told_how_much_was_skipped(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed parts of a file would read as zeros. Each line that is shown is whole."""
    monkeypatch.setattr(replica, "MAX_LOG_BYTES", 1 << 20)
    log = directory.log("master-0")
    log.write_bytes(b"the first line\n")
    launcher = directory.lock()
    assert launcher is not None
    lines = LocalDriver().logs("digits", "default", follow=True)
    assert next(lines).text == "the first line"
    with log.open("ab") as more:
        more.write(b"a line\n" * (1 << 20) + b"the last line\n")
    isolation, group = Container(engine="", shown={}, working_dir=None), cgroups.Parents().group("")
    Replica(task=Task(role="master", index=0), log_path=log, isolation=isolation, group=group).trim_log(None)
    os.close(launcher)
    left_out, *rest = [each.text for each in lines]
    assert left_out == "[datastore] 6 MiB of the log are left out here: they are no longer kept"
    assert set(rest) == {"a line", "the last line"}
    assert len(rest) > (1 << 20) / 8


def test_a_line_that_never_ends_is_shown_in_parts(directory: JobDirectory) -> None:
    """Otherwise the command's memory would grow with the line."""
    directory.log("master-0").write_bytes(b"x" * (3 << 20))
    parts = [each.text for each in LocalDriver().logs("digits", "default")]
    assert len(parts) > 2
    assert "".join(parts) == "x" * (3 << 20)


def test_of_a_long_log_the_oldest_line_is_whole(directory: JobDirectory) -> None:
    line = b"x" * 70 + b"\n"
    directory.log("master-0").write_bytes(line * ((32 << 20) // len(line) + 100))
    assert {each.text for each in LocalDriver().logs("digits", "default")} == {"x" * 70}


def test_the_last_lines_of_a_long_log_are_read_from_its_end(directory: JobDirectory) -> None:
    """Also of lines that are longer than what is read at once, and of a log with fewer lines."""

    def read_bytes() -> int:
        return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])

    log, long = directory.log("master-0"), "x" * 200_000
    for written, tail, shown in (
        ("no\n" * (2 << 20) + "one\ntwo\n", 2, ["one", "two"]),
        ("no\n" * (2 << 20) + "one\ntwo", 2, ["one", "two"]),
        (f"no\n{long}\n{long}\n", 2, [long, long]),
        ("one\ntwo\n", 3, ["one", "two"]),
        ("no\n" * (2 << 20), 0, []),
    ):
        log.write_text(written)
        before = read_bytes()
        assert [each.text for each in LocalDriver().logs("digits", "default", tail=tail)] == shown
        assert read_bytes() - before < 2 << 20


def test_a_log_begins_with_its_last_lines_and_is_followed(directory: JobDirectory) -> None:
    directory.log("master-0").write_text("one\ntwo\nthree\n")
    driver = LocalDriver()
    assert [each.text for each in driver.logs("digits", "default", tail=2)] == ["two", "three"]
    launcher = directory.lock()
    assert launcher is not None
    lines = driver.logs("digits", "default", follow=True, tail=1)
    assert next(lines).text == "three"
    with directory.log("master-0").open("a") as log:
        log.write("four\nfive\n")
    os.close(launcher)
    assert [each.text for each in lines] == ["four", "five"]


def test_a_log_is_printed_on_a_terminal_that_lacks_its_letters(directory: JobDirectory) -> None:
    directory.log("master-0").write_text("50 µs\nend\n")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "datastore.cli", "job", "logs", "digits"],
        capture_output=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"[master-0] 50 \\xb5s\n[master-0] end\n"), done.stderr


def test_a_name_that_is_wrong_is_told_with_those_that_there_are(directory: JobDirectory) -> None:
    driver = LocalDriver()
    with pytest.raises(DatastoreError, match=r"no TrainingJob digts on this machine; did you mean digits\?$"):
        driver.observe("digts", "default")
    with pytest.raises(DatastoreError, match=r"no TrainingJob other on this machine; it has digits$"):
        driver.observe("other", "default")
    for number in range(30):
        suspended = job("command: [sh], suspend: true", framework="none", name=f"a{number:02}")
        driver.create(suspended, parse("", "digits.yaml", wanted=""))
    with pytest.raises(DatastoreError, match=r"no TrainingJob other on this machine; it has a00, .*, a09 and 21 more$"):
        driver.observe("other", "default")
    for number in range(30):
        driver.delete(f"a{number:02}", "default")


def test_a_schedule_has_no_log_of_its_own(directory: JobDirectory) -> None:
    nightly = job("command: [sh], schedule: '0 3 * * *', suspend: true", framework="none", name="nightly")
    driver = LocalDriver()
    driver.create(nightly, parse("", "digits.yaml", wanted=""))
    with pytest.raises(DatastoreError, match="nightly has a schedule, and each run is a job of its own; none was yet"):
        list(driver.logs("nightly", "default", follow=True))
    made = directory_of("nightly", "default")
    status = {"phase": "Scheduled", "lastRun": "nightly-2611280300"}
    made.write_state(LocalState.model_validate({"status": status, "evidence": {"replicas": []}}))
    with pytest.raises(DatastoreError, match="; the last one is nightly-2611280300"):
        list(driver.logs("nightly", "default"))
    driver.delete("nightly", "default")
