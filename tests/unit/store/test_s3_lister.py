"""Listings with metadata against scripted answers: who is asked for them, and what becomes of a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import AccessDenied, ServerFault, StoreError
from datastore.fuse.store.base import Capabilities
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.packed import packed, unpacked
from datastore.fuse.store.s3 import xml
from datastore.secret import Secret
from tests.adapter import open_adapter
from tests.promises import promise
from tests.unit.store.scripted import ScriptedServer, http

MINIO = "Server: MinIO"
PLAIN = b"<ListBucketResult><Contents><Key>a</Key><Size>1</Size><ETag>e</ETag></Contents></ListBucketResult>"
ITEMS = (b"<X-Amz-Meta-Mode>33188</X-Amz-Meta-Mode>", b"<content-type>text/plain</content-type>", b"<A></A>")


def shown(*items: bytes) -> bytes:
    return PLAIN.replace(b"</Contents>", b"<UserMetadata>" + b"".join(items) + b"</UserMetadata></Contents>")


def said(*items: bytes) -> str | None:
    (listed,) = xml.parse_list(shown(*items)).objects
    return listed.said


@contextmanager
def scripted(*answers: bytes, shows: bool = False) -> Iterator[tuple[BlockingStore, ScriptedServer]]:
    """A store of a server that gives these answers. shows: it is known to show metadata."""
    keys = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("secret"))
    with ScriptedServer(answers) as server:
        location = S3Location(bucket="data", endpoint=f"http://127.0.0.1:{server.port}", credentials=keys)
        known = Capabilities(listed_metadata=shows)
        with closing(BlockingStore(open_adapter(location, capabilities=known, list_metadata=True))) as store:
            yield store, server


def asked(server: ScriptedServer) -> list[bool]:
    """Of each request whether it asked for metadata."""
    return [b"metadata=true" in request.split(b"\r\n", 1)[0] for request in server.requests]


@promise("S-129")
def test_metadata_is_read_from_a_listing() -> None:
    assert said(*ITEMS) == packed({"mode": "33188"}, "text/plain")
    assert unpacked(said(*ITEMS) or "") == ({"mode": "33188"}, "text/plain")


@promise("S-129")
@pytest.mark.parametrize(
    "item",
    [
        "<X-Amz-Meta-Who>gr\u00fc\u00dfe</X-Amz-Meta-Who>".encode(),
        b"<X-Amz-Meta-Tab>a&#x9;b</X-Amz-Meta-Tab>",
        b"<X-Amz-Meta-Line>a&#xA;b</X-Amz-Meta-Line>",
        b"<X-Amz-Meta-Blank> a</X-Amz-Meta-Blank>",
        b"<x-amz-meta-mode>1</x-amz-meta-mode>",
    ],
)
def test_what_a_head_may_show_otherwise_is_not_taken_from_a_listing(item: bytes) -> None:
    assert said(*ITEMS, item) is None


@promise("S-129")
def test_nothing_is_made_up_of_an_object_that_may_not_be_read() -> None:
    """MinIO leaves the element out; an object without metadata has its content type in it."""
    (listed,) = xml.parse_list(PLAIN).objects
    assert listed.said is None
    assert said(ITEMS[0]) is None
    assert said(ITEMS[1]) == packed({}, "text/plain")


@promise("S-130")
def test_a_page_is_the_same_with_and_without_metadata_but_not_with_another_time() -> None:
    """MinIO shows the metadata of an object in another order each time."""
    more = b"</UserMetadata><UserTags>a=b</UserTags><Internal><K>1</K><M>0</M></Internal>"
    pages = [shown(*ITEMS), shown(*reversed(ITEMS)), shown(*ITEMS).replace(b"</UserMetadata>", more), PLAIN]
    assert len({xml.list_digest(each) for each in pages}) == 1
    timed = PLAIN.replace(b"<Key>", b"<LastModified>2026-11-21T22:28:30.486Z</LastModified><Key>")
    assert len({xml.list_digest(each) for each in (PLAIN, timed, timed.replace(b"486", b"487"))}) == 3


@promise("S-130")
def test_a_known_page_is_asked_for_plainly_and_with_metadata_when_it_is_another() -> None:
    changed = shown(*ITEMS).replace(b"<Size>1<", b"<Size>2<")
    plain = PLAIN.replace(b"<Size>1<", b"<Size>2<")
    answers = (shown(*ITEMS), PLAIN, plain, changed)
    with scripted(*[http(200, each, MINIO) for each in answers], shows=True) as (store, server):
        known = store.list_page("").digest
        assert store.list_page("", unless=known).objects == ()
        (listed,) = store.list_page("", unless=known).objects
        assert (listed.size, listed.said) == (2, packed({"mode": "33188"}, "text/plain"))
        assert asked(server) == [True, False, False, True]


@promise("S-129")
def test_the_first_listing_tells_whether_metadata_can_be_asked_for() -> None:
    with scripted(http(200, PLAIN, MINIO), http(200, shown(*ITEMS), MINIO)) as (store, server):
        assert [one.said for one in store.list_page("").objects] == [None]
        assert store.capabilities.listed_metadata
        assert [one.said for one in store.list_page("").objects] == [packed({"mode": "33188"}, "text/plain")]
        assert asked(server) == [False, True]


@promise("S-129")
@pytest.mark.parametrize("header", ["Server: AmazonS3", "Server: VERSITYGW", "X-Nothing: MinIO"])
def test_no_other_server_is_asked_for_metadata(header: str) -> None:
    with scripted(*[http(200, PLAIN, header)] * 3) as (store, server):
        for _ in range(3):
            store.list_page("")
        assert not store.capabilities.listed_metadata
        assert asked(server) == [False] * 3


@promise("S-129")
@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_a_server_that_refuses_is_not_asked_again(status: int) -> None:
    error = b"<Error><Code>NotImplemented</Code></Error>"
    with scripted(http(status, error, MINIO), *[http(200, PLAIN, MINIO)] * 2, shows=True) as (store, server):
        for _ in range(2):
            assert [one.key for one in store.list_page("").objects] == ["a"]
        assert not store.capabilities.listed_metadata
        assert asked(server) == [True, False, False]


@promise("S-129")
@pytest.mark.parametrize(
    ("status", "code", "kind", "expected"),
    [(403, b"AccessDenied", AccessDenied, [True, False] * 2), (503, b"ServiceUnavailable", ServerFault, [True] * 2)],
)
def test_a_failure_that_has_nothing_to_do_with_it_changes_nothing(
    status: int, code: bytes, kind: type[StoreError], expected: list[bool]
) -> None:
    """The listing itself is refused, or the server is busy."""
    error = http(status, b"<Error><Code>" + code + b"</Code></Error>", MINIO)
    with scripted(*[error] * 8, shows=True) as (store, server):
        for _ in range(2):
            with pytest.raises(kind):
                store.list_page("")
        assert store.capabilities.listed_metadata
        assert asked(server) == expected


@promise("S-129")
def test_a_page_that_is_no_xml_because_of_its_metadata_is_asked_for_without() -> None:
    """`x-amz-meta-a!b` is a header, but no element."""
    broken = http(200, shown(*ITEMS, b"<X-Amz-Meta-A!b>1</X-Amz-Meta-A!b>"), MINIO)
    with scripted(broken, http(200, PLAIN, MINIO), http(200, shown(*ITEMS), MINIO), shows=True) as (store, server):
        assert [one.said for one in store.list_page("").objects] == [None]
        assert store.list_page("").objects[0].said is not None
        assert asked(server) == [True, False, True]
