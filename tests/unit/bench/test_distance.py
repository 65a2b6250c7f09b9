"""The relay that puts a server farther away: nothing lost, nothing in another order, and each round trip is paid."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from bench.distance import WINDOW, distant
from tests.patience import PATIENCE_S
from tests.servers import Server

RTT_MS = 60.0


def echo(listener: socket.socket) -> None:
    """Answer with what comes, until the end of the stream."""
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


@pytest.fixture
def upstream() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=echo, args=(listener,), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        yield Server(name="echo", endpoint=f"http://127.0.0.1:{port}", access_key="key", secret_key="secret")
    thread.join(PATIENCE_S)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(server.endpoint).port or 0), timeout=PATIENCE_S)


def test_a_new_connection_pays_its_handshake_and_each_question_a_round_trip(upstream: Server) -> None:
    with distant(upstream, RTT_MS) as far:
        took, began = [], time.monotonic()  # before it connects: the relay pays the handshake from then on
        with connect(far) as line:
            for question in (b"first", b"second"):
                line.sendall(question)
                assert line.recv(100) == question
                took.append(time.monotonic() - began)
                began = time.monotonic()
    assert took[0] >= 1.4 * RTT_MS / 1000, "the handshake, and half a round trip each way"
    assert took[1] >= 0.9 * RTT_MS / 1000


def test_more_than_a_window_arrives_whole_and_in_order(upstream: Server) -> None:
    sent = b"".join(number.to_bytes(4, "big") for number in range(WINDOW // 2))
    with distant(upstream, 2) as far, connect(far) as line:
        writer = threading.Thread(target=line.sendall, args=(sent,), daemon=True)
        writer.start()
        got = bytearray()
        while len(got) < len(sent):
            got += line.recv(1 << 20)
        writer.join(PATIENCE_S)
    assert got == sent


def test_the_end_of_the_stream_comes_after_all_that_was_sent(upstream: Server) -> None:
    with distant(upstream, 20) as far, connect(far) as line:
        line.sendall(b"last words")
        assert line.recv(100) == b"last words"
        line.shutdown(socket.SHUT_WR)
        assert line.recv(100) == b""


def test_an_unreachable_peer_is_not_waited_for() -> None:
    gone = Server(name="gone", endpoint="http://127.0.0.1:1", access_key="key", secret_key="secret")
    with distant(gone, 2) as far, connect(far) as line, contextlib.suppress(ConnectionResetError):
        assert line.recv(100) == b""
