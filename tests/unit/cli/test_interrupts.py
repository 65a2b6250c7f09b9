"""SIGINT and SIGTERM at each stage of the command: the right exit code, and no mount, process or directory left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datastore.cli import app, crd
from datastore.mounting import records, signals
from tests.patience import eventually
from tests.promises import promise

from .conftest import asked

DRIVER = Path(__file__).with_name("driver.py")
CHECKOUT = str(Path(__file__).parents[3])
PATIENCE_S = 60.0

IMPORTS = """
import signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "typer":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("cut off")

sys.meta_path.insert(0, Finder())
from datastore.cli.main import main
main()
"""
"""A library that makes an error of its own of Ctrl-C while it is imported."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP ends processes, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Start a verb as a process; it is killed at the end if it is still there."""
    started: list[subprocess.Popen[str]] = []

    def run(mode: str, *arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FAKE_MODE": mode, "PYTHONPATH": CHECKOUT},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def fake_pid(root: Path) -> int:
    found = [file.read_text() for file in root.glob("*/fake.pid")]
    return int(found[0]) if found and found[0] else 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("mode", ["silent", "late"])
def test_a_signal_while_mounting_undoes_it(
    start: Start, root: Path, manifest: Path, tmp_path: Path, mode: str, signum: signal.Signals
) -> None:
    process = start(mode, "mount", manifest, "digits", tmp_path / "d")
    eventually(lambda: fake_pid(root))
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (128 + signum, "", f"error: interrupted by {signum.name}\n")
    assert not records.is_server(fake_pid(root))
    assert not (tmp_path / "d").exists()
    assert not list(root.glob("*/mount.json"))


def test_a_signal_while_run_mounts_undoes_all_mounts(start: Start, root: Path, manifest: Path, tmp_path: Path) -> None:
    mounts = ["--mount", f"digits={tmp_path}/d", "--mount", f"digits={tmp_path}/e"]
    process = start("late", "run", "-f", manifest, *mounts, "--", "touch", tmp_path / "ran")
    eventually(lambda: fake_pid(root))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert not (tmp_path / "ran").exists()
    assert not list(root.glob("*/mount.json"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_once_and_its_code_is_ours(
    start: Start, root: Path, manifest: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    body = f"""
import pathlib, signal, sys
from tests.patience import eventually
count = 0
def came(number, frame):
    global count
    count += 1
    signal.alarm(1)
def end(number, frame):
    sys.exit(40 + count)
signal.signal({int(signum)}, came)
signal.signal(signal.SIGALRM, end)
pathlib.Path({str(tmp_path / "up")!r}).touch()
while True:
    signal.pause()
"""
    mounts = ["--mount", f"output={tmp_path}/d"]
    process = start("ready", "run", "-f", manifest, *mounts, "--", sys.executable, "-c", body)
    eventually((tmp_path / "up").exists)
    process.send_signal(signum)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 41
    assert [each["op"] for each in asked(root, "output")] == ["stop"]
    assert not (tmp_path / "d").exists()


def test_a_command_that_dies_of_the_signal_gives_its_number(start: Start, manifest: Path, tmp_path: Path) -> None:
    mounts = ["--mount", f"output={tmp_path}/d"]
    command = ["sh", "-c", f"touch {tmp_path}/up; exec sleep 60"]
    process = start("ready", "run", "-f", manifest, *mounts, "--", *command)
    eventually((tmp_path / "up").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143


@promise("S-192")
def test_under_nohup_the_command_outlives_the_terminal(start: Start, manifest: Path, tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    command = ["sh", "-c", f"touch {tmp_path}/up; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"]
    process = start("ready", "run", "-f", manifest, "--mount", f"output={tmp_path}/d", "--", *command)
    eventually((tmp_path / "up").exists)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_ctrl_c_in_the_foreground_is_an_ordinary_end(start: Start, manifest: Path, tmp_path: Path) -> None:
    process = start("ready", "mount", "--foreground", manifest, "digits", tmp_path / "d")
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    assert lines[1] == "press Ctrl-C to unmount\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert not (tmp_path / "d").exists()


def test_the_foreground_ends_when_the_server_crashes(start: Start, root: Path, manifest: Path, tmp_path: Path) -> None:
    process = start("ready", "mount", "--foreground", manifest, "digits", tmp_path / "d")
    eventually(lambda: list(root.glob("*/mount.json")))
    assert process.stderr is not None
    assert process.stderr.readline()
    os.kill(fake_pid(root), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 5
    assert "the mount server has crashed" in err


def test_a_wait_for_uploads_is_reported_and_ended_by_ctrl_c(
    start: Start, root: Path, manifest: Path, tmp_path: Path
) -> None:
    process = start("mute", "run", "-f", manifest, "--mount", f"output={tmp_path}/d", "--", "true")
    eventually(lambda: root.exists() and list(root.glob("*/asked")))
    assert process.stderr is not None
    waits = rf"waits for the mount at {tmp_path}/d to end, until \d\d:\d\d:\d\d at the latest: Datastore output: "
    assert any(re.search(waits, line) for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    said = f"interrupted: unmounting {tmp_path}/d now; what is not uploaded is kept on disk"
    assert any(said in line for line in iter(process.stderr.readline, ""))
    # The fake never answers, so the forced stop must go on to end it by itself.
    os.kill(fake_pid(root), signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@promise("S-192")
def test_a_signal_that_is_sent_twice_at_once_is_one_request() -> None:
    """timeout(1) signals a process and its group; the second one would break off the uploads of the first."""
    with signals.watching() as watch:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert [watch.take() for _ in range(3)] == [signal.SIGTERM, signal.SIGINT, None]
        for counts in (False, True):  # an impatient user's second and third
            time.sleep(0.6 * signals.REPEAT_S)
            signal.raise_signal(signal.SIGTERM)
            assert (watch.take() == signal.SIGTERM) == counts


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in signals.STOPPING]
    with signals.watching() as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.wait([], PATIENCE_S) == []
        assert watch.take() == signal.SIGTERM
        watch.check()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(signals.Interrupted, match="interrupted by SIGHUP"):
            watch.check()
    assert [signal.getsignal(number) for number in signals.STOPPING] == before


def test_waiting_ends_with_the_time_or_the_descriptor() -> None:
    reading, writing = os.pipe()
    with signals.watching() as watch:
        assert watch.wait([reading], 0.01) == []
        os.write(writing, b"x")
        assert watch.wait([reading], PATIENCE_S) == [reading]
    os.close(reading)
    os.close(writing)


def test_ctrl_c_while_the_command_imports_is_an_interrupt() -> None:
    environment = {**os.environ, "PYTHONPATH": CHECKOUT}
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_ctrl_c_is_an_interrupt_whatever_a_library_makes_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    def verb() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("half done") from None

    before = signal.getsignal(signal.SIGINT)
    with signals.keyboard() as came:
        assert app.exit_code_of(verb, came) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr() == ("", "error: interrupted\n")


def test_ctrl_c_in_a_verb_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer makes an exit code of it, without a word."""
    monkeypatch.setattr(crd, "crd_command", lambda: signal.raise_signal(signal.SIGINT))
    with signals.keyboard() as came:
        assert app.exit_code_of(lambda: app.run(["crd"]), came) == 130
    assert capfd.readouterr() == ("", "error: interrupted\n")


class Interrupting:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_python_drops_in_a_destructor_is_noticed_by_the_verb() -> None:
    """An import may be interrupted in one: the verb would go on as if nothing had come."""
    with signals.keyboard() as came:
        thing = Interrupting()
        del thing
        with signals.watching() as watch:
            assert watch.take() == signal.SIGINT
        with signals.watching() as watch:
            assert not watch.pending
    assert came == [signal.SIGINT]


def test_the_clean_up_after_ctrl_c_is_not_interrupted() -> None:
    with signals.keyboard():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            with signals.watching() as watch:
                assert not watch.pending
