from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from datastore.errors import MountFailed
from datastore.listening import UnixListener
from tests.patience import PATIENCE_S
from tests.promises import promise


def echo(client: socket.socket) -> None:
    client.sendall(client.recv(100))


def asked(path: Path, text: bytes = b"x") -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(PATIENCE_S)
        stream.connect(str(path))
        stream.sendall(text)
        return stream.recv(100)


def test_each_client_is_served_and_the_socket_goes_with_us(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "s", echo, clients=16)
    listener.start()
    assert listener.listening
    assert listener.path.stat().st_mode & 0o777 == 0o600
    assert [asked(listener.path) for _ in range(8)] == [b"x"] * 8
    listener.stop(PATIENCE_S)
    listener.stop(PATIENCE_S)
    assert not listener.path.exists()


def test_a_client_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    go_on, here = threading.Event(), threading.Semaphore(0)

    def wait(client: socket.socket) -> None:
        client.recv(1)
        here.release()
        go_on.wait(PATIENCE_S)
        client.sendall(b"y")

    listener = UnixListener(tmp_path / "s", wait, clients=1)
    listener.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
        first.connect(str(listener.path))
        first.sendall(b"x")
        assert here.acquire(timeout=PATIENCE_S)
        try:
            answer = asked(listener.path)
        except ConnectionError:
            answer = b""
        assert answer == b""
        go_on.set()
        listener.stop(PATIENCE_S)  # waits for the answer
        assert first.recv(1) == b"y"


def test_a_client_that_breaks_off_ends_nobody_else(tmp_path: Path) -> None:
    def fail(client: socket.socket) -> None:
        if client.recv(100) == b"bad":
            raise OSError("gone")
        client.sendall(b"y")

    listener = UnixListener(tmp_path / "s", fail, clients=8)
    listener.start()
    try:
        assert [asked(listener.path, b"bad") for _ in range(3)] == [b""] * 3
        assert asked(listener.path) == b"y"
    finally:
        listener.stop(PATIENCE_S)


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    listener = UnixListener(folder / "s", echo, clients=1)
    listener.start()
    try:
        assert listener.path.is_socket()
    finally:
        listener.stop(PATIENCE_S)
    with pytest.raises(MountFailed, match="can't listen"):
        UnixListener(tmp_path / "none" / "s", echo, clients=1).start()


@promise("S-153")
def test_a_system_without_room_for_a_client_ends_no_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no descriptor first, then no thread."""
    accept, start = socket.socket.accept, threading.Thread.start
    no_descriptor, no_thread = [True] * 3, [True]

    def accepts(listening: socket.socket) -> tuple[socket.socket, object]:
        if no_descriptor:
            no_descriptor.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    def starts(thread: threading.Thread) -> None:
        if thread.name.startswith("serve-") and no_thread:
            no_thread.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(socket.socket, "accept", accepts)
    monkeypatch.setattr(threading.Thread, "start", starts)
    listener = UnixListener(tmp_path / "s", echo, clients=1)
    listener.start()
    try:
        with suppress(ConnectionError):
            assert asked(listener.path) == b""
        assert (no_descriptor, no_thread) == ([], [])
        assert asked(listener.path) == b"x"
    finally:
        listener.stop(PATIENCE_S)
