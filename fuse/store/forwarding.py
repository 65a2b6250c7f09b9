"""A store in front of another one: every call goes through one hook, which is all that a wrapper has to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..loop import Loop
from .base import (
    Body,
    ByteRange,
    Capabilities,
    DeleteFailure,
    ETag,
    FilePart,
    GetFeed,
    GetSink,
    HeadSink,
    ListPage,
    ObjectInfo,
    ObjectStore,
    PartNumber,
    PendingUpload,
    Shown,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
)

T = TypeVar("T")


class ForwardingStore(ABC):
    """Wraps `inner`; implements ObjectStore. Threads: any, as far as the hook allows."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    @abstractmethod
    def _around(self, method: str, call: Callable[[], T]) -> T:
        """The answer of one call to `inner`; may call it never, once or again, and raise instead.

        method: its name in ObjectStore. close() and `capabilities` ask nothing of a server and do not come here.
        """

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do."""
        return self.inner.capabilities

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        token: str | None = None,
        start_after: str = "",
        max_keys: int = 1000,
        unless: bytes = b"",
    ) -> ListPage:
        """See ObjectStore."""
        return self._around(
            "list_page",
            lambda: self.inner.list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, max_keys=max_keys, unless=unless
            ),
        )

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore."""
        return self._around("head", lambda: self.inner.head(key))

    @abstractmethod
    def head_many(self, objects: Sequence[Shown], sink: HeadSink) -> None:
        """See ObjectStore. The hook takes one answer: this is each wrapper's own."""

    def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """See ObjectStore."""
        return self._around("get", lambda: self.inner.get(key, byte_range=byte_range, if_match=if_match, sink=sink))

    @abstractmethod
    def get_many(self, feed: GetFeed, sink: GetSink, loop: Loop | None = None) -> None:
        """See ObjectStore. As head_many()."""

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """See ObjectStore."""
        return self._around("put", lambda: self.inner.put(key, body, options))

    def copy(
        self,
        source: str,
        target: str,
        *,
        replace: WriteOptions | None = None,
        if_source_match: ETag | None = None,
        source_bucket: str = "",
    ) -> WriteResult:
        """See ObjectStore."""
        return self._around(
            "copy",
            lambda: self.inner.copy(
                source, target, replace=replace, if_source_match=if_source_match, source_bucket=source_bucket
            ),
        )

    def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """See ObjectStore."""
        self._around("delete", lambda: self.inner.delete(key, if_match=if_match))

    def delete_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectStore."""
        return self._around("delete_many", lambda: self.inner.delete_many(keys))

    def create_upload(self, key: str, options: WriteOptions, *, copies: bool = False) -> UploadId:
        """See ObjectStore."""
        return self._around("create_upload", lambda: self.inner.create_upload(key, options, copies=copies))

    def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """See ObjectStore."""
        return self._around("upload_part", lambda: self.inner.upload_part(key, upload_id, number, body))

    def upload_part_copy(
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
        """See ObjectStore."""
        return self._around(
            "upload_part_copy",
            lambda: self.inner.upload_part_copy(
                key, upload_id, number, source, byte_range, if_source_match, source_bucket=source_bucket
            ),
        )

    def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """See ObjectStore."""
        return self._around("complete_upload", lambda: self.inner.complete_upload(key, upload_id, parts, options))

    def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """See ObjectStore."""
        self._around("abort_upload", lambda: self.inner.abort_upload(key, upload_id))

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See ObjectStore. Read to its end inside the hook, so that a failure in the middle is that of the call."""
        return iter(self._around("pending_uploads", lambda: list(self.inner.pending_uploads(prefix))))

    def has_object_lock(self) -> bool:
        """See ObjectStore."""
        return self._around("has_object_lock", self.inner.has_object_lock)

    def set_legal_hold(self, key: str, *, on: bool) -> None:
        """See ObjectStore."""
        self._around("set_legal_hold", lambda: self.inner.set_legal_hold(key, on=on))

    def close(self) -> None:
        """See ObjectStore."""
        self.inner.close()
