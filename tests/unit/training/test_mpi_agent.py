"""datastore.training.frameworks.mpi_agent: what stands in for ssh (S-322), as a program of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore.training.frameworks import mpi, mpi_agent
from tests.promises import promise
from tests.servers import free_port
from tests.unit.training.jobs import job, on_one_host


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A worker's agent that runs; its file and its port."""
    for name, text in mpi.files(on_one_host(job("roles: {worker: {}}", "mpi"))).items():
        (tmp_path / name).write_text(text)
    port = free_port()
    (tmp_path / "hosts").write_text(f"digits-worker-0.train-digits 127.0.0.1 {port}\n")
    program = tmp_path / "mpi_agent.py"
    with subprocess.Popen(
        [sys.executable, str(program), "--serve", "0"],
        env={**os.environ, "DATASTORE_TOKEN": "right", "WHERE": "there"},
        stdout=subprocess.PIPE,
        text=True,
    ) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready for the master\n"
        yield program, port
        serving.kill()


def ask(program: Path, *words: str, token: str = "right") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program), *words],
        env={**os.environ, "DATASTORE_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@promise("S-322")
def test_a_command_runs_there_with_its_output_and_exit_code(agent: tuple[Path, int]) -> None:
    """Options of ssh are passed over, and the words are one line for a shell, as ssh has it."""
    for name in ("digits-worker-0", "digits-worker-0.train-digits"):
        done = ask(agent[0], "-x", "-p", "22", name, "echo", "here", "is", "$WHERE;", "exit 3")
        assert (done.returncode, done.stdout) == (3, "here is there\n"), "Open MPI leaves the domain out"


@promise("S-322")
def test_who_does_not_know_the_token_runs_nothing(agent: tuple[Path, int]) -> None:
    done = ask(agent[0], "digits-worker-0", "echo", "stolen", token="wrong")
    assert done.returncode != 0
    assert "stolen" not in done.stdout
    with socket.create_connection(("127.0.0.1", agent[1]), timeout=60) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(32))
        assert len(stranger.recv(32)) == 32
    assert ask(agent[0], "digits-worker-0", "true").returncode == 0


@promise("S-322")
def test_a_host_that_nobody_knows_is_told(agent: tuple[Path, int]) -> None:
    assert "no worker of this job is called other" in ask(agent[0], "other", "true").stderr


class SlowCaller:
    """A connection on which what is printed takes two seconds; its caller stays until told to go."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.going = threading.Event()

    def sendall(self, frame: bytes) -> None:
        if frame.startswith(b"o"):
            time.sleep(2.0)
        self.sent.append(frame)

    def recv(self, size: int) -> bytes:
        self.going.wait()
        return b""


@promise("S-322")
@pytest.mark.parametrize("line", ["echo here", "sleep 600 & echo here"])
def test_all_that_was_printed_comes_before_the_exit_code(line: str) -> None:
    """However busy the machine is, and also when something that was left in the background holds the pipe."""
    caller = SlowCaller()
    try:
        mpi_agent.run(caller, f"echo $$; {line}")  # type: ignore[arg-type]
        assert [frame[:1] for frame in caller.sent][-1] == b"x"
        printed = b"".join(frame[5:] for frame in caller.sent[:-1]).split()
        assert printed[1:] == [b"here"]
    finally:
        caller.going.set()
    if "&" in line:
        os.killpg(int(printed[0]), signal.SIGKILL)
