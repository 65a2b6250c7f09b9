"""Many HEADs by one thread: as many answers as questions, each its own, whatever the server does."""

from __future__ import annotations

import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from datastore.api.mountspec import S3Location, StaticCredentials
from datastore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    KeyTooLong,
    NotFound,
    ServerFault,
    StoreError,
    Throttled,
    Unreachable,
)
from datastore.fuse.store.base import Capabilities, ETag, ObjectInfo, Shown
from datastore.fuse.store.retrying import RetryingStore
from datastore.fuse.store.s3 import pipelining
from datastore.fuse.store.s3.caller import Caller
from datastore.fuse.store.s3.client import ExactClient
from datastore.fuse.store.s3.connections import Connections, Proxy, Route, TransportLimits, trust
from datastore.fuse.store.s3.credentials import StaticSource
from datastore.fuse.store.s3.endpoint import Endpoint, resolve
from datastore.fuse.store.s3.transport import Transport
from datastore.retry import Retrier, RetryPolicy
from datastore.secret import Secret
from tests.servers import free_port
from tests.unit.store.scripted import HANG_UP, SILENCE, Reply, ScriptedServer, http

KEYS = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("secret"))
PATIENT = TransportLimits(connections=8)
QUICK = TransportLimits(connections=8, connect_s=2.0, idle_s=0.3, call_s=1.0)
OBJECTS = [Shown(f"f{number}", ETag(f"e{number}")) for number in range(200)]


@pytest.fixture(autouse=True)
def on_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are sent together does not depend on how fast these servers answer."""
    monkeypatch.setattr(pipelining, "_WINDOW_S", 1000.0)


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


def client_of(port: int, limits: TransportLimits = PATIENT) -> ExactClient:
    return client_by(lambda to: Transport(Route(to.host, to.port, False), limits=limits), f"http://127.0.0.1:{port}")


def client_by(connect: Callable[[Endpoint], Transport], endpoint: str) -> ExactClient:
    location = S3Location(bucket="data", endpoint=endpoint)
    return ExactClient(Caller(resolve(location), StaticSource(KEYS), connect), Capabilities())


def asked(store: ExactClient | RetryingStore, objects: list[Shown] = OBJECTS) -> list[ObjectInfo | StoreError]:
    """What is said of each, which must be said once."""
    got: dict[int, ObjectInfo | StoreError] = {}

    def take(number: int, answer: ObjectInfo | StoreError) -> None:
        assert number not in got
        got[number] = answer

    store.head_many(objects, take)
    return [got[number] for number in range(len(objects))]


def all_right(answers: list[ObjectInfo | StoreError], objects: list[Shown] = OBJECTS) -> bool:
    """Each is of its own object, in all that it says."""
    return all(
        isinstance(info, ObjectInfo)
        and (info.key, info.etag, info.size, info.metadata["number"])
        == (shown.key, f"e{shown.key[1:]}", int(shown.key[1:]), shown.key[1:])
        for info, shown in zip(answers, objects, strict=True)
    )


def test_many_are_sent_together_once_a_few_were_answered_rightly() -> None:
    """S-150 each is asked once."""
    bucket = Bucket()
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        assert all_right(asked(client))
        assert all_right(asked(client))
        client.close()
    assert set(bucket.asked.values()) == {2}
    assert server.together > 4


def test_without_a_listed_version_one_is_sent_at_a_time() -> None:
    """S-150 an answer that could not be told from its neighbour's is never waited for beside others."""
    bucket = Bucket()
    objects = [Shown(shown.key) for shown in OBJECTS]
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        assert all_right(asked(client), objects)
        assert all_right(asked(client, objects), objects)
        seen = server.together
        client.close()
    assert seen > 1
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        assert all_right(asked(client, objects), objects)
        assert server.together == 1
        client.close()


def test_a_server_that_takes_its_time_is_asked_on_many_connections() -> None:
    """S-12 up to 64 HEADs are under way when a directory is walked."""
    together = threading.Barrier(64, timeout=20)

    def odd(key: str, _number: int) -> None:
        if key == "f0":
            time.sleep(0.2)  # what the first one takes tells how many are asked for side by side
        else:
            together.wait()

    objects = [Shown("f0"), *(Shown(f"f{number}") for number in range(1, 65))]
    with ScriptedServer(Bucket(odd)) as server:
        client = client_of(server.port, TransportLimits())
        assert all_right(asked(client, objects[:1]), objects[:1])
        assert all_right(asked(client, objects[1:]), objects[1:])
        client.close()
    assert server.connections == 64


def known(rtt_s: float, each_s: float, *, together: bool) -> pipelining.Pipelining:
    """What is thought of a server so far away, that takes so long for each. together: it sends all answers at once."""
    found = pipelining.Pipelining(Connections(Route("host", 80, False)))
    for count in (1, 2, 4, 8, 16, 32, 32, 32):
        all_s = rtt_s + count * each_s
        found.paced(count, all_s if together else rtt_s + each_s, all_s)
        found.went_well(found.depth)
    return found


@pytest.mark.parametrize("together", [False, True])
def test_the_way_and_the_time_of_the_server_are_told_apart(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-150 far and fast: much at once on a few connections; slow for each: little at once on many."""
    monkeypatch.undo()
    near = known(0.0002, 0.00015, together=together)
    assert (near.depth, near.lanes(near.depth)) == (32, 2)
    far = known(0.02, 0.0002, together=together)
    assert far.depth == 32
    assert 8 <= far.lanes(far.depth) <= 16
    assert far.lanes(1) == 64
    slow = known(0.001, 0.01, together=together)
    assert slow.depth <= 2
    assert slow.lanes(slow.depth) >= 20
    both = known(0.03, 0.01, together=together)
    assert both.depth <= 8
    assert both.lanes(both.depth) == 64


def test_a_way_that_grew_longer_is_no_slower_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-150 also one that is only asked for many."""
    monkeypatch.undo()
    found = known(0.001, 0.0002, together=True)
    for _ in range(200):
        depth = found.trial
        all_s = 0.05 + depth * 0.0002
        found.paced(depth, all_s, all_s)
        found.went_well(depth)
    assert found.depth == 32


SPOILT: dict[str, Callable[[str], Reply | bytes]] = {
    "the answer of another": lambda _key: right("f7"),
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


@pytest.mark.parametrize("kind", SPOILT)
def test_one_odd_answer_spoils_no_other(kind: str) -> None:
    """S-150 what came with it is asked for again, one at a time; nothing is sent together after what is no mishap."""
    spoilt: list[str] = []

    def odd(key: str, number: int) -> Reply | bytes | None:
        if key == "f150" and not spoilt:
            spoilt.append(key)
            return SPOILT[kind](key)
        return None

    with ScriptedServer(Bucket(odd)) as server:
        client = client_of(server.port, TransportLimits(connections=8, idle_s=1.0) if kind == "nothing" else PATIENT)
        retrying = RetryingStore(client, Retrier(RetryPolicy(first_delay_s=0.001)))
        assert all_right(asked(retrying))
        server.together = 0
        assert all_right(asked(retrying))
        assert server.together == 1 or kind == "the end"
        client.close()


def test_answers_that_slip_by_one_are_not_believed() -> None:
    """S-150 a server that answers twice to one request: every later answer on the connection is a neighbour's."""
    bucket = Bucket(lambda key, number: right(key) + (right(key) if number == 3 else b""))
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        for _ in range(3):
            assert all_right(asked(client))
        client.close()


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (403, AccessDenied), (500, ServerFault), (429, Throttled)]
)
def test_refusals_are_those_of_a_single_head(status: int, kind: type[StoreError]) -> None:
    """S-150 of one key, and of all."""
    with ScriptedServer(Bucket(lambda key, _number: http(status) if key == "f150" else None)) as server:
        client = client_of(server.port)
        answers = asked(client)
        client.close()
    assert type(answers.pop(150)) is kind
    assert all_right(answers, [shown for shown in OBJECTS if shown.key != "f150"])

    bucket = Bucket(lambda _key, _number: http(status))
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        answers = asked(client)
        client.close()
    assert {type(answer) for answer in answers} == {kind}
    assert all(
        isinstance(error, StoreError) and error.key == shown.key for error, shown in zip(answers, OBJECTS, strict=True)
    )
    assert bucket.asked.total() <= 201
    if status in {429, 500}:
        assert bucket.asked.total() < 60, "who is told to slow down does"


def test_the_bucket_is_followed_to_its_region() -> None:
    """S-150 as by a single HEAD, and the others are asked for there."""

    def rule(head: bytes, number: int) -> Reply | bytes:
        if b"/eu-west-3/" in head:
            return bucket(head, number)
        return http(400, b"", "x-amz-bucket-region: eu-west-3")

    bucket = Bucket()
    with ScriptedServer(rule) as server:
        client = client_of(server.port)
        assert all_right(asked(client))
        client.close()


def test_what_fails_for_a_while_is_asked_again_and_nothing_else() -> None:
    """S-150 S-66 one budget for all."""
    failures = Counter({f"f{number}": 2 for number in range(0, 200, 7)})

    def odd(key: str, _number: int) -> bytes | None:
        failures[key] -= 1
        return http(500) if failures[key] >= 0 else None

    bucket = Bucket(odd)
    told: list[str] = []
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        retrier = Retrier(RetryPolicy(first_delay_s=0.001))
        assert all_right(asked(RetryingStore(client, retrier, lambda method, _error: told.append(method))))
        client.close()
    assert set(told) == {"head"}
    assert len(told) <= 4
    assert bucket.asked["f199"] <= 2  # 2: it was sent together with one that failed


def test_an_outage_is_told_of_each_within_the_budget() -> None:
    """S-150 S-64 nobody listens, or nobody answers."""
    client = client_of(free_port(), QUICK)
    answers = asked(RetryingStore(client, Retrier(RetryPolicy(first_delay_s=0.001, budget_s=0.05))))
    assert {type(answer) for answer in answers} == {Unreachable}

    with ScriptedServer(lambda _head, _number: SILENCE) as server:
        client = client_of(server.port, QUICK)
        began = time.monotonic()
        answers = asked(client)
        client.close()
    assert {type(answer) for answer in answers} == {DeadlineExceeded}
    assert time.monotonic() - began < 10


def test_connections_that_the_server_gave_up_are_replaced() -> None:
    """S-150."""
    with ScriptedServer(Bucket(lambda key, number: Reply(right(key), close=number % 40 == 39))) as server:
        client = client_of(server.port)
        for _ in range(3):
            assert all_right(asked(client))
        client.close()


def test_keys_that_no_server_takes_are_refused_one_by_one() -> None:
    """S-150."""
    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        first, long, last = asked(client, [OBJECTS[1], Shown("x" * 1025), OBJECTS[2]])
        assert isinstance(long, KeyTooLong)
        assert all_right([first, last], OBJECTS[1:3])
        with pytest.raises(InvalidRequest):
            client.head_many([OBJECTS[0]] * 1001, lambda *_: None)
        client.close()


def test_what_a_sink_raises_ends_it() -> None:
    """S-150 and no place of the pool is lost."""

    def fails(_number: int, _answer: ObjectInfo | StoreError) -> None:
        raise LookupError

    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        for _ in range(20):
            with pytest.raises(LookupError):
                client.head_many(OBJECTS, fails)
        assert all_right(asked(client))
        client.close()


def test_through_tls(certificate: tuple[Path, Path]) -> None:
    """S-150."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with ScriptedServer(Bucket(), context) as server:
        tls = trust(certificate[0].read_text())
        client = client_by(
            lambda to: Transport(Route(to.host, to.port, True), tls=tls), f"https://127.0.0.1:{server.port}"
        )
        for _ in range(3):
            assert all_right(asked(client))
        assert server.together > 1
        client.close()


def test_through_a_proxy() -> None:
    """S-150."""
    with ScriptedServer(Bucket()) as server:
        route = Route("127.0.0.1", 1, False, Proxy("127.0.0.1", server.port, "http://proxy", "Basic x"))
        client = client_by(lambda _: Transport(route), "http://127.0.0.1:1")
        assert all_right(asked(client))
        client.close()
    assert all(request.startswith(b"HEAD http://127.0.0.1:1/data/f") for request in server.requests)
    assert all(b"proxy-authorization: Basic x" in request for request in server.requests)
