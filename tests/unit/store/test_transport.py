"""HTTP under bad weather: kept connections that died, cut bodies, silence, proxies, certificates."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.errors import CorruptBody, DeadlineExceeded, InvalidRequest, StoreError, Unreachable
from datastore.fuse.store.base import Body, FilePart
from datastore.fuse.store.s3.connections import Proxy, Route, TransportLimits, proxy_for, trust
from datastore.fuse.store.s3.messages import Outlet, Request
from tests.patience import PATIENCE_S, eventually
from tests.servers import reserved_port
from tests.unit.store.scripted import HANG_UP, SILENCE, PlainTransport, Reply, ScriptedServer, http

QUICK = TransportLimits(connections=4, connect_s=2.0, idle_s=0.2, call_s=1.0)
GET = Request(method="GET")
LARGER = replace(GET, most_bytes=1 << 20)


def transport_to(server: ScriptedServer, limits: TransportLimits | None = None) -> PlainTransport:
    return PlainTransport(Route("127.0.0.1", server.port, False), limits=limits)


class TestKeepAlive:
    def test_a_connection_is_used_again(self) -> None:
        with ScriptedServer([http(200, b"one"), http(404, b"two"), http(200, b"3", "X-A: b")]) as server:
            transport = transport_to(server)

            answers = [transport.send(GET) for _ in range(3)]
            transport.close()

        assert [(a.status, bytes(a.body)) for a in answers] == [(200, b"one"), (404, b"two"), (200, b"3")]
        assert answers[2].headers["x-a"] == "b"
        assert server.connections == 1

    def test_a_connection_the_server_gave_up_is_replaced(self) -> None:
        with ScriptedServer([Reply(http(200), close=True), http(200, b"again")]) as server:
            transport = transport_to(server)
            transport.send(GET)

            assert bytes(transport.send(GET).body) == b"again"
            transport.close()

    def test_a_repeatable_request_that_met_a_hang_up_is_sent_again_once(self) -> None:
        with ScriptedServer([http(200), HANG_UP, http(200, b"again"), HANG_UP, HANG_UP]) as server:
            transport = transport_to(server)
            transport.send(GET)

            assert bytes(transport.send(GET).body) == b"again"
            with pytest.raises(Unreachable):
                transport.send(GET)
            transport.close()

        assert len(server.requests) == 5

    def test_a_request_that_is_not_repeatable_is_sent_once(self) -> None:
        with ScriptedServer([http(200), HANG_UP, http(200)]) as server:
            transport = transport_to(server)
            transport.send(GET)

            with pytest.raises(Unreachable):
                transport.send(Request(method="POST", body=b"body", repeatable=False))
            transport.close()

        assert len(server.requests) == 2

    def test_close_announced_by_the_server_is_honoured(self) -> None:
        with ScriptedServer([http(200, b"1", "Connection: close"), http(200, b"2")]) as server:
            transport = transport_to(server)
            bodies = [bytes(transport.send(GET).body) for _ in range(2)]
            transport.close()

        assert (bodies, server.connections) == ([b"1", b"2"], 2)

    def test_the_pool_is_bounded(self) -> None:
        with ScriptedServer([http(200)] * 40) as server:
            transport = transport_to(server, TransportLimits(connections=3))
            with ThreadPoolExecutor(12) as pool:
                assert all(a.status == 200 for a in pool.map(lambda _: transport.send(GET), range(40)))
            transport.close()

        assert server.connections <= 3


class TestBodies:
    @pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_048_576, 1_048_577, 3_000_000])
    def test_bodies_travel_whole_both_ways(self, size: int) -> None:
        body = bytes(range(256)) * (size // 256 + 1)
        body = body[:size]
        with ScriptedServer([http(200, body)]) as server:
            transport = transport_to(server)
            answer = transport.send(Request(method="PUT", body=body, most_bytes=size))
            transport.close()

        assert bytes(answer.body) == body
        assert server.requests[0].partition(b"\r\n\r\n")[2] == body

    def test_a_chunked_answer_is_joined(self) -> None:
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        with ScriptedServer([chunked, http(200, b"next")]) as server:
            transport = transport_to(server)
            assert [bytes(transport.send(GET).body) for _ in range(2)] == [b"abcde", b"next"]
            transport.close()

    @pytest.mark.parametrize("promised", [10, 1_000_000])
    def test_a_body_cut_short_is_corrupt(self, promised: int) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {promised}\r\n\r\n".encode()
        with ScriptedServer([Reply(head + b"short", close=True)]) as server, pytest.raises(CorruptBody):
            transport_to(server).send(GET)

    @pytest.mark.parametrize(
        "head", [b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nETag: x", b"HTTP/1.1 200 OK\r\nETag: x\r\n", b"junk\r\n"]
    )
    def test_a_head_cut_short_is_never_an_empty_success(self, head: bytes) -> None:
        with ScriptedServer([Reply(head, close=True)]) as server, pytest.raises(Unreachable):
            transport_to(server).send(GET)

    def test_interim_answers_are_passed_over(self) -> None:
        with ScriptedServer([b"HTTP/1.1 100 Continue\r\n\r\n" + http(200, b"final")]) as server:
            transport = transport_to(server)
            assert bytes(transport.send(GET).body) == b"final"
            transport.close()

    @pytest.mark.parametrize("end", [b"\r\n", b"\n"])
    @pytest.mark.parametrize("lines", [[], [b"X-A: 1"], [b"X-A: 1", b"Y:  2 "]])
    def test_heads_of_every_form_end_where_they_end(self, lines: list[bytes], end: bytes) -> None:
        body = b"no: header\r\n\r\nof it"
        head = end.join([b"HTTP/1.1 200 OK", *lines, b"", b""])
        with ScriptedServer([Reply(head + body, close=True)]) as server:
            transport = transport_to(server)
            answer = transport.send(GET)
            transport.close()
        assert bytes(answer.body) == body
        assert answer.headers == {
            name.decode().lower(): value.decode().strip() for name, _, value in (line.partition(b":") for line in lines)
        }

    def test_a_body_that_ends_with_the_connection_is_read_to_its_end(self) -> None:
        with ScriptedServer([Reply(b"HTTP/1.0 200 OK\r\n\r\nall of it", close=True)]) as server:
            transport = transport_to(server)
            assert bytes(transport.send(GET).body) == b"all of it"
            transport.close()

    def test_a_header_that_would_end_early_is_not_sent(self) -> None:
        with ScriptedServer([]) as server, pytest.raises(InvalidRequest, match="printable"):
            transport_to(server).send(Request(method="PUT"), "/k", {"host": "h", "content-type": "a\r\nx-evil: 1"})

        assert server.requests == []

    @given(st.binary(max_size=80))
    def test_arbitrary_answers_never_crash(self, noise: bytes) -> None:
        with ScriptedServer([Reply(b"HTTP/1.1 200 OK\r\n" + noise, close=True)]) as server:
            transport = transport_to(server, QUICK)
            with contextlib.suppress(StoreError):
                transport.send(GET)
            transport.close()

    def test_an_early_refusal_of_a_large_body_is_heard(self) -> None:
        refusal = Reply(http(403, b"<Error/>", "Connection: close"), early=True)
        with ScriptedServer([refusal, http(200)]) as server:
            transport = transport_to(server)
            answer = transport.send(Request(method="PUT", body=bytes(200_000)))
            transport.close()

        assert answer.status == 403


MIB = 1 << 20
LARGE = random.Random(7).randbytes(3 * MIB + 77)


class Bucketful:
    """An outlet that keeps what it is given."""

    def __init__(self, status: int = 206, start: int = 0) -> None:
        self.outlet = Outlet(status, start, self._take)
        self.parts: list[tuple[int, bytes]] = []

    def _take(self, headers: object, length: int, offset: int, body: Body) -> None:
        assert length == len(LARGE)
        self.parts.append((offset, bytes(body)))

    @property
    def request(self) -> Request:
        return Request(method="GET", outlet=self.outlet, most_bytes=len(LARGE))


class TestLargeBodies:
    """What is handed on while it comes, and what is sent from a file."""

    @pytest.mark.parametrize("start", [0, 128 << 10, 5 * MIB - 1])
    def test_a_body_is_cut_at_whole_mib_of_the_object(self, start: int) -> None:
        taken = Bucketful(start=start)
        with ScriptedServer([http(206, LARGE), http(200, b"next")]) as server:
            transport = transport_to(server)
            answer = transport.send(taken.request)
            again = transport.send(GET)
            transport.close()

        assert (answer.body, answer.poured, again.body) == (b"", len(LARGE), b"next")
        assert b"".join(body for _, body in taken.parts) == LARGE
        edges = [start + offset for offset, _ in taken.parts]
        assert all(edge % MIB == 0 for edge in edges[1:])
        assert edges == sorted(set(edges))
        assert server.connections == 1

    def test_an_answer_of_another_status_is_taken_without_it(self) -> None:
        """A refusal as far as its reason may go."""
        taken = Bucketful()
        with ScriptedServer([http(200, LARGE), http(503, LARGE), http(206, b"small")]) as server:
            transport = transport_to(server)
            answers = [transport.send(taken.request) for _ in range(3)]
            transport.close()

        assert [len(answer.body) for answer in answers] == [len(LARGE), 64 << 10, 5]
        assert server.connections == 2
        assert taken.parts == []

    def test_a_body_that_is_cut_off_is_corrupt(self) -> None:
        taken = Bucketful()
        with ScriptedServer([Reply(http(206, LARGE)[:-MIB], close=True)]) as server, pytest.raises(CorruptBody):
            transport_to(server).send(taken.request)

        assert all(LARGE[at : at + len(body)] == body for at, body in taken.parts)

    def test_a_body_that_stops_flowing_ends_at_the_idle_limit(self) -> None:
        taken = Bucketful()
        with ScriptedServer([http(206, LARGE)[:-MIB]]) as server, pytest.raises(DeadlineExceeded):
            transport_to(server, QUICK).send(taken.request)

    def test_what_an_outlet_raises_ends_the_connection(self) -> None:
        def refuse(*_: object) -> None:
            raise CorruptBody("another version")

        with ScriptedServer([http(206, LARGE), http(200, b"next")]) as server:
            transport = transport_to(server)
            with pytest.raises(CorruptBody, match="another version"):
                transport.send(replace(LARGER, outlet=Outlet(206, 0, refuse), most_bytes=len(LARGE)))
            assert transport.send(GET).body == b"next"
            transport.close()

        assert server.connections == 2

    @pytest.mark.parametrize(("start", "stop"), [(0, len(LARGE)), (MIB + 1, 2 * MIB), (0, 5)])
    def test_a_part_is_sent_from_its_file(self, tmp_path: Path, start: int, stop: int) -> None:
        with ScriptedServer([http(200), http(200)]) as server, part_of(tmp_path, start, stop) as part:
            transport = transport_to(server)
            for _ in range(2):
                transport.send(Request(method="PUT", body=part))
            transport.close()

        assert [request.partition(b"\r\n\r\n")[2] for request in server.requests] == [LARGE[start:stop]] * 2
        assert server.connections == 1

    def test_what_the_file_has_lost_meanwhile_is_sent_as_zeros(self, tmp_path: Path) -> None:
        with ScriptedServer([http(200)]) as server, part_of(tmp_path, 0, len(LARGE)) as part:
            os.truncate(tmp_path / "file", MIB)
            transport = transport_to(server)
            transport.send(Request(method="PUT", body=part))
            transport.close()
            assert part.read() == LARGE[:MIB] + bytes(len(LARGE) - MIB)

        assert server.requests[0].partition(b"\r\n\r\n")[2] == LARGE[:MIB] + bytes(len(LARGE) - MIB)

    def test_a_server_that_does_not_take_a_part_ends_at_the_idle_limit(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(64 * MIB))
        with socket.create_server(("127.0.0.1", 0)) as deaf:  # nobody accepts, so nobody reads
            route = Route("127.0.0.1", deaf.getsockname()[1], False)
            part = FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, 64 * MIB)
            with part, pytest.raises(DeadlineExceeded):
                PlainTransport(route, limits=QUICK).send(Request(method="PUT", body=part))


def part_of(folder: Path, start: int, stop: int) -> FilePart:
    (folder / "file").write_bytes(LARGE)
    return FilePart(os.open(folder / "file", os.O_RDWR), start, stop)


class TestDeadlines:
    def test_silence_ends_at_the_idle_limit(self) -> None:
        with ScriptedServer([SILENCE]) as server, pytest.raises(DeadlineExceeded, match="no answer in time"):
            transport_to(server, QUICK).send(GET)

    def test_a_body_that_stops_flowing_ends_at_the_idle_limit(self) -> None:
        half = b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + bytes(100)
        with ScriptedServer([half]) as server, pytest.raises(DeadlineExceeded):
            transport_to(server, QUICK).send(LARGER)

    def test_a_full_pool_ends_at_the_call_limit(self) -> None:
        limits = TransportLimits(connections=1, idle_s=PATIENCE_S, call_s=0.3, long_s=2 * PATIENCE_S)
        with ThreadPoolExecutor(1) as pool, ScriptedServer([SILENCE]) as server:
            transport = transport_to(server, limits)
            patient = replace(GET, is_long=True)
            first = pool.submit(transport.send, patient)
            eventually(lambda: server.requests)
            with pytest.raises(DeadlineExceeded, match="all 1 connections stayed busy"):
                transport.send(patient)
            assert not first.done()
        assert isinstance(first.exception(), Unreachable), "the server hung up"
        transport.close()

    def test_nobody_listening_is_said_so(self) -> None:
        with reserved_port() as port, pytest.raises(Unreachable, match="connection refused"):
            PlainTransport(Route("127.0.0.1", port, False)).send(GET)

    def test_a_name_that_does_not_resolve_is_said_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "not known")))
        transport = PlainTransport(Route("no-such-host.invalid", 80, False))

        with pytest.raises(Unreachable, match="does not resolve"):
            transport.send(GET)


class TestProxies:
    def test_plain_http_goes_through_a_proxy_with_the_whole_address(self) -> None:
        login = base64.b64encode(b"u:p").decode()
        with ScriptedServer([http(200, b"via")]) as server:
            proxy = Proxy("127.0.0.1", server.port, f"Basic {login}")
            transport = PlainTransport(Route("bucket.example", 80, False, proxy))
            answer = transport.send(GET, "/k%20", {"host": "bucket.example"})
            transport.close()

        assert bytes(answer.body) == b"via"
        assert server.requests[0].startswith(b"GET http://bucket.example/k%20 HTTP/1.1\r\n")
        assert f"proxy-authorization: Basic {login}".encode() in server.requests[0].lower().replace(
            login.lower().encode(), login.encode()
        ).replace(b"basic", b"Basic")

    def test_https_asks_a_proxy_for_a_tunnel(self) -> None:
        with ScriptedServer([Reply(b"HTTP/1.1 407 Login\r\n\r\n", close=True)]) as server:
            proxy = Proxy("127.0.0.1", server.port, "Basic x")
            with pytest.raises(Unreachable, match="407"):
                PlainTransport(Route("bucket.example", 443, True, proxy)).send(GET)

        assert server.requests[0].startswith(b"CONNECT bucket.example:443 HTTP/1.")
        assert b"Proxy-Authorization: Basic x" in server.requests[0]

    def test_the_environment_names_proxies_and_exceptions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "http://user:p%40ss@proxy.example:3128")
        monkeypatch.setenv("http_proxy", "plain.example")
        monkeypatch.setenv("NO_PROXY", "inside.example,127.0.0.1")

        outside = proxy_for("s3.example", secure=True)
        plain = proxy_for("s3.example", secure=False)

        assert outside is not None
        assert plain is not None
        assert (outside.host, outside.port) == ("proxy.example", 3128)
        assert outside.authorization == "Basic " + base64.b64encode(b"user:p@ss").decode()
        assert (plain.host, plain.port) == ("plain.example", 80)
        assert proxy_for("b.inside.example", secure=True) is None
        assert proxy_for("127.0.0.1", secure=False) is None

    def test_a_proxy_that_is_no_http_url_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")

        with pytest.raises(InvalidRequest, match="HTTPS_PROXY"):
            proxy_for("s3.example", secure=True)


class TestTls:
    def serve(self, certificate: tuple[Path, Path], *replies: bytes) -> ScriptedServer:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        return ScriptedServer(replies, context)

    def test_a_certificate_of_the_bundle_is_trusted(self, certificate: tuple[Path, Path]) -> None:
        with self.serve(certificate, http(200, b"safe"), http(200, b"again")) as server:
            transport = PlainTransport(Route("127.0.0.1", server.port, True), tls=trust(certificate[0].read_text()))
            bodies = [bytes(transport.send(GET).body) for _ in range(2)]
            transport.close()

        assert (bodies, server.connections) == ([b"safe", b"again"], 1)

    def test_large_bodies_and_parts_of_files_travel_through_tls(
        self, certificate: tuple[Path, Path], tmp_path: Path
    ) -> None:
        taken = Bucketful()
        with self.serve(certificate, http(206, LARGE), http(200)) as server:
            transport = PlainTransport(Route("127.0.0.1", server.port, True), tls=trust(certificate[0].read_text()))
            transport.send(taken.request)
            with part_of(tmp_path, 5, MIB) as part:
                transport.send(Request(method="PUT", body=part))
            transport.close()

        assert b"".join(body for _, body in taken.parts) == LARGE
        assert server.requests[1].partition(b"\r\n\r\n")[2] == LARGE[5:MIB]

    def test_an_unknown_certificate_is_refused_with_what_to_do(self, certificate: tuple[Path, Path]) -> None:
        with self.serve(certificate, http(200)) as server, pytest.raises(Unreachable, match="caBundle"):
            PlainTransport(Route("127.0.0.1", server.port, True), tls=trust()).send(GET)

    def test_a_server_without_tls_is_said_so(self) -> None:
        plain = Reply(b"HTTP/1.1 400 Bad Request\r\n\r\n", close=True, early=True)
        with ScriptedServer([plain]) as server, pytest.raises((Unreachable, DeadlineExceeded)):
            PlainTransport(Route("127.0.0.1", server.port, True), tls=trust(), limits=QUICK).send(GET)

    def test_a_bundle_without_a_certificate_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="caBundle"):
            trust("not a certificate")
