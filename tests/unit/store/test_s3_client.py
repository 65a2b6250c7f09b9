"""The exact client and the adapter against scripted answers: what no well-behaved server shows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import (
    AccessDenied,
    BucketNotFound,
    ClockSkew,
    CorruptBody,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    ServerFault,
    StoreError,
    Throttled,
    Unreachable,
    WrongRegion,
)
from datastore.fuse.loop import now
from datastore.fuse.store.base import (
    Body,
    ByteRange,
    Capabilities,
    ETag,
    FilePart,
    ObjectInfo,
    PartNumber,
    UploadId,
    WriteOptions,
)
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.s3.caller import Caller
from datastore.fuse.store.s3.client import S3Store
from datastore.fuse.store.s3.credentials import CredentialSource, StaticSource
from datastore.fuse.store.s3.dialing import Proxy, Route
from datastore.fuse.store.s3.endpoint import Endpoint, resolve
from datastore.fuse.store.s3.messages import Request
from datastore.fuse.store.s3.transport import Transport
from datastore.secret import Secret
from tests.promises import promise
from tests.unit.store.scripted import ScriptedServer, http

KEYS = StaticCredentials(access_key_id="AKID", secret_access_key=Secret("secret"), session_token=Secret("token"))
MALFORMED = (
    b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-east-1' is wrong;"
    b" expecting 'eu-west-3'</Message><Region>eu-west-3</Region></Error>"
)
LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
PARTS = [(PartNumber(1), ETag("e"))]


Ask = Callable[[BlockingStore], object]


def caller_of(
    server: ScriptedServer,
    *,
    endpoint: str = "",
    proxied: bool = False,
    follow: bool = True,
    keys: CredentialSource | None = None,
) -> Caller:
    """endpoint: if another than the server's; proxied: the server is a proxy."""
    here = Route("127.0.0.1", 1, False, Proxy("127.0.0.1", server.port))
    location = S3Location(bucket="data", endpoint=endpoint or f"http://127.0.0.1:{server.port}")

    def connect(to: Endpoint) -> Transport:
        return Transport(here if proxied else Route("127.0.0.1", server.port, False))

    return Caller(resolve(location), keys or StaticSource(KEYS), connect, follow=follow)


def client_of(server: ScriptedServer, **options: Any) -> BlockingStore:
    return BlockingStore(S3Store(caller_of(server, **options), Capabilities()))


@contextlib.contextmanager
def scripted(*answers: bytes, **options: Any) -> Iterator[tuple[BlockingStore, ScriptedServer]]:
    """A client of a server that gives these answers."""
    with ScriptedServer(answers) as server, contextlib.closing(client_of(server, **options)) as client:
        yield client, server


class TestBodies:
    """Which bodies are signed, and how large ones are handed on."""

    def test_a_write_without_a_body_says_so(self) -> None:
        """Amazon's S3 answers 411 to a PUT that says nothing of its length, as the one that makes a bucket."""
        with ScriptedServer([http(200)]) as server, contextlib.closing(caller_of(server)) as caller:
            now(caller.send(Request(method="PUT")))
        assert b"content-length: 0\r\n" in server.requests[0].lower()

    @promise("S-127")
    @pytest.mark.parametrize(
        ("endpoint", "proxied", "signed"),
        [("http://minio", False, True), ("http://127.0.0.1", False, False), ("http://127.0.0.1:1", True, True)],
    )
    def test_over_a_network_without_tls_the_signature_covers_the_body(
        self, tmp_path: Path, endpoint: str, proxied: bool, signed: bool
    ) -> None:
        """Also through a proxy."""
        (tmp_path / "file").write_bytes(b"part")
        answer = http(200, b"", 'ETag: "e"')
        with scripted(answer, answer, endpoint=endpoint, proxied=proxied) as (client, server):
            with FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, 4) as part:
                assert client.upload_part("k", UploadId("u"), PartNumber(1), part) == "e"
            client.put("k", b"part", WriteOptions())
        expected = hashlib.sha256(b"part").hexdigest() if signed else "UNSIGNED-PAYLOAD"
        assert len(server.requests) == 2
        for request in server.requests:
            assert f"x-amz-content-sha256: {expected}\r\n".encode() in request
            assert request.endswith(b"\r\n\r\npart")

    @pytest.mark.parametrize("whole", [False, True])
    def test_a_sink_gets_a_large_body_with_its_facts(self, whole: bool) -> None:
        body = random.Random(3).randbytes(2_500_000)
        facts = ['ETag: "v1"', f"Content-Range: bytes 1000-{999 + len(body)}/{len(body) + 5000}"]
        byte_range = None if whole else ByteRange(1000, 1000 + len(body))
        got: list[tuple[ObjectInfo, int, bytes]] = []
        with scripted(http(200 if whole else 206, body, *facts)) as (client, _):
            answer, info = client.get(
                "k", byte_range=byte_range, sink=lambda info, at, part: got.append((info, at, bytes(part)))
            )
        assert (answer, info.etag, info.size) == (b"", "v1", len(body) if whole else len(body) + 5000)
        assert all(each == info for each, _, _ in got)
        assert b"".join(part for _, _, part in sorted(got, key=lambda each: each[1])) == body

    def test_a_sink_never_sees_another_range_than_was_asked_for(self) -> None:
        body = bytes(200_000)
        got: list[Body] = []
        short = http(206, body, 'ETag: "e"', "Content-Range: bytes 0-199999/900000")
        ignored = http(200, bytes(900_000), 'ETag: "e"')
        with scripted(short, ignored) as (client, _):
            for _ in range(2):
                with contextlib.suppress(CorruptBody):
                    client.get("k", byte_range=ByteRange(0, 300_000), sink=lambda _i, _a, part: got.append(part))
        assert [len(part) for part in got] == [300_000], "the second answer is cut to what was asked for"


class TestRegions:
    @pytest.mark.parametrize(
        "first",
        [
            http(400, MALFORMED),
            http(301, b"", "x-amz-bucket-region: eu-west-3"),
            http(400, b"", "x-amz-bucket-region: eu-west-3"),
            http(307, b"<Error><Code>TemporaryRedirect</Code></Error>", "x-amz-bucket-region: eu-west-3"),
        ],
    )
    def test_a_bucket_is_followed_to_its_region_and_remembered(self, first: bytes) -> None:
        """By requests of every kind."""
        there = http(200, b"", 'ETag: "e"')
        with scripted(there, first, *[http(200, LISTING)] * 2, there) as (client, server):
            client.head("k")
            client.list_page("")
            client.list_page("")
            client.head("k")
        assert [b"/eu-west-3/s3/" in request for request in server.requests] == [False, False, True, True, True]

    def test_a_second_redirect_is_an_error(self) -> None:
        answers = [http(301, b"", f"x-amz-bucket-region: eu-west-{n}") for n in (1, 2)]
        with scripted(*answers) as (client, _), pytest.raises(WrongRegion) as raised:
            client.list_page("")
        assert raised.value.region == "eu-west-2"

    def test_without_following_the_region_is_named(self) -> None:
        words = r"eu-west-3.*server says: AuthorizationHeaderMalformed"
        with scripted(http(400, MALFORMED), follow=False) as (client, _), pytest.raises(WrongRegion, match=words):
            client.list_page("")

    @promise("S-200")
    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    @pytest.mark.parametrize(
        ("location", "words"),
        [
            ("https://s3.lab.example/data?list-type=2", "https://s3.lab.example"),
            ("https://s3.lab.example:8443", "https://s3.lab.example:8443"),
            ("HTTPS://[fd00::1]/", "HTTPS://[fd00::1]"),
            ("https://s3.lab.example@evil.example/", ""),
            ("https://s3.lab.example\x1b[31m/", ""),
            (f"https://{'a' * 300}.example/", ""),
            ("/data/", ""),
            ("ftp://s3.lab.example/", ""),
        ],
    )
    def test_a_redirect_without_a_region_is_one_of_the_endpoint(self, status: int, location: str, words: str) -> None:
        """As an ingress sends from http to https. What it names is shown only as far as it is a scheme and a host."""
        answer = http(status, b"<html>Moved</html>", f"Location: {location}")
        with scripted(answer) as (client, server), pytest.raises(InvalidRequest) as raised:
            client.list_page("")
        expected = "the endpoint redirects to another place, and no redirect is followed: check the endpoint;"
        if words:
            expected = (
                f"the endpoint redirects to {words}, and no redirect is followed: if that is your S3 server, "
                f"write {words} into spec.s3.endpoint;"
            )
        assert str(raised.value) == f"GET of the bucket: {expected} server says: HTTP status {status}"
        assert len(server.requests) == 1

    def test_the_bucket_is_no_part_of_the_endpoint_that_a_redirect_names(self) -> None:
        answer = http(301, b"", "Location: https://data.s3.lab.example/")
        with (
            scripted(answer, endpoint="http://s3.lab.example", proxied=True) as (client, _),
            pytest.raises(InvalidRequest, match=r"write https://s3\.lab\.example into spec\.s3\.endpoint"),
        ):
            client.list_page("")


def error_of(code: str, message: str = "m") -> bytes:
    return f"\n <Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def get_range(start: int, stop: int) -> Ask:
    return lambda client: client.get("k", byte_range=ByteRange(start, stop))


PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>Please log in</body></html>"
LATE = http(200, error_of("InternalError", "late"))
MATCHING = WriteOptions(if_match=ETag("e"))


def head(client: BlockingStore) -> object:
    return client.head("k")


def put(client: BlockingStore) -> object:
    return client.put("k", b"", MATCHING)


def copy_part(client: BlockingStore) -> object:
    return client.upload_part_copy("a", UploadId("u"), PartNumber(1), "s", ByteRange(0, 1), None)


def complete(client: BlockingStore) -> object:
    return client.complete_upload("a", UploadId("u"), PARTS, MATCHING)


class TestAnswers:
    def test_each_request_is_signed_with_the_token(self) -> None:
        with scripted(http(200, LISTING)) as (client, server):
            client.list_page("a//b/ü", start_after="a b")
        head = server.requests[0].decode()
        assert head.startswith(
            "GET /data?encoding-type=url&list-type=2&max-keys=1000&prefix=a%2F%2Fb%2F%C3%BC&start-after=a%20b "
        )
        assert "x-amz-security-token: token" in head

    @pytest.mark.parametrize(
        ("answers", "ask", "kind", "words"),
        [
            ([LATE], lambda client: client.copy("a", "b"), ServerFault, "late"),
            ([LATE], complete, ServerFault, "late"),
            ([LATE], copy_part, ServerFault, "late"),
            ([http(200, error_of("PreconditionFailed"))], complete, PreconditionFailed, ""),
            ([http(404, error_of("NoSuchKey"))], put, PreconditionFailed, ""),
            ([http(404, error_of("NoSuchUpload"))], complete, NotFound, ""),
            ([http(404, error_of("NoSuchBucket"))], put, BucketNotFound, ""),
            ([http(206, b"01", "Content-Range: bytes 0-1/10")], get_range(0, 5), CorruptBody, ""),
            ([http(416), http(200, b"", "Content-Length: 50")], get_range(10, 20), CorruptBody, ""),
            ([http(400, b"<html>Bad\ngateway</html>")], head, InvalidRequest, "HTTP status 400"),
        ],
    )
    def test_what_is_an_error(self, answers: list[bytes], ask: Ask, kind: type[StoreError], words: str) -> None:
        """Also inside a success; if-match on a key that is gone is a failed condition; an object that grew while its
        end was asked for is read again."""
        with scripted(*answers) as (client, server), pytest.raises(kind) as raised:
            ask(client)
        assert type(raised.value) is kind
        assert words in str(raised.value)
        assert raised.value.transient is (kind in {ServerFault, CorruptBody})
        assert len(server.requests) == len(answers)

    @promise("S-66")
    @pytest.mark.parametrize("page", [PAGE, b"<!-- 1 -->" + PAGE.removeprefix(b"<!DOCTYPE html>")])
    @pytest.mark.parametrize(
        "ask",
        [
            lambda client: client.delete("k"),
            lambda client: client.delete_many(["k"]),
            lambda client: client.abort_upload("k", UploadId("u")),
            lambda client: client.put("k", b"", WriteOptions()),
            lambda client: client.upload_part("k", UploadId("u"), PartNumber(1), b"part"),
            lambda client: client.create_upload("k", WriteOptions()),
            lambda client: client.copy("a", "b"),
            lambda client: client.set_legal_hold("k", on=True),
            lambda client: client.list_page(""),
            lambda client: client.has_object_lock(),
        ],
    )
    def test_the_page_of_a_network_that_asks_for_a_login_is_no_success(self, page: bytes, ask: Ask) -> None:
        """Such networks answer each request with status 200."""
        with scripted(http(200, page)) as (client, _), pytest.raises(CorruptBody, match="does this network ask for a"):
            ask(client)

    @pytest.mark.parametrize("status", [403, 503])
    def test_a_refusal_of_the_proxy_is_told_as_that(self, status: int) -> None:
        """It says so by a page of its own; what is S3's refusal stays that, and a HEAD has no words of either."""
        answers = http(status, PAGE), http(403, error_of("AccessDenied")), http(403, b"")
        with scripted(*answers, endpoint="http://s3.lab.example", proxied=True) as (client, _):
            words = rf"the proxy 127\.0\.0\.1:\d+ refuses.*check HTTP_PROXY.*; proxy says: HTTP status {status}"
            with pytest.raises(Unreachable, match=words):
                client.list_page("")
            for ask in (lambda: client.list_page(""), lambda: client.head("k")):
                with pytest.raises(AccessDenied, match="these credentials are not allowed to do that"):
                    ask()

    @promise("S-66")
    @pytest.mark.parametrize("ask", [put, copy_part, head, get_range(0, 10), lambda client: client.get("k")])
    def test_an_answer_that_tells_nothing_of_the_object_is_no_success(self, ask: Ask) -> None:
        """S3 sends an ETag with each."""
        with scripted(http(200, b"")) as (client, _), pytest.raises(CorruptBody):
            ask(client)

    @promise("S-65")
    @pytest.mark.parametrize(
        ("body", "ask"), [(error_of("RequestTimeTooSkewed"), lambda client: client.list_page("")), (b"", head)]
    )
    def test_clock_skew_says_by_how_much(self, body: bytes, ask: Ask) -> None:
        """A HEAD can't say that the clock is wrong, but its date can."""
        words = r"this machine's clock is \d+ days ahead of the server's: set it"
        answer = http(403, body, "Date: Thu, 01 Jan 2026 00:00:00 GMT")
        with scripted(answer) as (client, _), pytest.raises(ClockSkew, match=words):
            ask(client)

    def test_a_server_that_ignores_ranges_still_gives_the_range(self) -> None:
        with scripted(http(200, b"0123456789", 'ETag: "e"')) as (client, _):
            body, info = client.get("k", byte_range=ByteRange(2, 5))
        assert (bytes(body), info.size, info.etag) == (b"234", 10, "e")

    def test_foreign_metadata_beyond_ascii_is_shown_as_an_encoded_word(self) -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: e\r\nx-amz-meta-Who: J\xc3\xbcrgen\r\n\r\n"
        with scripted(answer) as (client, _):
            assert dict(client.head("k").metadata) == {"who": "=?UTF-8?B?SsO8cmdlbg==?="}

    def test_pages_of_uploads_are_followed_by_their_markers(self) -> None:
        page = (
            b"<ListMultipartUploadsResult><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>"
            b"<NextKeyMarker>a+b</NextKeyMarker><NextUploadIdMarker>u1</NextUploadIdMarker><Upload><Key>a+b</Key><UploadId>u1</UploadId></Upload>"
            b"</ListMultipartUploadsResult>"
        )
        with scripted(http(200, page), http(200, b"<ListMultipartUploadsResult/>")) as (client, server):
            found = [upload.key for upload in client.pending_uploads("a")]
        assert found == ["a b"]
        assert b"key-marker=a%20b" in server.requests[1]
        assert b"upload-id-marker=u1" in server.requests[1]

    def test_failures_of_a_bulk_delete_come_back_key_by_key(self) -> None:
        body = (
            b"<DeleteResult><Error><Key>b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
            b"<Error><Key>c</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
        )
        denied = http(403, error_of("AccessDenied", "odd"))
        with scripted(http(200, body), http(204), denied) as (client, server):
            failures = client.delete_many(["a", "b", "c", "\x01", "\x02"])
        assert [(type(f), f.key, f.code, f.server_message) for f in failures] == [
            (AccessDenied, "b", "AccessDenied", "no"),
            (AccessDenied, "\x02", "AccessDenied", "odd"),
        ]
        assert str(failures[0]).startswith("DELETE b: these credentials are not allowed to do that; server says: Acc")
        assert b"content-md5: " in server.requests[0]

    def test_a_bulk_delete_whose_failures_are_temporary_may_be_tried_again(self) -> None:
        body = (
            b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code></Error>"
            b"<Error><Key>b</Key><Code>SlowDown</Code></Error></DeleteResult>"
        )
        with scripted(http(200, body)) as (client, _), pytest.raises(Throttled, match="DELETE b: "):
            client.delete_many(["a", "b"])
