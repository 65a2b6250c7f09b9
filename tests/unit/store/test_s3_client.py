"""The exact client and the adapter against scripted answers: what no well-behaved server shows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from pathlib import Path

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import (
    BucketNotFound,
    ClockSkew,
    CorruptBody,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    ServerFault,
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
from datastore.fuse.store.s3.connections import Proxy, Route
from datastore.fuse.store.s3.credentials import CredentialSource, StaticSource
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


def caller_of(server: ScriptedServer, *, follow: bool = True, keys: CredentialSource | None = None) -> Caller:
    location = S3Location(bucket="data", endpoint=f"http://127.0.0.1:{server.port}")

    def connect(endpoint: Endpoint) -> Transport:
        return Transport(Route(endpoint.host, endpoint.port, False))

    return Caller(resolve(location), keys or StaticSource(KEYS), connect, follow=follow)


def client_of(server: ScriptedServer, *, follow: bool = True, keys: CredentialSource | None = None) -> BlockingStore:
    return client_by(caller_of(server, follow=follow, keys=keys))


def client_by(caller: Caller) -> BlockingStore:
    return BlockingStore(S3Store(caller, Capabilities()))


class TestBodies:
    """Which bodies are signed, and how large ones are handed on."""

    def test_a_write_without_a_body_says_so(self) -> None:
        """Amazon's S3 answers 411 to a PUT that says nothing of its length, as the one that makes a bucket."""
        with ScriptedServer([http(200)]) as server, contextlib.closing(caller_of(server)) as caller:
            now(caller.send(Request(method="PUT")))
        assert b"content-length: 0\r\n" in server.requests[0].lower()

    @promise("S-127")
    @pytest.mark.parametrize(("endpoint", "signed"), [("http://minio", True), ("http://127.0.0.1", False)])
    def test_over_a_network_without_tls_the_signature_covers_the_body(
        self, tmp_path: Path, endpoint: str, signed: bool
    ) -> None:
        (tmp_path / "file").write_bytes(b"part")
        with ScriptedServer([http(200, b"", 'ETag: "e"')] * 2) as server:
            location = S3Location(bucket="data", endpoint=endpoint)
            caller = Caller(
                resolve(location), StaticSource(KEYS), lambda _: Transport(Route("127.0.0.1", server.port, False))
            )
            client = client_by(caller)
            with FilePart(os.open(tmp_path / "file", os.O_RDONLY), 0, 4) as part:
                assert client.upload_part("k", UploadId("u"), PartNumber(1), part) == "e"
            client.put("k", b"part", WriteOptions())
            client.close()

        expected = hashlib.sha256(b"part").hexdigest() if signed else "UNSIGNED-PAYLOAD"
        for request in server.requests:
            assert f"x-amz-content-sha256: {expected}\r\n".encode() in request
            assert request.endswith(b"\r\n\r\npart")

    def test_through_a_proxy_the_signature_covers_the_body(self) -> None:
        with ScriptedServer([http(200, b"", 'ETag: "e"')]) as server:
            route = Route("127.0.0.1", 1, False, Proxy("127.0.0.1", server.port))
            location = S3Location(bucket="data", endpoint="http://127.0.0.1:1")
            client = client_by(Caller(resolve(location), StaticSource(KEYS), lambda _: Transport(route)))
            client.put("k", b"part", WriteOptions())
            client.close()

        assert hashlib.sha256(b"part").hexdigest().encode() in server.requests[0]

    @pytest.mark.parametrize("whole", [False, True])
    def test_a_sink_gets_a_large_body_with_its_facts(self, whole: bool) -> None:
        body = random.Random(3).randbytes(2_500_000)
        facts = ['ETag: "v1"', f"Content-Range: bytes 1000-{999 + len(body)}/{len(body) + 5000}"]
        byte_range = None if whole else ByteRange(1000, 1000 + len(body))
        got: list[tuple[ObjectInfo, int, bytes]] = []
        with ScriptedServer([http(200 if whole else 206, body, *facts)]) as server:
            client = client_of(server)
            answer, info = client.get(
                "k", byte_range=byte_range, sink=lambda info, at, part: got.append((info, at, bytes(part)))
            )
            client.close()

        assert (answer, info.etag, info.size) == (b"", "v1", len(body) if whole else len(body) + 5000)
        assert all(each == info for each, _, _ in got)
        assert b"".join(part for _, _, part in sorted(got, key=lambda each: each[1])) == body

    def test_a_sink_never_sees_another_range_than_was_asked_for(self) -> None:
        body = bytes(200_000)
        got: list[Body] = []
        short = http(206, body, "Content-Range: bytes 0-199999/900000")
        ignored = http(200, bytes(900_000))
        with ScriptedServer([short, ignored]) as server:
            client = client_of(server)
            for _ in range(2):
                with contextlib.suppress(CorruptBody):
                    client.get("k", byte_range=ByteRange(0, 300_000), sink=lambda _i, _a, part: got.append(part))
            client.close()

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
        with ScriptedServer([http(200), first, *[http(200, LISTING)] * 2, http(200)]) as server:
            client = client_of(server)
            client.head("k")
            client.list_page("")
            client.list_page("")
            client.head("k")
            client.close()

        assert [b"/eu-west-3/s3/" in request for request in server.requests] == [False, False, True, True, True]

    def test_a_second_redirect_is_an_error(self) -> None:
        with ScriptedServer([http(301, b"", f"x-amz-bucket-region: eu-west-{n}") for n in (1, 2)]) as server:
            client = client_of(server)
            with pytest.raises(WrongRegion) as raised:
                client.list_page("")
            client.close()

        assert raised.value.region == "eu-west-2"

    def test_without_following_the_region_is_named(self) -> None:
        with ScriptedServer([http(400, MALFORMED)]) as server:
            client = client_of(server, follow=False)
            with pytest.raises(WrongRegion, match=r"eu-west-3.*server says: AuthorizationHeaderMalformed"):
                client.list_page("")
            client.close()


class TestAnswers:
    def test_each_request_is_signed_with_the_token(self) -> None:
        with ScriptedServer([http(200, LISTING)]) as server:
            client = client_of(server)
            client.list_page("a//b/ü", start_after="a b")
            client.close()

        head = server.requests[0].decode()
        assert head.startswith(
            "GET /data?encoding-type=url&list-type=2&max-keys=1000&prefix=a%2F%2Fb%2F%C3%BC&start-after=a%20b "
        )
        assert "x-amz-security-token: token" in head

    def test_an_error_inside_a_success_is_an_error(self) -> None:
        fault = http(200, b"\n <Error><Code>InternalError</Code><Message>late</Message></Error>")
        with ScriptedServer([fault, fault, fault]) as server:
            client = client_of(server)
            with pytest.raises(ServerFault, match="late"):
                client.copy("a", "b")
            with pytest.raises(ServerFault, match="late"):
                client.complete_upload("a", UploadId("u"), PARTS, WriteOptions())
            with pytest.raises(ServerFault, match="late"):
                client.upload_part_copy("a", UploadId("u"), PartNumber(1), "s", ByteRange(0, 1), None)
            client.close()

    def test_a_late_failed_condition_of_a_completion_is_a_condition(self) -> None:
        body = b"<Error><Code>PreconditionFailed</Code></Error>"
        with ScriptedServer([http(200, body)]) as server:
            client = client_of(server)
            with pytest.raises(PreconditionFailed):
                client.complete_upload("a", UploadId("u"), PARTS, WriteOptions(if_match=ETag("e")))
            client.close()

    def test_if_match_on_a_key_that_is_gone_is_a_failed_condition(self) -> None:
        gone = http(404, b"<Error><Code>NoSuchKey</Code></Error>")
        no_upload = http(404, b"<Error><Code>NoSuchUpload</Code></Error>")
        no_bucket = http(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        options = WriteOptions(if_match=ETag("e"))
        with ScriptedServer([gone, no_upload, no_bucket]) as server:
            client = client_of(server)
            with pytest.raises(PreconditionFailed):
                client.put("a", b"", options)
            with pytest.raises(NotFound):
                client.complete_upload("a", UploadId("u"), PARTS, options)
            with pytest.raises(BucketNotFound):
                client.put("a", b"", options)
            client.close()

    def test_a_server_that_ignores_ranges_still_gives_the_range(self) -> None:
        with ScriptedServer([http(200, b"0123456789", 'ETag: "e"')]) as server:
            client = client_of(server)
            body, info = client.get("k", byte_range=ByteRange(2, 5))
            client.close()

        assert (bytes(body), info.size, info.etag) == (b"234", 10, "e")

    def test_a_range_of_the_wrong_length_is_corrupt(self) -> None:
        with ScriptedServer([http(206, b"01", "Content-Range: bytes 0-1/10")]) as server:
            client = client_of(server)
            with pytest.raises(CorruptBody):
                client.get("k", byte_range=ByteRange(0, 5))
            client.close()

    def test_an_object_that_grew_while_its_end_was_asked_for_is_read_again(self) -> None:
        with ScriptedServer([http(416), http(200, b"", "Content-Length: 50")]) as server:
            client = client_of(server)
            with pytest.raises(CorruptBody) as raised:
                client.get("k", byte_range=ByteRange(10, 20))
            client.close()

        assert raised.value.transient

    def test_foreign_metadata_beyond_ascii_is_shown_as_an_encoded_word(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nx-amz-meta-Who: J\xc3\xbcrgen\r\n\r\n"
        with ScriptedServer([head]) as server:
            client = client_of(server)
            info = client.head("k")
            client.close()

        assert dict(info.metadata) == {"who": "=?UTF-8?B?SsO8cmdlbg==?="}

    def test_a_page_of_a_proxy_is_an_error_with_its_status(self) -> None:
        with ScriptedServer([http(400, b"<html>Bad\ngateway</html>")]) as server:
            client = client_of(server)
            with pytest.raises(InvalidRequest, match="HTTP status 400"):
                client.head("k")
            client.close()

    def test_clock_skew_says_by_how_much(self) -> None:
        body = b"<Error><Code>RequestTimeTooSkewed</Code><Message>m</Message></Error>"
        with ScriptedServer([http(403, body, "Date: Thu, 01 Jan 2026 00:00:00 GMT")]) as server:
            client = client_of(server)
            with pytest.raises(ClockSkew, match=r"this machine's clock is \d+ days ahead of the server's"):
                client.list_page("")
            client.close()

    @promise("S-65")
    def test_a_head_can_not_say_that_the_clock_is_wrong_but_its_date_can(self) -> None:
        with ScriptedServer([http(403, b"", "Date: Thu, 01 Jan 2026 00:00:00 GMT")]) as server:
            client = client_of(server)
            with pytest.raises(ClockSkew, match=r"this machine's clock is \d+ days ahead of the server's: set it"):
                client.head("k")
            client.close()

    def test_pages_of_uploads_are_followed_by_their_markers(self) -> None:
        page = (
            b"<ListMultipartUploadsResult><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextKeyMarker>a+b</NextKeyMarker>"
            b"<NextUploadIdMarker>u1</NextUploadIdMarker><Upload><Key>a+b</Key><UploadId>u1</UploadId></Upload>"
            b"</ListMultipartUploadsResult>"
        )
        with ScriptedServer([http(200, page), http(200, b"<ListMultipartUploadsResult/>")]) as server:
            client = client_of(server)
            found = [upload.key for upload in client.pending_uploads("a")]
            client.close()

        assert found == ["a b"]
        assert b"key-marker=a%20b" in server.requests[1]
        assert b"upload-id-marker=u1" in server.requests[1]

    def test_failures_of_a_bulk_delete_come_back_key_by_key(self) -> None:
        body = (
            b"<DeleteResult><Error><Key>b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
            b"<Error><Key>c</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
        )
        denied = http(403, b"<Error><Code>AccessDenied</Code><Message>odd</Message></Error>")
        with ScriptedServer([http(200, body), http(204), denied]) as server:
            client = client_of(server)
            failures = client.delete_many(["a", "b", "c", "\x01", "\x02"])
            client.close()

        assert [(f.key, f.code, f.message) for f in failures] == [
            ("b", "AccessDenied", "no"),
            ("\x02", "AccessDenied", "odd"),
        ]
        assert b"content-md5: " in server.requests[0]
