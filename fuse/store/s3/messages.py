"""Requests to a server, its answers, and what the headers of an answer say of an object."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NamedTuple

from datastore.errors import CorruptBody

from ..base import SYSTEM, SYSTEM_HEADERS, TAGGED, WHOLE_BYTES, Body, ByteRange, ETag, FilePart, ObjectInfo
from ..limits import shown
from .errors import one_line
from .sigv4 import encode_path

META = "x-amz-meta-"
"""Prefix of the headers that carry user metadata."""
_SIZE = re.compile(r"[0-9]{1,18}")
_DATE_CHARACTERS = 64

A_PAGE = "a web page and not the S3 server's: does this network ask for a login, or does a proxy answer?"
NO_ETAG = (
    "the answer has no ETag, so it is not the S3 server's: does the network ask for a login, or does a proxy answer?"
)

SMALL_BYTES = 64 << 10
"""The largest body of an answer that is neither an object nor a listing; no more is read of a refusal's body."""


class Answer(NamedTuple):
    """Status, headers by lower-case name, and the whole body; b"" when the body went to the request's outlet."""

    status: int
    headers: Mapping[str, str]
    body: Body


class Outlet(NamedTuple):
    """Takes a body over SMALL_BYTES in pieces. status: the status of such an answer; other bodies come in the Answer.

    start: the body's offset in the object; pieces end at whole MiB of the object. take: is called with the headers, the
    body's length, the piece's offset in the body, and the piece.
    """

    status: int
    start: int
    take: Callable[[Mapping[str, str], int, int, Body], None]


@dataclass(slots=True, kw_only=True)
class Request:
    """A request, not signed yet. query: not encoded; repeatable: to send it twice has the same effect as once."""

    method: str
    key: str = ""
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | FilePart = b""
    repeatable: bool = True
    expected_bytes: int = 0
    """About how large the body of the answer is, to extend the deadline by the time that it takes."""
    is_long: bool = False
    """The server copies or joins objects before it answers, so the answer may take longer."""
    outlet: Outlet | None = None
    most_bytes: int = SMALL_BYTES
    """The largest body that is accepted in a successful answer; what goes beyond is not read."""


def describe(key: str, headers: Mapping[str, str], size: int | None = None) -> ObjectInfo:
    """Return the facts in the headers about an object of `size` bytes; None: as they say. Errors: CorruptBody."""
    if "etag" not in headers and "last-modified" not in headers:
        raise CorruptBody(f"{shown(key)}: {NO_ETAG}", key=key)
    return ObjectInfo(
        key=key,
        size=size_of(headers.get("content-length", "0")) if size is None else size,
        etag=unquote_etag(headers.get("etag", "")),
        mtime_ns=http_date_ns(headers.get("last-modified", "")),
        server_time_ns=http_date_ns(headers.get("date", "")),
        metadata=_metadata(key, headers),
        content_type=headers.get("content-type", ""),
    )


def _metadata(key: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return user metadata, and what S3 keeps beside them (base.SYSTEM).
    Other clients may have written bytes beyond ASCII: they are shown as an RFC 2047 word, as Amazon S3 does."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name.startswith(META):
            found[name.removeprefix(META)] = _printable(value)
        elif name in SYSTEM_HEADERS and value:
            found[SYSTEM + name] = _printable(value)
    if found.get(":content-encoding") == "aws-chunked":
        del found[":content-encoding"]  # the encoding of the upload itself, which some servers keep
    if headers.get("x-amz-tagging-count", "0") != "0":
        found[TAGGED] = encode_path(key)
    return found


def _printable(value: str) -> str:
    return value if value.isascii() else f"=?UTF-8?B?{base64.b64encode(value.encode('latin-1', 'replace')).decode()}?="


def received(key: str, answer: Answer, byte_range: ByteRange | None) -> tuple[Body, ObjectInfo]:
    """Return body and facts of a GET; a server that ignores Range sends the whole object. Errors: CorruptBody."""
    body, size = answer.body, len(answer.body)
    if answer.status == 206:
        return body, describe_part(key, answer.headers, size, byte_range or ByteRange(0, WHOLE_BYTES))
    if byte_range is not None:
        body = memoryview(body)[byte_range.start : byte_range.stop]
    return body, describe(key, answer.headers, size)


def describe_part(key: str, headers: Mapping[str, str], length: int, byte_range: ByteRange | None) -> ObjectInfo:
    """Return the object's facts, from the headers of an answer with `length` bytes of the range, or of the whole object
    when there is no range. Errors: CorruptBody."""
    if byte_range is None:
        return describe(key, headers, length)
    size = size_of(headers.get("content-range", "").rpartition("/")[2] or str(length))
    if length != min(byte_range.stop, size) - byte_range.start:
        raise CorruptBody(
            f"GET {shown(key)}: {length} bytes came for range {byte_range.start}-{byte_range.stop}", key=key
        )
    return describe(key, headers, size)


def written_etag(request: Request, answer: Answer) -> ETag:
    """Return the ETag of what a PUT has written. Errors: CorruptBody if it is missing, as every S3 server sends it."""
    etag = unquote_etag(answer.headers.get("etag", ""))
    if not etag:
        raise CorruptBody(f"PUT {shown(request.key)}: {NO_ETAG}", key=request.key)
    return etag


def unquote_etag(text: str) -> ETag:
    """Return an ETag without its quotes and without the mark of a weak one (W/)."""
    return ETag(text.strip().removeprefix("W/").strip('"'))


def size_of(text: str) -> int:
    """Return a size in bytes that a server sent. Errors: CorruptBody if it is no number or larger than any file."""
    if not _SIZE.fullmatch(text):
        raise CorruptBody(f"the server says {one_line(text, 40)!r} where S3 sends a size")
    return int(text)


def http_date_ns(text: str) -> int:
    """Return an HTTP date in nanoseconds since the epoch; 0 when there is none."""
    return _http_date_ns(text) if len(text) <= _DATE_CHARACTERS else 0


@lru_cache(maxsize=256)
def _http_date_ns(text: str) -> int:
    """Cached, since all answers within a second have the same date."""
    try:
        return int(parsedate_to_datetime(text).timestamp()) * 1_000_000_000
    except (TypeError, ValueError, OverflowError):
        return 0
