"""The contract of an object store: what every adapter promises and tests/contract checks.

Keys are `str` with surrogateescape: `key.encode("utf-8", "surrogateescape")` gives the exact bytes of the key. They are
relative to nothing: an adapter is bound to one bucket and takes whole keys, sent exactly as they are (`dir/`, `a//b`,
`/a` and `a/./b` are ordinary keys). Metadata keys are lower-case without the `x-amz-meta-` prefix; values are ASCII.
All calls are coroutines: on a loop they wait without holding it up, and in a thread without one `fuse.loop.now` has
them block (store/blocking.py is that for all calls). They are bounded by the adapter's deadline, and raise only
datastore.errors.StoreError subclasses. They do not retry: store/retrying.py does, by `transient`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NewType, Protocol, Self

from datastore.errors import StoreError

ETag = NewType("ETag", str)
"""As the server sent it, without the surrounding quotes."""
PartNumber = NewType("PartNumber", int)
"""1-based, at most 10,000, without gaps: AWS asks for that where parts have checksums."""
UploadId = NewType("UploadId", str)

Body = bytes | bytearray | memoryview

WHOLE_BYTES = 16 << 20
"""The largest body that a GET without a range takes: what is larger is asked for in ranges."""
PENDING_UPLOADS = 10_000
"""So many unfinished uploads are shown at most; who ended these asks again."""

_PIECE_BYTES = 256 << 10
"""What is read of a file at once: it stays in the processor's cache."""


class FilePart:
    """Bytes of an open file as the body of a part: where nothing has to look at them, they never become ours.

    Owns its descriptor: a context manager. What is changed in the file before the server has the part may be sent so.
    """

    __slots__ = ("fd", "start", "stop")

    def __init__(self, fd: int, start: int, stop: int) -> None:
        """fd: becomes ours."""
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
        """All of it; what the file has lost meanwhile as zeros. OSError."""
        return os.pread(self.fd, len(self), self.start).ljust(len(self), b"\0")

    def pieces(self) -> Iterator[memoryview]:
        """The same, little by little; each is overwritten by the next.

        Not by mmap(2): who shortens the file meanwhile would end this process.
        """
        at = self.start
        with memoryview(bytearray(min(_PIECE_BYTES, len(self)))) as piece:
            while at < self.stop:
                wanted = piece[: self.stop - at]
                count = os.preadv(self.fd, [wanted], at)
                yield wanted[:count] if count else memoryview(bytes(len(wanted)))
                at += count or len(wanted)


def in_memory(body: Body | FilePart) -> Body:
    """The bytes of a body."""
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
    """Metadata and content type, packed(), just as a HEAD would show them; None: the listing does not tell."""


SYSTEM = ":"
"""Begins the names of what S3 keeps beside user metadata, among them: no header of a user's can be named so."""
SYSTEM_HEADERS = ("cache-control", "content-disposition", "content-encoding", "content-language")
"""`:cache-control` and so on: they are kept as user metadata are (S3 user guide, system-defined object metadata)."""
TAGGED = ":tagged"
"""The object has tags, which a HEAD only counts: its key, percent-encoded. What is written in its place gets them."""


def user_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Without what is S3's own."""
    return {name: text for name, text in metadata.items() if not name.startswith(SYSTEM)}


class ListPage(NamedTuple):
    """One page of a listing, in the server's key order (UTF-8 byte order on S3)."""

    objects: Sequence[ListedObject]
    common_prefixes: Sequence[str]
    next_token: str | None
    """Continuation token, None when the listing is complete."""
    digest: bytes = b""
    """Of what the page says, not of how it was asked for: pages of one digest are the same. b"": not known."""


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
    """What a write left behind."""

    etag: ETag
    mtime_ns: int
    """The server's time of the write where it says so (Date or LastModified), else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How an object is written.

    if_none_match: create only; AlreadyExists when the key is taken. if_match: replace only this version;
    PreconditionFailed otherwise. At most one of the two is set. legal_hold: in a bucket with object lock nobody can
    remove this version of the object until set_legal_hold() ends that.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    if_none_match: bool = False
    if_match: ETag | None = None
    legal_hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do; probed or known, never guessed from its name."""

    hides_below_files: bool = False
    """`a` and `a/b` can both exist, but no listing shows `a/b` then."""
    max_key_segment_bytes: int = 1024
    """Longest part of a key between slashes (255 where keys are files of a disk)."""
    max_new_segment_bytes: int = 1024
    """Longest one of what is written, and can be written again."""
    listed_metadata: bool = False
    """Listings show the metadata of objects that may be read."""


class Shown(NamedTuple):
    """A key that is to be asked for, and the version that a listing showed of it; "": none is known."""

    key: str
    etag: ETag = ETag("")


class ObjectVersion(NamedTuple):
    """One version of an object, whose bytes never change; `size` is the whole object's, bytes."""

    key: str
    etag: ETag
    size: int


GetFeed = Callable[[], ObjectVersion | None]
"""The next version, asked for whenever there is a connection for it; None: there is no other one now."""

HeadSink = Callable[[int, ObjectInfo | StoreError], None]
"""Takes what is said of one of several objects, or why nothing is: its place among those asked for, and the answer.
Called while other answers are on their way: it asks the store for nothing, and raises no StoreError. What else it
raises ends the call."""


GetSink = Callable[[ObjectVersion, tuple[Body, ObjectInfo] | None], None]
"""Takes the bytes of one of several objects, as many as its size, which are the sink's to keep; None: it was not that
version, or there was another failure, which get() says. Called as a HeadSink is."""

Sink = Callable[[ObjectInfo, int, Body], None]
"""Takes a body as it comes: the object's facts, where in what was asked for the bytes belong, and the bytes, ascending.
The bytes are the sink's to keep. An attempt that failed is repeated from offset 0. What a sink raises ends it."""


def handed_over(answer: tuple[Body, ObjectInfo], sink: Sink | None) -> tuple[Body, ObjectInfo]:
    """The answer of a get() that had the whole body at once."""
    if sink is None:
        return answer
    sink(answer[1], 0, answer[0])
    return b"", answer[1]


class PendingUpload(NamedTuple):
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload_id: UploadId
    initiated_ns: int


class DeleteFailure(NamedTuple):
    """One key that a bulk delete could not remove."""

    key: str
    code: str
    message: str


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

        unless: the digest of a page that is known; the same page comes without its contents and token.
        """

    async def head(self, key: str) -> ObjectInfo:
        """The object's facts; NotFound when there is none."""

    async def head_many(self, objects: Sequence[Shown], sink: HeadSink) -> None:
        """The facts of up to 1,000 objects, each once, in any order: as of head(), whose errors are answers here.

        What is shown of an object is no condition; where nothing is, it takes longer. On a loop only.
        """

    async def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """The object's bytes, all (up to WHOLE_BYTES) or a range; with a sink it gets them, the answer has b"" instead.

        A range that reaches past the end gives what there is; one that starts at or past the end gives b"".
        NotFound; PreconditionFailed when `if_match` is not the present version. ObjectInfo.metadata may be empty here.
        """

    async def get_many(self, feed: GetFeed, sink: GetSink) -> None:
        """The whole bytes of small objects that nobody waits for yet, until there is no other one, in any order.

        Nothing is tried again, and what raises leaves the rest of `feed`. On a loop only.
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

        replace None keeps metadata and content type; otherwise they are replaced by `replace`'s (its conditions are
        ignored); source and target may be the same key then. source_bucket: '' is this bucket; our keys must reach it.
        NotFound, PreconditionFailed.
        """

    async def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """Remove an object; success when it was not there. `if_match` is honoured by servers that know it."""

    async def delete_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """Remove up to 1,000 objects; what could not be removed is returned."""

    async def create_upload(self, key: str, options: WriteOptions, *, copies: bool = False) -> UploadId:
        """Begin a multipart upload; metadata and content type are fixed here. copies: parts may be made by copying."""

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
        """Make a part of an upload with `copies` from a range of an object; PreconditionFailed when that changed."""

    async def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """Make the object from its parts (ascending); the conditions of `options` apply here."""

    async def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """Drop an upload; success when it is not there."""

    async def pending_uploads(self, prefix: str) -> list[PendingUpload]:
        """Unfinished multipart uploads of keys that start with `prefix`, PENDING_UPLOADS at most."""

    async def has_object_lock(self) -> bool:
        """Whether the bucket was made with object lock. AccessDenied when these keys may not ask."""

    async def set_legal_hold(self, key: str, *, on: bool) -> None:
        """Begin or end the legal hold of an object's present version; in a bucket with object lock. NotFound."""

    def close(self) -> None:
        """Release connections; idempotent."""
