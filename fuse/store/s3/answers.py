"""What the answers to a GET or HEAD say of an object. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from datastore.errors import CorruptBody

from ..base import SYSTEM, SYSTEM_HEADERS, TAGGED, Body, ByteRange, ObjectInfo
from ..limits import shown
from . import xml
from .messages import Answer
from .sigv4 import encode_path


def describe(key: str, headers: Mapping[str, str], size: int) -> ObjectInfo:
    """The facts in the headers about an object of `size` bytes."""
    return ObjectInfo(
        key=key,
        size=size,
        etag=xml.unquote_etag(headers.get("etag", "")),
        mtime_ns=xml.http_date_ns(headers.get("last-modified", "")),
        server_time_ns=xml.http_date_ns(headers.get("date", "")),
        metadata=_metadata(key, headers),
        content_type=headers.get("content-type", ""),
    )


def described(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    """The facts in the headers of an answer to a HEAD. Errors: CorruptBody."""
    return describe(key, headers, xml.size_of(headers.get("content-length", "0")))


def _metadata(key: str, headers: Mapping[str, str]) -> dict[str, str]:
    """User metadata, and what S3 keeps beside them (base.SYSTEM).

    Others may have written bytes beyond ASCII: shown as an RFC 2047 word, as Amazon's S3 does.
    """
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name.startswith(xml.META):
            found[name.removeprefix(xml.META)] = _printable(value)
        elif name in SYSTEM_HEADERS and value:
            found[SYSTEM + name] = _printable(value)
    if found.get(":content-encoding") == "aws-chunked":
        del found[":content-encoding"]  # how it was sent, which some servers keep
    if headers.get("x-amz-tagging-count", "0") != "0":
        found[TAGGED] = encode_path(key)
    return found


def _printable(value: str) -> str:
    return value if value.isascii() else f"=?UTF-8?B?{base64.b64encode(value.encode('latin-1', 'replace')).decode()}?="


def received(key: str, answer: Answer, byte_range: ByteRange | None) -> tuple[Body, ObjectInfo]:
    """Body and facts of a GET; a server that ignores Range sends everything with 200. Errors: CorruptBody."""
    body, total = answer.body, _total(answer.headers) if answer.status == 206 else ""
    if byte_range is None or not total:
        size = xml.size_of(total) if total else len(body)
        if byte_range is not None:
            body = memoryview(body)[byte_range.start : byte_range.stop]
        return body, describe(key, answer.headers, size)
    return body, describe_part(key, answer.headers, len(body), byte_range)


def describe_part(key: str, headers: Mapping[str, str], length: int, byte_range: ByteRange | None) -> ObjectInfo:
    """The object's facts, from the headers of an answer with `length` bytes of a range, or of all of it.

    Errors: CorruptBody.
    """
    if byte_range is None:
        return describe(key, headers, length)
    size = xml.size_of(_total(headers) or str(length))
    if length != min(byte_range.stop, size) - byte_range.start:
        raise CorruptBody(
            f"GET {shown(key)}: {length} bytes came for range {byte_range.start}-{byte_range.stop}", key=key
        )
    return describe(key, headers, size)


def _total(headers: Mapping[str, str]) -> str:
    return headers.get("content-range", "").rpartition("/")[2]
