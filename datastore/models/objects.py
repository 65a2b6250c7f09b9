"""A store of models in a bucket, or a prefix of one.

Documents are objects, compared and swapped by If-None-Match and If-Match. Trees are objects as the S3 mount writes
them (docs/SEMANTICS.md, S-03, S-06 and following), so that a version is a directory with the same names, links and
modes wherever the bucket is mounted. Owners and times of files are not kept, because a version belongs to the store.
"""

from __future__ import annotations

import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from datastore import errors
from datastore.backends.s3copy import Limits, copy
from datastore.errors import (
    AccessDenied,
    BucketNotFound,
    InvalidRequest,
    KeyTooLong,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unsupported,
)
from datastore.fuse.store.base import (
    ByteRange,
    ETag,
    ListedObject,
    ObjectInfo,
    ObjectStore,
    PartNumber,
    UploadId,
    WriteOptions,
)
from datastore.fuse.store.blocking import BlockingStore
from datastore.fuse.store.metrics import StoreMetrics
from datastore.fuse.vfs.tree.attrs import DIRECTORY_TYPE, FILE_TYPE, Defaults, from_metadata
from datastore.fuse.vfs.tree.names import LINK_SUFFIX, name_of, segment_of
from datastore.models.errors import SourceChanged, SourceInvalid
from datastore.models.manifest import Entry
from datastore.models.storage import (
    CHUNK_BYTES,
    Body,
    Document,
    Name,
    Node,
    Piece,
    ReadableTree,
    Tag,
    Tree,
    chunk_bytes,
    compare,
    leads_inside,
)
from datastore.models.transfer import Budget
from datastore.retry import tried_once

SIDE_BY_SIDE = 24
"""The most requests at once for one store: enough to hide a latency of 20 ms with 10,000 small files."""
UPLOADS_AT_ONCE = 16
"""The most chunks of 8 MiB that wait to be sent: 128 MiB of memory."""
COPY_LIMITS = Limits(whole=1 << 30, part=256 << 20)
"""The most bytes that one request copies: at 100 MB/s the server answers within about 10 s."""
OWN_PREFIX = ".datastore."
"""The beginning of the names that this project keeps in the root of a Datastore; they are no part of the data."""
_DELETE_KEYS = 1000
_LINK_MAX = 4096
_SEEN = Defaults(0, 0)
_CANT_COPY = (AccessDenied, BucketNotFound, InvalidRequest, NotFound, Unsupported)


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and its server's endpoint, by which two places on one server are recognised."""

    endpoint: str
    bucket: str


class Objects:
    """One bucket and the threads that wait for its answers. close() ends both."""

    def __init__(
        self, store: ObjectStore, place: Place, metrics: StoreMetrics, *, copy_limits: Limits = COPY_LIMITS
    ) -> None:
        """metrics: the store's statistics of its requests."""
        self.store = BlockingStore(store)
        self.metrics = metrics
        self.place = place
        self.copy_limits = copy_limits
        self.threads = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="objects")
        self._locks: bool | None = None
        self.uploads = Budget(UPLOADS_AT_ONCE)

    def locks(self) -> bool:
        """Return whether versions are to be locked: whether the bucket is known to have object lock. Asked once."""
        if self._locks is None:
            try:
                self._locks = self.store.has_object_lock()
            except AccessDenied:
                self._locks = False
        return self._locks

    def options(self, mode: int, content_type: str = FILE_TYPE) -> WriteOptions:
        """Return the options to write an object of a version with."""
        return WriteOptions(metadata={"mode": str(mode)}, content_type=content_type, legal_hold=self.locks())

    def unanswered(self) -> bool:
        """Return whether a request was ever repeated or given up unanswered: the server may still perform it later."""
        for tally in self.metrics.snapshot().values():
            if tally["retries"] or any(getattr(errors, name).transient for name in tally["errors"]):
                return True
        return False

    def list(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose key begins with the prefix."""
        token = None
        while True:
            page = self.store.list_page(prefix, token=token)
            yield from page.objects
            if (token := page.next_token) is None:
                return

    def close(self) -> None:
        """End the threads and close the store; idempotent."""
        self.threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()


class ObjectStorage:
    """See Storage. prefix: '' or ends with '/'."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects = objects
        self._store = objects.store
        self._prefix = prefix

    @property
    def location(self) -> str:
        """The URL of the store."""
        return f"s3://{self._objects.place.bucket}/{self._prefix}"

    def check(self) -> None:
        """See Storage. Nothing to do: Models.check() (registry.py) tries the server's conditional requests."""

    def read(self, path: str, limit: int | None = None) -> Document:
        """See Storage."""
        key = self._prefix + path
        while True:
            first = CHUNK_BYTES if limit is None else limit
            body, info = self._store.get(key, byte_range=ByteRange(0, first))
            pieces = [bytes(body)]
            with suppress(PreconditionFailed):  # the object was replaced between two requests: read it again
                for start in range(first, info.size if limit is None else 0, CHUNK_BYTES):
                    part = ByteRange(start, min(start + CHUNK_BYTES, info.size))
                    pieces.append(bytes(self._store.get(key, byte_range=part, if_match=info.etag)[0]))
                return Document(b"".join(pieces), Tag(info.etag))

    def age_s(self, path: str) -> float:
        """See Storage."""
        info = self._store.head(self._prefix + path)
        return max(0.0, (info.server_time_ns - info.mtime_ns) / 1e9)

    def create(self, path: str, body: bytes) -> Tag:
        """See Storage."""
        # A manifest is locked like the files of its version; other documents change.
        locked = path.endswith(".json") and "/" in path and self._objects.locks()
        options = WriteOptions(content_type="application/json", if_none_match=True, legal_hold=locked)
        return Tag(self._store.put(self._prefix + path, body, options).etag)

    def replace(self, path: str, body: bytes, tag: Tag) -> Tag:
        """See Storage."""
        options = WriteOptions(content_type="application/json", if_match=ETag(tag))
        return Tag(self._store.put(self._prefix + path, body, options).etag)

    def remove(self, path: str) -> None:
        """See Storage."""
        self._store.delete(self._prefix + path)

    def names(self, path: str) -> list[Name]:
        """See Storage."""
        prefix = self._prefix + (f"{path}/" if path else "")
        found: list[Name] = []
        token = None
        while True:
            page = self._store.list_page(prefix, delimiter="/", token=token)
            found += [Name(common[len(prefix) : -1], True) for common in page.common_prefixes]
            found += [Name(each.key[len(prefix) :], False) for each in page.objects if each.key != prefix]
            if (token := page.next_token) is None:
                return found

    def tree(self, path: str) -> ObjectTree:
        """See Storage."""
        return ObjectTree(self._objects, f"{self._prefix}{path}/")

    def sweep(self, path: str) -> int:
        """See Storage. Nothing is ever left, because a request takes effect as a whole."""
        return 0


class ObjectTree:
    """See Tree. prefix: '' or ends with '/'. within: as in DirectoryTree, but a prefix, with which `prefix` begins."""

    def __init__(self, objects: Objects, prefix: str, *, within: str | None = None) -> None:
        self._objects = objects
        self._store = objects.store
        self._prefix = prefix
        self._within = within

    @property
    def location(self) -> str:
        """The URL of the tree."""
        return f"s3://{self._objects.place.bucket}/{self._prefix}".removesuffix("/")

    def scan(self) -> list[Node]:
        """See Tree."""
        files: dict[str, Node] = {}
        links: dict[str, ListedObject] = {}
        directories: dict[str, ListedObject | None] = {}
        empty = True
        for listed in self._objects.list(self._prefix):
            tail = listed.key[len(self._prefix) :]
            empty = False
            if not tail or (self._prefix == self._within and tail.startswith(OWN_PREFIX)):
                continue
            *above, last = tail.split("/")
            for depth in range(1, len(above) + 1):
                directories.setdefault(self._shown(above[:depth], listed), None)
            if not last:
                if listed.size:
                    raise SourceInvalid(
                        f"{self._url(listed.key)}: is a directory with a content, which no file system has"
                    )
                directories[self._shown(above, listed)] = listed
            elif last.endswith(LINK_SUFFIX) and last != LINK_SUFFIX:
                links[self._shown([*above, last.removesuffix(LINK_SUFFIX)], listed)] = listed
            else:
                path = self._shown([*above, last], listed)
                files[path] = Node(path, "file", listed.size, at=listed.key, state=listed.etag)
        if empty:
            raise NotFound(f"{self.location}/: there is nothing", key=self._prefix)
        for path in sorted((files.keys() & links.keys()) | ((files.keys() | links.keys()) & directories.keys())):
            raise SourceInvalid(f"{self.location}/{path}: is there as a file and as a link or directory")
        nodes = [*files.values(), *self._links(links), *self._directories(directories)]
        return sorted(nodes, key=lambda node: node.path)

    def read(self, node: Node, start: int, stop: int) -> Piece:
        """See Tree."""
        key = node.at or self._key(node.path)
        byte_range = ByteRange(start, stop) if stop > start else None
        try:
            body, info = self._store.get(key, byte_range=byte_range, if_match=ETag(node.state) if node.state else None)
        except PreconditionFailed as error:
            raise self._changed(key) from error
        except NotFound as error:
            if node.state:
                raise self._changed(key) from error
            raise
        if len(body) != stop - start or info.size != node.size:
            raise self._changed(key)
        return Piece(body, _mode_of(info, stat.S_IFREG))

    def begin(self) -> None:
        """See Tree. Nothing to do."""

    def write(self, path: str, mode: int, size: int) -> _UploadSink:
        """See Tree."""
        return _UploadSink(self._objects, self._key(path), self._objects.options(stat.S_IFREG | mode), size)

    def make(self, entry: Entry, *, bare: bool) -> None:
        """See Tree. A directory with the default mode and something in it needs no object."""
        key = self._key(entry.path)
        if entry.kind == "directory":
            if not bare and entry.mode == _SEEN.directory_mode:
                return
            self._store.put(f"{key}/", b"", self._objects.options(stat.S_IFDIR | entry.mode, DIRECTORY_TYPE))
            return
        target = entry.target.encode()
        options = self._objects.options(stat.S_IFLNK | 0o777)
        try:
            self._store.put(key + LINK_SUFFIX, target, options)
        except KeyTooLong:  # the mount does the same (S-09)
            self._store.put(key, target, options)

    def copy(self, source: ReadableTree, node: Node, path: str, mode: int) -> str | None:
        """See Tree."""
        bucket = self._beside(source)
        if bucket is None or not isinstance(source, ObjectTree):
            return None
        listed = ListedObject(node.at or source._key(node.path), node.size, ETag(node.state), 0)
        options = self._objects.options(stat.S_IFREG | mode)
        limits = self._objects.copy_limits
        try:
            return copy(self._store, listed, self._key(path), limits, replace=options, bucket=bucket).etag
        except PreconditionFailed as error:
            raise source._changed(listed.key) from error
        except _CANT_COPY:
            return None

    def reaches(self, source: ReadableTree, node: Node) -> bool:
        """See Tree. To test whether our keys open another bucket, it copies one byte, in an aborted upload."""
        bucket = self._beside(source)
        if not bucket or not isinstance(source, ObjectTree):
            return bucket is not None
        if not node.size:
            return False
        key = f"{self._prefix}.trial"
        upload_id = self._store.create_upload(key, WriteOptions(), copies=True)
        try:
            at, state = node.at or source._key(node.path), ETag(node.state) if node.state else None
            self._store.upload_part_copy(
                key, upload_id, PartNumber(1), at, ByteRange(0, 1), state, source_bucket=bucket
            )
        except PreconditionFailed:
            pass  # the file changed since the scan, and reading it will raise that error
        except _CANT_COPY:
            return False
        finally:
            self._store.abort_upload(key, upload_id)
        return True

    def _beside(self, source: ReadableTree) -> str | None:
        """Return the bucket of a source on the same server; '' when it is this one, None when there is none."""
        if not isinstance(source, ObjectTree) or self._objects.place.endpoint != source._objects.place.endpoint:
            return None
        there = source._objects.place.bucket
        return "" if there == self._objects.place.bucket else there

    def adopt(self, tree: Tree, entry: Entry, state: str) -> str | None:
        """See Tree. The server copies the file."""
        if not isinstance(tree, ObjectTree):
            return None
        node = Node(entry.path, "file", entry.size, at=tree._key(entry.path), state=state)
        try:
            return self.copy(tree, node, entry.path, entry.mode)
        except SourceChanged:
            return None

    def settle(self, entries: Sequence[Entry]) -> None:
        """See Tree."""
        compare(self.location, entries, self.scan())

    def is_quiet(self) -> bool:
        """See Tree."""
        return not self._objects.unanswered()

    def discard(self, path: str) -> None:
        """See Tree."""
        self._store.delete(self._key(path))

    def remove(self) -> int:
        """See Tree."""
        removed = 0
        while uploads := self._store.pending_uploads(self._prefix):
            for upload in uploads:
                self._store.abort_upload(upload.key, upload.upload_id)
            removed += len(uploads)
        keys: list[str] = []
        for listed in self._objects.list(self._prefix):
            keys.append(listed.key)
            if len(keys) == _DELETE_KEYS:
                removed += self._delete(keys)
                keys = []
        return removed + (self._delete(keys) if keys else 0)

    def _delete(self, keys: list[str]) -> int:
        if self._objects.locks():
            list(self._objects.threads.map(self._release, keys))
        # The deepest keys first: a server that keeps keys as a disk's directories removes only empty ones.
        for error in self._store.delete_many(sorted(keys, reverse=True)):
            raise error
        return len(keys)

    def _release(self, key: str) -> None:
        with suppress(NotFound):
            self._store.set_legal_hold(key, on=False)

    def _key(self, path: str) -> str:
        return self._prefix + "/".join(segment_of(name.encode()) for name in path.split("/"))

    def _shown(self, segments: Sequence[str], listed: ListedObject) -> str:
        """Return the path that a mount shows for the segments of a key. Errors: SourceInvalid."""
        try:
            return b"/".join(map(name_of, segments)).decode()
        except UnicodeDecodeError:
            raise SourceInvalid(f"{self._url(listed.key)}: its name is not UTF-8; rename it") from None

    def _links(self, links: dict[str, ListedObject]) -> Iterator[Node]:
        """Yield the links with their targets, each of which is an object's content."""

        def target_of(listed: ListedObject) -> str:
            if listed.size > _LINK_MAX:
                raise SourceInvalid(f"{self._url(listed.key)}: is too long for a link's target")
            try:
                body, _ = self._store.get(listed.key, if_match=listed.etag)
                return bytes(body).decode()
            except (PreconditionFailed, NotFound) as error:
                raise self._changed(listed.key) from error
            except UnicodeDecodeError:
                raise SourceInvalid(f"{self._url(listed.key)}: leads to a name that is not UTF-8") from None

        for path, target in zip(links, self._objects.threads.map(target_of, links.values()), strict=True):
            yield self._outside(path, target) or Node(path, "symlink", target=target)

    def _outside(self, path: str, target: str) -> Node | None:
        """See DirectoryTree._outside()."""
        if self._within is None or leads_inside(path, target):
            return None
        url = f"{self.location}/{path}"
        names = f"{self._prefix.removeprefix(self._within)}{path}".split("/")[:-1]
        for name in target.split("/"):
            if name == ".." and names:
                names.pop()
            elif name not in ("", "."):
                names.append(name)
        key = self._within + "/".join(names if ".." in names else (segment_of(name.encode()) for name in names))
        try:
            if target.startswith("/") or ".." in names:
                raise NotFound(f"{url}: leads out of the Datastore")
            info = self._store.head(key)
        except NotFound:
            raise SourceInvalid(
                f"{url}: is a symbolic link to {target}, which is no file of the Datastore; a version must hold all "
                "that it needs, so put the file there or remove the link"
            ) from None
        return Node(path, "file", info.size, at=key, state=info.etag)

    def _directories(self, directories: dict[str, ListedObject | None]) -> Iterator[Node]:
        """Yield the directories with their modes, which are known from their marker objects only."""
        markers = [(path, listed) for path, listed in directories.items() if listed is not None]
        try:
            infos = self._store.heads([listed.key for _, listed in markers])
        except NotFound as error:
            raise self._changed(error.key) from None
        modes = {
            path: stat.S_IMODE(_mode_of(info, stat.S_IFDIR)) for (path, _), info in zip(markers, infos, strict=True)
        }
        for path in directories:
            yield Node(path, "directory", mode=modes.get(path, _SEEN.directory_mode))

    def _changed(self, key: str) -> SourceChanged:
        return SourceChanged(f"{self._url(key)}: changed while it was read; save it again when nobody writes there")

    def _url(self, key: str) -> str:
        return f"s3://{self._objects.place.bucket}/{key}"


class _UploadSink:
    """See Sink. The file is sent in one request, or as a multipart upload with several parts under way."""

    def __init__(self, objects: Objects, key: str, options: WriteOptions, size: int) -> None:
        self.state = ""
        self._objects = objects
        self._store = objects.store
        self._key = key
        self._options = options
        self._whole = size <= chunk_bytes(size)
        self._body: Body = b""
        self._upload_id = UploadId("")
        self._parts: list[tuple[PartNumber, ETag]] = []
        self._under_way: deque[Future[tuple[PartNumber, ETag]]] = deque()
        self._number = 0

    def write(self, chunk: Body) -> None:
        """See Sink."""
        if self._whole:
            self._body = chunk
            return
        while not self._objects.uploads.take(first=not self._under_way):
            self._parts.append(self._under_way.popleft().result())
        self._number += 1
        number = PartNumber(self._number)

        def send() -> tuple[PartNumber, ETag]:
            return number, self._store.upload_part(self._key, self._upload_id, number, chunk)

        self._under_way.append(_released(self._objects.threads, send, self._objects.uploads.give))

    def __enter__(self) -> Self:
        if not self._whole:
            self._upload_id = self._store.create_upload(self._key, self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._whole:
                self.state = self._store.put(self._key, self._body, self._options).etag
            elif error is None:
                while self._under_way:
                    self._parts.append(self._under_way.popleft().result())
                result = self._store.complete_upload(self._key, self._upload_id, self._parts, self._options)
                self.state = result.etag
        except BaseException:
            self._abort()
            raise
        if error is not None:
            self._abort()

    def _abort(self) -> None:
        for each in self._under_way:
            with suppress(StoreError):
                each.result()
        if self._upload_id:
            with suppress(StoreError), tried_once():  # an upload that can't be aborted now is removed with the tree
                self._store.abort_upload(self._key, self._upload_id)


def _released(
    threads: ThreadPoolExecutor, job: Callable[[], tuple[PartNumber, ETag]], release: Callable[[], None]
) -> Future[tuple[PartNumber, ETag]]:
    """Start a job; `release` is called when the job has ended, also with an error, or could not be started."""
    try:
        future = threads.submit(job)
    except BaseException:
        release()
        raise
    future.add_done_callback(lambda _: release())
    return future


def _mode_of(info: ObjectInfo, kind: int) -> int:
    return from_metadata(info.metadata, kind, _SEEN.of(kind, 0)).mode
