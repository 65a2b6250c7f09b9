"""A store that fails on demand: the n-th call, before or after it took effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from datastore.fuse.store.base import (
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """What to raise; after: the call takes effect first, and only its answer is lost. alter: gives another answer."""

    error: BaseException | None = None
    after: bool = False
    alter: Callable[[Any], Any] | None = None


Plan = Callable[[int, str], Fault | None]
"""(index of the call from 0, name of the ObjectStore method) -> the fault to inject, or None."""


def no_faults(index: int, method: str) -> Fault | None:
    """The plan of a healthy store; counting its calls bounds a sweep."""
    return None


def nth(n: int, error: BaseException, *, after: bool = False) -> Plan:
    """Only the n-th call (from 0) fails."""

    def plan(index: int, method: str) -> Fault | None:
        return Fault(error, after) if index == n else None

    return plan


def from_nth(n: int, error: BaseException, *, after: bool = False) -> Plan:
    """The n-th call and all that follow fail: an outage."""

    def plan(index: int, method: str) -> Fault | None:
        return Fault(error, after) if index >= n else None

    return plan


class FaultyStore:
    """Wraps a store; implements ObjectStore. `calls` lists the methods called so far; `plan` may be replaced."""

    def __init__(self, inner: ObjectStore, plan: Plan = no_faults) -> None:
        self.inner = inner
        self.plan = plan
        self.calls: list[str] = []
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
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
        return self._run(
            "list_page",
            lambda: self.inner.list_page(
                prefix, delimiter=delimiter, token=token, start_after=start_after, max_keys=max_keys, unless=unless
            ),
        )

    def head(self, key: str) -> ObjectInfo:
        return self._run("head", lambda: self.inner.head(key))

    def get(
        self,
        key: str,
        *,
        byte_range: ByteRange | None = None,
        if_match: ETag | None = None,
        sink: Sink | None = None,
    ) -> tuple[Body, ObjectInfo]:
        return self._run("get", lambda: self.inner.get(key, byte_range=byte_range, if_match=if_match, sink=sink))

    def put(self, key: str, body: Body, options: WriteOptions) -> WriteResult:
        return self._run("put", lambda: self.inner.put(key, body, options))

    def copy(
        self, source: str, target: str, *, replace: WriteOptions | None = None, if_source_match: ETag | None = None
    ) -> WriteResult:
        return self._run(
            "copy", lambda: self.inner.copy(source, target, replace=replace, if_source_match=if_source_match)
        )

    def delete(self, key: str, *, if_match: ETag | None = None) -> None:
        self._run("delete", lambda: self.inner.delete(key, if_match=if_match))

    def delete_many(self, keys: Sequence[str]) -> list[DeleteFailure]:
        return self._run("delete_many", lambda: self.inner.delete_many(keys))

    def create_upload(self, key: str, options: WriteOptions) -> UploadId:
        return self._run("create_upload", lambda: self.inner.create_upload(key, options))

    def upload_part(self, key: str, upload_id: UploadId, number: PartNumber, body: Body | FilePart) -> ETag:
        return self._run("upload_part", lambda: self.inner.upload_part(key, upload_id, number, body))

    def upload_part_copy(
        self,
        key: str,
        upload_id: UploadId,
        number: PartNumber,
        source: str,
        byte_range: ByteRange,
        if_source_match: ETag | None,
    ) -> ETag:
        return self._run(
            "upload_part_copy",
            lambda: self.inner.upload_part_copy(key, upload_id, number, source, byte_range, if_source_match),
        )

    def complete_upload(
        self, key: str, upload_id: UploadId, parts: Sequence[tuple[PartNumber, ETag]], options: WriteOptions
    ) -> WriteResult:
        return self._run("complete_upload", lambda: self.inner.complete_upload(key, upload_id, parts, options))

    def abort_upload(self, key: str, upload_id: UploadId) -> None:
        self._run("abort_upload", lambda: self.inner.abort_upload(key, upload_id))

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        return iter(self._run("pending_uploads", lambda: list(self.inner.pending_uploads(prefix))))

    def close(self) -> None:
        self.inner.close()

    def _run(self, method: str, call: Callable[[], T]) -> T:
        with self._lock:
            index = len(self.calls)
            self.calls.append(method)
        fault = self.plan(index, method)
        if fault is None:
            return call()
        if fault.alter is not None:
            altered: T = fault.alter(call())
            return altered
        assert fault.error is not None
        if fault.after:
            call()
        raise fault.error
