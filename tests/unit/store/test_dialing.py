"""Who is connected to, in which order, and how long a look-up may take."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from datastore.errors import DeadlineExceeded, Unreachable
from datastore.fuse.store.s3.dialing import Route
from datastore.fuse.store.s3.messages import Request
from datastore.fuse.store.s3.transport import TransportLimits
from tests.clock import ManualClock
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.servers import reserved_port
from tests.unit.store.scripted import ScriptedServer, Transports, http, resolving

GET = Request(method="GET")


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch, transports: Transports) -> None:
    with ScriptedServer([http(200, b"it is")]) as server, reserved_port() as closed:
        resolving(monkeypatch, [("127.0.0.1", closed), ("127.0.0.1", server.port)])
        assert transports.to(Route("s3.example", 80, False)).ask(GET).body == b"it is"


def test_an_address_that_is_silent_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, transports: Transports
) -> None:
    clock, silent = ManualClock(), ("10.99.0.1", 80)

    class Socket(socket.socket):
        def connect(self, address: Any) -> None:
            if address == silent:
                clock.advance(self.gettimeout() or 0.0)
                raise TimeoutError
            super().connect(address)

    with ScriptedServer([http(200, b"it is")]) as server:
        resolving(monkeypatch, [silent, ("127.0.0.1", server.port)])
        monkeypatch.setattr(socket, "socket", Socket)
        transport = transports.to(Route("s3.example", 80, False), clock=clock.monotonic)
        assert transport.ask(GET).body == b"it is"
    assert clock.monotonic() > ManualClock().monotonic(), "it was waited for"


def test_all_addresses_that_refuse_are_said_so(monkeypatch: pytest.MonkeyPatch, transports: Transports) -> None:
    with reserved_port() as one, reserved_port() as other:
        resolving(monkeypatch, [("127.0.0.1", one), ("127.0.0.1", other)])
        with pytest.raises(Unreachable, match="connection refused"):
            transports.to(Route("s3.example", 80, False)).ask(GET)


@promise("S-202")
def test_a_name_server_that_is_silent_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, transports: Transports
) -> None:
    over = threading.Event()

    def silent(host: str, port: int, *, flags: int = 0, **_: Any) -> list[Any]:
        if not flags:
            over.wait(2 * PATIENCE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        transports.to(Route("s3.example", 80, False), limits=TransportLimits(connect_s=0.2)).ask(GET)
    over.set()
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_is_none_does_not_resolve(host: str, transports: Transports) -> None:
    with pytest.raises(Unreachable, match="does not resolve"):
        transports.to(Route(host, 80, False)).ask(GET)
