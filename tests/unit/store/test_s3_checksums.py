"""Checksums of what is sent, against scripted answers: who takes them, who ignores them, and who refuses them."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from datastore.errors import CredentialsInvalid, InvalidRequest, NotFound, ServerFault
from datastore.fuse.store.base import ByteRange, ETag, FilePart, PartNumber, UploadId, WriteOptions
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.retrying import Retrier, RetryingStore
from datastore.fuse.store.s3.checksums import crc32_of
from datastore.fuse.store.s3.client import S3Store
from tests.promises import promise
from tests.unit.store.scripted import ScriptedServer, http
from tests.unit.store.test_s3_client import scripted

BODY = b"what is sent"
ONE, TWO = PartNumber(1), PartNumber(2)
PLAIN = WriteOptions()
TAKEN = ("x-amz-checksum-algorithm: CRC32", "x-amz-checksum-type: COMPOSITE")
PUT_DONE, PART_DONE = http(200, b"", 'ETag: "e"'), http(200, b"", 'ETag: "p"')
COPIED = http(200, b"<CopyPartResult><ETag>c</ETag></CopyPartResult>")
COMPLETED = http(200, b"<CompleteMultipartUploadResult><ETag>m</ETag></CompleteMultipartUploadResult>")


def sum_of(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def begun(upload_id: str, *headers: str) -> bytes:
    root = "InitiateMultipartUploadResult"
    return http(200, f"<{root}><UploadId>{upload_id}</UploadId></{root}>".encode(), *headers)


def refused(status: int, code: str) -> bytes:
    return http(status, f"<Error><Code>{code}</Code><Message>no such header</Message></Error>".encode())


def sent(server: ScriptedServer) -> list[list[str]]:
    """The checksum headers of each request."""
    return [re.findall(r"\n(x-amz-checksum[^\r]*)", request.decode()) for request in server.requests]


def file_part(folder: Path, body: bytes = BODY, start: int = 0, stop: int = len(BODY)) -> FilePart:
    (folder / "file").write_bytes(body)
    return FilePart(os.open(folder / "file", os.O_RDONLY), start, stop)


def known_of(client: BlockingStore, upload: UploadId, parts: list[tuple[PartNumber, ETag]]) -> list[str]:
    """The checksums that it remembers."""
    assert isinstance(client.inner, S3Store)
    return client.inner._checksums.of(upload, parts)


DECLARED = ["x-amz-checksum-algorithm: CRC32"]
SUMMED = [f"x-amz-checksum-crc32: {sum_of(BODY)}"]
REFUSALS = [(400, "InvalidArgument"), (501, "NotImplemented"), (403, "SignatureDoesNotMatch")]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (5, 300_000), (0, 1 << 20), (262_144, 524_289)])
def test_the_checksum_of_a_part_of_a_file(tmp_path: Path, start: int, stop: int) -> None:
    body = random.Random(1).randbytes(1 << 20)
    with file_part(tmp_path, body, start, stop) as part:
        assert crc32_of(part) == sum_of(body[start:stop]) == crc32_of(memoryview(body)[start:stop])


def test_what_a_file_has_lost_meanwhile_counts_as_zeros(tmp_path: Path) -> None:
    """As it is sent."""
    with file_part(tmp_path, b"left", 2, 700_000) as part:
        assert crc32_of(part) == sum_of(part.read()) == sum_of(b"ft".ljust(699_998, b"\0"))


@promise("S-131")
def test_where_the_algorithm_is_taken_each_part_and_the_completion_carry_it(tmp_path: Path) -> None:
    """Of a part that was sent again the one that counts."""
    script = [begun("u", *TAKEN), http(200, b"", 'ETag: "old"'), PART_DONE, http(200, b"", 'ETag: "q"'), COMPLETED]
    with scripted(*script) as (client, server):
        upload = client.create_upload("k", PLAIN)
        client.upload_part("k", upload, ONE, b"older")
        with file_part(tmp_path) as part:
            tags = [(ONE, client.upload_part("k", upload, ONE, part))]
        tags.append((TWO, client.upload_part("k", upload, TWO, b"tail")))
        client.complete_upload("k", upload, tags, PLAIN)
        older, tail = ([f"x-amz-checksum-crc32: {sum_of(body)}"] for body in (b"older", b"tail"))
        assert sent(server) == [DECLARED, older, SUMMED, tail, []]
        listed = re.findall("<ChecksumCRC32>(.*?)</ChecksumCRC32>", server.requests[-1].decode())
        assert listed == [sum_of(BODY), sum_of(b"tail")]


@promise("S-131", "S-45")
def test_a_part_that_changes_on_its_way_is_summed_and_sent_again(tmp_path: Path) -> None:
    """A writer may do that: the file goes on being written."""
    script = [begun("u", *TAKEN), refused(400, "BadDigest"), PART_DONE]

    async def write(_seconds: float) -> None:
        (tmp_path / "file").write_bytes(BODY)

    with scripted(*script) as (client, server):
        store = BlockingStore(RetryingStore(client.inner, Retrier(sleep=write)))
        upload = store.create_upload("k", PLAIN)
        with file_part(tmp_path, b"as it was   ") as part:
            store.upload_part("k", upload, ONE, part)
        assert sent(server) == [DECLARED, [f"x-amz-checksum-crc32: {sum_of(b'as it was   ')}"], SUMMED]
        assert server.requests[2].endswith(BODY)


@promise("S-146")
def test_where_it_is_ignored_parts_are_sent_as_ever() -> None:
    with scripted(begun("u"), PART_DONE, COMPLETED) as (client, server):
        upload = client.create_upload("k", PLAIN)
        client.complete_upload("k", upload, [(ONE, client.upload_part("k", upload, ONE, BODY))], PLAIN)
        assert sent(server) == [DECLARED, [], []]
        assert b"ChecksumCRC32" not in server.requests[-1]


@promise("S-146")
@pytest.mark.parametrize("said", [TAKEN[:1], ("x-amz-checksum-algorithm: CRC32", "x-amz-checksum-type: FULL_OBJECT")])
def test_a_server_of_another_kind_of_checksum_gets_an_upload_without(said: Sequence[str]) -> None:
    """Of the upload that it began nothing is left."""
    with scripted(begun("u", *said), http(204), begun("v"), PART_DONE, COMPLETED, begun("w")) as (client, server):
        upload = client.create_upload("k", PLAIN)
        client.complete_upload("k", upload, [(ONE, client.upload_part("k", upload, ONE, BODY))], PLAIN)
        assert (upload, client.create_upload("k", PLAIN)) == ("v", "w")
        assert sent(server) == [DECLARED, [], [], [], [], []]
        assert server.requests[1].startswith(b"DELETE /data/k?uploadId=u ")


@promise("S-131", "S-146")
def test_parts_that_are_sent_beside_copied_ones_carry_their_md5(tmp_path: Path) -> None:
    """No CRC-32: servers make none of the whole then, or a wrong one."""
    with scripted(begun("u"), COPIED, PART_DONE, PART_DONE, COMPLETED, PART_DONE) as (client, server):
        upload = client.create_upload("k", PLAIN, copies=True)
        tags = [(ONE, client.upload_part_copy("k", upload, ONE, "s", ByteRange(0, 5), None))]
        tags.append((TWO, client.upload_part("k", upload, TWO, BODY)))
        with file_part(tmp_path) as part:
            client.upload_part("k", upload, TWO, part)
        client.complete_upload("k", upload, tags, PLAIN)
        client.upload_part("k", upload, TWO, BODY)
        assert sent(server) == [[]] * 6
        digest = base64.b64encode(hashlib.md5(BODY).digest()).decode()
        carried = [re.findall(r"\ncontent-md5: ([^\r]*)", request.decode()) for request in server.requests]
        assert carried == [[], [], [digest], [digest], [], []]


@promise("S-146")
@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_a_put_that_is_refused_for_its_checksum_is_sent_without(status: int, code: str) -> None:
    """Once: the next one goes without from the start."""
    options = WriteOptions(if_none_match=True)
    with scripted(refused(status, code), PUT_DONE, PUT_DONE) as (client, server):
        assert client.put("k", BODY, options).etag == "e"
        client.put("k", BODY, PLAIN)
        assert sent(server) == [SUMMED, [], []]


@promise("S-146")
@pytest.mark.parametrize(("status", "code"), REFUSALS)
def test_an_upload_that_is_refused_for_its_algorithm_is_begun_without(status: int, code: str) -> None:
    with scripted(refused(status, code), begun("u"), PART_DONE, begun("v")) as (client, server):
        client.upload_part("k", client.create_upload("k", PLAIN), ONE, BODY)
        client.create_upload("k", PLAIN)
        assert sent(server) == [DECLARED, [], [], []]


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(400, "InvalidArgument", InvalidRequest), (403, "SignatureDoesNotMatch", CredentialsInvalid)],
)
def test_what_is_refused_for_another_reason_says_so(status: int, code: str, error: type[Exception]) -> None:
    """Checksums are sent all the same; once the server has taken one, no request is sent twice because of them."""
    no = refused(status, code)
    with scripted(no, no, PUT_DONE, no) as (client, server):
        with pytest.raises(error):
            client.put("k", BODY, PLAIN)
        client.put("k", BODY, PLAIN)
        with pytest.raises(error):
            client.put("k", BODY, PLAIN)
        assert sent(server) == [SUMMED, [], SUMMED, SUMMED]


@promise("S-146")
@pytest.mark.parametrize("late", [False, True])
def test_a_server_that_refuses_what_it_agreed_to_gets_the_next_upload_without(late: bool) -> None:
    """At a part, or at the completion."""
    no = refused(501, "NotImplemented")
    script = [begun("u", *TAKEN), *([PART_DONE, no] if late else [no]), http(204), begun("v"), PART_DONE]
    with scripted(*script) as (client, server):
        upload = client.create_upload("k", PLAIN)
        with pytest.raises(Exception, match="NotImplemented"):
            client.complete_upload("k", upload, [(ONE, client.upload_part("k", upload, ONE, BODY))], PLAIN)
        client.abort_upload("k", upload)
        client.upload_part("k", client.create_upload("k", PLAIN), ONE, BODY)
        assert sent(server)[-2:] == [[], []]


@pytest.mark.parametrize("end", ["done", "gone", "dropped"])
def test_what_was_sent_is_known_until_the_upload_ends(end: str) -> None:
    """A completion may have to be repeated; an upload that is done, gone or dropped leaves nothing in memory."""
    lost = http(500, b"<Error><Code>InternalError</Code></Error>")
    gone = http(404, b"<Error><Code>NoSuchUpload</Code></Error>")
    last = {"done": COMPLETED, "gone": gone, "dropped": http(204)}[end]
    with scripted(begun("u", *TAKEN), PART_DONE, lost, last) as (client, server):
        upload = client.create_upload("k", PLAIN)
        tags = [(ONE, client.upload_part("k", upload, ONE, BODY))]
        with pytest.raises(ServerFault, match="InternalError"):
            client.complete_upload("k", upload, tags, PLAIN)
        assert sum_of(BODY) in known_of(client, upload, tags)[0]
        if end == "dropped":
            client.abort_upload("k", upload)
        else:
            with pytest.raises(NotFound) if end == "gone" else nullcontext():
                client.complete_upload("k", upload, tags, PLAIN)
            assert b"ChecksumCRC32" in server.requests[3]
        assert known_of(client, upload, tags) == [""]
