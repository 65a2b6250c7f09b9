"""What is asked of a server and what comes back, and what its headers say of an object."""

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
"""Before the names of user metadata."""
_SIZE = re.compile(r"[0-9]{1,18}")
_DATE_CHARACTERS = 64

SMALL_BYTES = 64 << 10
"""The most that an answer may have that is neither an object nor a listing, and that is read of a refusal."""


class Answer(NamedTuple):
    """status, headers by lower-case name, and the whole body: b"" when it went to the request's outlet."""

    status: int
    headers: Mapping[str, str]
    body: Body


class Outlet(NamedTuple):
    """Where a large body goes while it comes. status: of the answer that is meant, others are kept whole.

    start: where in the object the body begins: it is cut at whole MiB of that. take: given the headers, the body's
    length, where in the body these bytes are, and the bytes.
    """

    status: int
    start: int
    take: Callable[[Mapping[str, str], int, int, Body], None]


@dataclass(slots=True, kw_only=True)
class Request:
    """What to ask, not signed yet. query: not encoded; repeatable: sending it twice is as good as once."""

    method: str
    key: str = ""
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | FilePart = b""
    repeatable: bool = True
    expected_bytes: int = 0
    """About how large the answer is, for the deadline."""
    is_long: bool = False
    """The server copies or joins objects before it answers."""
    outlet: Outlet | None = None
    most_bytes: int = SMALL_BYTES
    """The largest body that is taken from a server that says yes: whatever else it sends is not read."""


def describe(key: str, headers: Mapping[str, str], size: int) -> ObjectInfo:
    """The facts in the headers about an object of `size` bytes."""
    return ObjectInfo(
        key=key,
        size=size,
        etag=unquote_etag(headers.get("etag", "")),
        mtime_ns=http_date_ns(headers.get("last-modified", "")),
        server_time_ns=http_date_ns(headers.get("date", "")),
        metadata=_metadata(key, headers),
        content_type=headers.get("content-type", ""),
    )


def described(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    """The facts in the headers of an answer to a HEAD. Errors: CorruptBody."""
    return describe(key, headers, size_of(headers.get("content-length", "0")))


def _metadata(key: str, headers: Mapping[str, str]) -> dict[str, str]:
    """User metadata, and what S3 keeps beside them (base.SYSTEM).

    Others may have written bytes beyond ASCII: shown as an RFC 2047 word, as Amazon's S3 does.
    """
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name.startswith(META):
            found[name.removeprefix(META)] = _printable(value)
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
    body, size = answer.body, len(answer.body)
    if answer.status == 206:
        return body, describe_part(key, answer.headers, size, byte_range or ByteRange(0, WHOLE_BYTES))
    if byte_range is not None:
        body = memoryview(body)[byte_range.start : byte_range.stop]
    return body, describe(key, answer.headers, size)


def describe_part(key: str, headers: Mapping[str, str], length: int, byte_range: ByteRange | None) -> ObjectInfo:
    """The object's facts, from the headers of an answer with `length` bytes of a range, or of all of it.

    Errors: CorruptBody.
    """
    if byte_range is None:
        return describe(key, headers, length)
    size = size_of(headers.get("content-range", "").rpartition("/")[2] or str(length))
    if length != min(byte_range.stop, size) - byte_range.start:
        raise CorruptBody(
            f"GET {shown(key)}: {length} bytes came for range {byte_range.start}-{byte_range.stop}", key=key
        )
    return describe(key, headers, size)


def unquote_etag(text: str) -> ETag:
    """An ETag without its quotes (and without a weak mark)."""
    return ETag(text.strip().removeprefix("W/").strip('"'))


def size_of(text: str) -> int:
    """Bytes, as a server writes them. Errors: CorruptBody for what is no size, or larger than any file."""
    if not _SIZE.fullmatch(text):
        raise CorruptBody(f"the server says {one_line(text, 40)!r} where S3 sends a size")
    return int(text)


def http_date_ns(text: str) -> int:
    """An HTTP date in nanoseconds since the epoch; 0 when there is none."""
    return _http_date_ns(text) if len(text) <= _DATE_CHARACTERS else 0


@lru_cache(maxsize=256)
def _http_date_ns(text: str) -> int:
    """Kept: one second's answers share theirs."""
    try:
        return int(parsedate_to_datetime(text).timestamp()) * 1_000_000_000
    except (TypeError, ValueError, OverflowError):
        return 0
