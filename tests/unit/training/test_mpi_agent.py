"""datastore.training.frameworks.mpi_agent: what stands in for ssh (S-322), as a program of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore.training.frameworks import mpi, mpi_agent
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.servers import reserved_port
from tests.unit.training.jobs import job, on_one_host


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A worker's agent that runs; its file and its port."""
    for name, text in mpi.files(on_one_host(job("roles: {worker: {}}", "mpi"))).items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "mpi_agent.py"
    with reserved_port() as port:
        (tmp_path / "hosts").write_text(f"digits-worker-0.train-digits 127.0.0.1 {port}\n")
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
        timeout=PATIENCE_S,
        check=False,
    )


@promise("S-322")
def test_a_command_runs_there_with_its_output_and_exit_code(agent: tuple[Path, int]) -> None:
    """Options of ssh are passed over, and the words are one line for a shell, as ssh has it."""
    for name in ("digits-worker-0", "digits-worker-0.train-digits"):
        done = ask(agent[0], "-x", "-p", "22", name, "echo", "here", "is", "$WHERE;", "exit 3")
        assert (done.returncode, done.stdout) == (3, "here is there\n"), "Open MPI leaves the domain out"


@promise("S-322")
def test_a_request_without_the_token_runs_nothing(agent: tuple[Path, int]) -> None:
    done = ask(agent[0], "digits-worker-0", "echo", "stolen", token="wrong")
    assert done.returncode != 0
    assert "stolen" not in done.stdout
    with socket.create_connection(("127.0.0.1", agent[1]), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(32))
        assert len(stranger.recv(32)) == 32
    assert ask(agent[0], "digits-worker-0", "true").returncode == 0


@promise("S-322")
def test_an_unknown_host_is_reported(agent: tuple[Path, int]) -> None:
    assert "no worker of this job is called other" in ask(agent[0], "other", "true").stderr


@promise("S-322")
def test_all_that_a_command_printed_comes_before_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the way to the caller is, and without waiting for what the command left in the background."""
    sent: list[tuple[bytes, bytes]] = []

    def slowly(_connection: socket.socket, letter: bytes, data: bytes) -> None:
        if letter == b"o":
            time.sleep(1.5)
        sent.append((letter, data))

    monkeypatch.setattr(mpi_agent, "send", slowly)
    caller, connection = socket.socketpair()
    with caller, connection:
        mpi_agent.run(connection, "sleep 3 & echo here")
    assert sent == [(b"o", b"here\n"), (b"x", bytes(4))]
