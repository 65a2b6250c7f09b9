"""Who is connected to, in which order, and how long a look-up may take."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from datastore.errors import DeadlineExceeded, Unreachable
from datastore.fuse.store.s3.connections import Route, TransportLimits
from datastore.fuse.store.s3.messages import Request
from datastore.fuse.store.s3.transport import Transport
from tests.promises import promise
from tests.servers import free_port
from tests.unit.store.scripted import ScriptedServer, http

GET = Request("GET", "/k", {"host": "h"})


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Every name leads to these IPv4 addresses."""

    def found(host: str, port: int, *, type: int = 0, flags: int = 0, **_: Any) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not an address")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer([http(200, b"it is")]) as server:
        resolving(monkeypatch, ("127.0.0.1", free_port()), ("127.0.0.1", server.port))
        transport = Transport(Route("s3.example", 80, False))
        assert transport.send(GET).body == b"it is"
        transport.close()


def test_an_address_that_is_silent_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # The queue of who wants to connect is full: the kernel does not answer.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ScriptedServer([http(200, b"it is")]) as server:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        resolving(monkeypatch, full.getsockname(), ("127.0.0.1", server.port))
        transport = Transport(Route("s3.example", 80, False), limits=TransportLimits(connect_s=1.0))
        assert transport.send(GET).body == b"it is"
        transport.close()
        for each in waiting:
            each.close()


def test_all_addresses_that_refuse_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ("127.0.0.1", free_port()), ("127.0.0.1", free_port()))
    with pytest.raises(Unreachable, match="connection refused"):
        Transport(Route("s3.example", 80, False)).send(GET)


@promise("S-202")
def test_a_name_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(host: str, port: int, *, flags: int = 0, **_: Any) -> list[Any]:
        if not flags:
            over.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        Transport(Route("s3.example", 80, False), limits=TransportLimits(connect_s=0.2)).send(GET)
    over.set()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_name_that_is_none_does_not_resolve(host: str) -> None:
    with pytest.raises(Unreachable, match="does not resolve"):
        Transport(Route(host, 80, False)).send(GET)
