"""The contract of an object store: what every adapter promises and tests/contract checks.

Keys are `str` with surrogateescape: `key.encode("utf-8", "surrogateescape")` gives the exact bytes of the key. An
adapter is bound to one bucket and takes whole keys, which are sent exactly as they are (`dir/`, `a//b`, `/a` and
`a/./b` are ordinary keys). Metadata keys are lower-case without the `x-amz-meta-` prefix; values are ASCII.
All calls are coroutines: on an event loop they await without blocking it, and in a thread without a loop
`fuse.loop.now` runs them by blocking the thread (store/blocking.py does so for all calls). They end within the
adapter's deadline, and raise only StoreErrors. Adapters do not retry: store/retrying.py retries `transient` errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NewType, Protocol, Self

from datastore.errors import StoreError

ETag = NewType("ETag", str)
"""An etag as the server sent it, without the surrounding quotes."""
PartNumber = NewType("PartNumber", int)
"""The number of a part, 1 to 10,000; there are no gaps, as AWS requires where parts have checksums."""
UploadId = NewType("UploadId", str)

Body = bytes | bytearray | memoryview

WHOLE_BYTES = 16 << 20
"""The largest object that a GET without a range accepts, in bytes; larger objects are read in ranges."""
PENDING_UPLOADS = 10_000
"""The most unfinished uploads that pending_uploads() returns; to see others, the caller ends these and asks again."""

_PIECE_BYTES = 256 << 10
"""How much of a file is read at once, in bytes: little enough to stay in the processor's cache."""


class FilePart:
    """A range of an open file as the body of a part, which can be sent without passing through this process's memory.

    It owns its descriptor: use it as a context manager. Changes of the file may be sent until the server has the part.
    """

    __slots__ = ("fd", "start", "stop")

    def __init__(self, fd: int, start: int, stop: int) -> None:
        """fd: closed by this object."""
        self.fd = fd
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def read(self) -> bytes:
        """Return all bytes, with zeros for those that the file has lost by being shortened. Errors: OSError."""
        return os.pread(self.fd, len(self), self.start).ljust(len(self), b"\0")

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of read() in pieces; each piece is overwritten by the next one. Errors: OSError.
        mmap(2) is not used: shortening the file while it is mapped would end this process."""
        at = self.start
        with memoryview(bytearray(min(_PIECE_BYTES, len(self)))) as piece:
            while at < self.stop:
                wanted = piece[: self.stop - at]
                count = os.preadv(self.fd, [wanted], at)
                yield wanted[:count] if count else memoryview(bytes(len(wanted)))
                at += count or len(wanted)


def in_memory(body: Body | FilePart) -> Body:
    """Return the bytes of a body; those of a FilePart are read from the file. Errors: OSError."""
    return body.read() if isinstance(body, FilePart) else body


class ByteRange(NamedTuple):
    """Half-open range [start, stop) of bytes; start < stop."""

    start: int
    stop: int


class ListedObject(NamedTuple):
    """One object of a listing page."""

    key: str
    size: int
    etag: ETag
    mtime_ns: int
    """LastModified, nanoseconds since the epoch (the server's resolution, often 1 ms or 1 s)."""
    said: str | None = None
    """Metadata and content type as packed() by packed.py, equal to a HEAD's; None: the listing does not show them."""


SYSTEM = ":"
"""The first character of the metadata names that are not the user's; the name of a user's header cannot contain it."""
SYSTEM_HEADERS = ("cache-control", "content-disposition", "content-encoding", "content-language")
"""Kept in metadata as `:cache-control` and so on (S3 user guide, system-defined object metadata)."""
TAGGED = ":tagged"
"""The metadata name that marks an object with tags, which a HEAD only counts. The value is its percent-encoded key: an
object that is written with this entry gets the tags of that key."""


CHANGED = "ctime"
"""The metadata name of the time at which a file was changed last, in nanoseconds: no two versions have the same."""


def user_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without the entries whose names begin with SYSTEM."""
    return {name: text for name, text in metadata.items() if not name.startswith(SYSTEM)}


class ListPage(NamedTuple):
    """One page of a listing, in the server's key order (UTF-8 byte order on S3)."""

    objects: Sequence[ListedObject]
    common_prefixes: Sequence[str]
    next_token: str | None
    """Continuation token, None when the listing is complete."""
    digest: bytes = b""
    """Hash of what the page says, not of how it was asked for: pages of equal digests are equal. b"": not known."""


class ObjectInfo(NamedTuple):
    """What a HEAD or GET says of an object."""

    key: str
    size: int
    """Size of the whole object in bytes, also for a ranged GET."""
    etag: ETag
    mtime_ns: int
    """Last-Modified, nanoseconds since the epoch (1 s resolution)."""
    server_time_ns: int
    """The server's Date of this answer, nanoseconds since the epoch; 0 when unknown."""
    metadata: Mapping[str, str] = MappingProxyType({})
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The version of an object that a write made."""

    etag: ETag
    mtime_ns: int
    """When the server wrote it (LastModified or Date), nanoseconds since the epoch; 0 when the server does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How an object is written.

    if_none_match: create only; AlreadyExists when the key is taken. if_match: replace only this version;
    PreconditionFailed otherwise. At most one of the two is set. legal_hold: nobody can remove this version of the
    object until set_legal_hold() ends the hold (only in a bucket with object lock).
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    if_none_match: bool = False
    if_match: ETag | None = None
    legal_hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as learned from its answers; never guessed from its host name."""

    hides_below_files: bool = False
    """`a` and `a/b` can both exist, but no listing shows `a/b` then."""
    max_new_segment_bytes: int = 1024
    """The longest part of a key between slashes that can be written and later replaced, in bytes."""
    unlisted_segment: str = ""
    """A part of a key between slashes that no listing shows, as the server has its own files there; '': none."""
    listed_metadata: bool = False
    """Listings can show the metadata of the objects that these credentials may read."""


class ObjectVersion(NamedTuple):
    """One version of an object, whose bytes never change; `size` is that of the whole object, in bytes."""

    key: str
    etag: ETag
    size: int


Sink = Callable[[ObjectInfo, int, Body], None]
"""Takes a body in ascending pieces: the object's facts, the offset in what was asked for, and the piece, which the sink
may keep. Each piece ends at a whole MiB of the object or at the end of what was asked for. A failed attempt is repeated
from offset 0. An exception of the sink ends the call."""


def handed_over(answer: tuple[Body, ObjectInfo], sink: Sink | None) -> tuple[Body, ObjectInfo]:
    """Return the answer of a get() whose body came at once; if there is a sink, it is given the body."""
    if sink is None:
        return answer
    sink(answer[1], 0, answer[0])
    return b"", answer[1]


class PendingUpload(NamedTuple):
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload_id: UploadId
    initiated_ns: int


class ObjectStore(Protocol):
    """One bucket."""

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do."""

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        max_keys: int = 1000,
        unless: bytes = b"",
    ) -> ListPage:
        """One page of the keys that start with `prefix` (ListObjectsV2); `delimiter` is '' or '/'.
        unless: the digest of a page that the caller has; if the page is still the same, only the digest is returned."""

    async def head(self, key: str) -> ObjectInfo:
        """Return the object's facts. Errors: NotFound."""

    async def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """Return the object's bytes, all (up to WHOLE_BYTES) or a range; a sink is given them, then b"" is returned.

        A range that reaches past the end gives the bytes that exist; one that starts at or past the end gives b"".
        ObjectInfo.metadata may be empty. Errors: NotFound; PreconditionFailed when the etag is not `if_match`.
        """

    async def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """Write a whole object of at most 5 GiB."""

    async def copy(
        self,
        source: str,
        target: str,
        *,
        replace: WriteOptions | None = None,
        if_source_match: ETag | None = None,
        source_bucket: str = "",
    ) -> WriteResult:
        """Copy an object (at most 5 GiB) on the server, inside the bucket or from another one of the same server.

        replace: the new metadata and content type (its conditions are ignored); None keeps both, and then source and
        target must differ. source_bucket: '' is this bucket; the store's credentials must give access to another one.
        Errors: NotFound, PreconditionFailed.
        """

    async def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """Remove an object; that it does not exist is no error. Only servers that know `if_match` honour it."""

    async def delete_many(self, keys: Sequence[str]) -> list[StoreError]:
        """Remove up to 1,000 objects; return an error, none of them transient, for each that could not be removed."""

    async def create_upload(self, key: str, options: WriteOptions, *, copies: bool = False) -> UploadId:
        """Begin a multipart upload with its metadata and content type. copies: upload_part_copy() may make parts."""

    async def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """Send a part (5 MiB to 5 GiB; the last may be smaller)."""

    async def upload_part_copy(
        self,
        key: str,
        upload_id: UploadId,
        number: PartNumber,
        source: str,
        byte_range: ByteRange,
        if_source_match: ETag | None,
        *,
        source_bucket: str = "",
    ) -> ETag:
        """Copy a range of an object as a part of an upload with `copies`. Errors: PreconditionFailed if it changed."""

    async def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """Make the object from its parts, in ascending order, under the conditions of `options`."""

    async def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """Drop an upload; that it does not exist is no error."""

    async def pending_uploads(self, prefix: str) -> list[PendingUpload]:
        """Return unfinished multipart uploads of keys that start with `prefix`, PENDING_UPLOADS at most."""

    async def has_object_lock(self) -> bool:
        """Return whether the bucket has object lock. Errors: AccessDenied when the credentials may not ask."""

    async def set_legal_hold(self, key: str, *, on: bool) -> None:
        """Begin or end the legal hold of the present version, in a bucket with object lock. Errors: NotFound."""

    def close(self) -> None:
        """Release connections; idempotent."""
