"""The supervisor's pure parts, and the messages between our processes."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore import frames
from datastore.errors import MountFailed
from datastore.frames import PeerGone
from datastore.fuse.kernel import abi, reply
from datastore.fuse.supervisor import serverprocess
from datastore.fuse.supervisor.outage import Outage, Refusal
from datastore.fuse.supervisor.serverprocess import ServerProcess, Standby
from datastore.ourprocess import BACKOFF_LAST_S, STABLE_S, Backoff
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise

Pair = tuple[socket.socket, socket.socket]
DYING = """
import ctypes, os, threading, time

def hang():
    while not os.path.exists({released!r}):
        time.sleep(0.01)

threading.Thread(target=hang).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""A builder whose first thread ends while another goes on, as one does that waits in the kernel."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_message_travels_with_its_descriptor(pair: Pair) -> None:
    ours, theirs = pair
    read_fd, write_fd = os.pipe()
    frames.send(ours, {"serve": True, "text": "x" * 100_000}, (read_fd,))
    message, (received,) = frames.receive(theirs, 5.0)
    assert message["text"] == "x" * 100_000
    os.write(write_fd, b"through")
    assert os.read(received, 10) == b"through"
    assert not os.get_inheritable(received)
    for fd in (read_fd, write_fd, received):
        os.close(fd)


def test_who_has_read_a_message_may_answer_and_end_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses its mount says why: that is read, and not lost to a send that had nothing left to send."""
    ours, theirs = pair
    send_fds = socket.send_fds

    def send_and_be_refused(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        frames.receive(theirs, 5.0)
        frames.send(theirs, {"error": "the key is unknown"})
        theirs.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_be_refused)
    with open(os.devnull, "rb") as null:
        frames.send(ours, {"spec": "..."}, (null.fileno(),))
    assert frames.receive(ours, 5.0)[0] == {"error": "the key is unknown"}


def test_the_other_ends_death_and_silence_are_told(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(PeerGone, match="in time"):
        frames.receive(ours, 0.05)
    theirs.close()
    with pytest.raises(PeerGone, match="ended"):
        frames.receive(ours, 5.0)
    with pytest.raises(PeerGone, match="gone"):
        frames.send(ours, {})


def test_a_length_that_is_not_ours_is_refused(pair: Pair) -> None:
    one, other = pair
    one.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(PeerGone, match="not one of ours"):
        frames.receive(other, 5.0)


@given(st.lists(st.floats(0.0, 2 * STABLE_S), max_size=30))
def test_pauses_grow_from_none_to_a_bound_until_one_runs_stably(lived: list[float]) -> None:
    backoff, before = Backoff(), 0.0
    for seconds in lived:
        backoff.ended(seconds)
        least = before if seconds <= STABLE_S else 0.0
        before = backoff.pause_s()
        assert least <= before <= (BACKOFF_LAST_S if seconds <= STABLE_S else 0.0)


@promise("S-61")
def test_while_servers_serve_and_die_young_only_who_waited_for_long_is_refused() -> None:
    """Kills without a pause for over a minute cost no caller an error whom a next server answers."""
    outage = Outage(60.0, 0.0)
    for second in range(100):
        outage.started = outage.served = second
        assert outage.lives(second + 0.1) == pytest.approx(0.1)
        outage.died(second + 0.1)
        refused = 30.0 if second >= 30 else None
        assert outage.patience_s(second + 0.1, resend=True) == refused
        assert outage.patience_s(second + 0.1, resend=False) == (0.0 if second >= 60 else None)
    assert outage.backoff.pause_s() == BACKOFF_LAST_S
    outage.started = outage.served = 100.0
    outage.lives(101.0)
    outage.died(101.0)
    assert (outage.backoff.pause_s(), outage.patience_s(101.0, resend=True)) == (0.0, None)


@promise("S-153")
def test_when_the_system_starts_none_the_pauses_grow_all_the_same() -> None:
    outage = Outage(60.0, 0.0)
    outage.lives(10.0)
    outage.died(10.0)
    now, pauses = 10.0, []
    for _ in range(10):
        outage.backoff.ended(0.0)
        outage.started = now
        pauses.append(outage.backoff.pause_s())
        now += pauses[-1]
    assert pauses == [0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, BACKOFF_LAST_S]
    assert outage.patience_s(75.0, resend=True) == 0.0


@promise("S-153")
def test_no_standby_where_the_system_starts_no_process() -> None:
    """The server serves on, and it is tried again later."""
    tries = []

    def start() -> ServerProcess:
        tries.append(1)
        raise MountFailed("no room")

    standby = Standby(start)
    standby.keep(5.0)
    standby.keep(6.0)
    assert standby.take() is None
    assert len(tries) == 1


@promise("S-61")
def test_when_none_can_be_started_all_are_refused() -> None:
    """Nobody waits for a mount that is dead."""
    outage = Outage(60.0, 0.0)
    outage.lives(10.0)
    outage.died(10.0)
    assert outage.patience_s(50.0, resend=True) == 30.0
    assert outage.patience_s(61.0, resend=True) == 0.0


@promise("S-61")
def test_who_is_refused_and_who_is_left_to_the_next_server() -> None:
    """As far as Refusal sees it the device is a socket that keeps messages apart."""
    supervisor, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    now = 0.0
    refusal = Refusal(supervisor.fileno(), resend=True, clock=lambda: now)

    def refused(*requests: tuple[int, int], older_than_s: float) -> list[int]:
        for opcode, unique in requests:
            kernel.send(abi.IN_HEADER.pack(abi.HEADER_SIZE, opcode, unique, 1, 0, 0, 1, 0, 0))
        refusal.answer(0.02, older_than_s=older_than_s)
        assert kernel.recv(100) == reply.resend()
        answers = []
        while select.select([kernel], [], [], 0)[0]:
            _, error, unique = abi.OUT_HEADER.unpack(kernel.recv(100))
            assert error == -errno.EIO
            answers.append(unique)
        return answers

    again = abi.UNIQUE_RESEND
    with supervisor, kernel:
        assert refused((abi.READ, 2), (abi.FORGET, 4), (abi.GETATTR, 6), older_than_s=30.0) == []
        now = 20.0
        assert refused((abi.READ, 2 | again), (abi.LOOKUP, 8), older_than_s=30.0) == [], "6 was answered meanwhile"
        now = 30.0
        assert refused((abi.READ, 2 | again), (abi.LOOKUP, 8 | again), older_than_s=30.0) == [2 | again]
        now = 31.0
        assert refused((abi.LOOKUP, 8 | again), (abi.FORGET, 10), (abi.READ, 12), older_than_s=0.0) == [8 | again, 12]


def is_there(server: ServerProcess) -> bool:
    """Whether the process, or what is left of it, was not reaped; it is reaped if that is possible."""
    server.code()
    return Path(f"/proc/{server.pid}").exists()


def test_a_server_whose_first_thread_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverprocess, "LAST_THREAD_S", 0.5)
    released = tmp_path / "released"
    (tmp_path / "dying.py").write_text(DYING.format(released=str(released)))
    monkeypatch.syspath_prepend(tmp_path)
    server = ServerProcess("dying:build", tmp_path / "log")
    try:
        started = time.monotonic()
        assert server.wait(2 * PATIENCE_S) == -9
        assert time.monotonic() - started < PATIENCE_S
        assert is_there(server)
    finally:
        released.touch()
        server.kill()
    eventually(lambda: not is_there(server))


def test_a_server_that_ends_while_it_is_looked_at_is_not_taken_for_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end comes between the two looks, at wait(2) and at /proc."""
    (tmp_path / "leaving.py").write_text("import os\nos._exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ServerProcess("leaving:build", tmp_path / "log")
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", lambda _: None)
        assert server.code() is None
    assert server.code() == 0
    server.channel.close()


def test_what_is_no_message_is_refused_and_its_descriptor_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    one, other = pair
    with open(os.devnull, "rb") as null:
        socket.send_fds(one, [b"\x03\0\0\0no!"], [null.fileno()])
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closed.append)
        with pytest.raises(PeerGone, match="not a message"):
            frames.receive(other, 5.0)
    assert len(closed) == 1
    os.close(closed[0])
