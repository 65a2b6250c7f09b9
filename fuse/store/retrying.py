"""The one retry layer over a store: by `transient`, with back-off and a total budget (datastore/retry.py).

A write that failed without an answer may have taken effect. What its repetition then says is read with that in mind:
a refused condition, or an upload that is gone, is a success when the object there is the one we sent.

All requests for one call of a program share one budget (datastore.retry.Call): a call is EIO when the store said
nothing for that long, whatever was tried for it in turn, and however long it waited for another call that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from datastore.errors import AlreadyExists, NotFound, PreconditionFailed, StoreError, Throttled
from datastore.retry import Call, Retrier, current_call

from .base import (
    Body,
    ByteRange,
    Capabilities,
    DeleteFailure,
    ETag,
    FilePart,
    ListPage,
    ObjectInfo,
    ObjectStore,
    PartNumber,
    PendingUpload,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
)
from .etags import etag_of, joined_etag

T = TypeVar("T")


class RetryingStore:
    """Wraps a store; implements ObjectStore. on_retry(method, error) is told of each failure that is tried again."""

    def __init__(
        self,
        inner: ObjectStore,
        retrier: Retrier | None = None,
        on_retry: Callable[[str, StoreError], None] | None = None,
    ) -> None:
        self._inner = inner
        self._retrier = retrier or Retrier()
        self._on_retry = on_retry
        self._answered_at = self._retrier.clock()
        """When a request was last answered, be it by a refusal; the retrier's clock."""

    @property
    def capabilities(self) -> Capabilities:
        """What this server can do."""
        return self._inner.capabilities

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
        return self._run(
            "list_page",
            lambda: self._inner.list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, max_keys=max_keys, unless=unless
            ),
        )

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore."""
        return self._run("head", lambda: self._inner.head(key))

    def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        """See ObjectStore."""
        return self._run("get", lambda: self._inner.get(key, byte_range=byte_range, if_match=if_match, sink=sink))

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """See ObjectStore."""

        def ours() -> WriteResult | None:
            return self._ours(key, lambda: etag_of(body), size=len(body), metadata=options.metadata)

        return self._write("put", lambda: self._inner.put(key, body, options), ours)

    def copy(
        self, source: str, target: str, *, replace: WriteOptions | None = None, if_source_match: ETag | None = None
    ) -> WriteResult:
        """See ObjectStore."""
        return self._run(
            "copy", lambda: self._inner.copy(source, target, replace=replace, if_source_match=if_source_match)
        )

    def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        """See ObjectStore."""
        self._run("delete", lambda: self._inner.delete(key, if_match=if_match))

    def delete_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectStore."""
        return self._run("delete_many", lambda: self._inner.delete_many(keys))

    def create_upload(self, key: str, options: WriteOptions) -> UploadId:
        """See ObjectStore. A repetition may leave an empty upload behind, which pending_uploads shows."""
        return self._run("create_upload", lambda: self._inner.create_upload(key, options))

    def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        """See ObjectStore."""
        return self._run("upload_part", lambda: self._inner.upload_part(key, upload_id, number, body))

    def upload_part_copy(
        self,
        key: str,
        upload_id: UploadId,
        number: PartNumber,
        source: str,
        byte_range: ByteRange,
        if_source_match: ETag | None,
    ) -> ETag:
        """See ObjectStore."""
        return self._run(
            "upload_part_copy",
            lambda: self._inner.upload_part_copy(key, upload_id, number, source, byte_range, if_source_match),
        )

    def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """See ObjectStore."""
        return self._write(
            "complete_upload",
            lambda: self._inner.complete_upload(key, upload_id, parts, options),
            lambda: self._ours(key, lambda: joined_etag(etag for _, etag in parts)),
        )

    def abort_upload(self, key: str, upload_id: UploadId) -> None:
        """See ObjectStore."""
        self._run("abort_upload", lambda: self._inner.abort_upload(key, upload_id))

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """See ObjectStore. Read to its end first, so that a failure in the middle can start anew."""
        return iter(self._run("pending_uploads", lambda: list(self._inner.pending_uploads(prefix))))

    def close(self) -> None:
        """See ObjectStore."""
        self._inner.close()

    def _run(self, method: str, call: Callable[[], T], on_retry: Callable[[StoreError], None] | None = None) -> T:
        def told(error: BaseException) -> None:
            if isinstance(error, StoreError):
                if on_retry is not None:
                    on_retry(error)
                if self._on_retry is not None:
                    self._on_retry(method, error)

        asker = current_call()
        now = self._retrier.clock()
        since = now if asker is None else asker.waiting_since(now, self._answered_at)
        try:
            answer = self._retrier.run(call, told, since)
        except StoreError as error:
            if not error.transient:
                self._answered(asker)
            elif asker is not None:
                asker.failing_since = since
            raise
        self._answered(asker)
        return answer

    def _answered(self, call: Call | None) -> None:
        self._answered_at = self._retrier.clock()
        if call is not None:
            call.failing_since = None

    def _write(
        self, method: str, call: Callable[[], WriteResult], ours: Callable[[], WriteResult | None]
    ) -> WriteResult:
        """A write whose refusal after an unanswered attempt may be that attempt's own success."""
        unanswered: list[StoreError] = []

        def remember(error: StoreError) -> None:
            if not isinstance(error, Throttled):
                unanswered.append(error)

        try:
            return self._run(method, call, remember)
        except (AlreadyExists, PreconditionFailed, NotFound):
            found = ours() if unanswered else None
            if found is None:
                raise
            return found

    def _ours(
        self,
        key: str,
        etag: Callable[[], str],
        *,
        size: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> WriteResult | None:
        """The object there, when it is what we sent: size, ETag, and metadata, whose time sets equal bodies apart."""
        try:
            info = self.head(key)
        except NotFound:
            return None
        if size is not None and info.size != size:
            return None
        if metadata is not None and dict(info.metadata) != dict(metadata):
            return None
        return WriteResult(info.etag, info.mtime_ns) if info.etag == etag() else None
