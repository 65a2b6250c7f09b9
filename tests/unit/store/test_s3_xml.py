"""The XML of S3, as different servers send it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.errors import CorruptBody
from datastore.fuse.store.base import ETag, PartNumber
from datastore.fuse.store.s3 import xml
from datastore.fuse.store.s3.messages import http_date_ns, unquote_etag

LISTING = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix>d%2F</Prefix>
<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>t/+=</NextContinuationToken>
<Contents><Key>d/a+b%2Bc%01%FF</Key><LastModified>2009-10-12T17:50:30.123Z</LastModified>
<ETag>&quot;fba9dede5f27731c9771645a39863328&quot;</ETag><Size>434234</Size></Contents>
<CommonPrefixes><Prefix>d/e%20f/</Prefix></CommonPrefixes></ListBucketResult>"""


def test_a_listing_is_read_with_its_keys_decoded() -> None:
    page = xml.parse_list(LISTING)
    (listed,) = page.objects
    assert listed.key == "d/a b+c\x01\udcff"
    assert (listed.size, listed.etag) == (434234, "fba9dede5f27731c9771645a39863328")
    assert listed.mtime_ns == 1_255_369_830_123_000_000
    assert page.common_prefixes == ["d/e f/"]
    assert page.next_token == "t/+="


def test_a_server_that_does_not_encode_is_taken_at_its_word() -> None:
    page = xml.parse_list(b"<ListBucketResult><Contents><Key>a+b%20</Key></Contents></ListBucketResult>")
    assert [listed.key for listed in page.objects] == ["a+b%20"]
    assert page.next_token is None


@pytest.mark.parametrize(
    "body", [b"", b"<html>proxy", b"<a>", b'<!DOCTYPE a [<!ENTITY x "y">]><ListBucketResult>&x;</ListBucketResult>']
)
def test_what_is_no_s3_answer_is_a_corrupt_body(body: bytes) -> None:
    with pytest.raises(CorruptBody):
        xml.parse_list(body)


def test_a_page_is_the_same_wherever_it_was_asked_to_begin() -> None:
    by_token = LISTING.replace(b"<Contents>", b"<ContinuationToken>d/a</ContinuationToken><Contents>", 1)
    by_key = LISTING.replace(b"<Contents>", b"<StartAfter>d/a</StartAfter><ContinuationToken/><Contents>", 1)
    another_way_on = LISTING.replace(b"t/+=", b"another")
    assert {xml.list_digest(body) for body in (by_token, by_key, another_way_on)} == {xml.list_digest(LISTING)}


@pytest.mark.parametrize(
    "change", [(b"434234", b"434235"), (b">true<", b">false<"), (b"e%20f", b"e%20g"), (b":30.123", b":31")]
)
def test_a_page_that_says_something_else_has_another_digest(change: tuple[bytes, bytes]) -> None:
    assert xml.list_digest(LISTING.replace(*change)) != xml.list_digest(LISTING)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash_the_parsers(body: bytes) -> None:
    for parse in (xml.parse_list, xml.parse_uploads, xml.parse_copy, xml.parse_upload_id, xml.parse_delete):
        with pytest.raises(CorruptBody):
            parse(body)
    assert xml.parse_error(body) is None


def test_an_error_document_is_read_whatever_its_namespace() -> None:
    body = (
        b'<?xml version="1.0"?><Error xmlns="x"><Code>NoSuchKey</Code><Message>gone</Message>'
        b"<RequestId>R</RequestId><Region>eu</Region></Error>"
    )
    assert xml.parse_error(body) == xml.ErrorAnswer("NoSuchKey", "gone", "R", "eu")
    assert xml.parse_error(b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>") is None
    assert xml.parse_error(b"<Error><Code>cut") is None


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(xml.fits_xml), max_size=5))
def test_a_bulk_delete_carries_every_key_that_fits(keys: list[str]) -> None:
    root = ElementTree.fromstring(xml.build_delete(keys))
    assert [item.text or "" for item in root.iter("Key")] == keys


@pytest.mark.parametrize("key", ["\x01", "\udcff", "\x00", "\ufffe", "\uffff", "\x0b"])
def test_keys_that_xml_cannot_carry_are_known(key: str) -> None:
    assert not xml.fits_xml(f"a{key}b")


def test_a_completion_lists_its_parts() -> None:
    parts = [(PartNumber(1), ETag("a")), (PartNumber(9), ETag("b"))]
    root = ElementTree.fromstring(xml.build_complete(parts, ["", ""]))
    assert [(part.findtext("PartNumber"), part.findtext("ETag")) for part in root] == [("1", '"a"'), ("9", '"b"')]


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("nonsense", 0), ("Thu, 01 Jan 1970 00:01:00 GMT", 60 * 10**9)]
)
def test_http_dates_become_nanoseconds(text: str, expected: int) -> None:
    assert http_date_ns(text) == expected


@pytest.mark.parametrize("text", ['"abc"', 'W/"abc"', "abc", ' "abc" '])
def test_an_etag_loses_its_quotes(text: str) -> None:
    assert unquote_etag(text) == "abc"
