"""What TLS brings with it: tickets, records, bytes decrypted before they are read, ends that nobody announced."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import select
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from datastore.errors import DeadlineExceeded, StoreError, Unreachable
from datastore.fuse.store.base import FilePart
from datastore.fuse.store.s3 import fanout
from datastore.fuse.store.s3.connections import Connections, Route, TransportLimits, trust
from datastore.fuse.store.s3.fanout import Question
from datastore.fuse.store.s3.http1 import Connection
from datastore.fuse.store.s3.messages import Answer, Request
from tests.authority import HERE, Authority, Identity, Subject
from tests.patience import PATIENCE_S
from tests.unit.store.scripted import PlainTransport, Reply, ScriptedServer, http

GET = Request(method="GET")
MIB = 1 << 20
REFUSAL = Reply(http(403, b"<Error/>", "Connection: close"), close=True, early=True)
QUICK = TransportLimits(connections=4, connect_s=2.0, idle_s=0.3, call_s=1.0)
MISSING = "put the certificate authority that signed it into spec.s3.caBundle"


@pytest.fixture(scope="module")
def identity(authority: Authority) -> Identity:
    return authority.issue("here", HERE)


def context_of(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    return context


def serving(identity: Identity, *replies: Reply | bytes) -> ScriptedServer:
    return ScriptedServer(replies, context_of(identity))


def transport_to(port: int, identity: Identity, limits: TransportLimits | None = None) -> PlainTransport:
    return PlainTransport(Route("127.0.0.1", port, True), tls=trust(identity.authority.read_text()), limits=limits)


Talk = Callable[[ssl.SSLSocket], None]


@contextlib.contextmanager
def talking(identity: Identity, *talks: Talk) -> Iterator[int]:
    """The port of a server that says on its n-th connection what the n-th of `talks` says."""

    def run() -> None:
        for talk in talks:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as encrypted:
                talk(encrypted)

    context = context_of(identity)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)


def take(connection: ssl.SSLSocket) -> None:
    """A whole request."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(MIB)
    head, _, body = head.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    left = int(length or 0) - len(body)
    while left > 0:
        left -= len(connection.recv(MIB))


class TestKeptConnections:
    def test_one_that_was_made_and_not_used_is_used_later(self, identity: Identity) -> None:
        """The server's session tickets have come meanwhile, which are no bytes of an answer."""
        with serving(identity, http(200, b"it is")) as server:
            transport = transport_to(server.port, identity)
            made = transport.connections.connect(time.monotonic() + PATIENCE_S)
            assert select.select([made.sock], [], [], PATIENCE_S)[0], "no ticket"
            transport.connections.give_back(made, keep=True)

            assert transport.send(GET).body == b"it is"
            transport.close()

        assert server.connections == 1

    def test_what_is_decrypted_beyond_an_answer_is_no_answer_to_the_next(self, identity: Identity) -> None:
        """It came in one record with the answer, so that the socket itself has nothing to read."""
        beyond = b"X-Padding: " + b"x" * 9000 + b"\r\n\r\n"
        with serving(identity, http(200, b"one") + beyond, http(200, b"two")) as server:
            transport = transport_to(server.port, identity)
            bodies = [transport.send(GET).body for _ in range(2)]
            transport.close()

        assert bodies == [b"one", b"two"]
        assert server.connections == 2

    @pytest.mark.parametrize("announced", [True, False])
    def test_one_that_the_server_ended_meanwhile_is_replaced(self, identity: Identity, announced: bool) -> None:
        """announced: by close_notify."""

        def answer(connection: ssl.SSLSocket) -> None:
            take(connection)
            connection.sendall(http(200))
            if announced:
                connection.settimeout(0)
                with contextlib.suppress(ssl.SSLWantReadError):
                    connection.unwrap()

        with talking(identity, answer, answer) as port:
            transport = transport_to(port, identity)
            put = Request(method="PUT", body=bytes(3 * MIB))
            assert [transport.send(put).status for _ in range(2)] == [200, 200]
            transport.close()

    def test_one_that_ends_while_much_is_sent_is_replaced_once(self, identity: Identity) -> None:
        def answer(connection: ssl.SSLSocket) -> None:
            take(connection)
            connection.sendall(http(200))

        def answer_and_hang_up(connection: ssl.SSLSocket) -> None:
            answer(connection)
            connection.recv(100)

        with talking(identity, answer_and_hang_up, answer) as port:
            transport = transport_to(port, identity)
            put = Request(method="PUT", body=bytes(40 * MIB))
            assert [transport.send(put).status for _ in range(2)] == [200, 200]
            transport.close()


class LateServer(ScriptedServer):
    """Lets the third who comes wait."""

    turns = itertools.count(1)

    def _serve(self, connection: socket.socket) -> None:
        time.sleep(0.3 if next(self.turns) == 3 else 0)
        super()._serve(connection)


def test_a_connection_that_comes_when_nothing_is_left_to_ask_stays(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session tickets come while others wait for their answers."""
    monkeypatch.setattr(fanout, "_LANES_MIN", 3)
    given_back, give_back = threading.Semaphore(0), Connections.give_back

    def noted(connections: Connections, connection: Connection, *, keep: bool) -> None:
        give_back(connections, connection, keep=keep)
        given_back.release()

    monkeypatch.setattr(Connections, "give_back", noted)

    def rule(head: bytes, _number: int) -> bytes:
        if b"/0 " in head:  # the last one that is answered: the other two connections have nothing left to ask
            assert given_back.acquire(timeout=PATIENCE_S)
            assert given_back.acquire(timeout=PATIENCE_S)
        return http(200)

    with LateServer(rule, context_of(identity)) as server:
        transport = transport_to(server.port, identity)
        for _ in range(2):
            answers: dict[int, Answer | StoreError | None] = {}
            questions = [Question(number, b"HEAD /%d HTTP/1.1\r\nhost: h\r\n\r\n" % number) for number in range(3)]
            assert transport.fan_out.ask(partial(next, iter(questions), None), answers.__setitem__) is None
            assert [getattr(answers[number], "status", 0) for number in range(3)] == [200] * 3
        kept = [transport.connections.take_idle() for _ in range(4)]
        for connection in kept:
            if connection is not None:
                connection.close()
        transport.close()

    assert server.connections == 3
    assert sum(connection is not None for connection in kept) == 3


class TestLargeBodies:
    @pytest.mark.parametrize("size", [200_000, 40 * MIB])
    def test_an_early_refusal_is_heard(self, identity: Identity, size: int) -> None:
        """The server hangs up after it, while there is more to be sent."""
        with serving(identity, REFUSAL) as server:
            transport = transport_to(server.port, identity)
            assert transport.send(Request(method="PUT", body=bytes(size))).status == 403
            transport.close()

    def test_who_hangs_up_in_the_middle_is_not_said_to_have_a_wrong_certificate(self, identity: Identity) -> None:
        put = Request(method="PUT", body=bytes(40 * MIB))
        with (
            talking(identity, lambda connection: connection.close()) as port,
            pytest.raises(Unreachable, match="the connection failed") as raised,
        ):
            transport_to(port, identity).send(put)
        assert "caBundle" not in str(raised.value)

    def test_a_part_of_a_file_is_sent_without_being_held_as_a_whole(self, identity: Identity, tmp_path: Path) -> None:
        """What the file has lost meanwhile is zeros."""
        size, got = 48 * MIB, []

        def answer(connection: ssl.SSLSocket) -> None:
            buffer, seen = bytearray(MIB), bytearray()
            while b"\r\n\r\n" not in seen:
                seen += connection.recv(1)
            left = size
            while left:
                count = connection.recv_into(buffer)
                got.append((buffer[0], count))
                left -= count
            connection.sendall(http(200))

        (tmp_path / "file").write_bytes(b"\1" * (size - MIB))
        with talking(identity, answer) as port, FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, size) as part:
            transport = transport_to(port, identity)
            tracemalloc.start()
            try:
                assert transport.send(Request(method="PUT", body=part)).status == 200
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            transport.close()
        assert peak < 8 * MIB
        assert {first for first, _ in got} == {0, 1}

    def test_a_body_that_drips_ends_when_the_call_may_take_no_longer(self, identity: Identity) -> None:
        """Each record comes in time, and there are thousands of them."""

        def drip(connection: ssl.SSLSocket) -> None:
            take(connection)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n")
            for _ in range(3000):
                connection.sendall(bytes(100))
                time.sleep(0.05)

        with talking(identity, drip) as port:
            transport = transport_to(port, identity, QUICK)
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                transport.send(replace(GET, most_bytes=1 << 20))
            assert time.monotonic() - began < PATIENCE_S
            transport.close()


def test_a_handshake_that_does_not_end_is_given_up(identity: Identity) -> None:
    limits = TransportLimits(connect_s=0.3, idle_s=2 * PATIENCE_S, call_s=2 * PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, and nobody speaks
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="no connection"):
            transport_to(mute.getsockname()[1], identity, limits).send(GET)
        assert time.monotonic() - began < PATIENCE_S


class TestWhatIsSaid:
    """Whose certificate is not right is told why, and what helps."""

    def refused(self, identity: Identity, bundle: str = "", host: str = "127.0.0.1") -> str:
        with serving(identity) as server:
            transport = PlainTransport(Route(host, server.port, True), tls=trust(bundle))
            with pytest.raises(Unreachable) as raised:
                transport.send(GET)
            transport.close()
        return str(raised.value)

    def test_an_authority_that_is_not_known(self, identity: Identity) -> None:
        assert MISSING in self.refused(identity)

    def test_another_authority(self, identity: Identity, tmp_path: Path) -> None:
        Authority(tmp_path)
        assert MISSING in self.refused(identity, (tmp_path / "ca.crt").read_text())

    def test_a_certificate_that_has_expired(self, authority: Authority) -> None:
        expired = authority.issue("expired", HERE, validity=datetime.timedelta(minutes=1))
        text = self.refused(expired, expired.authority.read_text())
        assert "its TLS certificate has expired: renew it on the server" in text
        assert "caBundle" not in text

    def test_a_certificate_of_another_name(self, authority: Authority) -> None:
        other = authority.issue("other", Subject(common_name="other", names=("s3.example.org",)))
        for host in ("127.0.0.1", "localhost"):
            text = self.refused(other, other.authority.read_text(), host)
            assert "its TLS certificate is for another host" in text
            assert f"not valid for '{host}'.): write a name that it is for into spec.s3.endpoint" in text
            assert "caBundle" not in text

    def test_a_server_without_tls(self, identity: Identity) -> None:
        plain = Reply(b"HTTP/1.1 400 Bad Request\r\n\r\n", close=True, early=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(MIB)
                    connection.sendall(plain.data)

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            with pytest.raises(StoreError, match="does not speak TLS: write http://"):
                transport_to(listener.getsockname()[1], identity).send(GET)
            thread.join(5)
