"""The XML of S3: listings, multipart uploads, bulk delete, errors; parsed to types of base.py or built from them. Pure.

Names are matched without their namespace, since not every server sends a namespace. Keys in listings are asked for with
encoding-type=url, since XML 1.0 can carry neither control characters nor non-UTF-8 bytes.

Documents are parsed to trees, so anything that expands a small document into a large tree is refused before parsing:
entities, more elements or attributes than the requested entries can have, and long namespaces, which a tree repeats in
each name. most_bytes() and the parsers are told how many entries were requested.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from datastore.errors import CorruptBody

from ..base import (
    SYSTEM,
    SYSTEM_HEADERS,
    TAGGED,
    ETag,
    ListedObject,
    ListPage,
    PartNumber,
    PendingUpload,
    UploadId,
)
from ..packed import packed
from .errors import one_line
from .messages import A_PAGE, META, SMALL_BYTES, size_of, unquote_etag
from .sigv4 import encode_path

_NAMESPACE = re.compile(rb"""\sxmlns=("[^"]*"|'[^']*')""")
_DOCTYPE = b"<!DOCTYPE"
_LONG_NAMESPACE = re.compile(rb"xmlns[^<>]{1000}")
_ATTRIBUTE = re.compile(rb"""=\s*["']""")
_ROOT_BYTES = 1000
"""The root's namespace is within this many bytes; XML declaration, name and namespace have 200."""
_FEW_TAGS = 1000
"""The most start and end tags in a document about one thing, and around the entries of a listing."""
_ENTRY_TAGS, _ENTRY_TAGS_METADATA = 40, 400
"""The most start and end tags in an entry: S3 sends 12 to 24 for an object, MinIO two more for each header shown."""
_ENTRY_BYTES, _ENTRY_BYTES_METADATA = 4 << 10, 12 << 10
"""The largest entry: 3 KiB are a key of 1,024 bytes, each escaped as %FF. MinIO shows 2 KiB of metadata, and tags."""
_ASKED = re.compile(rb"<(StartAfter|ContinuationToken|NextContinuationToken)(/>|>[^<]*</\1>)")
"""The elements of a listing's page that say how it was asked for, and how to continue."""
_ITEM, _ITEM_END = b"<Contents>", b"</Contents>"
_METADATA_END = b"</UserMetadata>"
_ADDED = re.compile(rb"<(UserMetadata|UserTags|Internal)>.*?</\1>", re.DOTALL)
_HTML = re.compile(rb"\s*(?:<[?!](?!doctype html)[^>]*>\s*)*<(?:!doctype )?html\b", re.IGNORECASE)
"""The beginning of an HTML page, after comments and the like."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ErrorAnswer(NamedTuple):
    """An <Error> document; '' where an element is missing."""

    code: str
    message: str
    request_id: str
    region: str


def most_bytes(entries: int, *, metadata: bool = False) -> int:
    """Return the largest size of a document with this many entries. metadata: they show metadata as MinIO does."""
    return SMALL_BYTES + entries * (_ENTRY_BYTES_METADATA if metadata else _ENTRY_BYTES)


def parse_list(body: bytes, entries: int = 1000, *, metadata: bool = False) -> ListPage:
    """Parse the answer to ListObjectsV2. Errors: CorruptBody."""
    tags = _ENTRY_TAGS_METADATA if metadata else _ENTRY_TAGS
    root = _parse(body, "ListBucketResult", _FEW_TAGS + entries * tags)
    decoded = root.findtext("EncodingType") == "url"
    objects = [
        ListedObject(
            _key(item, "Key", decoded=decoded),
            size_of(item.findtext("Size") or "0"),
            unquote_etag(item.findtext("ETag") or ""),
            _iso_ns(item.findtext("LastModified") or ""),
            _said(item, decoded=decoded),
        )
        for item in root.iterfind("Contents")
    ]
    prefixes = [_key(item, "Prefix", decoded=decoded) for item in root.iterfind("CommonPrefixes")]
    truncated = root.findtext("IsTruncated") == "true"
    return ListPage(objects, prefixes, root.findtext("NextContinuationToken") if truncated else None)


def list_digest(body: bytes) -> bytes:
    """Return a digest of a listing page's content, wherever the page began, in a twentieth of the time of parse_list().

    What MinIO's ListObjectsV2M adds is left out, so that a page without metadata has the same digest. A change of
    metadata changes LastModified, which MinIO shows in milliseconds.
    """
    if _METADATA_END in body:
        body = _ADDED.sub(b"", body)
    first, last = body.find(_ITEM), body.rfind(_ITEM_END)
    if not 0 <= first <= last:
        first = last = len(body)
    view = memoryview(body)
    digest = hashlib.blake2b(_ASKED.sub(b"", body[:first]), digest_size=16)
    digest.update(view[first:last])
    digest.update(_ASKED.sub(b"", body[last:]))
    return digest.digest()


def _said(item: ElementTree.Element, *, decoded: bool) -> str | None:
    """Return what MinIO's ListObjectsV2M adds for an object, packed(); None if it adds nothing, or less than a HEAD."""
    listed = item.find("UserMetadata")
    if listed is None:
        return None
    metadata: dict[str, str] = {}
    content_type = ""
    for one in listed:
        name = one.tag.lower()
        if name == "content-type":
            content_type = one.text or ""
        elif name.startswith(META) or name in SYSTEM_HEADERS:
            name = name.removeprefix(META) if name.startswith(META) else SYSTEM + name
            if name in metadata:
                return None
            metadata[name] = one.text or ""
    if item.findtext("UserTags"):
        metadata[TAGGED] = encode_path(_key(item, "Key", decoded=decoded))
    return packed(metadata, content_type)


def parse_uploads(body: bytes, entries: int = 1000) -> tuple[list[PendingUpload], list[tuple[str, str]]]:
    """Parse the answer to ListMultipartUploads: one page, and the query of the next one. Errors: CorruptBody."""
    root = _parse(body, "ListMultipartUploadsResult", _FEW_TAGS + entries * _ENTRY_TAGS)
    decoded = root.findtext("EncodingType") == "url"
    uploads = [
        PendingUpload(
            _key(item, "Key", decoded=decoded),
            UploadId(item.findtext("UploadId") or ""),
            _iso_ns(item.findtext("Initiated") or ""),
        )
        for item in root.iterfind("Upload")
    ]
    next_key = _key(root, "NextKeyMarker", decoded=decoded)
    if root.findtext("IsTruncated") != "true" or not next_key:
        return uploads, []
    return uploads, [("key-marker", next_key), ("upload-id-marker", root.findtext("NextUploadIdMarker") or "")]


def parse_copy(body: bytes) -> tuple[ETag, int]:
    """Parse ETag and time (ns) of a copy, a part copy or a completed upload. Errors: CorruptBody."""
    root = _parse(body)
    etag = root.findtext("ETag")
    if not etag:
        raise CorruptBody(f"the server's answer has no ETag but <{one_line(root.tag, 80)}>")
    return unquote_etag(etag), _iso_ns(root.findtext("LastModified") or "")


def parse_upload_id(body: bytes) -> UploadId:
    """Parse an InitiateMultipartUploadResult. Errors: CorruptBody."""
    found = text_of(body, "UploadId")
    if not found:
        raise CorruptBody("the server began a multipart upload without an UploadId")
    return UploadId(found)


def text_of(body: bytes, name: str) -> str:
    """Return the text of one element below the root; '' where there is none. Errors: CorruptBody."""
    return _parse(body).findtext(name) or ""


def parse_tags(body: bytes) -> list[tuple[str, str]]:
    """Parse a Tagging document to names and values. Errors: CorruptBody."""
    found = _parse(body, "Tagging").iterfind("TagSet/Tag")
    return [(tag.findtext("Key") or "", tag.findtext("Value") or "") for tag in found]


def parse_delete(body: bytes, entries: int = 1000) -> list[tuple[str, str, str]]:
    """Parse the failures in a DeleteResult to key, not URL-encoded, code and message. Errors: CorruptBody."""
    failures = _parse(body, "DeleteResult", _FEW_TAGS + entries * _ENTRY_TAGS).iterfind("Error")
    return [(one.findtext("Key") or "", one.findtext("Code") or "", one.findtext("Message") or "") for one in failures]


def parse_error(body: bytes) -> ErrorAnswer | None:
    """Parse an <Error> document; None when the body is none (a proxy's page, nothing at all, a success)."""
    if b"<Error" not in body[:1000]:
        return None
    try:
        root = _parse(body)
    except CorruptBody:
        return None
    if root.tag != "Error":
        return None
    return ErrorAnswer(*(root.findtext(name) or "" for name in ("Code", "Message", "RequestId", "Region")))


def is_html(body: bytes) -> bool:
    """Whether a body is a web page, as login pages of networks and other middleboxes send it in the server's place."""
    return _HTML.match(body[:1000]) is not None


def build_complete(parts: Sequence[tuple[PartNumber, ETag]], checksums: Sequence[str]) -> bytes:
    """Build a CompleteMultipartUpload. checksums: an element for each part, or ''."""
    items = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{escape(etag)}&quot;</ETag>{checksum}</Part>"
        for (number, etag), checksum in zip(parts, checksums, strict=True)
    )
    return f"<CompleteMultipartUpload>{items}</CompleteMultipartUpload>".encode()


def build_delete(keys: Sequence[str]) -> bytes:
    """Build a quiet Delete: the answer has only failures. All keys must pass fits_xml()."""
    items = "".join(f"<Object><Key>{escape(key, {chr(13): '&#13;'})}</Key></Object>" for key in keys)
    return f"<Delete><Quiet>true</Quiet>{items}</Delete>".encode()


def build_legal_hold(*, on: bool) -> bytes:
    return f"<LegalHold><Status>{'ON' if on else 'OFF'}</Status></LegalHold>".encode()


def build_location(region: str) -> bytes:
    """Build a CreateBucketConfiguration."""
    return (
        f"<CreateBucketConfiguration><LocationConstraint>{escape(region)}</LocationConstraint>"
        "</CreateBucketConfiguration>"
    ).encode()


def fits_xml(key: str) -> bool:
    """Whether XML 1.0 can carry this key: no control characters but tab and line ends, no surrogates (section 2.2)."""
    return all(c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" for c in key)


def _parse(body: bytes, tag: str = "", most_tags: int = _FEW_TAGS) -> ElementTree.Element:
    """Parse a document without its namespace, with root `tag` if given. The module's docstring says what is refused."""
    if is_html(body):
        raise CorruptBody(f"the answer is {A_PAGE}")
    if _DOCTYPE in body or b"\0" in body:  # UTF-16 would hide a DOCTYPE
        raise CorruptBody("the server's XML has a DOCTYPE or is not UTF-8, which S3 never sends")
    if body.count(b"<") > most_tags or (
        body.count(b"=") > most_tags and sum(1 for _ in _ATTRIBUTE.finditer(body)) > most_tags
    ):
        raise CorruptBody("the server's XML has more in it than was asked for")
    if b"xmlns" in body and _LONG_NAMESPACE.search(body):
        raise CorruptBody("the server's XML has a namespace that S3 never sends")
    parser = ElementTree.XMLParser()  # noqa: S314 - no DOCTYPE, so no entities
    try:
        parser.feed(_NAMESPACE.sub(b"", body[:_ROOT_BYTES], count=1))
        parser.feed(memoryview(body)[_ROOT_BYTES:])
        root: ElementTree.Element = parser.close()
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # the last two: an unknown encoding
        raise CorruptBody(f"the server's answer is not XML: {one_line(str(error))}") from error
    if tag not in {"", root.tag}:
        raise CorruptBody(f"the server answered with <{one_line(root.tag, 80)}> where S3 sends <{tag}>")
    return root


def _key(item: ElementTree.Element, name: str, *, decoded: bool) -> str:
    text = item.findtext(name) or ""
    if not decoded:
        return text
    return unquote_to_bytes(text.replace("+", " ")).decode("utf-8", "surrogateescape")


def _iso_ns(text: str) -> int:
    """Return a time like 2009-10-12T17:50:30.123Z in nanoseconds since the epoch; 0 when it is no date."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000
