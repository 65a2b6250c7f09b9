"""The one retry layer over a store: by `transient`, with back-off and a total budget (datastore/retry.py).

A write that failed without an answer may have taken effect. What its repetition then says is read with that in mind:
a refused condition, or an upload that is gone, is a success when the object there is the one we sent.

All requests for one call of a program share one budget (datastore.retry.Call): a call is EIO when the store said
nothing for that long, whatever was tried for it in turn, and however long it waited for another call that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from datastore.errors import AlreadyExists, NotFound, PreconditionFailed, StoreError, Throttled
from datastore.retry import Call, Retrier, current_call

from ..loop import Loop
from .base import (
    Body,
    ETag,
    GetFeed,
    GetSink,
    HeadSink,
    ObjectInfo,
    ObjectStore,
    ObjectVersion,
    PartNumber,
    Shown,
    UploadId,
    WriteOptions,
    WriteResult,
    user_metadata,
)
from .etags import etag_of, joined_etag
from .forwarding import ForwardingStore
from .silence import Silence

T = TypeVar("T")


class RetryingStore(ForwardingStore):
    """Tries again. on_retry(method, error) is told of each failure that is tried again.

    A repeated create_upload may leave an empty upload behind, which pending_uploads shows.
    """

    def __init__(
        self,
        inner: ObjectStore,
        retrier: Retrier | None = None,
        on_retry: Callable[[str, StoreError], None] | None = None,
        silence: Silence | None = None,
    ) -> None:
        """silence: told what is answered."""
        super().__init__(inner)
        self._retrier = retrier or Retrier()
        self._on_retry = on_retry
        self._silence = silence or Silence()
        self._answered_at = self._retrier.clock()
        """When a request was last answered, be it by a refusal; the retrier's clock."""

    def head_many(self, objects: Sequence[Shown], sink: HeadSink) -> None:
        """See ObjectStore. Those that failed and may not the next time are asked for again together, in one budget."""
        failed: dict[int, StoreError] = {}

        def attempt() -> None:
            numbers = list(failed or range(len(objects)))
            failed.clear()

            def take(at: int, answer: ObjectInfo | StoreError) -> None:
                if isinstance(answer, StoreError) and answer.transient:
                    failed[numbers[at]] = answer
                else:
                    sink(numbers[at], answer)

            self.inner.head_many([objects[number] for number in numbers], take)
            if failed:
                raise next(iter(failed.values()))

        try:
            self._around("head", attempt)
        except StoreError:
            if not failed:
                raise
        for number, error in failed.items():
            sink(number, error)

    def get_many(self, feed: GetFeed, sink: GetSink, loop: Loop | None = None) -> None:
        """See ObjectStore."""

        def answered(wanted: ObjectVersion, answer: tuple[Body, ObjectInfo] | None) -> None:
            if answer is not None:
                self._answered_at = self._retrier.clock()
            sink(wanted, answer)

        self.inner.get_many(feed, answered, loop)

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        """See ObjectStore."""

        def ours() -> WriteResult | None:
            return self._ours(key, lambda: etag_of(body), size=len(body), metadata=options.metadata)

        return self._write("put", lambda: self.inner.put(key, body, options), ours)

    def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        """See ObjectStore."""
        return self._write(
            "complete_upload",
            lambda: self.inner.complete_upload(key, upload_id, parts, options),
            lambda: self._ours(key, lambda: joined_etag(etag for _, etag in parts)),
        )

    def _around(self, method: str, call: Callable[[], T], on_retry: Callable[[StoreError], None] | None = None) -> T:
        def told(error: BaseException) -> None:
            self._silence.failed(error)
            if isinstance(error, StoreError):
                if on_retry is not None:
                    on_retry(error)
                if self._on_retry is not None:
                    self._on_retry(method, error)

        asker = current_call()
        now = self._retrier.clock()
        since = now if asker is None else asker.waiting_since(now, self._answered_at)
        self._silence.asked()
        try:
            answer = self._retrier.run(call, told, since)
        except StoreError as error:
            if not error.transient:
                self._answered(asker)
            else:
                self._silence.gave_up(error)
                if asker is not None:
                    asker.failing_since = since
            raise
        except BaseException:
            self._silence.answered()  # it was not the store that failed
            raise
        self._answered(asker)
        return answer

    def _answered(self, call: Call | None) -> None:
        self._silence.answered()
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
            return self._around(method, call, remember)
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
        if metadata is not None and user_metadata(info.metadata) != user_metadata(metadata):
            return None
        return WriteResult(info.etag, info.mtime_ns) if info.etag == etag() else None
