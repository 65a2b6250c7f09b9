"""What the answers to a GET or HEAD say of an object, and how its bytes are handed on."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from datastore.errors import CorruptBody

from ..base import SYSTEM, SYSTEM_HEADERS, TAGGED, Body, ByteRange, ObjectInfo, Sink
from ..limits import shown
from . import xml
from .messages import Answer, Outlet
from .sigv4 import encode_path

META = "x-amz-meta-"
"""Before the names of user metadata."""


class Pouring:
    """Hands the body of one GET to a sink as it comes."""

    def __init__(self, key: str, byte_range: ByteRange | None, sink: Sink) -> None:
        self._key = key
        self._range = byte_range
        self._sink = sink
        self._info: ObjectInfo | None = None

    def outlet(self) -> Outlet:
        """For the request. A server that ignores Range answers with another status, and is then read as a whole."""
        start = self._range.start if self._range is not None else 0
        return Outlet(200 if self._range is None else 206, start, self._take)

    def info(self, headers: Mapping[str, str], length: int) -> ObjectInfo:
        """The object's facts, from the headers of an answer with a body of `length` bytes. Errors: CorruptBody."""
        size = length
        if self._range is not None:
            size = xml.size_of(headers.get("content-range", "").rpartition("/")[2] or str(length))
            _check_length(self._key, length, self._range, size)
        return describe(self._key, headers, size)

    def _take(self, headers: Mapping[str, str], length: int, offset: int, body: Body) -> None:
        if self._info is None or offset == 0:
            self._info = self.info(headers, length)
        self._sink(self._info, offset, body)


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
    found = {name.removeprefix(META): value for name, value in headers.items() if name.startswith(META)}
    found |= {SYSTEM + name: headers[name] for name in SYSTEM_HEADERS if headers.get(name)}
    if found.get(":content-encoding") == "aws-chunked":
        del found[":content-encoding"]  # how it was sent, which some servers keep
    if headers.get("x-amz-tagging-count", "0") != "0":
        found[TAGGED] = encode_path(key)
    return {name: value if value.isascii() else _encoded_word(value) for name, value in found.items()}


def _encoded_word(value: str) -> str:
    return f"=?UTF-8?B?{base64.b64encode(value.encode('latin-1', 'replace')).decode()}?="


def received(key: str, answer: Answer, byte_range: ByteRange | None) -> tuple[Body, ObjectInfo]:
    """Body and facts of a GET; a server that ignores Range sends everything with 200. Errors: CorruptBody."""
    body = answer.body
    partial = answer.headers.get("content-range", "") if answer.status == 206 else ""
    size = xml.size_of(partial.rpartition("/")[2]) if partial else len(body)
    if byte_range is None:
        return body, describe(key, answer.headers, size)
    if not partial:
        return memoryview(body)[byte_range.start : byte_range.stop], describe(key, answer.headers, size)
    _check_length(key, len(body), byte_range, size)
    return body, describe(key, answer.headers, size)


def _check_length(key: str, length: int, byte_range: ByteRange, size: int) -> None:
    if length != min(byte_range.stop, size) - byte_range.start:
        raise CorruptBody(
            f"GET {shown(key)}: {length} bytes came for range {byte_range.start}-{byte_range.stop}", key=key
        )
