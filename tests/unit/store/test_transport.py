"""HTTP under bad weather: kept connections that died, cut bodies, silence, proxies; for threads and for tasks."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastore.errors import CorruptBody, DeadlineExceeded, InvalidRequest, StoreError, Unreachable
from datastore.fuse.loop import Loop, Task, each, now
from datastore.fuse.store.base import Body, FilePart
from datastore.fuse.store.s3.dialing import Proxy, Route, proxy_for
from datastore.fuse.store.s3.messages import Answer, Outlet, Request
from datastore.fuse.store.s3.transport import TransportLimits
from tests.authority import Identity
from tests.driving import resolve, the_loop
from tests.patience import PATIENCE_S, eventually
from tests.servers import reserved_port
from tests.unit.store.scripted import (
    HANG_UP,
    SILENCE,
    PlainTransport,
    Reply,
    ScriptedServer,
    Served,
    Transports,
    Wait,
    http,
    talking,
    trusting,
)

QUICK = TransportLimits(connections=4, connect_s=2.0, idle_s=0.2, call_s=1.0)
GET = Request(method="GET")
LARGER = replace(GET, most_bytes=1 << 20)
MIB = 1 << 20
LARGE = random.Random(7).randbytes(3 * MIB + 77)


class TestKeepAlive:
    def test_a_connection_is_used_again(self, served: Served) -> None:
        with served(http(200, b"one"), http(404, b"two"), http(200, b"3", "X-A: b")) as (transport, server):
            answers = [transport.ask(GET) for _ in range(3)]
        assert [(a.status, bytes(a.body)) for a in answers] == [(200, b"one"), (404, b"two"), (200, b"3")]
        assert answers[2].headers["x-a"] == "b"
        assert server.connections == 1

    @pytest.mark.parametrize("gone", [[Reply(http(200), close=True)], [http(200), HANG_UP]])
    def test_a_connection_the_server_gave_up_is_replaced_once(self, gone: list[Reply | bytes], served: Served) -> None:
        """Before the request came, or when it had come."""
        with served(*gone, http(200, b"again"), HANG_UP, HANG_UP) as (transport, server):
            transport.ask(GET)
            assert transport.ask(GET).body == b"again"
            with pytest.raises(Unreachable):
                transport.ask(GET)
        assert len(server.requests) == len(gone) + 3

    def test_a_request_that_is_not_repeatable_is_sent_once(self, served: Served) -> None:
        with served(http(200), HANG_UP, http(200)) as (transport, server):
            transport.ask(GET)
            with pytest.raises(Unreachable):
                transport.ask(Request(method="POST", body=b"body", repeatable=False))
        assert len(server.requests) == 2

    def test_close_announced_by_the_server_is_honoured(self, served: Served) -> None:
        with served(http(200, b"1", "Connection: close"), http(200, b"2")) as (transport, server):
            bodies = [transport.ask(GET).body for _ in range(2)]
        assert (bodies, server.connections) == ([b"1", b"2"], 2)

    def test_the_pool_is_bounded(self, served: Served) -> None:
        limits = TransportLimits(connections=3)
        with served(*[http(200)] * 40, limits=limits) as (transport, server), ThreadPoolExecutor(12) as pool:
            assert all(a.status == 200 for a in pool.map(lambda _: transport.ask(GET), range(40)))
        assert server.connections <= 3


class TestPlaces:
    """Who may have a connection, of threads and tasks together."""

    @pytest.fixture(params=["thread", "task"])
    def holder(self, request: pytest.FixtureRequest) -> Wait:
        return now if request.param == "thread" else resolve

    @contextlib.contextmanager
    def held(self, holder: Wait, call_s: float) -> Iterator[tuple[PlainTransport, ScriptedServer, threading.Event]]:
        """The only connection is in use until the event."""
        over = threading.Event()

        def answer(_head: bytes, _number: int) -> bytes:
            assert over.wait(PATIENCE_S)
            return http(200)

        limits = TransportLimits(connections=1, idle_s=PATIENCE_S, call_s=call_s, long_s=2 * PATIENCE_S)
        with ScriptedServer(answer) as server, ThreadPoolExecutor(1) as threads:
            transport = PlainTransport(server.port, limits=limits)
            first = threads.submit(holder, transport.begin(replace(GET, is_long=True)))
            eventually(lambda: server.requests or server.connections)
            yield transport, server, over
            over.set()
            assert first.result().status == 200
            the_loop().call(transport.close)

    def test_a_thread_and_a_task_get_their_turn(self, holder: Wait) -> None:
        """In the order in which they asked."""
        with ThreadPoolExecutor(3) as threads, self.held(holder, 2 * PATIENCE_S) as (transport, server, over):
            waiting = transport._waiting
            for number, wait in enumerate([resolve, now, resolve], 1):
                threads.submit(wait, transport.begin(GET, f"/{number}"))
                eventually(lambda number=number: len(waiting) == number)  # type: ignore[misc]
            over.set()
            eventually(lambda: len(server.requests) == 4)
        assert [request.split(b" ")[1] for request in server.requests] == [b"/k", b"/1", b"/2", b"/3"]

    def test_who_waits_too_long_is_told_so_and_takes_no_place(self, holder: Wait, wait: Wait) -> None:
        with self.held(holder, 0.3) as (transport, _, over):
            with pytest.raises(DeadlineExceeded, match="all 1 connections stayed busy"):
                wait(transport.begin(GET))
            over.set()
            eventually(lambda: transport._free == 1)
            assert wait(transport.begin(GET)).status == 200


class TestBodies:
    @pytest.mark.parametrize("size", [0, 1, 16_384, 65_536, 65_537, 1_048_576, 1_048_577, 3_000_000])
    def test_bodies_travel_whole_both_ways(self, size: int, served: Served) -> None:
        body = (LARGE * (size // len(LARGE) + 1))[:size]
        with served(http(200, body)) as (transport, server):
            answer = transport.ask(Request(method="PUT", body=body, most_bytes=size))
        assert bytes(answer.body) == body
        assert server.requests[0].partition(b"\r\n\r\n")[2] == body

    @pytest.mark.parametrize("size", [1, MIB])
    def test_an_answer_that_comes_in_pieces_is_put_together(
        self, size: int, shown: Identity | None, transports: Transports
    ) -> None:
        """Its head, a chunk's size, the chunks, and an interim answer before it; also when it comes at once."""
        answers = [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n2\r\nbo\r\n2;x\r\ndy\r\n0\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\n" + http(200, b"body", "X-A: b"),
        ]

        def drip(connection: socket.socket) -> None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for answer in answers:
                connection.recv(MIB)
                for at in range(0, len(answer), size):
                    connection.sendall(answer[at : at + size])

        with talking(drip, identity=shown) as port:
            transport = transports.to(port, **trusting(shown))
            for _ in answers:
                answer = transport.ask(GET)
                assert (answer.body, answer.headers["x-a"]) == (b"body", "b")

    @pytest.mark.parametrize("promised", [10, 1_000_000])
    def test_a_body_cut_short_is_corrupt(self, promised: int, served: Served) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {promised}\r\n\r\n".encode()
        with served(Reply(head + b"short", close=True)) as (transport, _), pytest.raises(CorruptBody):
            transport.ask(LARGER)

    @pytest.mark.parametrize(
        "head", [b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\nETag: x", b"HTTP/1.1 200 OK\r\nETag: x\r\n", b"junk\r\n"]
    )
    def test_a_head_cut_short_is_never_an_empty_success(self, head: bytes, served: Served) -> None:
        with served(Reply(head, close=True)) as (transport, _), pytest.raises(Unreachable):
            transport.ask(GET)

    @pytest.mark.parametrize("end", [b"\r\n", b"\n"])
    @pytest.mark.parametrize("lines", [[], [b"X-A: 1"], [b"X-A: 1", b"Y:  2 "]])
    def test_heads_of_every_form_end_where_they_end(self, lines: list[bytes], end: bytes, served: Served) -> None:
        """And so does a body of unknown length, with the connection."""
        body = b"no: header\r\n\r\nof it"
        head = end.join([b"HTTP/1.1 200 OK", *lines, b"", b""])
        with served(Reply(head + body, close=True)) as (transport, _):
            answer = transport.ask(GET)
        assert bytes(answer.body) == body
        assert answer.headers == {
            name.decode().lower(): value.decode().strip() for name, _, value in (line.partition(b":") for line in lines)
        }

    def test_a_header_that_would_end_early_is_not_sent(self, served: Served) -> None:
        with served() as (transport, server), pytest.raises(InvalidRequest, match="printable"):
            transport.ask(Request(method="PUT"), "/k", {"host": "h", "content-type": "a\r\nx-evil: 1"})
        assert server.requests == []

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(noise=st.binary(max_size=80))
    def test_arbitrary_answers_never_crash(self, noise: bytes, transports: Transports) -> None:
        answer = Reply(b"HTTP/1.1 200 OK\r\n" + noise, close=True)
        with ScriptedServer([answer]) as server, contextlib.suppress(StoreError):
            transports.to(server.port, limits=QUICK).ask(GET)

    @pytest.mark.parametrize(("size", "closes"), [(200_000, False), (200_000, True), (40 * MIB, True)])
    def test_an_early_refusal_of_a_large_body_is_heard(self, size: int, closes: bool, served: Served) -> None:
        """closes: the server hangs up after it, while there is more to be sent."""
        refusal = Reply(http(403, b"<Error/>", "Connection: close"), close=closes, early=True)
        with served(refusal, http(200)) as (transport, _):
            assert transport.ask(Request(method="PUT", body=bytes(size))).status == 403


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
    def test_a_body_is_cut_at_whole_mib_of_the_object(self, start: int, served: Served) -> None:
        taken = Bucketful(start=start)
        with served(http(206, LARGE), http(200, b"next")) as (transport, server):
            answer, again = transport.ask(taken.request), transport.ask(GET)
        assert (answer.body, again.body) == (b"", b"next")
        assert b"".join(body for _, body in taken.parts) == LARGE
        edges = [start + offset for offset, _ in taken.parts]
        assert all(edge % MIB == 0 for edge in edges[1:])
        assert edges == sorted(set(edges))
        assert server.connections == 1

    def test_an_answer_of_another_status_is_taken_without_it(self, served: Served) -> None:
        """A refusal as far as its reason may go."""
        taken = Bucketful()
        with served(http(200, LARGE), http(503, LARGE), http(206, b"small")) as (transport, server):
            answers = [transport.ask(taken.request) for _ in range(3)]
        assert [len(answer.body) for answer in answers] == [len(LARGE), 64 << 10, 5]
        assert server.connections == 2
        assert taken.parts == []

    def test_a_body_that_is_cut_off_is_corrupt(self, served: Served) -> None:
        taken = Bucketful()
        with served(Reply(http(206, LARGE)[:-MIB], close=True)) as (transport, _), pytest.raises(CorruptBody):
            transport.ask(taken.request)
        assert all(LARGE[at : at + len(body)] == body for at, body in taken.parts)

    def test_what_an_outlet_raises_ends_the_connection(self, served: Served) -> None:
        def refuse(*_: object) -> None:
            raise CorruptBody("another version")

        with served(http(206, LARGE), http(200, b"next")) as (transport, server):
            with pytest.raises(CorruptBody, match="another version"):
                transport.ask(replace(LARGER, outlet=Outlet(206, 0, refuse), most_bytes=len(LARGE)))
            assert transport.ask(GET).body == b"next"
        assert server.connections == 2

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, len(LARGE)), (MIB + 1, 2 * MIB), (0, 5), (0, 0), (0, 16_384), (0, 65_537)]
    )
    def test_a_part_is_sent_from_its_file(self, tmp_path: Path, start: int, stop: int, served: Served) -> None:
        with served(http(200), http(200)) as (transport, server), part_of(tmp_path, start, stop) as part:
            for _ in range(2):
                transport.ask(Request(method="PUT", body=part))
        assert [request.partition(b"\r\n\r\n")[2] for request in server.requests] == [LARGE[start:stop]] * 2
        assert server.connections == 1

    def test_a_refusal_that_comes_while_a_part_is_sent_is_heard_at_its_end(
        self, tmp_path: Path, shown: Identity | None, transports: Transports
    ) -> None:
        """The server says nothing more: who waited for room until the last byte was told of the answer meanwhile."""
        size, over = 16 * MIB, threading.Event()

        def refuse(connection: socket.socket) -> None:
            got = 0
            while got < size:
                if not got:
                    connection.sendall(http(503))
                    time.sleep(0.3)  # until there is no more room
                got += len(connection.recv(MIB))
            over.wait(PATIENCE_S)

        (tmp_path / "file").write_bytes(b"")
        os.truncate(tmp_path / "file", size)
        with (
            talking(refuse, identity=shown) as port,
            FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, size) as part,
        ):
            limits = TransportLimits(idle_s=2 * PATIENCE_S, call_s=2 * PATIENCE_S)
            transport, began = transports.to(port, limits=limits, **trusting(shown)), time.monotonic()
            assert transport.ask(Request(method="PUT", body=part)).status == 503
            assert time.monotonic() - began < PATIENCE_S
            over.set()

    def test_what_the_file_has_lost_meanwhile_is_sent_as_zeros(self, tmp_path: Path, served: Served) -> None:
        with served(http(200)) as (transport, server), part_of(tmp_path, 0, len(LARGE)) as part:
            os.truncate(tmp_path / "file", MIB)
            transport.ask(Request(method="PUT", body=part))
            assert part.read() == LARGE[:MIB] + bytes(len(LARGE) - MIB)
        assert server.requests[0].partition(b"\r\n\r\n")[2] == LARGE[:MIB] + bytes(len(LARGE) - MIB)


def part_of(folder: Path, start: int, stop: int) -> FilePart:
    (folder / "file").write_bytes(LARGE)
    return FilePart(os.open(folder / "file", os.O_RDWR), start, stop)


class TestDeadlines:
    def test_a_proxy_that_first_takes_the_whole_body_has_time_to_pass_it_on(self, transports: Transports) -> None:
        """It is silent meanwhile, for longer than a server may be."""

        def answer(_head: bytes, _number: int) -> bytes:
            time.sleep(5 * QUICK.idle_s)
            return http(200)

        with ScriptedServer(answer) as server:
            transport = transports.to(server.port, limits=replace(QUICK, passed_on=len(LARGE) // 60))
            assert transport.ask(Request(method="PUT", body=LARGE)).status == 200
            with pytest.raises(DeadlineExceeded, match="no answer in time to PUT"):
                transport.ask(Request(method="PUT", body=b"small"))

    @pytest.mark.parametrize("asked", [GET, Bucketful().request, replace(LARGER, most_bytes=len(LARGE))])
    def test_silence_ends_at_the_idle_limit(self, asked: Request, transports: Transports) -> None:
        """Before an answer, and in the middle of its body."""
        with ScriptedServer([b"" if asked is GET else http(206, LARGE)[:-MIB]]) as server:
            transport, began = transports.to(server.port, limits=QUICK), time.monotonic()
            with pytest.raises(DeadlineExceeded, match="no answer in time to GET"):
                transport.ask(asked)
            assert QUICK.idle_s <= time.monotonic() - began < PATIENCE_S

    @pytest.mark.parametrize(
        ("head", "again", "every_s"),
        [(b"Content-Length: 900000", b"x", 0.05), (b"Transfer-Encoding: chunked", b"1\r\nx\r\n" * 1000, 0.0)],
    )
    def test_an_answer_without_an_end_ends_at_the_limit_of_the_call(
        self, head: bytes, again: bytes, every_s: float, shown: Identity | None, transports: Transports
    ) -> None:
        """Each byte of it comes in time, and there may be no need to wait for any."""
        over = threading.Event()

        def send(connection: socket.socket) -> None:
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
            while not over.wait(every_s):
                connection.sendall(again)

        with talking(send, identity=shown) as port:
            limits = replace(QUICK, idle_s=PATIENCE_S, body_floor=1 << 40)
            transport, began = transports.to(port, limits=limits, **trusting(shown)), time.monotonic()
            with pytest.raises(DeadlineExceeded):
                transport.ask(replace(GET, most_bytes=256 * MIB))
            assert QUICK.call_s <= time.monotonic() - began < PATIENCE_S
            over.set()

    @pytest.mark.parametrize(("method", "expected"), [("PUT", 0), ("GET", 600_000), ("GET", 0)])
    def test_a_slow_line_is_no_silence(
        self, method: str, expected: int, shown: Identity | None, transports: Transports
    ) -> None:
        """All connections share it: eight parts of uploads of 8 MiB each, or 64 files that are read, in part or whole;
        the size of a whole file is known only from its answer."""
        body = bytes(600_000)

        def crawl(connection: socket.socket) -> None:
            head = connection.recv(1000)
            if method == "GET":
                connection.sendall(http(200, body)[: -len(body)])
            received = len(head.partition(b"\r\n\r\n")[2])
            for start in range(0, len(body), 60_000):
                time.sleep(0.1)
                if method == "GET":
                    connection.sendall(body[start : start + 60_000])
                else:
                    while received < start + 60_000:
                        received += len(connection.recv(start + 60_000 - received))
            if method == "PUT":
                connection.sendall(http(200))

        with talking(crawl, identity=shown) as port:
            limits = TransportLimits(idle_s=2 * PATIENCE_S, call_s=0.5)
            transport = transports.to(port, limits=limits, **trusting(shown))
            sent = body if method == "PUT" else b""
            asked = Request(method=method, body=sent, expected_bytes=expected, most_bytes=len(body))
            assert transport.ask(asked).status == 200

    def test_what_the_other_side_takes_is_no_silence(self, transports: Transports) -> None:
        """Though the kernel has room for more only when it has taken a third of what is under way."""
        size, over = 4 * MIB, threading.Event()

        def crawl(listener: socket.socket) -> None:
            with listener.accept()[0] as connection:
                received = 0
                while received < size:
                    time.sleep(0.05)
                    received += len(connection.recv(200_000))
                connection.sendall(http(200))
                over.wait(PATIENCE_S)

        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            threading.Thread(target=crawl, args=[listener], daemon=True).start()
            limits = replace(QUICK, call_s=2 * PATIENCE_S)
            transport = transports.to(listener.getsockname()[1], limits=limits)
            assert transport.ask(Request(method="PUT", body=bytes(size))).status == 200
            over.set()

    def test_a_server_that_does_not_take_a_part_ends_at_the_idle_limit(
        self, tmp_path: Path, transports: Transports
    ) -> None:
        (tmp_path / "file").write_bytes(bytes(64 * MIB))
        with socket.create_server(("127.0.0.1", 0)) as deaf:  # nobody accepts, so nobody reads
            part = FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, 64 * MIB)
            with part, pytest.raises(DeadlineExceeded):
                transports.to(deaf.getsockname()[1], limits=QUICK).ask(Request(method="PUT", body=part))


def mute_in_places(head: bytes, _number: int) -> Reply | bytes:
    return SILENCE if b"/silent" in head else http(200)


class TestOnALoop:
    def test_others_go_on_while_a_server_is_silent(self) -> None:
        """Other requests of the same transport as well, and connections that take their time to be made."""

        async def ask() -> tuple[list[Answer], list[Task[Answer]]]:
            silent = [the_loop().spawn(transport.begin(GET, "/silent")) for _ in range(2)]
            answers = await each(lambda _: transport.begin(GET), range(50), 4)
            assert not any(one.done for one in silent)
            return answers, silent

        limits = TransportLimits(idle_s=2 * PATIENCE_S, call_s=2 * PATIENCE_S)
        with ScriptedServer(mute_in_places) as server:
            transport = PlainTransport(server.port, limits=limits)
            answers, silent = resolve(ask())
        assert {answer.status for answer in answers} == {200}
        eventually(lambda: all(isinstance(one.error, Unreachable) for one in silent))
        the_loop().call(transport.close)

    def test_a_loop_that_ends_leaves_no_connection_behind(self) -> None:
        """Neither an idle one, nor one in use. Those of threads stay."""
        loop = Loop()
        with ScriptedServer(mute_in_places) as server:
            transport = PlainTransport(server.port)
            transport.ask(GET)
            loop.run(each(lambda _: transport.begin(GET), range(10), 3))
            loop.spawn(transport.begin(GET, "/silent"))
            while len(server.requests) < 12:
                loop.run(loop.pause())
            assert server.opened >= 2
            loop.close()
            eventually(lambda: server.opened == 1)
            transport.close()
            eventually(lambda: server.opened == 0)
            del loop
            gc.collect()


class TestProxies:
    def test_plain_http_goes_through_a_proxy_with_the_whole_address(self, transports: Transports) -> None:
        login = base64.b64encode(b"u:p").decode()
        with ScriptedServer([http(200, b"via")]) as server:
            proxy = Proxy("127.0.0.1", server.port, f"Basic {login}")
            answer = transports.to(Route("bucket.example", 80, False, proxy)).ask(
                GET, "/k%20", {"host": "bucket.example"}
            )
        assert answer.body == b"via"
        assert server.requests[0].startswith(b"GET http://bucket.example/k%20 HTTP/1.1\r\n")
        assert f"proxy-authorization: Basic {login}".encode() in server.requests[0]

    def test_https_asks_a_proxy_for_a_tunnel(self, transports: Transports) -> None:
        with ScriptedServer([Reply(b"HTTP/1.1 407 Login\r\n\r\n", close=True)]) as server:
            proxy = Proxy("127.0.0.1", server.port, "Basic x")
            with pytest.raises(Unreachable, match="407"):
                transports.to(Route("bucket.example", 443, True, proxy)).ask(GET)
        assert server.requests[0].startswith(b"CONNECT bucket.example:443 HTTP/1.")
        assert b"Proxy-Authorization: Basic x" in server.requests[0]

    @pytest.mark.parametrize(("secure", "variable"), [(True, "HTTPS_PROXY"), (False, "HTTP_PROXY")])
    @pytest.mark.parametrize(
        ("host", "said"), [("127.0.0.1", "nothing listens at the proxy"), ("nobody.invalid", "the proxy's host name")]
    )
    def test_a_proxy_that_cannot_be_reached_is_blamed_itself(
        self, transports: Transports, secure: bool, variable: str, host: str, said: str
    ) -> None:
        with reserved_port() as port, pytest.raises(Unreachable, match=f"{said} .*: check {variable} and NO_PROXY"):
            transports.to(Route("bucket.example", 443, secure, Proxy(host, port))).ask(GET)

    def test_the_environment_names_proxies_and_exceptions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "http://user:p%40ss@proxy.example:3128")
        monkeypatch.setenv("http_proxy", "plain.example")
        monkeypatch.setenv("NO_PROXY", "inside.example,127.0.0.1")
        assert proxy_for("s3.example", secure=True) == Proxy(
            "proxy.example", 3128, "Basic " + base64.b64encode(b"user:p@ss").decode()
        )
        assert proxy_for("s3.example", secure=False) == Proxy("plain.example", 80)
        assert proxy_for("b.inside.example", secure=True) is None
        assert proxy_for("127.0.0.1", secure=False) is None

    def test_a_proxy_that_is_no_http_url_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")
        with pytest.raises(InvalidRequest, match="HTTPS_PROXY"):
            proxy_for("s3.example", secure=True)
