"""obstore beside the exact client: which keys it may have, and who answers when it fails."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.api.mountspec import S3Location, StaticCredentials
from datastore.errors import NotFound, PreconditionFailed, ServerFault
from datastore.fuse.store.base import ByteRange, Capabilities, ETag
from datastore.fuse.store.limits import key_bytes
from datastore.fuse.store.s3 import open_adapter
from datastore.fuse.store.s3.adapter import S3Store
from datastore.fuse.store.s3.bulk import Bulk, is_ordinary
from datastore.fuse.store.s3.caller import Caller
from datastore.fuse.store.s3.connections import Route
from datastore.fuse.store.s3.credentials import CredentialSource, StaticSource
from datastore.fuse.store.s3.endpoint import resolve
from datastore.fuse.store.s3.sigv4 import SigningKeys
from datastore.fuse.store.s3.transport import Transport
from datastore.secret import Secret
from tests.authority import HERE, Authority
from tests.unit.store.scripted import ScriptedServer, http

KEYS = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("secret"))
FACTS = ('ETag: "e"', "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT")


def store_of(server: ScriptedServer, credentials: CredentialSource | None = None) -> S3Store:
    source = credentials or StaticSource(KEYS)
    endpoint = resolve(S3Location(bucket="data", endpoint=f"http://127.0.0.1:{server.port}"))
    caller = Caller(endpoint, source, lambda to: Transport(Route(to.host, to.port, False)))
    return S3Store(caller, Bulk(source), Capabilities())


@given(st.binary(min_size=1, max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_only_keys_that_obstore_sends_as_they_are_go_through_it(key: str) -> None:
    segments = key_bytes(key).split(b"/")

    if is_ordinary(key):
        key.encode()
        assert all(segment not in {b"", b".", b".."} for segment in segments)


@pytest.mark.parametrize("key", ["dir/", "/a", "a//b", ".", "..", "a/./b", "\udcff", "a\x01", "a\nb", "a\x7f"])
def test_odd_keys_stay_with_the_exact_client(key: str) -> None:
    assert not is_ordinary(key)


@pytest.mark.parametrize("key", ["a", "a/b", "a b+%20", "é/漢/😀", ".hidden", "a..b", "q?#&=;:\\*~"])
def test_ordinary_keys_go_through_obstore(key: str) -> None:
    assert is_ordinary(key)


@pytest.mark.parametrize(("stop", "exact"), [(5, True), (8 << 20, True)])
def test_a_range_comes_with_the_facts_of_the_whole_whoever_asks(stop: int, exact: bool) -> None:
    with ScriptedServer([http(206, b"234", "Content-Range: bytes 2-4/5", *FACTS)]) as server:
        store = store_of(server)
        body, info = store.get("k", byte_range=ByteRange(2, stop), if_match=ETag("e"))
        store.close()

    assert (bytes(body), info.size, info.etag, info.mtime_ns) == (b"234", 5, "e", 1_767_225_600_000_000_000)
    assert b'if-match: "e"' in server.requests[0].lower()
    assert (b"user-agent" not in server.requests[0].lower()) == exact


def test_another_version_is_refused() -> None:
    with ScriptedServer([http(412)]) as server:
        store = store_of(server)
        with pytest.raises(PreconditionFailed):
            store.get("k", if_match=ETag("x"))
        store.close()

    assert len(server.requests) == 1


def test_the_exact_client_says_why() -> None:
    missing = http(404, b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>")
    broken = http(500, b"<Error><Code>InternalError</Code><Message>disk</Message></Error>")
    with ScriptedServer([missing, missing, broken, broken]) as server:
        store = store_of(server)
        with pytest.raises(NotFound, match="gone"):
            store.get("k")
        with pytest.raises(ServerFault, match="disk"):
            store.get("k")
        store.close()

    assert len(server.requests) == 4


def test_obstore_is_given_up_when_only_it_fails() -> None:
    with ScriptedServer([http(500), http(200, b"exact", *FACTS)] * 16 + [http(200, b"exact", *FACTS)] * 2) as server:
        store = store_of(server)
        bodies = {bytes(store.get("k")[0]) for _ in range(18)}
        store.close()

    assert bodies == {b"exact"}
    assert len(server.requests) == 34


def test_over_tls_everything_goes_through_the_exact_client(authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    identity = authority.issue("adapter", HERE)
    context.load_cert_chain(identity.certificate, identity.key)
    with ScriptedServer([http(200, b"exact", *FACTS)] * 2, context) as server:
        bundle = identity.authority.read_text()
        where = f"https://127.0.0.1:{server.port}"
        store = open_adapter(S3Location(bucket="data", endpoint=where, credentials=KEYS, ca_bundle=bundle))
        bodies = [bytes(store.get(key)[0]) for key in ("ordinary", "odd//key")]
        store.close()

    assert bodies == [b"exact"] * 2
    assert server.connections == 1
    assert not any(b"user-agent" in request.lower() for request in server.requests)


class Renewing:
    """A source whose keys are new each time they are asked for."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = iter(range(1, 100))

    def keys(self) -> SigningKeys:
        return SigningKeys(f"AKID{next(self._numbers)}", Secret("s"), Secret("token"))

    def expires(self) -> datetime | None:
        return datetime.now(UTC) - timedelta(seconds=1)

    def refused(self, keys: SigningKeys) -> bool:
        return False


def test_renewed_keys_reach_obstore() -> None:
    with ScriptedServer([http(200, b"x", *FACTS)] * 2) as server:
        store = store_of(server, Renewing())
        store.get("k")
        store.get("k")
        store.close()

    assert b"Credential=AKID1/" in server.requests[0]
    assert b"Credential=AKID2/" in server.requests[1]
    assert b"x-amz-security-token: token" in server.requests[1].lower()
