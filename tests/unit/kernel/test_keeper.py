"""The keeper's pure parts and its channel."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.frames import PeerGone
from datastore.fuse.keeper.channel import Channel
from datastore.fuse.keeper.process import BACKOFF_LAST_S, pause_after
from datastore.fuse.keeper.serverprocess import ServerProcess

DYING = """
import ctypes, os, threading, time

def hang():
    while not os.path.exists({released!r}):
        time.sleep(0.01)

threading.Thread(target=hang).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""A builder whose first thread ends while another goes on, as one does that waits in the kernel."""


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_a_message_travels_with_its_descriptor() -> None:
    ours, theirs = pair()
    read_fd, write_fd = os.pipe()
    ours.send({"serve": True, "text": "x" * 100_000}, read_fd)
    message, received = theirs.receive(5.0)
    assert message["text"] == "x" * 100_000
    os.write(write_fd, b"through")
    assert os.read(received, 10) == b"through"
    assert not os.get_inheritable(received)
    for fd in (read_fd, write_fd, received):
        os.close(fd)
    ours.close()
    theirs.close()


def test_who_has_read_a_message_may_answer_and_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses its mount says why: that is read, and not lost to a send that had nothing left to send."""
    ours, theirs = pair()
    send_fds = socket.send_fds

    def send_and_be_refused(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        theirs.receive(5.0)
        theirs.send({"error": "the key is unknown"})
        theirs.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_be_refused)
    with open(os.devnull, "rb") as null:
        ours.send({"spec": "..."}, null.fileno())
    assert ours.receive(5.0)[0] == {"error": "the key is unknown"}
    ours.close()


def test_the_other_ends_death_and_silence_are_told() -> None:
    ours, theirs = pair()
    with pytest.raises(PeerGone, match="in time"):
        ours.receive(0.05)
    theirs.close()
    with pytest.raises(PeerGone, match="ended"):
        ours.receive(5.0)
    with pytest.raises(PeerGone, match="gone"):
        ours.send({})
    ours.close()


def test_a_length_that_is_not_ours_is_refused() -> None:
    one, other = socket.socketpair()
    one.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(PeerGone, match="not one of ours"):
        Channel(other).receive(5.0)
    one.close()
    other.close()


@given(st.integers(0, 10_000))
def test_pauses_grow_from_none_to_a_bound(deaths: int) -> None:
    assert 0.0 <= pause_after(deaths) <= pause_after(deaths + 1) <= BACKOFF_LAST_S
    assert pause_after(3) == 0.0


def test_a_server_whose_first_thread_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = tmp_path / "released"
    (tmp_path / "dying.py").write_text(DYING.format(released=str(released)))
    monkeypatch.syspath_prepend(tmp_path)
    server = ServerProcess("dying:build", tmp_path / "log")
    try:
        server.channel.send({"prepare": True})
        started = time.monotonic()
        assert server.wait(30.0) == -9
        assert time.monotonic() - started < 25.0
        assert not server.reaped()
    finally:
        released.touch()
        server.kill()
        server.channel.close()
    deadline = time.monotonic() + 10.0
    while not server.reaped():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_no_message_is_refused_and_its_descriptor_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    one, other = socket.socketpair()
    with open(os.devnull, "rb") as null:
        socket.send_fds(one, [b"\x03\0\0\0no!"], [null.fileno()])
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closed.append)
        with pytest.raises(PeerGone, match="our language"):
            Channel(other).receive(5.0)
    assert len(closed) == 1
    os.close(closed[0])
    one.close()
    other.close()
