"""One conformance suite for every object store: what fuse/store/base.py promises (S3's rules, AWS documentation)."""

from __future__ import annotations

import hashlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from datastore.errors import (
    AlreadyExists,
    InvalidKey,
    InvalidRequest,
    KeyConflict,
    KeyTooLong,
    MetadataTooLarge,
    NotFound,
    PreconditionFailed,
    Throttled,
)
from datastore.fuse.store.base import (
    ByteRange,
    ETag,
    PartNumber,
    UploadId,
    WriteOptions,
)
from datastore.fuse.store.blocking import BlockingStore
from tests.contract.conftest import Subject
from tests.contract.deviations import REFUSED

PLAIN = WriteOptions()
OTHER = ETag("0123456789abcdef0123456789abcdef")
PART = 5 << 20
SECOND_NS = 1_000_000_000

ODD_KEYS = [
    "dir/",
    "deep/dir/",
    "a//b",
    "/leading",
    "a/./b",
    "a/../b",
    ".",
    "space key",
    " start and end ",
    "plus+percent%20%2B",
    "query?a=b&c#d",
    "quotes'\"<>&;",
    "back\\slash:*~|{}[]()!@$^,=",
    "tab\tkey",
    "new\nline",
    "carriage\rreturn",
    "control\x01byte",
    "umlaut-ü-ß",
    "combining-e\u0301",
    "cjk-漢字",
    "emoji-\U0001f600",
    "bad\udcffbyte",
    "dots...",
    ".hidden",
    "x" * 255,
]


def md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def fill(store: BlockingStore, *keys: str) -> None:
    for key in keys:
        store.put(key, b"", PLAIN)


def all_pages(
    store: BlockingStore, prefix: str, *, delimiter: str = "", max_keys: int = 1000, start_after: str = ""
) -> tuple[list[str], list[str], int]:
    """Object keys, common prefixes, number of pages."""
    keys: list[str] = []
    prefixes: list[str] = []
    token = None
    for pages in itertools.count(1):
        page = store.list_page(prefix, delimiter=delimiter, token=token, start_after=start_after, max_keys=max_keys)
        assert len(page.objects) + len(page.common_prefixes) <= max_keys
        keys += [listed.key for listed in page.objects]
        prefixes += page.common_prefixes
        token = page.next_token
        if token is None:
            return keys, prefixes, pages
    raise AssertionError


def sent(
    store: BlockingStore, key: str, *bodies: bytes, options: WriteOptions = PLAIN
) -> tuple[UploadId, list[tuple[PartNumber, ETag]]]:
    """An upload with these parts."""
    upload = store.create_upload(key, options)
    numbered = [(PartNumber(number), body) for number, body in enumerate(bodies, 1)]
    return upload, [(number, store.upload_part(key, upload, number, body)) for number, body in numbered]


class TestObjects:
    def test_an_object_reads_back_with_its_facts(self, store: BlockingStore) -> None:
        options = WriteOptions(metadata={"mode": "33188", "note": "a b=c;d"}, content_type="text/x-test")
        before_ns = time.time_ns()
        written = store.put("dir/file", b"content", options)
        info = store.head("dir/file")
        body, got = store.get("dir/file")
        after_ns = time.time_ns()

        def is_now(told_ns: int) -> bool:
            return before_ns - 2 * SECOND_NS < told_ns < after_ns + 2 * SECOND_NS

        assert bytes(body) == b"content"
        assert (info.key, info.size, info.etag) == ("dir/file", 7, md5(b"content"))
        assert dict(info.metadata) == dict(options.metadata)
        assert info.content_type == "text/x-test"
        assert is_now(info.mtime_ns)
        assert is_now(info.server_time_ns)
        assert written.etag == info.etag
        assert written.mtime_ns == 0 or is_now(written.mtime_ns)
        assert (got.key, got.size, got.etag, got.mtime_ns) == (info.key, info.size, info.etag, info.mtime_ns)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_bodies_of_every_kind_and_size_arrive(
        self, store: BlockingStore, kind: type[bytes | bytearray | memoryview]
    ) -> None:
        for size in (0, 1, 70_000, 3_000_000):
            content = hashlib.shake_128(str(size).encode()).digest(size)
            store.put("body", kind(content), PLAIN)
            assert bytes(store.get("body")[0]) == content, size

    def test_overwriting_replaces_body_metadata_and_etag(self, store: BlockingStore) -> None:
        first = store.put("key", b"one", WriteOptions(metadata={"a": "1"}))
        second = store.put("key", b"two!", PLAIN)
        info = store.head("key")
        assert first.etag != second.etag == info.etag
        assert (info.size, dict(info.metadata)) == (4, {})

    def test_a_missing_object_is_not_found(self, store: BlockingStore) -> None:
        with pytest.raises(NotFound):
            store.head("missing")
        for byte_range in (None, ByteRange(0, 1)):
            with pytest.raises(NotFound):
                store.get("missing", byte_range=byte_range)

    @pytest.mark.parametrize("content", [b"0123456789", b""])
    def test_a_range_gives_what_there_is(self, store: BlockingStore, content: bytes) -> None:
        written = store.put("digits", content, PLAIN)
        for start, stop in ((0, 1), (3, 7), (9, 10), (0, 10), (5, 100), (10, 11), (50, 60), (0, 4096)):
            body, info = store.get("digits", byte_range=ByteRange(start, stop))
            assert (bytes(body), info.size, info.etag) == (content[start:stop], len(content), written.etag), start

    def test_a_read_of_another_version_is_refused(self, store: BlockingStore) -> None:
        etag = store.put("key", b"content", PLAIN).etag
        for byte_range, there in ((None, b"content"), (ByteRange(1, 3), b"on"), (ByteRange(90, 99), b"")):
            assert bytes(store.get("key", if_match=etag, byte_range=byte_range)[0]) == there
            with pytest.raises(PreconditionFailed):
                store.get("key", if_match=OTHER, byte_range=byte_range)


class TestConditions:
    def test_create_only_refuses_a_taken_key(self, store: BlockingStore) -> None:
        store.put("key", b"first", WriteOptions(if_none_match=True))
        with pytest.raises(AlreadyExists):
            store.put("key", b"second", WriteOptions(if_none_match=True))
        assert bytes(store.get("key")[0]) == b"first"

    def test_one_of_many_creators_wins(self, store: BlockingStore) -> None:
        def create(number: int) -> bool:
            try:
                store.put("lock", str(number).encode(), WriteOptions(if_none_match=True))
            except AlreadyExists:
                return False
            except Throttled:  # another creator is at it: S3 says 409 then
                return create(number)
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert sum(won) == 1
        assert bytes(store.get("lock")[0]) == str(won.index(True)).encode()

    def test_replace_needs_the_named_version(self, store: BlockingStore) -> None:
        etag = store.put("key", b"one", PLAIN).etag
        newer = store.put("key", b"two", WriteOptions(if_match=etag)).etag
        with pytest.raises(PreconditionFailed):
            store.put("key", b"three", WriteOptions(if_match=etag))
        assert store.head("key").etag == newer

    def test_replace_of_a_missing_key_is_refused(self, store: BlockingStore) -> None:
        with pytest.raises(PreconditionFailed):
            store.put("missing", b"", WriteOptions(if_match=OTHER))
        with pytest.raises(NotFound):
            store.head("missing")


class TestLimits:
    def test_two_kib_of_metadata_fit_and_no_more(self, store: BlockingStore) -> None:
        store.put("key", b"", WriteOptions(metadata={"k": "v" * 2000}))
        assert len(store.head("key").metadata["k"]) == 2000
        with pytest.raises(MetadataTooLarge):
            store.put("key", b"", WriteOptions(metadata={"k": "v" * 2048}))
        with pytest.raises(MetadataTooLarge):
            store.create_upload("key", WriteOptions(metadata={"k": "v" * 2048}))

    def test_metadata_that_headers_cannot_carry_is_refused(self, store: BlockingStore) -> None:
        for metadata in ({"k": "ü"}, {"k": "a\nb"}):
            with pytest.raises(InvalidRequest):
                store.put("key", b"", WriteOptions(metadata=metadata))

    def test_a_key_of_1024_bytes_fits_and_no_more(self, store: BlockingStore) -> None:
        longest = "/".join(["k" * 204] * 5)
        store.put(longest, b"x", PLAIN)
        assert store.head(longest).size == 1
        with pytest.raises(KeyTooLong):
            store.put(longest + "k", b"x", PLAIN)

    def test_a_name_over_255_bytes_is_kept_or_too_long(self, subject: Subject) -> None:
        name = "dir/" + "x" * 256
        if subject.name in {"memory", "moto"}:
            subject.store.put(name, b"x", PLAIN)
            assert subject.store.head(name).size == 1
            return
        with pytest.raises(KeyTooLong):
            subject.store.put(name, b"x", PLAIN)
        with pytest.raises((KeyTooLong, NotFound)):
            subject.store.head(name)

    def test_a_file_beside_a_directory_is_kept_or_conflicts(self, subject: Subject) -> None:
        store = subject.store
        store.put("a", b"file", PLAIN)
        store.put("b/c", b"child", PLAIN)
        if subject.keeps_both:
            store.put("a/b", b"child", PLAIN)
            store.put("b", b"file", PLAIN)
            assert [bytes(store.get(key)[0]) for key in ("a", "a/b", "b", "b/c")] == [b"file", b"child"] * 2
            return
        with pytest.raises(KeyConflict):
            store.put("a/b", b"child", PLAIN)
        with pytest.raises(KeyConflict):
            store.put("b", b"file", PLAIN)
        with pytest.raises(KeyConflict):
            store.copy("b/c", "a/b")
        upload, parts = sent(store, "a/b", b"part")
        with pytest.raises(KeyConflict):
            store.complete_upload("a/b", upload, parts, PLAIN)

    def test_a_file_and_the_directory_beside_it_are_both_listed(self, subject: Subject) -> None:
        store = subject.store
        if not subject.keeps_both:
            return
        fill(store, "a", "a/b")
        assert all_pages(store, "", delimiter="/")[:2] == (["a"], ["a/"])
        assert all_pages(store, "a/")[0] == ["a/b"]
        assert all_pages(store, "")[0] == ["a", "a/b"]

    def test_an_empty_key_is_refused(self, store: BlockingStore) -> None:
        with pytest.raises(InvalidKey):
            store.put("", b"", PLAIN)


class TestOddKeys:
    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_an_odd_key_reads_back(self, subject: Subject, key: str) -> None:
        body = b"" if key.endswith("/") else b"body of it"
        if (subject.name, key) in REFUSED:
            with pytest.raises(InvalidKey):
                subject.store.put(key, body, PLAIN)
            return
        subject.store.put(key, body, WriteOptions(metadata={"a": "1"}))
        assert bytes(subject.store.get(key)[0]) == body
        assert dict(subject.store.head(key).metadata) == {"a": "1"}
        changed = subject.store.copy(key, key, replace=WriteOptions(metadata={"a": "2"}))
        assert dict(subject.store.head(key).metadata) == {"a": "2"}
        assert subject.store.head(key).etag == changed.etag
        subject.store.delete(key)
        with pytest.raises(NotFound):
            subject.store.head(key)

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_an_odd_key_is_listed_exactly(self, subject: Subject, key: str) -> None:
        if (subject.name, key) in REFUSED:
            return
        subject.store.put(key, b"", PLAIN)
        assert all_pages(subject.store, "")[0] == [key]

    def test_a_key_is_never_taken_for_its_normal_form(self, store: BlockingStore) -> None:
        store.put("d/", b"", PLAIN)
        with pytest.raises(NotFound):
            store.head("d")

    def test_bulk_delete_takes_odd_keys(self, subject: Subject) -> None:
        keys = [key for key in ODD_KEYS if (subject.name, key) not in REFUSED and key != "deep/dir/"]
        for key in keys:
            subject.store.put(key, b"", PLAIN)
        failures = subject.store.delete_many([*keys, "never was"])
        assert failures == []
        assert all_pages(subject.store, "")[0] == []


class TestListing:
    def test_keys_come_in_byte_order_page_by_page(self, store: BlockingStore) -> None:
        keys = ["B", "a", "a b", "a+", "a-", "aa", "z", "~", "é", "\uff01", "\U0001f600"]
        fill(store, *keys)
        listed, _, pages = all_pages(store, "", max_keys=3)
        assert listed == sorted(keys, key=str.encode)
        assert pages == 4

    def test_a_prefix_need_not_end_at_a_slash(self, store: BlockingStore) -> None:
        fill(store, "ab/1", "ab/2", "abc", "b")
        assert all_pages(store, "ab")[0] == ["ab/1", "ab/2", "abc"]
        assert all_pages(store, "ab/")[0] == ["ab/1", "ab/2"]
        assert all_pages(store, "nothing")[0] == []

    def test_listing_starts_after_a_key_that_need_not_exist(self, store: BlockingStore) -> None:
        fill(store, "p/a", "p/b", "p/d")
        assert all_pages(store, "p/", start_after="p/b")[0] == ["p/d"]
        assert all_pages(store, "p/", start_after="p/c", max_keys=1)[0] == ["p/d"]
        assert all_pages(store, "p/", start_after="a")[0] == ["p/a", "p/b", "p/d"]
        assert all_pages(store, "p/", start_after="q")[0] == []

    def test_a_delimiter_groups_and_shows_the_marker_inside_its_directory(self, store: BlockingStore) -> None:
        fill(store, "top", "dir/", "dir/file", "dir/sub/", "dir/sub/deep", "implied/x")
        assert all_pages(store, "", delimiter="/")[:2] == (["top"], ["dir/", "implied/"])
        assert all_pages(store, "dir/", delimiter="/")[:2] == (["dir/", "dir/file"], ["dir/sub/"])
        assert all_pages(store, "dir/sub/", delimiter="/")[:2] == (["dir/sub/", "dir/sub/deep"], [])
        assert all_pages(store, "dir", delimiter="/")[:2] == ([], ["dir/"])

    @pytest.mark.parametrize("max_keys", [1, 2, 3, 5])
    def test_pages_with_a_delimiter_lose_and_double_nothing(self, store: BlockingStore, max_keys: int) -> None:
        fill(store, "p/", *(f"p/d{n}/{leaf}" for n in range(5) for leaf in "xyz"), *(f"p/f{n}" for n in range(3)))
        keys, prefixes, _ = all_pages(store, "p/", delimiter="/", max_keys=max_keys)
        assert keys == ["p/", "p/f0", "p/f1", "p/f2"]
        assert prefixes == [f"p/d{n}/" for n in range(5)]

    def test_start_after_a_directory_skips_what_is_inside(self, store: BlockingStore) -> None:
        fill(store, "p/a/1", "p/a/2", "p/b/1", "p/c")
        assert all_pages(store, "p/", delimiter="/", start_after="p/a/")[:2] == (["p/c"], ["p/b/"])
        assert all_pages(store, "p/", delimiter="/", start_after="p/a")[:2] == (["p/c"], ["p/a/", "p/b/"])

    @pytest.mark.parametrize("delimiter", ["", "/"])
    def test_a_page_that_is_known_comes_without_its_contents(self, store: BlockingStore, delimiter: str) -> None:
        fill(store, "p/a/1", "p/b", "p/c", "p/d")
        first = store.list_page("p/", delimiter=delimiter, max_keys=2)
        second = store.list_page("p/", delimiter=delimiter, max_keys=2, token=first.next_token)
        assert first.digest
        assert first.digest != second.digest
        again = store.list_page("p/", delimiter=delimiter, max_keys=2, start_after="p/b", unless=second.digest)
        assert (list(again.objects), again.next_token, again.digest) == ([], None, second.digest)
        store.put("p/d", b"another body", PLAIN)
        changed = store.list_page("p/", delimiter=delimiter, max_keys=2, start_after="p/b", unless=second.digest)
        assert [found.key for found in changed.objects] == ["p/c", "p/d"]

    def test_a_listing_agrees_with_head(self, store: BlockingStore) -> None:
        store.put("key", b"content", PLAIN)
        (listed,) = store.list_page("").objects
        info = store.head("key")
        assert (listed.key, listed.size, listed.etag) == (info.key, info.size, info.etag)
        assert abs(listed.mtime_ns - info.mtime_ns) <= SECOND_NS


class TestCopy:
    def test_a_copy_keeps_body_metadata_and_type(self, store: BlockingStore) -> None:
        store.put("from +%/key", b"content", WriteOptions(metadata={"a": "1"}, content_type="text/x-test"))
        copied = store.copy("from +%/key", "to ü/key")
        info = store.head("to ü/key")
        assert bytes(store.get("to ü/key")[0]) == b"content"
        assert (dict(info.metadata), info.content_type, info.etag) == ({"a": "1"}, "text/x-test", copied.etag)
        assert store.head("from +%/key").size == 7

    def test_headers_of_s3s_own_are_kept_beside_user_metadata(self, store: BlockingStore) -> None:
        headers = {
            ":cache-control": "no-cache",
            ":content-disposition": 'attachment; filename="a b.txt"',
            ":content-encoding": "gzip",
            ":content-language": "de",
        }
        store.put("key", b"content", WriteOptions(metadata={"a": "1", "cache-control": "a user's", **headers}))
        store.copy("key", "copied")
        store.copy("copied", "copied", replace=WriteOptions(metadata={"b": "2", **headers}))
        store.complete_upload("parts", *sent(store, "parts", b"content", options=WriteOptions(metadata=headers)), PLAIN)
        assert dict(store.head("key").metadata) == {"a": "1", "cache-control": "a user's", **headers}
        assert dict(store.get("key")[1].metadata) == dict(store.head("key").metadata)
        assert dict(store.head("copied").metadata) == {"b": "2", **headers}
        assert dict(store.head("parts").metadata) == headers

    def test_a_copy_can_replace_metadata_also_in_place(self, store: BlockingStore) -> None:
        store.put("key", b"content", WriteOptions(metadata={"a": "1"}))
        written = store.copy("key", "key", replace=WriteOptions(metadata={"b": "2"}, content_type="text/x-new"))
        info = store.head("key")
        assert bytes(store.get("key")[0]) == b"content"
        assert (dict(info.metadata), info.content_type, info.etag) == ({"b": "2"}, "text/x-new", written.etag)

    def test_an_in_place_copy_that_changes_nothing_is_refused(self, store: BlockingStore) -> None:
        store.put("key", b"", PLAIN)
        with pytest.raises(InvalidRequest):
            store.copy("key", "key")

    def test_a_copy_of_another_version_is_refused(self, store: BlockingStore) -> None:
        etag = store.put("key", b"content", PLAIN).etag
        store.copy("key", "good", if_source_match=etag)
        with pytest.raises(PreconditionFailed):
            store.copy("key", "bad", if_source_match=OTHER)
        assert all_pages(store, "")[0] == ["good", "key"]

    def test_a_copy_comes_from_another_bucket(self, subject: Subject) -> None:
        store, (other, bucket) = subject.store, subject.beside()
        body = bytes(range(256)) * 24_000
        etag = other.put("dir/key", body, WriteOptions(metadata={"mode": "33188"})).etag
        kept = WriteOptions(metadata={"mode": "33152"})
        store.copy("dir/key", "whole", if_source_match=etag, replace=kept, source_bucket=bucket)
        upload_id = store.create_upload("parts", kept, copies=True)
        part = store.upload_part_copy(
            "parts", upload_id, PartNumber(1), "dir/key", ByteRange(0, len(body)), etag, source_bucket=bucket
        )
        store.complete_upload("parts", upload_id, [(PartNumber(1), part)], kept)
        for key in ("whole", "parts"):
            assert bytes(store.get(key)[0]) == body
            assert store.head(key).metadata["mode"] == "33152"
        with pytest.raises(NotFound):
            store.copy("dir/key", "none")

    def test_a_directory_marker_can_be_copied(self, store: BlockingStore) -> None:
        etag = store.put("dir/", b"", WriteOptions(metadata={"mode": "16877"})).etag
        store.copy("dir/", "moved/", if_source_match=etag)
        store.copy("dir/", "changed/", replace=WriteOptions(metadata={"mode": "16832"}))
        assert dict(store.head("moved/").metadata) == {"mode": "16877"}
        assert dict(store.head("changed/").metadata) == {"mode": "16832"}
        with pytest.raises(PreconditionFailed):
            store.copy("dir/", "bad/", if_source_match=OTHER)
        with pytest.raises(NotFound):
            store.copy("missing/", "bad/")


class TestDelete:
    def test_deleting_twice_is_success(self, store: BlockingStore) -> None:
        store.put("key", b"", PLAIN)
        store.delete("key")
        store.delete("key")
        with pytest.raises(NotFound):
            store.head("key")

    def test_deleting_below_a_file_is_success(self, store: BlockingStore) -> None:
        store.put("file", b"", PLAIN)
        store.delete("file/below")
        assert store.head("file").size == 0

    def test_a_marker_goes_alone(self, store: BlockingStore) -> None:
        fill(store, "dir/", "dir/file")
        store.delete("dir/file")
        assert all_pages(store, "")[0] == ["dir/"]

    def test_a_condition_is_honoured_by_servers_that_know_it(self, subject: Subject) -> None:
        store = subject.store
        etag = store.put("key", b"content", PLAIN).etag
        if subject.conditional_delete:
            with pytest.raises(PreconditionFailed):
                store.delete("key", if_match=OTHER)
            assert store.head("key").etag == etag
        store.delete("key", if_match=etag)
        with pytest.raises(NotFound):
            store.head("key")

    def test_a_thousand_keys_go_at_once(self, store: BlockingStore) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: store.put(f"many/{n}", b"", PLAIN), range(60)))
        assert store.delete_many([f"many/{n}" for n in range(1000)]) == []
        assert all_pages(store, "many/")[0] == []


class TestMultipart:
    def test_parts_become_one_object(self, store: BlockingStore) -> None:
        options = WriteOptions(metadata={"a": "1"}, content_type="text/x-test")
        upload, parts = sent(store, "big", b"a" * PART, b"b" * PART, b"tail", options=options)
        with pytest.raises(NotFound):
            store.head("big")
        written = store.complete_upload("big", upload, parts, PLAIN)
        info = store.head("big")
        assert info.size == 2 * PART + 4
        assert (info.etag, dict(info.metadata), info.content_type) == (written.etag, {"a": "1"}, "text/x-test")
        assert info.etag.endswith("-3")
        edge, _ = store.get("big", byte_range=ByteRange(PART - 2, PART + 2))
        assert bytes(edge) == b"aabb"
        assert store.pending_uploads("") == []

    def test_a_part_sent_again_replaces_the_first(self, store: BlockingStore) -> None:
        upload, _ = sent(store, "key", b"first")
        etag = store.upload_part("key", upload, PartNumber(1), b"second")
        store.complete_upload("key", upload, [(PartNumber(1), etag)], PLAIN)
        assert bytes(store.get("key")[0]) == b"second"

    def test_a_range_of_an_object_becomes_a_part(self, store: BlockingStore) -> None:
        source = store.put("source", b"x" * PART + b"0123456789", PLAIN)
        upload = store.create_upload("target", PLAIN, copies=True)
        first = store.upload_part_copy("target", upload, PartNumber(1), "source", ByteRange(0, PART), source.etag)
        second = store.upload_part_copy("target", upload, PartNumber(2), "source", ByteRange(PART + 2, PART + 5), None)
        store.complete_upload("target", upload, [(PartNumber(1), first), (PartNumber(2), second)], PLAIN)
        body, info = store.get("target", byte_range=ByteRange(PART - 1, PART + 9))
        assert (bytes(body), info.size) == (b"x234", PART + 3)

    def test_parts_that_are_sent_and_ranges_of_an_object_of_parts_become_one_object(self, store: BlockingStore) -> None:
        """Also ranges of that one, and copies of it: whatever the server keeps of the parts' checksums."""
        source = store.complete_upload("source", *sent(store, "source", b"x" * PART, b"x" * PART), PLAIN).etag
        for target in ("once", "twice"):
            upload = store.create_upload(target, PLAIN, copies=True)
            tags = [store.upload_part_copy(target, upload, PartNumber(1), "source", ByteRange(1, PART + 1), source)]
            tags.append(store.upload_part(target, upload, PartNumber(2), b"tail"))
            parts = [(PartNumber(n), tag) for n, tag in enumerate(tags, 1)]
            store.complete_upload(target, upload, parts, PLAIN)
            source = store.copy(target, "source").etag
        store.copy("source", "source", replace=WriteOptions(metadata={"a": "1"}))
        assert bytes(store.get("source")[0]) == b"x" * (PART - 1) + b"t" + b"tail"

    def test_a_part_copy_of_another_version_is_refused(self, store: BlockingStore) -> None:
        store.put("source", b"content", PLAIN)
        upload = store.create_upload("target", PLAIN, copies=True)
        with pytest.raises(PreconditionFailed):
            store.upload_part_copy("target", upload, PartNumber(1), "source", ByteRange(0, 3), OTHER)
        store.abort_upload("target", upload)

    def test_completion_needs_the_parts_in_order_as_sent(self, store: BlockingStore) -> None:
        upload, [first, second] = sent(store, "key", b"1" * PART, b"2")
        for parts in ([], [(PartNumber(1), OTHER)], [first, (PartNumber(3), second[1])], [second, first]):
            with pytest.raises(InvalidRequest):
                store.complete_upload("key", upload, parts, PLAIN)
        store.abort_upload("key", upload)

    def test_a_small_part_that_is_not_the_last_is_refused(self, store: BlockingStore) -> None:
        upload, parts = sent(store, "key", b"small", b"small")
        with pytest.raises(InvalidRequest):
            store.complete_upload("key", upload, parts, PLAIN)
        store.abort_upload("key", upload)

    def test_complete_creates_only_a_free_key(self, store: BlockingStore) -> None:
        upload, parts = sent(store, "key", b"ours")
        store.put("key", b"theirs", PLAIN)
        with pytest.raises(AlreadyExists):
            store.complete_upload("key", upload, parts, WriteOptions(if_none_match=True))
        assert bytes(store.get("key")[0]) == b"theirs"
        store.abort_upload("key", upload)

    def test_complete_replaces_only_the_named_version(self, store: BlockingStore) -> None:
        old = store.put("key", b"old", PLAIN).etag
        upload, parts = sent(store, "key", b"new")
        with pytest.raises(PreconditionFailed):
            store.complete_upload("key", upload, parts, WriteOptions(if_match=OTHER))
        store.complete_upload("key", upload, parts, WriteOptions(if_match=old))
        assert bytes(store.get("key")[0]) == b"new"

    def test_uploads_are_listed_until_they_end(self, store: BlockingStore) -> None:
        first = store.create_upload("up/one +%", PLAIN)
        second = store.create_upload("up/two", PLAIN)
        other = store.create_upload("other", PLAIN)
        pending = {(u.key, u.upload_id) for u in store.pending_uploads("up/")}
        assert pending == {("up/one +%", first), ("up/two", second)}
        store.abort_upload("up/one +%", first)
        assert [(u.key, u.upload_id) for u in store.pending_uploads("up/")] == [("up/two", second)]
        assert {u.key for u in store.pending_uploads("")} == {"other", "up/two"}
        store.abort_upload("up/two", second)
        store.abort_upload("other", other)

    def test_aborting_twice_is_success(self, store: BlockingStore) -> None:
        upload, _ = sent(store, "key", b"part")
        store.abort_upload("key", upload)
        store.abort_upload("key", upload)
        assert store.pending_uploads("") == []

    def test_an_aborted_upload_is_gone(self, store: BlockingStore) -> None:
        upload = store.create_upload("key", PLAIN)
        store.abort_upload("key", upload)
        with pytest.raises(NotFound):
            store.complete_upload("key", upload, [(PartNumber(1), OTHER)], PLAIN)

    def test_a_part_of_an_unknown_upload_is_not_found(self, store: BlockingStore) -> None:
        with pytest.raises(NotFound):
            store.upload_part("key", UploadId("00000000-0000-0000-0000-000000000000"), PartNumber(1), b"part")


class TestThreads:
    def test_many_threads_share_a_store(self, store: BlockingStore) -> None:
        def work(number: int) -> bool:
            body = hashlib.shake_128(str(number).encode()).digest(2000 + 300 * number)
            key = f"thread/{number}"
            if number % 10 == 0:
                key, body = f"{key}/", b""
            store.put(key, body, WriteOptions(metadata={"n": str(number)}))
            return bytes(store.get(key)[0]) == body and store.head(key).metadata["n"] == str(number)

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(100)))

    def test_closing_twice_is_success(self, store: BlockingStore) -> None:
        store.put("key", b"", PLAIN)
        store.close()
        store.close()
