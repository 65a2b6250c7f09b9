"""Many HEADs or GETs side by side: as many answers as questions, each its own, whatever the server does."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidKey,
    InvalidRequest,
    KeyTooLong,
    NotFound,
    ServerFault,
    StoreError,
    Throttled,
    Unreachable,
)
from datastore.fuse.loop import Loop, now, running
from datastore.fuse.store.base import Body, Capabilities, ETag, GetFeed, ObjectInfo, ObjectStore, ObjectVersion
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.retrying import Retrier, RetryingStore
from datastore.fuse.store.s3.caller import Caller
from datastore.fuse.store.s3.client import S3Store
from datastore.fuse.store.s3.credentials import StaticSource
from datastore.fuse.store.s3.dialing import Route
from datastore.fuse.store.s3.endpoint import Endpoint
from datastore.fuse.store.s3.endpoint import resolve as resolved
from datastore.fuse.store.s3.many import Width
from datastore.fuse.store.s3.transport import Transport, TransportLimits
from datastore.secret import Secret
from tests.driving import resolve, the_loop
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise
from tests.servers import reserved_port
from tests.unit.store.scripted import HANG_UP, SILENCE, Reply, ScriptedServer, http

OLD = StaticCredentials(access_key_id="OLD", secret_access_key=Secret("secret"))
PATIENT = TransportLimits(connections=8, idle_s=PATIENCE_S, call_s=2 * PATIENCE_S)
QUICK = TransportLimits(connections=64, connect_s=2.0, idle_s=0.3, call_s=1.0)
KEYS = [f"f{number}" for number in range(200)]


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


class Renewed(StaticSource):
    """Keys that others take the place of once they were refused."""

    def refused(self, keys: StaticCredentials) -> bool:
        self.replace(replace(OLD, access_key_id="NEW"))
        return super().refused(keys)


Connect = Callable[..., S3Store]


@pytest.fixture
def client_of() -> Iterator[Connect]:
    """Makes stores of a port; no place of their pools is lost in the end."""
    made: list[tuple[S3Store, Transport]] = []

    def make(port: int, limits: TransportLimits = PATIENT, keys: StaticSource | None = None) -> S3Store:
        def connect(to: Endpoint) -> Transport:
            return Transport(Route(to.host, to.port, False), limits=limits)

        location = S3Location(bucket="data", endpoint=f"http://127.0.0.1:{port}")
        caller = Caller(resolved(location), keys or StaticSource(OLD), connect)
        made.append((S3Store(caller, Capabilities()), caller.place[1]))
        return made[-1][0]

    yield make
    for store, transport in made:
        eventually(lambda at=transport: at._free == at.limits.connections)  # type: ignore[misc]
        the_loop().call(store.close)


def asked(store: ObjectStore, keys: list[str] = KEYS) -> list[ObjectInfo | StoreError]:
    """What is said of each, which must be said once, on the loop."""
    got: dict[int, ObjectInfo | StoreError] = {}

    def take(number: int, answer: ObjectInfo | StoreError) -> None:
        assert running() is the_loop()
        assert number not in got
        got[number] = answer

    resolve(store.head_many(keys, take))
    return [got[number] for number in range(len(keys))]


def all_right(answers: list[ObjectInfo | StoreError], keys: list[str] = KEYS) -> bool:
    """Each is of its own object, in all that it says."""
    return all(
        isinstance(info, ObjectInfo)
        and (info.key, info.etag, info.size, info.metadata["number"]) == (key, f"e{key[1:]}", int(key[1:]), key[1:])
        for info, key in zip(answers, keys, strict=True)
    )


@promise("S-150")
def test_each_is_asked_once_and_alone_on_its_connection(client_of: Connect) -> None:
    """An answer to a HEAD does not say of which object it is."""
    bucket = Bucket()
    with ScriptedServer(bucket) as server:
        client = client_of(server.port)
        assert all_right(asked(client))
        assert all_right(asked(client))
    assert set(bucket.asked.values()) == {2}
    assert server.together == 1


@promise("S-12")
def test_a_server_that_takes_its_time_is_asked_on_many_connections(client_of: Connect) -> None:
    """Up to 64 HEADs are under way when a directory is walked."""
    together = threading.Barrier(64, timeout=PATIENCE_S)

    def odd(key: str, _number: int) -> None:
        if key == "f0":
            time.sleep(0.2)  # what the first one takes tells how many are asked for side by side
        else:
            together.wait()

    with ScriptedServer(Bucket(odd)) as server:
        assert all_right(asked(client_of(server.port, replace(PATIENT, connections=64)), KEYS[:65]), KEYS[:65])
    assert server.connections == 64


@promise("S-150")
def test_a_server_that_is_near_and_quick_is_asked_on_few() -> None:
    """Each connection more costs both sides a switch."""
    width = Width(64)
    width.paced(0.0008)
    assert width.connections == 2
    width.paced(20.0)
    assert width.connections <= 3, "what took long once was in the way of something else"
    for _ in range(100):
        width.paced(0.02)
    assert 30 <= width.connections <= 40
    for _ in range(100):
        width.paced(1.0)
    assert width.connections == 64


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
def test_one_odd_answer_spoils_no_other(kind: str, client_of: Connect) -> None:
    """What comes after an answer and belongs to none is not taken for the next one."""
    odd = iter([SPOILT[kind]("f150")])
    with ScriptedServer(Bucket(lambda key, _number: next(odd, None) if key == "f150" else None)) as server:
        client = client_of(server.port, replace(PATIENT, idle_s=1.0) if kind == "nothing" else PATIENT)
        retrying = RetryingStore(client, Retrier(first_delay_s=0.001))
        answers = asked(retrying)
        if kind in {"400", "404"}:
            assert isinstance(answers[150], NotFound if kind == "404" else InvalidRequest)
            answers[150:151] = asked(retrying, KEYS[150:151])
        assert all_right(answers)
        assert all_right(asked(retrying))


@promise("S-150")
@pytest.mark.parametrize(
    "odd",
    [
        lambda key, number: right(key) * 2 if number == 3 else None,
        lambda key, number: Reply(right(key), close=number % 40 == 39),
    ],
)
def test_answers_that_slip_by_one_are_not_believed(
    odd: Callable[[str, int], Reply | bytes | None], client_of: Connect
) -> None:
    """A server that answers twice to one request: every later answer on the connection is a neighbour's. Or one that
    gives a connection up: it is replaced."""
    with ScriptedServer(Bucket(odd)) as server:
        client = client_of(server.port)
        for _ in range(3):
            assert all_right(asked(client))


@promise("S-150")
@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (403, AccessDenied), (500, ServerFault), (429, Throttled)]
)
def test_refusals_are_those_of_a_single_head(status: int, kind: type[StoreError], client_of: Connect) -> None:
    """Of one key, and of all."""
    with ScriptedServer(Bucket(lambda key, _number: http(status) if key == "f150" else None)) as server:
        answers = asked(client_of(server.port))
    assert type(answers.pop(150)) is kind
    assert all_right(answers, [key for key in KEYS if key != "f150"])
    bucket = Bucket(lambda _key, _number: http(status))
    with ScriptedServer(bucket) as server:
        answers = asked(client_of(server.port))
    assert {type(answer) for answer in answers} == {kind}
    if status in {429, 500}:
        assert bucket.asked.total() < 20, "who is told to slow down does"
    else:
        assert bucket.asked.total() <= len(KEYS) + 1
        assert [getattr(error, "key", "") for error in answers] == KEYS


@promise("S-150")
@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [(b"/eu-west-3/", http(400, b"", "x-amz-bucket-region: eu-west-3")), (b"Credential=NEW/", http(403))],
)
def test_each_goes_where_the_bucket_is_with_the_present_keys(wanted: bytes, refusal: bytes, client_of: Connect) -> None:
    """As a single HEAD finds them."""
    bucket = Bucket()
    with ScriptedServer(lambda head, number: bucket(head, number) if wanted in head else refusal) as server:
        assert all_right(asked(client_of(server.port, keys=Renewed(OLD))))
    assert set(bucket.asked.values()) == {1}


@promise("S-150", "S-66")
def test_what_fails_for_a_while_is_asked_again_and_nothing_else(client_of: Connect) -> None:
    """One budget for all."""
    failures = Counter({f"f{number}": 2 for number in range(0, 200, 7)})

    def odd(key: str, _number: int) -> bytes | None:
        failures[key] -= 1
        return http(500) if failures[key] >= 0 else None

    bucket = Bucket(odd)
    with ScriptedServer(bucket) as server:
        store = RetryingStore(client_of(server.port), Retrier(first_delay_s=0.001))
        assert all_right(asked(store))
    told = store.metrics.snapshot()
    assert set(told) == {"head"}
    assert told["head"]["calls"] == len(KEYS)
    assert sum(told["head"]["retries"].values()) <= 4
    assert bucket.asked["f199"] == 1


@promise("S-150", "S-64")
def test_an_outage_is_told_of_each_within_the_budget(client_of: Connect) -> None:
    """Nobody listens, or nobody answers."""
    with reserved_port() as port:
        retrier = Retrier(first_delay_s=0.001, budget_s=0.05)
        answers = asked(RetryingStore(client_of(port, QUICK), retrier))
    assert {type(answer) for answer in answers} == {Unreachable}
    with ScriptedServer(lambda _head, _number: SILENCE) as server:
        answers = asked(client_of(server.port, QUICK))
    assert {type(answer) for answer in answers} == {DeadlineExceeded}
    assert len(server.requests) < 10, "silence is no reason for more connections, nor to ask for the others"


@promise("S-150")
def test_keys_that_no_server_takes_are_refused_one_by_one(client_of: Connect) -> None:
    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        first, long, none, last = asked(client, [KEYS[1], "x" * 1025, "", KEYS[2]])
        assert isinstance(long, KeyTooLong)
        assert isinstance(none, InvalidKey)
        assert all_right([first, last], KEYS[1:3])
        for key in ("x" * 1025, ""):
            assert got(client, partial(next, iter([ObjectVersion(key, ETag("e"), 1)]), None)) == {key: None}
    assert len(server.requests) == 2


BODY = bytes(range(256)) * 400
VERSIONS = [ObjectVersion(f"f{number}", ETag(f"e{number}"), len(BODY)) for number in range(60)]


def body_of(key: str, *headers: str, body: bytes = BODY) -> bytes:
    """The answer to a GET of a server that has the object."""
    return http(200, body, f'ETag: "e{key[1:]}"', *headers)


def got(store: ObjectStore, feed: GetFeed | None = None) -> dict[str, bytes | None]:
    """What came of each, which must be told once, on the loop."""
    found: dict[str, bytes | None] = {}

    def take(version: ObjectVersion, answer: tuple[Body, ObjectInfo] | None) -> None:
        assert running() is the_loop()
        assert version.key not in found
        found[version.key] = bytes(answer[0]) if answer is not None else None

    resolve(store.get_many(feed or partial(next, iter(VERSIONS), None), take))
    return found


@promise("S-150")
@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
def test_many_bodies_come_side_by_side(before: bytes, client_of: Connect) -> None:
    """Each of the version that was asked for."""
    with ScriptedServer(Bucket(lambda key, _number: before + body_of(key))) as server:
        assert got(client_of(server.port)) == {version.key: BODY for version in VERSIONS}
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
def test_what_is_no_body_of_the_version_is_left_to_who_asks_for_it(kind: str, client_of: Connect) -> None:
    """The other bodies arrive all the same."""
    with ScriptedServer(Bucket(lambda key, _n: UNFIT[kind](key) if key == "f33" else body_of(key))) as server:
        expected = {version.key: None if version.key == "f33" else BODY for version in VERSIONS}
        assert got(client_of(server.port)) == expected


@promise("S-150")
def test_a_server_that_was_busy_for_a_while_gives_the_rest(client_of: Connect) -> None:
    busy = iter([http(503)] * 20)
    with ScriptedServer(Bucket(lambda key, _number: next(busy, None) or body_of(key))) as server:
        assert sum(body == BODY for body in got(client_of(server.port)).values()) == len(VERSIONS) - 20


@promise("S-150")
@pytest.mark.parametrize("error", [Unreachable, DeadlineExceeded])
def test_without_a_server_the_rest_is_not_asked_for(error: type[StoreError], client_of: Connect) -> None:
    """Nobody waits for these, so nothing is tried for long."""
    asked_for = itertools.count()
    with ScriptedServer(lambda _head, _number: SILENCE) as server, reserved_port() as port:
        client = client_of(port if error is Unreachable else server.port, QUICK)
        with pytest.raises(error):
            got(client, lambda: VERSIONS[next(asked_for)])
    assert next(asked_for) < 10


def test_what_nobody_thought_of_ends_it(client_of: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever."""
    with ScriptedServer(Bucket()) as server:
        client = client_of(server.port)
        monkeypatch.setattr(Loop, "aside", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="thread"):
            asked(client)
        monkeypatch.undo()
        assert all_right(asked(client))


@promise("S-150")
@pytest.mark.parametrize("many", ["head", "get", "feed"])
def test_what_the_asker_raises_comes_back_to_him(many: str, client_of: Connect) -> None:
    """The loop goes on."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    with ScriptedServer(Bucket(lambda key, _number: body_of(key))) as server:
        client = client_of(server.port)
        asking = {
            "head": lambda: client.head_many(["", *KEYS], fails),
            "get": lambda: client.get_many(partial(next, iter(VERSIONS), None), fails),
            "feed": lambda: client.get_many(fails, lambda *_: None),
        }
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                resolve(asking[many]())
        assert set(got(client).values()) == {BODY}


def test_who_has_no_loop_gets_one_for_it(client_of: Connect) -> None:
    """And no connection stays open behind him."""
    heads: dict[int, ObjectInfo | StoreError] = {}
    with ScriptedServer(Bucket()) as server:
        store = BlockingStore(client_of(server.port))
        with pytest.raises(AssertionError, match="loop"):
            now(store.inner.head_many(KEYS, heads.__setitem__))
        store.head_many(KEYS, heads.__setitem__)
        store.get_many(lambda: None, lambda *_: None)
        assert all_right([heads[number] for number in range(len(KEYS))])
        eventually(lambda: server.opened == 0)
