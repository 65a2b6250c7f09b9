"""What the fake can do beyond the contract: several clients, an injected clock, stricter servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.errors import InvalidRequest, KeyConflict, KeyTooLong
from datastore.fuse.store.base import Capabilities, PartNumber, WriteOptions
from tests.memorystore import MemoryBucket, MemoryStore

names = st.lists(st.sampled_from(["a", "b", "a-", "é", "", "z"]), min_size=1, max_size=4).map("/".join).filter(bool)


def test_two_views_of_a_bucket_see_each_other() -> None:
    bucket = MemoryBucket()
    ours, theirs = MemoryStore(bucket), MemoryStore(bucket)

    theirs.put("key", b"theirs", WriteOptions())

    assert bytes(ours.get("key")[0]) == b"theirs"


def test_times_come_from_the_clock_at_a_millisecond() -> None:
    store = MemoryStore(MemoryBucket(clock=lambda: 1_234_567_890_123_456_789))

    store.put("key", b"", WriteOptions())

    assert store.head("key").mtime_ns == 1_234_567_890_123_000_000 == store.list_page("").objects[0].mtime_ns


def test_a_bucket_can_stand_for_a_server_on_a_disk() -> None:
    store = MemoryStore(MemoryBucket(capabilities=Capabilities(file_beside_directory=False, max_key_segment_bytes=255)))
    store.put("a", b"", WriteOptions())
    store.put("b/c/d", b"", WriteOptions())

    with pytest.raises(KeyConflict):
        store.put("a/x/y", b"", WriteOptions())
    with pytest.raises(KeyConflict):
        store.put("b/c", b"", WriteOptions())
    with pytest.raises(KeyTooLong):
        store.put("x" * 256, b"", WriteOptions())
    with pytest.raises(InvalidRequest):
        store.put("dir/", b"body", WriteOptions())
    store.put("b/c/", b"", WriteOptions())


def test_a_server_without_conditional_deletes_ignores_the_condition() -> None:
    store = MemoryStore(MemoryBucket(capabilities=Capabilities(conditional_delete=False)))
    first = store.put("key", b"1", WriteOptions()).etag
    store.put("key", b"2", WriteOptions())

    store.delete("key", if_match=first)

    assert store.list_page("").objects == []


def test_a_body_given_as_a_buffer_is_copied() -> None:
    store, body = MemoryStore(), bytearray(b"before")
    store.put("key", body, WriteOptions())
    upload = store.create_upload("parts", WriteOptions())
    etag = store.upload_part("parts", upload, PartNumber(1), memoryview(body))

    body[:] = b"AFTER!"
    store.complete_upload("parts", upload, [(PartNumber(1), etag)], WriteOptions())

    assert bytes(store.get("key")[0]) == bytes(store.get("parts")[0]) == b"before"


@given(keys=st.sets(names, max_size=12), prefix=st.sampled_from(["", "a", "a/", "b/", "/"]), max_keys=st.integers(1, 5))
def test_pages_add_up_to_the_grouping_of_all_keys(keys: set[str], prefix: str, max_keys: int) -> None:
    store = MemoryStore()
    for key in keys:
        store.put(key, b"", WriteOptions())
    matching = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
    groups = {key: key[: key.index("/", len(prefix)) + 1] for key in matching if "/" in key[len(prefix) :]}

    listed: list[str] = []
    prefixes: list[str] = []
    token = None
    while True:
        page = store.list_page(prefix, delimiter="/", token=token, max_keys=max_keys)
        listed += [listed_object.key for listed_object in page.objects]
        prefixes += page.common_prefixes
        token = page.next_token
        if token is None:
            break

    assert listed == [key for key in matching if key not in groups]
    assert prefixes == sorted(set(groups.values()), key=str.encode)
