"""A bucket in memory, a fake that passes the same contract suite as the real servers (tests/contract).
Its calls never wait, so that `fuse.loop.now` can return their results in any thread.

Several MemoryStore views may share one MemoryBucket, each as a different client. Thread-safe: one lock per bucket,
never held while waiting. By its Capabilities a bucket can behave as a stricter server, such as one that keeps keys as
files on a disk.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from datastore.errors import (
    AlreadyExists,
    InvalidRequest,
    KeyConflict,
    KeyTooLong,
    NotFound,
    PreconditionFailed,
    StoreError,
)
from datastore.fuse.store.base import (
    Body,
    ByteRange,
    Capabilities,
    ETag,
    FilePart,
    ListedObject,
    ListPage,
    ObjectInfo,
    ObjectStore,
    PartNumber,
    PendingUpload,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
    handed_over,
    in_memory,
)
from datastore.fuse.store.limits import check_key, check_metadata, key_bytes, shown
from datastore.fuse.store.packed import packed
from datastore.fuse.store.retrying import Retrier, RetryingStore

T = TypeVar("T")
P = ParamSpec("P")


def _hooked(
    method: Callable[Concatenate[ObjectStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[HookedStore, P], Coroutine[Any, Any, T]]:
    name = method.__name__

    def call(store: HookedStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        inner: Callable[P, Coroutine[Any, Any, T]] = getattr(store.inner, name)
        return store.around(name, partial(inner, *args, **kwargs))

    return call


class HookedStore:
    """A store in front of another one: around() makes each call."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    async def around(self, method: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the answer of a call to `inner`; a subclass may make the call never, once or again, or raise."""
        return await call()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    list_page = _hooked(ObjectStore.list_page)
    head = _hooked(ObjectStore.head)
    get = _hooked(ObjectStore.get)
    put = _hooked(ObjectStore.put)
    copy = _hooked(ObjectStore.copy)
    delete = _hooked(ObjectStore.delete)
    delete_many = _hooked(ObjectStore.delete_many)
    create_upload = _hooked(ObjectStore.create_upload)
    upload_part = _hooked(ObjectStore.upload_part)
    upload_part_copy = _hooked(ObjectStore.upload_part_copy)
    complete_upload = _hooked(ObjectStore.complete_upload)
    abort_upload = _hooked(ObjectStore.abort_upload)
    pending_uploads = _hooked(ObjectStore.pending_uploads)
    has_object_lock = _hooked(ObjectStore.has_object_lock)
    set_legal_hold = _hooked(ObjectStore.set_legal_hold)

    def close(self) -> None:
        self.inner.close()


def tried_once(store: ObjectStore) -> RetryingStore:
    """Wrap a store as a mount does, but without retries."""
    return RetryingStore(store, Retrier(budget_s=0.0))


MIN_PART_BYTES = 5 << 20
_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class _Object:
    body: bytes
    etag: ETag
    mtime_ns: int
    metadata: Mapping[str, str]
    content_type: str


@dataclass(slots=True)
class _Upload:
    key: str
    options: WriteOptions
    initiated_ns: int
    copies: bool
    parts: dict[int, _Object] = field(default_factory=dict)


class MemoryBucket:
    """The objects of a bucket.

    clock: returns nanoseconds since the epoch (times are cut to 1 ms). min_part_bytes: S3's 5 MiB, or less in a test.

    INVARIANT sorted_keys is the sorted list of the keys of objects.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int] = time.time_ns,
        capabilities: Capabilities | None = None,
        keeps_both: bool = True,
        min_part_bytes: int = MIN_PART_BYTES,
    ) -> None:
        """keeps_both: whether `a` and `a/b` can both exist."""
        self.capabilities = capabilities or Capabilities()
        self.longest_segment = 1024
        """The longest part of a key between slashes that is taken, in bytes; no answer but a refusal tells of it."""
        self.keeps_both = keeps_both
        self.min_part_bytes = min_part_bytes
        self.lock = threading.RLock()
        self.objects: dict[bytes, _Object] = {}
        self.sorted_keys: list[bytes] = []
        self.uploads: dict[UploadId, _Upload] = {}
        self.upload_numbers = itertools.count(1)
        self.others: dict[str, MemoryBucket] = {}
        """Other buckets of the same server by name, from which objects may be copied."""
        self._clock = clock

    def now_ns(self) -> int:
        """The server's time in nanoseconds, cut to 1 ms."""
        return self._clock() // _MS * _MS

    def find(self, key: str) -> _Object:
        """Return an object. Errors: NotFound."""
        found = self.objects.get(key_bytes(key))
        if found is None:
            raise NotFound(f"{shown(key)}: no such object", key=key, status=404, code="NoSuchKey")
        return found

    def check_condition(self, key: str, options: WriteOptions) -> None:
        """Check the conditions of a write. Errors: AlreadyExists, PreconditionFailed."""
        present = self.objects.get(key_bytes(key))
        if options.if_none_match and present is not None:
            raise AlreadyExists(f"{shown(key)}: the key is taken", key=key, status=412, code="PreconditionFailed")
        if options.if_match is not None and (present is None or present.etag != options.if_match):
            raise _changed(key)

    def store(self, key: str, body: bytes, etag: ETag, options: WriteOptions) -> WriteResult:
        """Store an object. Errors: KeyConflict."""
        raw = key_bytes(key)
        self._check_beside(key, raw)
        made = _Object(body, etag, self.now_ns(), dict(options.metadata), options.content_type)
        if raw not in self.objects:
            insort(self.sorted_keys, raw)
        self.objects[raw] = made
        return WriteResult(etag, made.mtime_ns)

    def remove(self, key: str) -> None:
        """Remove an object; success when it is not there."""
        raw = key_bytes(key)
        if self.objects.pop(raw, None) is not None:
            del self.sorted_keys[bisect_left(self.sorted_keys, raw)]

    def _check_beside(self, key: str, raw: bytes) -> None:
        if self.keeps_both:
            return
        below = raw.rstrip(b"/") + b"/"
        at = bisect_left(self.sorted_keys, below)
        occupied = at < len(self.sorted_keys) and self.sorted_keys[at].startswith(below)
        parents = [raw[:end] for end, byte in enumerate(raw) if byte == ord("/")]
        if (occupied and not raw.endswith(b"/")) or any(parent in self.objects for parent in parents):
            raise KeyConflict(f"{shown(key)}: this server can't hold a file beside a directory of its name", key=key)


def _check_options(key: str, options: WriteOptions) -> None:
    """Refuse metadata that are too large, or that no header can carry."""
    check_metadata(key, options.metadata)
    if not all(value.isascii() and value.isprintable() for value in options.metadata.values()):
        raise InvalidRequest(f"{shown(key)}: metadata that is not printable ASCII", key=key)


class MemoryStore:
    """One client's view of a MemoryBucket; implements ObjectStore."""

    def __init__(self, bucket: MemoryBucket | None = None) -> None:
        self.bucket = bucket or MemoryBucket()

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do."""
        return self.bucket.capabilities

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
        with self.bucket.lock:
            page = _Lister(self.bucket, key_bytes(prefix), key_bytes(delimiter)).page(token, start_after, max_keys)
        said = repr((page.objects, page.common_prefixes, page.next_token is None)).encode("ascii", "backslashreplace")
        digest = hashlib.blake2b(said, digest_size=16).digest()
        return ListPage((), (), None, digest) if digest == unless else page._replace(digest=digest)

    async def head(self, key: str) -> ObjectInfo:
        with self.bucket.lock:
            return self._describe(key, self.bucket.find(key))

    async def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        with self.bucket.lock:
            found = self.bucket.find(key)
            info = self._describe(key, found)
        if if_match is not None and found.etag != if_match:
            raise _changed(key)
        body = found.body if byte_range is None else found.body[byte_range.start : byte_range.stop]
        return handed_over((body, info), sink)

    def _check_key(self, key: str) -> None:
        """Refuse a key that S3 refuses, or that a stricter server refuses."""
        check_key(key)
        if max(map(len, key_bytes(key).split(b"/"))) > self.bucket.longest_segment:
            raise KeyTooLong(f"{shown(key)[:80]}...: this server takes no name of that length", key=key)

    async def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        self._check_key(key)
        _check_options(key, options)
        copied = bytes(body)
        etag = _md5(copied)
        if copied and key.endswith("/") and not self.bucket.keeps_both:
            raise InvalidRequest(f"{shown(key)}: a directory object has no body here", key=key, status=400)
        with self.bucket.lock:
            self.bucket.check_condition(key, options)
            return self.bucket.store(key, copied, etag, options)

    async def copy(
        self,
        source: str,
        target: str,
        *,
        replace: WriteOptions | None = None,
        if_source_match: ETag | None = None,
        source_bucket: str = "",
    ) -> WriteResult:
        self._check_key(target)
        if replace is not None:
            _check_options(target, replace)
        if source == target and replace is None:
            raise InvalidRequest(f"{shown(target)}: a copy onto itself must change something", key=target, status=400)
        with self.bucket.lock:
            found = (self.bucket.others[source_bucket] if source_bucket else self.bucket).find(source)
            if if_source_match is not None and found.etag != if_source_match:
                raise _changed(source)
            kept = replace or WriteOptions(metadata=found.metadata, content_type=found.content_type)
            return self.bucket.store(target, found.body, _md5(found.body), kept)

    async def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        with self.bucket.lock:
            present = self.bucket.objects.get(key_bytes(key))
            if if_match is not None and present is not None and present.etag != if_match:
                raise _changed(key)
            self.bucket.remove(key)

    async def delete_many(self, keys: Sequence[str]) -> list[StoreError]:
        with self.bucket.lock:
            for key in keys:
                self.bucket.remove(key)
        return []

    async def create_upload(self, key: str, options: WriteOptions, *, copies: bool = False) -> UploadId:
        self._check_key(key)
        _check_options(key, options)
        with self.bucket.lock:
            upload_id = UploadId(f"upload-{next(self.bucket.upload_numbers)}")
            self.bucket.uploads[upload_id] = _Upload(key, options, self.bucket.now_ns(), copies)
            return upload_id

    async def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        return self._keep_part(key, upload_id, number, bytes(in_memory(body)))

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
        there = MemoryStore(self.bucket.others[source_bucket]) if source_bucket else self
        body, info = await there.get(source, if_match=if_source_match)
        if byte_range.stop > info.size:
            raise InvalidRequest(f"{shown(source)}: {byte_range} is not inside its {info.size} bytes", key=source)
        if not self._upload(key, upload_id).copies:  # as MinIO refuses it if the upload's parts have checksums
            raise InvalidRequest(f"{shown(key)}: the upload was begun without copies", key=key)
        return self._keep_part(key, upload_id, number, bytes(body[byte_range.start : byte_range.stop]))

    async def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        with self.bucket.lock:
            upload = self._upload(key, upload_id)
            bodies = self._chosen(key, upload, parts)
            self.bucket.check_condition(key, options)
            digests = b"".join(hashlib.md5(body, usedforsecurity=False).digest() for body in bodies)
            etag = ETag(f"{_md5(digests)}-{len(bodies)}")
            result = self.bucket.store(key, b"".join(bodies), etag, upload.options)
            del self.bucket.uploads[upload_id]
            return result

    async def abort_upload(self, key: str, upload_id: UploadId) -> None:
        with self.bucket.lock:
            self.bucket.uploads.pop(upload_id, None)

    async def pending_uploads(self, prefix: str) -> list[PendingUpload]:
        with self.bucket.lock:
            found = [
                PendingUpload(upload.key, upload_id, upload.initiated_ns)
                for upload_id, upload in self.bucket.uploads.items()
                if upload.key.startswith(prefix)
            ]
        return sorted(found, key=lambda upload: (key_bytes(upload.key), upload.initiated_ns))

    async def has_object_lock(self) -> bool:
        """See ObjectStore; this bucket has no object lock."""
        return False

    async def set_legal_hold(self, key: str, *, on: bool) -> None:
        raise InvalidRequest(f"{shown(key)}: the bucket has no object lock", key=key, status=400)

    def close(self) -> None:
        """See ObjectStore."""

    def _describe(self, key: str, found: _Object) -> ObjectInfo:
        return ObjectInfo(
            key=key,
            size=len(found.body),
            etag=found.etag,
            mtime_ns=found.mtime_ns,
            server_time_ns=self.bucket.now_ns(),
            metadata=dict(found.metadata),
            content_type=found.content_type,
        )

    def _upload(self, key: str, upload_id: UploadId) -> _Upload:
        upload = self.bucket.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NotFound(f"{shown(key)}: no such upload", key=key, status=404, code="NoSuchUpload")
        return upload

    def _keep_part(self, key: str, upload_id: UploadId, number: int, body: bytes) -> ETag:
        part = _Object(body, _md5(body), self.bucket.now_ns(), {}, "")
        with self.bucket.lock:
            self._upload(key, upload_id).parts[number] = part
        return part.etag

    def _chosen(self, key: str, upload: _Upload, parts: Sequence[tuple[PartNumber, ETag]]) -> list[bytes]:
        numbers = [number for number, _ in parts]
        if not parts or any(a >= b for a, b in itertools.pairwise(numbers)):
            raise InvalidRequest(f"{shown(key)}: parts must be given, in ascending order", key=key, status=400)
        bodies = []
        for number, etag in parts:
            part = upload.parts.get(number)
            if part is None or part.etag != etag:
                raise InvalidRequest(f"{shown(key)}: part {number} was not sent", key=key, status=400)
            bodies.append(part.body)
        if any(len(body) < self.bucket.min_part_bytes for body in bodies[:-1]):
            raise InvalidRequest(f"{shown(key)}: a part is under the least size", key=key, status=400)
        return bodies


class _Lister:
    """Groups sorted keys into a page; keys and prefixes count alike towards max_keys, as on S3."""

    def __init__(self, bucket: MemoryBucket, prefix: bytes, delimiter: bytes) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._delimiter = delimiter

    def page(self, token: str | None, start_after: str, max_keys: int) -> ListPage:
        after = bytes.fromhex(token) if token else key_bytes(start_after)
        objects: list[ListedObject] = []
        prefixes: list[str] = []
        last = b""
        for entry in self._entries(after):
            if len(objects) + len(prefixes) == min(max_keys, 1000):
                return ListPage(objects, prefixes, last.hex())
            last = entry
            found = self._bucket.objects.get(entry)
            text = entry.decode("utf-8", "surrogateescape")
            if found is None or self._group(entry) is not None:
                prefixes.append(text)
            else:
                said = packed(found.metadata, found.content_type) if self._bucket.capabilities.listed_metadata else None
                objects.append(ListedObject(text, len(found.body), found.etag, found.mtime_ns, said))
        return ListPage(objects, prefixes, None)

    def _entries(self, after: bytes) -> Iterator[bytes]:
        """Yield keys and common prefixes in order; a common prefix of `after` is skipped (as on all servers tried)."""
        keys = self._bucket.sorted_keys
        position = bisect_left(keys, self._prefix)
        if after >= self._prefix:
            skipped = self._group(after) if after.startswith(self._prefix) else None
            position = bisect_left(keys, _past(skipped) if skipped is not None else after + b"\0")
        while position < len(keys) and keys[position].startswith(self._prefix):
            group = self._group(keys[position])
            yield keys[position] if group is None else group
            position = position + 1 if group is None else bisect_left(keys, _past(group))

    def _group(self, key: bytes) -> bytes | None:
        if not self._delimiter:
            return None
        at = key.find(self._delimiter, len(self._prefix))
        return None if at < 0 else key[: at + len(self._delimiter)]


def _past(prefix: bytes) -> bytes:
    """The least byte string above everything that starts with `prefix` (which ends with the delimiter, below 0xff)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _md5(body: bytes) -> ETag:
    return ETag(hashlib.md5(body, usedforsecurity=False).hexdigest())


def _changed(key: str) -> PreconditionFailed:
    return PreconditionFailed(f"{shown(key)}: the object is another version", key=key, status=412)
