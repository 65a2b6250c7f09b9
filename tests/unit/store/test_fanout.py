"""Many HEADs or GETs by one thread: as many answers as questions, each its own, whatever the server does."""

from __future__ import annotations

import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    KeyTooLong,
    MountFailed,
    NotFound,
    ServerFault,
    StoreError,
    Throttled,
    Unreachable,
)
from datastore.fuse.loop import Loop
from datastore.fuse.store.base import Body, Capabilities, ETag, ObjectInfo, ObjectVersion, Shown
from datastore.fuse.store.retrying import RetryingStore
from datastore.fuse.store.s3.caller import Caller
from datastore.fuse.store.s3.client import S3Store
from datastore.fuse.store.s3.connections import Proxy, Route, TransportLimits, trust
from datastore.fuse.store.s3.credentials import StaticSource
from datastore.fuse.store.s3.endpoint import Endpoint, resolve
from datastore.fuse.store.s3.transport import Transport
from datastore.retry import Retrier, RetryPolicy
from datastore.secret import Secret
from tests.patience import PATIENCE_S
from tests.promises import promise
from tests.servers import reserved_port
from tests.unit.store.scripted import HANG_UP, SILENCE, Reply, ScriptedServer, http

KEYS = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("secret"))
PATIENT = TransportLimits(connections=8, idle_s=PATIENCE_S, call_s=2 * PATIENCE_S)
QUICK = TransportLimits(connections=8, connect_s=2.0, idle_s=0.3, call_s=1.0)
OBJECTS = [Shown(f"f{number}", ETag(f"e{number}")) for number in range(200)]


class Bucket:
    """Answers each HEAD with what belongs to its key; `odd` says what else, given the key and its number."""

    def __init__(self, odd: Callable[[str, int], Reply | bytes | None] = lambda _key, _number: None) -> None:
        self.odd = odd
        self.asked: Counter[str] = Counter()

    def __call__(self, head: bytes, number: int) -> Reply | bytes:
        key = head.split(b" ", 2)[1].decode().rpartition("/")[2]
        self.asked[key] += 1
        found = self.odd(key, number)
        return found if found is not None else right(key)


def right(key: str, *headers: str) -> bytes:
    """The answer of a server that has the object."""
    number = key[1:]
    head = http(200, b"", f'ETag: "e{number}"', f"x-amz-meta-number: {number}", *headers)
    return head.replace(b"Content-Length: 0", f"Content-Length: {number}".encode())


def client_of(port: int, limits: TransportLimits = PATIENT) -> S3Store:
    return client_by(lambda to: Transport(Route(to.host, to.port, False), limits=limits), f"http://127.0.0.1:{port}")


def client_by(connect: Callable[[Endpoint], Transport], endpoint: str) -> S3Store:
    location = S3Location(bucket="data", endpoint=endpoint)
    return S3Store(Caller(resolve(location), StaticSource(KEYS), connect), Capabilities())


@contextmanager
def turning() -> Iterator[Loop]:
    """A loop with a thread of its own."""
    loop, ended = Loop(), threading.Event()

    def turn() -> None:
        with loop.turning():
            while not ended.is_set():
                loop.turn()
        loop.close()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield loop
    finally:
        loop.soon(ended.set)
        thread.join(PATIENCE_S)


@pytest.fixture(params=["by itself", "by a loop"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop | None]:
    """Who waits for the answers."""
    if request.param == "by itself":
        yield None
    else:
        with turning() as loop:
            yield loop


def asked(
    store: S3Store | RetryingStore, objects: list[Shown] = OBJECTS, *, loop: Loop | None = None
) -> list[ObjectInfo | StoreError]:
    """What is said of each, which must be said once."""
    got: dict[int, ObjectInfo | StoreError] = {}
    here = threading.current_thread()

    def take(number: int, answer: ObjectInfo | StoreError) -> None:
        assert (threading.current_thread() is here) == (loop is None)
        assert number not in got
        got[number] = answer

    store.head_many(objects, take, loop)
    return [got[number] for number in range(len(objects))]


def all_right(answers: list[ObjectInfo | StoreError], objects: list[Shown] = OBJECTS) -> bool:
    """Each is of its own object, in all that it says."""
    return all(
        isinstance(info, ObjectInfo)
        and (info.key, info.etag, info.size, info.metadata["number"])
        == (shown.key, f"e{shown.key[1:]}", int(shown.key[1:]), shown.key[1:])
        for info, shown in zip(answers, objects, strict=True)
    )


@promise("S-150")
def test_each_is_asked_once_and_alone_on_its_connection(loop: Loop | None) -> None:
    """An answer to a HEAD does not say of which object it is."""
    bucket = Bucket()
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        assert all_right(asked(client, loop=loop))
        assert all_right(asked(client, loop=loop))
        client.close()
    assert set(bucket.asked.values()) == {2}
    assert server.together == 1


@promise("S-12")
def test_a_server_that_takes_its_time_is_asked_on_many_connections() -> None:
    """Up to 64 HEADs are under way when a directory is walked."""
    together = threading.Barrier(64, timeout=PATIENCE_S)

    def odd(key: str, _number: int) -> None:
        if key == "f0":
            time.sleep(0.2)  # what the first one takes tells how many are asked for side by side
        else:
            together.wait()

    objects = [Shown("f0"), *(Shown(f"f{number}") for number in range(1, 65))]
    with ScriptedServer(Bucket(odd)) as server:
        client = client_of(server.port, replace(PATIENT, connections=64))
        assert all_right(asked(client, objects[:1]), objects[:1])
        assert all_right(asked(client, objects[1:]), objects[1:])
        client.close()
    assert server.connections == 64


@promise("S-150")
def test_a_server_that_is_near_and_quick_is_asked_on_few() -> None:
    """Each connection more costs both sides a switch."""
    with ScriptedServer(Bucket()) as server:
        transport = Transport(Route("127.0.0.1", server.port, False))
        transport.fan_out.paced(0.0008)
        assert transport.fan_out.lanes == 2
        for _ in range(100):
            transport.fan_out.paced(0.02)
        assert 30 <= transport.fan_out.lanes <= 40
        transport.close()


SPOILT: dict[str, Callable[[str], Reply | bytes]] = {
    "twice": lambda key: right(key) * 2,
    "with a body": lambda key: right(key) + b"a body",
    "an interim answer": lambda key: b"HTTP/1.1 103 Early Hints\r\n\r\n" + right(key),
    "a last answer": lambda key: right(key, "Connection: close"),
    "a last answer, and the end": lambda key: Reply(right(key, "Connection: close"), close=True),
    "the end": lambda _key: HANG_UP,
    "half an answer": lambda key: Reply(right(key)[:30], close=True),
    "HTTP/1.0": lambda key: right(key).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "no HTTP": lambda _key: b"junk\r\n\r\n",
    "nothing": lambda _key: b"",
    "400": lambda _key: http(400),
    "404": lambda _key: http(404),
    "500": lambda _key: http(500),
    "503": lambda _key: http(503),
}


@promise("S-150")
@pytest.mark.parametrize("kind", SPOILT)
def test_one_odd_answer_spoils_no_other(kind: str) -> None:
    """What comes after an answer and belongs to none is not taken for the next one."""
    spoilt: list[str] = []

    def odd(key: str, number: int) -> Reply | bytes | None:
        if key == "f150" and not spoilt:
            spoilt.append(key)
            return SPOILT[kind](key)
        return None

    with ScriptedServer(Bucket(odd)) as server:
        client = client_of(server.port, TransportLimits(connections=8, idle_s=1.0) if kind == "nothing" else PATIENT)
        retrying = RetryingStore(client, Retrier(RetryPolicy(first_delay_s=0.001)))
        answers = asked(retrying)
        told = answers[150]
        if kind == "404":
            assert isinstance(told, StoreError)
            answers[150:151] = asked(retrying, OBJECTS[150:151])
        assert all_right(answers)
        assert all_right(asked(retrying))
        client.close()


@promise("S-150")
def test_answers_that_slip_by_one_are_not_believed() -> None:
    """A server that answers twice to one request: every later answer on the connection is a neighbour's."""
    bucket = Bucket(lambda key, number: right(key) + (right(key) if number == 3 else b""))
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        for _ in range(3):
            assert all_right(asked(client))
        client.close()


@promise("S-150")
@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (403, AccessDenied), (500, ServerFault), (429, Throttled)]
)
def test_refusals_are_those_of_a_single_head(status: int, kind: type[StoreError], loop: Loop | None) -> None:
    """Of one key, and of all."""
    with ScriptedServer(Bucket(lambda key, _number: http(status) if key == "f150" else None)) as server:
        client = client_of(server.port)
        answers = asked(client, loop=loop)
        client.close()
    assert type(answers.pop(150)) is kind
    assert all_right(answers, [shown for shown in OBJECTS if shown.key != "f150"])

    bucket = Bucket(lambda _key, _number: http(status))
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        answers = asked(client, loop=loop)
        client.close()
    assert {type(answer) for answer in answers} == {kind}
    assert all(
        isinstance(error, StoreError) and error.key == shown.key for error, shown in zip(answers, OBJECTS, strict=True)
    )
    assert bucket.asked.total() <= 201
    if status in {429, 500}:
        assert bucket.asked.total() < 60, "who is told to slow down does"


@promise("S-150")
def test_the_bucket_is_followed_to_its_region(loop: Loop | None) -> None:
    """As by a single HEAD, and the others are asked for there."""

    def rule(head: bytes, number: int) -> Reply | bytes:
        if b"/eu-west-3/" in head:
            return bucket(head, number)
        return http(400, b"", "x-amz-bucket-region: eu-west-3")

    bucket = Bucket()
    with ScriptedServer(rule) as server:
        client = client_of(server.port)
        assert all_right(asked(client, loop=loop))
        client.close()


@promise("S-150", "S-66")
def test_what_fails_for_a_while_is_asked_again_and_nothing_else(loop: Loop | None) -> None:
    """One budget for all."""
    failures = Counter({f"f{number}": 2 for number in range(0, 200, 7)})

    def odd(key: str, _number: int) -> bytes | None:
        failures[key] -= 1
        return http(500) if failures[key] >= 0 else None

    bucket = Bucket(odd)
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        retrier = Retrier(RetryPolicy(first_delay_s=0.001))
        store = RetryingStore(client, retrier)
        assert all_right(asked(store, loop=loop))
        client.close()
    told = store.metrics.snapshot()
    assert set(told) == {"head"}
    assert told["head"]["calls"] == len(OBJECTS)
    assert sum(told["head"]["retries"].values()) <= 4
    assert bucket.asked["f199"] == 1


@promise("S-150", "S-64")
def test_an_outage_is_told_of_each_within_the_budget(loop: Loop | None) -> None:
    """Nobody listens, or nobody answers."""
    with reserved_port() as port:
        client = client_of(port, QUICK)
        answers = asked(RetryingStore(client, Retrier(RetryPolicy(first_delay_s=0.001, budget_s=0.05))), loop=loop)
    assert {type(answer) for answer in answers} == {Unreachable}

    with ScriptedServer(lambda _head, _number: SILENCE) as server:
        client = client_of(server.port, QUICK)
        answers = asked(client, loop=loop)
        client.close()
    assert {type(answer) for answer in answers} == {DeadlineExceeded}
    assert len(server.requests) < 20, "the others are not asked for, one time limit after the other"


@promise("S-150")
def test_connections_that_the_server_gave_up_are_replaced() -> None:
    with ScriptedServer(Bucket(lambda key, number: Reply(right(key), close=number % 40 == 39))) as server:
        client = client_of(server.port)
        for _ in range(3):
            assert all_right(asked(client))
        client.close()


@promise("S-150")
def test_keys_that_no_server_takes_are_refused_one_by_one(loop: Loop | None) -> None:
    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        first, long, last = asked(client, [OBJECTS[1], Shown("x" * 1025), OBJECTS[2]], loop=loop)
        assert isinstance(long, KeyTooLong)
        assert all_right([first, last], OBJECTS[1:3])
        with pytest.raises(InvalidRequest):
            client.head_many([OBJECTS[0]] * 1001, lambda *_: None)
        client.close()


@promise("S-150")
@pytest.mark.parametrize("objects", [OBJECTS, [Shown("")]])
def test_what_a_sink_raises_ends_it(objects: list[Shown], loop: Loop | None) -> None:
    """The pool loses no place by that, and the loop goes on."""

    def fails(_number: int, _answer: ObjectInfo | StoreError) -> None:
        raise LookupError

    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        for _ in range(20):
            with pytest.raises(LookupError):
                client.head_many(objects, fails, loop)
        assert all_right(asked(client, loop=loop))
        client.close()


@promise("S-150")
def test_through_tls(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with ScriptedServer(Bucket(), context) as server:
        tls = trust(certificate[0].read_text())
        client = client_by(
            lambda to: Transport(Route(to.host, to.port, True), tls=tls), f"https://127.0.0.1:{server.port}"
        )
        for _ in range(3):
            assert all_right(asked(client))
        client.close()


@promise("S-150")
def test_through_a_proxy() -> None:
    with ScriptedServer(Bucket()) as server:
        route = Route("127.0.0.1", 1, False, Proxy("127.0.0.1", server.port, "Basic x"))
        client = client_by(lambda _: Transport(route), "http://127.0.0.1:1")
        assert all_right(asked(client))
        client.close()
    assert all(request.startswith(b"HEAD http://127.0.0.1:1/data/f") for request in server.requests)
    assert all(b"proxy-authorization: Basic x" in request for request in server.requests)


BODY = bytes(range(256)) * 400
VERSIONS = [ObjectVersion(f"f{number}", ETag(f"e{number}"), len(BODY)) for number in range(60)]


def body_of(key: str, *headers: str, body: bytes = BODY) -> bytes:
    """The answer to a GET of a server that has the object."""
    return http(200, body, f'ETag: "e{key[1:]}"', *headers)


def got(
    store: S3Store, versions: list[ObjectVersion] = VERSIONS, *, loop: Loop | None = None
) -> dict[str, bytes | None]:
    """What came of each, which must be told once."""
    found: dict[str, bytes | None] = {}
    here = threading.current_thread()

    def take(version: ObjectVersion, answer: tuple[Body, ObjectInfo] | None) -> None:
        assert (threading.current_thread() is here) == (loop is None)
        assert version.key not in found
        found[version.key] = bytes(answer[0]) if answer is not None else None

    left = iter(versions)
    store.get_many(lambda: next(left, None), take, loop)
    return found


@promise("S-150")
def test_many_bodies_come_by_one_thread(loop: Loop | None) -> None:
    """Each of the version that was asked for."""
    with ScriptedServer(Bucket(lambda key, _number: body_of(key))) as server:
        client = client_of(server.port)
        assert got(client, loop=loop) == {version.key: BODY for version in VERSIONS}
        client.close()
    assert server.together == 1
    assert all(b'if-match: "e' in request for request in server.requests)


UNFIT: dict[str, Callable[[str], Reply | bytes]] = {
    "another version": lambda key: body_of(key).replace(b'ETag: "e', b'ETag: "o'),
    "shorter": lambda key: body_of(key, body=BODY[1:]),
    "longer": lambda key: body_of(key, body=BODY + b"x"),
    "an endless one": lambda key: body_of(key).replace(b"Content-Length: 102400", b"Content-Length: 999999999999"),
    "in chunks": lambda key: http(200, b"", f'ETag: "e{key[1:]}"', "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "a redirect": lambda _key: http(302, b"elsewhere", "Location: http://169.254.169.254/"),
    "412": lambda _key: http(412, b"<Error/>"),
    "503": lambda _key: http(503, b"<Error/>"),
    "half a body": lambda key: Reply(body_of(key)[:-50], close=True),
    "no HTTP": lambda _key: b"junk\r\n\r\n",
}


@promise("S-150")
@pytest.mark.parametrize("kind", UNFIT)
def test_what_is_no_body_of_the_version_is_left_to_who_asks_for_it(kind: str, loop: Loop | None) -> None:
    """The other bodies arrive all the same."""
    with ScriptedServer(Bucket(lambda key, _n: UNFIT[kind](key) if key == "f33" else body_of(key))) as server:
        client = client_of(server.port)
        assert got(client, loop=loop) == {version.key: None if version.key == "f33" else BODY for version in VERSIONS}
        client.close()


@promise("S-150")
def test_a_body_after_its_answer_is_the_version_s() -> None:
    """Interim answers, and bytes that come one after the other through TLS or not."""
    with ScriptedServer(Bucket(lambda key, _n: b"HTTP/1.1 103 Early Hints\r\n\r\n" + body_of(key))) as server:
        client = client_of(server.port)
        assert set(got(client).values()) == {BODY}
        client.close()


@promise("S-150")
def test_without_a_server_the_rest_is_not_asked_for(loop: Loop | None) -> None:
    """Nobody waits for these, so nothing is tried for long."""
    asked_for: list[ObjectVersion] = []
    left = iter(VERSIONS)
    by = set[threading.Thread]()

    def feed() -> ObjectVersion | None:
        by.add(threading.current_thread())
        version = next(left, None)
        if version is not None:
            asked_for.append(version)
        return version

    told: list[object] = []
    with reserved_port() as port:
        client = client_of(port, QUICK)
        with pytest.raises(Unreachable):
            client.get_many(feed, lambda _version, answer: told.append(answer), loop)
    assert told == [None] * len(asked_for)
    assert len(asked_for) < 10

    def take(_version: ObjectVersion, answer: object) -> None:
        by.add(threading.current_thread())
        told.append(answer)

    with ScriptedServer(lambda _head, _number: SILENCE) as server:
        client = client_of(server.port, QUICK)
        with pytest.raises(DeadlineExceeded):
            client.get_many(feed, take, loop)
        client.close()
    assert len(server.requests) < 20
    assert told == [None] * len(asked_for)
    assert len(by) == 1
    assert (threading.current_thread() in by) == (loop is None)


@promise("S-150")
def test_at_the_end_of_the_loop_what_is_on_its_way_is_given_up() -> None:
    """Nobody is left waiting, and who asks after the end is told so: what the loop calls is called by no other one."""
    told: list[object] = []
    left = iter(VERSIONS)

    def ask(client: S3Store, loop: Loop) -> None:
        with suppress(Unreachable):
            client.get_many(lambda: next(left, None), lambda _version, answer: told.append(answer), loop)
            told.append("no error")

    with ScriptedServer(lambda _head, _number: SILENCE) as server:
        client = client_of(server.port)
        with turning() as loop:
            asking = threading.Thread(target=ask, args=(client, loop))
            asking.start()
            while not server.requests:
                assert asking.is_alive()
                time.sleep(0.01)
        asking.join(PATIENCE_S)
        assert not asking.is_alive()
        client.close()
    assert told
    assert set(told) == {None}
    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        with pytest.raises(Unreachable):
            client.get_many(lambda: VERSIONS[0], lambda *_: told.append("a body"), loop)
        for store in (client, RetryingStore(client)):
            with pytest.raises(MountFailed):
                store.head_many(OBJECTS, lambda *_: told.append("an answer"), loop)
        assert set(told) == {None}
        assert all_right(asked(client))
        client.close()


def test_what_the_asker_raises_comes_back_to_him(loop: Loop | None) -> None:
    """The loop goes on."""

    def take(_version: ObjectVersion, _answer: object) -> None:
        raise ZeroDivisionError

    with ScriptedServer(Bucket(lambda key, _number: body_of(key))) as server:
        client = client_of(server.port)
        with pytest.raises(ZeroDivisionError):
            client.get_many(partial(next, iter(VERSIONS), None), take, loop)
        assert set(got(client, loop=loop).values()) == {BODY}
        client.close()
