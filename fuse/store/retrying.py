"""The store that all other modules use: it makes each call to the adapter, retries, times and counts it.

Nothing else retries, so delays never multiply. A `transient` failure is retried, with backoff, within a time budget.
A write that failed without an answer may have taken effect, so its retry may meet the result of the first attempt: a
refused condition, or an upload that no longer exists, is a success when the object at the key is the one that we sent.

All requests for one call of a program share one budget (datastore.retry.Call): the call fails with EIO when the store
has answered nothing for that long, whatever requests the call sent, or while it waited for another call that failed.

Bodies wait here until they may be sent (pacing.py). That wait counts neither as the store's time nor as its silence.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from datastore.errors import AlreadyExists, NotFound, PreconditionFailed, StoreError, Throttled
from datastore.retry import current_call

from ..loop import pause
from .base import (
    CHANGED,
    Body,
    ByteRange,
    Capabilities,
    ETag,
    FilePart,
    ObjectInfo,
    ObjectStore,
    PartNumber,
    Sink,
    UploadId,
    WriteOptions,
    WriteResult,
    user_metadata,
)
from .etags import etag_of, joined_etag
from .metrics import StoreMetrics
from .pacing import UploadPace

T = TypeVar("T")
P = ParamSpec("P")
Answering = Coroutine[Any, Any, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrier:
    """When a failed call is tried again. budget_s: from the first try to the start of the last one; 0: a single try.

    Delays double from first_delay_s up to max_delay_s; the upper half of each is jitter, so that clients that failed
    together don't retry together. clock: monotonic seconds; jitter: a fraction in [0, 1).
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 8.0
    budget_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = pause
    jitter: Callable[[], float] = random.random

    def delay_s(self, attempt: int) -> float:
        """Return the wait after an attempt (the first is 1)."""
        whole = min(self.first_delay_s * 2.0 ** min(attempt - 1, 32), self.max_delay_s)
        return whole / 2 + whole / 2 * self.jitter()


def _asked(
    method: Callable[Concatenate[ObjectStore, P], Answering[T]],
) -> Callable[Concatenate[RetryingStore, P], Answering[T]]:
    """Return a method of RetryingStore that calls the same method of the inner store through _ask()."""
    name = method.__name__

    def ask(store: RetryingStore, /, *args: P.args, **kwargs: P.kwargs) -> Answering[T]:
        attempt: Callable[P, Answering[T]] = getattr(store.inner, name)
        return store._ask(name, partial(attempt, *args, **kwargs))

    return ask


class RetryingStore:
    """One bucket; implements ObjectStore. Any thread may use it.
    A retried create_upload may leave an empty upload behind, which pending_uploads shows."""

    def __init__(self, inner: ObjectStore, retrier: Retrier | None = None) -> None:
        self.inner = inner
        self.metrics = StoreMetrics()
        self.upload_pace = UploadPace()
        self._retrier = retrier or Retrier()
        self._clock = self._retrier.clock
        self._answered_at = self._clock()
        """When the store last answered a request, even by a refusal; seconds of the retrier's clock."""

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def close(self) -> None:
        self.inner.close()

    list_page = _asked(ObjectStore.list_page)
    head = _asked(ObjectStore.head)
    copy = _asked(ObjectStore.copy)
    delete = _asked(ObjectStore.delete)
    delete_many = _asked(ObjectStore.delete_many)
    create_upload = _asked(ObjectStore.create_upload)
    upload_part_copy = _asked(ObjectStore.upload_part_copy)
    abort_upload = _asked(ObjectStore.abort_upload)
    pending_uploads = _asked(ObjectStore.pending_uploads)
    has_object_lock = _asked(ObjectStore.has_object_lock)
    set_legal_hold = _asked(ObjectStore.set_legal_hold)

    async def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        def received(answer: tuple[Body, ObjectInfo]) -> int:
            size = answer[1].size
            return size if byte_range is None else max(0, min(byte_range.stop, size) - byte_range.start)

        attempt = partial(self.inner.get, key, byte_range=byte_range, if_match=if_match, sink=sink)
        return await self._ask("get", attempt, received=received)

    async def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        await self._await_pace(len(body))
        ours = partial(self._ours, key, lambda: etag_of(body), size=len(body), metadata=options.metadata)
        return await self._ask("put", partial(self.inner.put, key, body, options), sent=len(body), ours=ours)

    async def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        await self._await_pace(len(body))
        attempt = partial(self.inner.upload_part, key, upload_id, number, body)
        return await self._ask("upload_part", attempt, sent=len(body))

    async def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        attempt = partial(self.inner.complete_upload, key, upload_id, parts, options)
        return await self._ask(
            "complete_upload", attempt, ours=lambda: self._ours(key, lambda: joined_etag(etag for _, etag in parts))
        )

    async def _ask(
        self,
        method: str,
        attempt: Callable[[], Answering[T]],
        *,
        sent: int = 0,
        received: Callable[[T], int] | None = None,
        ours: Callable[[], Answering[T | None]] | None = None,
    ) -> T:
        """Return the answer to one call, after as many attempts as the budget allows. If the first attempt took over
        half of the budget, it was making progress, and the budget begins when it failed.

        sent: bytes of the request's body. received: returns those of an answer. ours: returns what an earlier attempt
        without an answer has written, or None.
        """
        retrier, began, call, silence = self._retrier, self._clock(), current_call(), self.metrics.silence
        since = began if call is None else call.waiting_since(began, self._answered_at)
        silence.asked(sent)
        failed, lost, by_store, unanswered, got = "", "", True, False, 0
        refusal: StoreError | None = None
        try:
            for number in itertools.count(1):
                try:
                    answer = await attempt()
                    break
                except (AlreadyExists, PreconditionFailed, NotFound):
                    found = await ours() if ours is not None and unanswered else None
                    if found is None:
                        raise
                    answer = found
                    break
                except StoreError as failure:
                    if not failure.transient:
                        raise
                    failed_at, delay_s = self._clock(), retrier.delay_s(number)
                    if number == 1 and failed_at - began > retrier.budget_s / 2:
                        since = failed_at
                    if failed_at - since + delay_s > retrier.budget_s:
                        raise
                    unanswered |= not isinstance(failure, Throttled)
                    silence.failed(failure)
                    self.metrics.record_retry(method, failure)
                await retrier.sleep(delay_s)
            if received is not None:
                got = received(answer)
            return answer
        except StoreError as error:
            failed, lost = type(error).__name__, str(error) if error.transient else ""
            refusal = error
            raise
        except BaseException as error:
            failed, by_store = type(error).__name__, False
            raise
        finally:
            ended = self._clock()
            silence.ended(lost, sent)
            if by_store and not lost:
                self._answered_at = ended
                silence.answered(refusal)
            if by_store and call is not None:
                call.failing_since = since if lost else None
            self.metrics.record(method, ended - began, sent=0 if failed else sent, received=got, error=failed)
            del refusal  # its traceback holds this frame, which holds the body

    async def _ours(
        self,
        key: str,
        etag: Callable[[], str],
        *,
        size: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> WriteResult | None:
        """Return the object there if its size, etag and metadata (whose time tells equal bodies apart) are ours."""
        try:
            info = await self.head(key)
        except NotFound:
            return None
        if size is not None and info.size != size:
            return None
        if metadata is not None and user_metadata(info.metadata) != user_metadata(metadata):
            return None
        dated = metadata is not None and CHANGED in metadata  # where an ETag is no MD5 (SSE-KMS), this tells
        return WriteResult(info.etag, info.mtime_ns) if dated or info.etag == etag() else None

    async def _await_pace(self, size_bytes: int) -> None:
        if await self.upload_pace.take(size_bytes) and (call := current_call()) is not None:
            call.began = time.monotonic()  # the store was not asked yet: the call has its whole budget
