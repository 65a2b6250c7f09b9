"""What TLS brings with it: tickets, records, bytes decrypted before they are read, ends that nobody announced."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import ssl
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from datastore.errors import CorruptBody, DeadlineExceeded, InvalidRequest, Unreachable
from datastore.fuse.store.base import FilePart
from datastore.fuse.store.s3.dialing import Route, trust
from datastore.fuse.store.s3.messages import Request
from datastore.fuse.store.s3.transport import TransportLimits
from tests.authority import HERE, Authority, Identity, Subject
from tests.patience import PATIENCE_S
from tests.unit.store.scripted import (
    PlainTransport,
    ScriptedServer,
    Transports,
    Wait,
    content_length,
    context_of,
    http,
    received,
    talking,
)

GET = Request(method="GET")
MIB = 1 << 20
RECORD = 16 << 10
QUICK = TransportLimits(connections=4, connect_s=2.0, idle_s=0.3, call_s=1.0)
MISSING = "put the certificate authority that signed it into spec.s3.caBundle"


To = Callable[..., PlainTransport]


@pytest.fixture(scope="module")
def tls(identity: Identity) -> ssl.SSLContext:
    return trust(identity.authority.read_text())


@pytest.fixture
def to(transports: Transports, tls: ssl.SSLContext) -> To:
    """A transport to a port, whose server is trusted."""
    return partial(transports.to, tls=tls)


def take(connection: socket.socket) -> None:
    """A whole request."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += received(connection)
    head, _, body = head.partition(b"\r\n\r\n")
    left = content_length(head) - len(body)
    while left > 0:
        left -= len(received(connection))


class TestKeptConnections:
    def test_one_that_was_made_and_not_used_is_used_later(self, identity: Identity, to: To, wait: Wait) -> None:
        """The server's session tickets have come meanwhile, which are no bytes of an answer."""
        with ScriptedServer([http(200, b"it is")] * 2, identity) as server:
            transport = to(server.port)

            async def keep() -> None:
                made = await transport.connect(time.monotonic() + PATIENCE_S)
                assert select.select([made.sock], [], [], PATIENCE_S)[0], "no ticket"
                transport.give_back(made)

            wait(keep())
            assert [transport.ask(GET).body for _ in range(2)] == [b"it is"] * 2
        assert server.connections == 1

    def test_what_is_decrypted_beyond_an_answer_is_no_answer_to_the_next(self, identity: Identity, to: To) -> None:
        """It came in one record with the answer, so that the socket itself has nothing to read."""
        beyond = b"X-Padding: " + b"x" * 9000 + b"\r\n\r\n"
        with ScriptedServer([http(200, b"one") + beyond, http(200, b"two")], identity) as server:
            transport = to(server.port)
            bodies = [transport.ask(GET).body for _ in range(2)]
        assert bodies == [b"one", b"two"]
        assert server.connections == 2

    @pytest.mark.parametrize("in_the_last_record", [0, 300])
    def test_what_follows_a_large_body_is_no_answer_to_the_next(
        self, in_the_last_record: int, identity: Identity, to: To
    ) -> None:
        """Neither in the body's last record nor in one of its own."""
        head = len(http(200, bytes(60_000))) - 60_000
        body = os.urandom(4 * RECORD - head - in_the_last_record)
        with ScriptedServer([http(200, body) + bytes(300), http(200, b"two")], identity) as server:
            transport = to(server.port)
            bodies = [transport.ask(GET).body for _ in range(2)]
        assert bodies == [body, b"two"]
        assert server.connections == 2

    @pytest.mark.parametrize("announced", [True, False])
    def test_one_that_the_server_ended_meanwhile_is_replaced(self, announced: bool, identity: Identity, to: To) -> None:
        """announced: by close_notify."""

        def answer(connection: socket.socket) -> None:
            take(connection)
            connection.sendall(http(200))
            if announced:
                assert isinstance(connection, ssl.SSLSocket)
                connection.settimeout(0)
                with contextlib.suppress(ssl.SSLWantReadError):
                    connection.unwrap()

        with talking(answer, answer, identity=identity) as port:
            transport = to(port)
            put = Request(method="PUT", body=bytes(3 * MIB))
            assert [transport.ask(put).status for _ in range(2)] == [200, 200]

    def test_one_that_ends_while_much_is_sent_is_replaced_once(self, identity: Identity, to: To) -> None:
        def answer(connection: socket.socket) -> None:
            take(connection)
            connection.sendall(http(200))

        def answer_and_hang_up(connection: socket.socket) -> None:
            answer(connection)
            connection.recv(100)

        with talking(answer_and_hang_up, answer, identity=identity) as port:
            transport = to(port)
            put = Request(method="PUT", body=bytes(40 * MIB))
            assert [transport.ask(put).status for _ in range(2)] == [200, 200]


class OverBytes:
    """The server's side of TLS on a plain connection; what it sends may be cut anywhere. It has taken one request."""

    def __init__(self, connection: socket.socket, identity: Identity) -> None:
        self._received, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context_of(identity).wrap_bio(self._received, self._outgoing, server_side=True)
        self._connection = connection
        self._once_more(self._tls.do_handshake)
        while b"\r\n\r\n" not in self._once_more(self._tls.read):
            pass

    def _once_more(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
                self._received.write(received(self._connection))

    def encrypted(self, content: bytes) -> bytes:
        self._tls.write(content)
        return self._outgoing.read()

    def farewell(self) -> bytes:
        """close_notify."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        return self._outgoing.read()


class TestRecords:
    def test_they_may_come_byte_by_byte(self, identity: Identity, to: To) -> None:
        def answer(connection: socket.socket) -> None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in OverBytes(connection, identity).encrypted(http(200, b"it is")):
                connection.sendall(bytes([byte]))
                time.sleep(0.0005)

        with talking(answer) as port:
            assert to(port).ask(GET).body == b"it is"

    def test_one_that_comes_too_slowly_is_given_up(self, identity: Identity, to: To) -> None:
        def answer(connection: socket.socket) -> None:
            for byte in OverBytes(connection, identity).encrypted(http(200, bytes(9000))):
                connection.sendall(bytes([byte]))
                time.sleep(QUICK.idle_s / 10)

        with talking(answer) as port:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                to(port, limits=QUICK).ask(GET)
        assert time.monotonic() - began < PATIENCE_S

    def test_close_notify_ends_a_body_of_unknown_length(self, identity: Identity, to: To) -> None:
        """Also where the server keeps the connection open after it."""

        def answer(connection: socket.socket) -> None:
            server = OverBytes(connection, identity)
            connection.sendall(server.encrypted(b"HTTP/1.1 200 OK\r\n\r\nall of it") + server.farewell())
            connection.recv(1)

        with talking(answer) as port:
            assert to(port).ask(GET).body == b"all of it"

    def test_an_end_between_two_of_them_cuts_the_body_short(self, identity: Identity, to: To) -> None:
        def answer(connection: socket.socket) -> None:
            connection.sendall(OverBytes(connection, identity).encrypted(http(200, bytes(60_000))[:50_000]))

        with talking(answer) as port, pytest.raises(CorruptBody, match="cut short"):
            to(port).ask(GET)


class TestLargeBodies:
    def test_all_of_it_arrives_at_a_server_that_reads_slowly(self, identity: Identity, to: To) -> None:
        body, got = os.urandom(5 * MIB), bytearray()

        def answer(connection: socket.socket) -> None:
            while len(got) < len(body) or b"\r\n\r\n" not in got or not got.endswith(body[-1000:]):
                got.extend(received(connection))
                time.sleep(0.0005)
            connection.sendall(http(200))

        with talking(answer, identity=identity) as port:
            assert to(port).ask(Request(method="PUT", body=body)).status == 200
        assert bytes(got).partition(b"\r\n\r\n")[2] == body

    def test_who_hangs_up_in_the_middle_is_not_said_to_have_a_wrong_certificate(
        self, identity: Identity, to: To
    ) -> None:
        put = Request(method="PUT", body=bytes(40 * MIB))
        with (
            talking(lambda connection: connection.close(), identity=identity) as port,
            pytest.raises(Unreachable, match="the connection failed") as raised,
        ):
            to(port).ask(put)
        assert "caBundle" not in str(raised.value)

    def test_a_part_of_a_file_is_sent_without_being_held_as_a_whole(
        self, identity: Identity, tls: ssl.SSLContext, tmp_path: Path
    ) -> None:
        """By a thread: large parts go no other way. What the file has lost meanwhile is zeros."""
        size, got = 48 * MIB, []

        def answer(connection: socket.socket) -> None:
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
        with (
            talking(answer, identity=identity) as port,
            FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, size) as part,
        ):
            transport = PlainTransport(port, tls=tls)
            tracemalloc.start()
            try:
                assert transport.ask(Request(method="PUT", body=part)).status == 200
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            transport.close()
        assert peak < 8 * MIB
        assert {first for first, _ in got} == {0, 1}


def test_a_handshake_that_does_not_end_is_given_up(to: To) -> None:
    limits = TransportLimits(connect_s=0.3, idle_s=2 * PATIENCE_S, call_s=2 * PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, and nobody speaks
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="no connection"):
            to(mute.getsockname()[1], limits=limits).ask(GET)
        assert time.monotonic() - began < PATIENCE_S


class TestWhoIsTrusted:
    def answered(self, transports: Transports, identity: Identity, bundle: str) -> bool:
        with ScriptedServer([http(200)], identity) as server:
            return transports.to(server.port, tls=trust(bundle)).ask(GET).status == 200

    def test_an_authority_that_writes_no_key_identifiers(
        self, identity: Identity, transports: Transports, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From Python 3.13 on its certificates are refused by default, which is played here."""
        made = ssl.create_default_context

        def strict() -> ssl.SSLContext:
            context = made()
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            return context

        monkeypatch.setattr(ssl, "create_default_context", strict)
        assert self.answered(transports, identity, identity.authority.read_text())

    def test_an_authority_in_between_whose_root_is_not_trusted(self, transports: Transports, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        between = Authority(tmp_path, "between", Authority(tmp_path / "root", "root"))
        assert self.answered(transports, between.issue("server", HERE), (tmp_path / "ca.crt").read_text())


class TestWhatIsSaid:
    """Whose certificate is not right is told why, and what helps."""

    def refused(self, transports: Transports, identity: Identity, bundle: str = "", host: str = "127.0.0.1") -> str:
        with ScriptedServer([], identity) as server, pytest.raises(Unreachable) as raised:
            transports.to(Route(host, server.port, True), tls=trust(bundle)).ask(GET)
        return str(raised.value)

    def test_another_authority_or_none(self, identity: Identity, transports: Transports, tmp_path: Path) -> None:
        Authority(tmp_path)
        for bundle in ("", (tmp_path / "ca.crt").read_text()):
            assert MISSING in self.refused(transports, identity, bundle)

    def test_the_server_learns_it_too(self, identity: Identity, transports: Transports) -> None:
        heard = []

        def answer(connection: socket.socket) -> None:
            try:
                OverBytes(connection, identity)
            except ssl.SSLError as error:
                heard.append(error.reason)

        with talking(answer) as port, pytest.raises(Unreachable):
            transports.to(Route("127.0.0.1", port, True), tls=trust()).ask(GET)
        assert heard == ["TLSV1_ALERT_UNKNOWN_CA"]

    def test_a_certificate_that_has_expired(self, authority: Authority, transports: Transports) -> None:
        expired = authority.issue("expired", HERE, validity=datetime.timedelta(minutes=1))
        text = self.refused(transports, expired, expired.authority.read_text())
        assert "its TLS certificate has expired: renew it on the server" in text
        assert "caBundle" not in text

    def test_a_certificate_of_another_name(self, authority: Authority, transports: Transports) -> None:
        other = authority.issue("other", Subject(common_name="other", names=("s3.example.org",)))
        for host in ("127.0.0.1", "localhost"):
            text = self.refused(transports, other, other.authority.read_text(), host)
            assert "its TLS certificate is for another host" in text
            assert f"not valid for '{host}'.): write a name that it is for into spec.s3.endpoint" in text
            assert "caBundle" not in text

    def test_a_server_without_tls(self, to: To) -> None:
        def answer(connection: socket.socket) -> None:
            connection.recv(MIB)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with talking(answer) as port, pytest.raises(Unreachable, match="does not speak TLS: write http://"):
            to(port).ask(GET)

    def test_a_bundle_without_a_certificate(self) -> None:
        with pytest.raises(InvalidRequest, match="caBundle"):
            trust("not a certificate")
