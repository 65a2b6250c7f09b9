"""What a listing shows of the objects' metadata is what a HEAD shows, on every store that shows any."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from datastore.fuse.store.base import ListPage, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.packed import unpacked
from datastore.fuse.store.s3 import probe
from tests.adapter import open_adapter
from tests.contract.conftest import Subject, location_of
from tests.promises import promise
from tests.servers import Server, boto_client, make_bucket

LINK = "cadena%20de%20s%C3%ADmbolos"
OBJECTS = {
    "file": ({"mode": "33188", "uid": "1000", "gid": "0", "mtime": "1234567890.123456789"}, "text/plain"),
    "dir/": ({"mode": "16877"}, "application/x-directory"),
    "dir/nothing": ({}, "application/octet-stream"),
    "dir/link": ({"--symlink-target": LINK}, "application/octet-stream"),
    "odd name+ü&<>": ({"xattr": "%7B%22user.a%22%3A%22YQ%3D%3D%22%7D", "empty": "", "gaps": "a  b"}, "image/png"),
    "headers": ({"a": "1", ":cache-control": "no-cache", ":content-encoding": "gzip"}, "text/html"),
    "signs": ({"a-b.c_d": "&<>\"'%+~"}, "application/octet-stream"),
}


def fill(store: BlockingStore) -> None:
    for key, (metadata, content_type) in OBJECTS.items():
        store.put(key, b"", WriteOptions(metadata=metadata, content_type=content_type))


def agrees(store: BlockingStore, page: ListPage) -> list[str]:
    """The keys whose metadata the page shows, each just as a HEAD does."""
    shown = []
    for found in page.objects:
        if found.said is not None:
            info = store.head(found.key)
            assert unpacked(found.said) == (dict(info.metadata), info.content_type)
            shown.append(found.key)
    return shown


@promise("S-129")
def test_what_a_listing_shows_is_what_a_head_shows(subject: Subject) -> None:
    """Also page by page."""
    fill(subject.store)
    for prefix, delimiter in (("", ""), ("", "/"), ("dir/", "/"), ("dir/", "")):
        page = subject.store.list_page(prefix, delimiter=delimiter)
        every = [found.key for found in page.objects]
        assert agrees(subject.store, page) == (every if subject.store.capabilities.listed_metadata else [])
    keys: list[str] = []
    token: str | None = None
    while True:
        page = subject.store.list_page("", token=token, max_keys=2)
        keys += agrees(subject.store, page)
        token = page.next_token
        if token is None:
            break
    assert len(keys) == (len(OBJECTS) if subject.store.capabilities.listed_metadata else 0)


@promise("S-130")
def test_the_same_page_has_the_same_digest_and_a_change_of_metadata_another(subject: Subject) -> None:
    """MinIO shows the metadata of an object in another order each time, and nothing of it when asked plainly."""
    store = subject.store
    fill(store)
    digests = {store.list_page("").digest for _ in range(20)}
    assert len(digests) == 1
    (known,) = digests
    assert store.list_page("", unless=known).objects == ()
    if not store.capabilities.listed_metadata:
        return
    changed = WriteOptions(metadata={**OBJECTS["file"][0], "mode": "33152"}, content_type="text/plain")
    store.copy("file", "file", replace=changed)
    page = store.list_page("", unless=known)
    assert page.digest != known
    assert agrees(store, page) == [found.key for found in page.objects]


@promise("S-129")
@pytest.mark.parametrize("name", ["minio", "versitygw", "moto"])
def test_only_a_server_that_says_that_it_is_minio_is_asked(name: str, request: pytest.FixtureRequest) -> None:
    """The probe tells it, or the first listing."""
    server: Server = request.getfixturevalue(name)
    location = location_of(server, make_bucket(server, f"told-{name}"))
    assert probe(location, writable=False, deadline_s=60).listed_metadata is (name == "minio")
    store = BlockingStore(open_adapter(location, list_metadata=True))
    fill(store)
    assert agrees(store, store.list_page("")) == []
    assert len(agrees(store, store.list_page(""))) == (len(OBJECTS) if name == "minio" else 0)
    store.close()


@promise("S-129")
def test_metadata_is_not_asked_for_where_nobody_wants_it(minio: Server) -> None:
    """`attributes: listing`, and whoever only counts."""
    location = location_of(minio, make_bucket(minio, "unwanted"))
    store = BlockingStore(open_adapter(location, capabilities=probe(location, writable=False, deadline_s=60)))
    fill(store)
    assert agrees(store, store.list_page("")) == []
    store.close()


@promise("S-129")
def test_what_a_listing_of_minio_can_not_show_as_a_head_does_is_left_to_the_head(minio: Server) -> None:
    """Bytes beyond ASCII, which a HEAD encodes, and names that break the XML."""
    bucket = make_bucket(minio, "unlike")
    allow = {"Effect": "Allow", "Principal": {"AWS": ["*"]}, "Action": ["s3:PutObject"]}
    policy = {"Version": "2012-10-17", "Statement": [{**allow, "Resource": [f"arn:aws:s3:::{bucket}/*"]}]}
    boto_client(minio).put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    location = location_of(minio, bucket)
    known = probe(location, writable=False, deadline_s=60)
    store = BlockingStore(open_adapter(location, capabilities=known, list_metadata=True))
    _put_as_anyone(minio, f"/{bucket}/plain", "mode", b"33188")
    _put_as_anyone(minio, f"/{bucket}/utf-8", "who", "grüße".encode())
    _put_as_anyone(minio, f"/{bucket}/latin-1", "who", b"gr\xfce")
    assert agrees(store, store.list_page("")) == ["plain"]
    _put_as_anyone(minio, f"/{bucket}/zzz", "no!xml&name", b"1")
    page = store.list_page("")
    assert [found.key for found in page.objects] == ["latin-1", "plain", "utf-8", "zzz"]
    assert agrees(store, page) == []
    assert agrees(store, store.list_page("", max_keys=3)) == ["plain"]
    assert dict(store.head("zzz").metadata) == {"no!xml&name": "1"}
    store.close()


def _put_as_anyone(server: Server, path: str, name: str, value: bytes) -> None:
    """A PUT as no client of ours would send it."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=30)
    connection.putrequest("PUT", path)
    connection.putheader("content-length", "1")
    connection.putheader(f"x-amz-meta-{name}", value)
    connection.endheaders(b"x")
    assert connection.getresponse().status == 200
    connection.close()
