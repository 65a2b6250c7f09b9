"""Copies objects of any size on the server; one that is too large for a single request is copied in concurrent parts.

See S3 user guide, "Copying an object using multipart upload" and "Amazon S3 multipart upload limits".
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from datastore.errors import StoreError
from datastore.fuse.store.base import ByteRange, ETag, ListedObject, PartNumber, UploadId, WriteOptions, WriteResult
from datastore.fuse.store.blocking import BlockingStore

SIDE_BY_SIDE = 8
PARTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes. whole: the largest object that one request copies; part: one part, unless there are too many."""

    whole: int = 5 << 30
    part: int = 256 << 20


def copy(
    store: BlockingStore,
    source: ListedObject,
    target: str,
    limits: Limits,
    *,
    replace: WriteOptions | None = None,
    bucket: str = "",
) -> WriteResult:
    """Copy this version of an object. Errors: StoreError; then the target has not changed.

    replace: metadata and content type in place of the source's. bucket: the source's bucket on the same server ('':
    the store's own); another bucket needs `replace` too.
    """
    if source.size <= limits.whole:
        return store.copy(source.key, target, replace=replace, if_source_match=source.etag, source_bucket=bucket)
    options = replace
    if options is None:
        info = store.head(source.key)
        options = WriteOptions(metadata=info.metadata, content_type=info.content_type)
    upload_id = store.create_upload(target, options, copies=True)
    try:
        parts = _parts(store, source, target, upload_id, limits, bucket)
        return store.complete_upload(target, upload_id, parts, options)
    except StoreError:
        # If it can't be aborted now, the next Delete or the bucket's lifecycle rule for unfinished uploads aborts it.
        with suppress(StoreError):
            store.abort_upload(target, upload_id)
        raise


def _parts(
    store: BlockingStore, source: ListedObject, target: str, upload_id: UploadId, limits: Limits, bucket: str
) -> list[tuple[PartNumber, ETag]]:
    step = max(limits.part, -(-source.size // PARTS_MAX))

    def part(number: int) -> tuple[PartNumber, ETag]:
        byte_range = ByteRange((number - 1) * step, min(number * step, source.size))
        sent = PartNumber(number)
        etag = store.upload_part_copy(
            target, upload_id, sent, source.key, byte_range, source.etag, source_bucket=bucket
        )
        return sent, etag

    with ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="copy") as pool:
        running = [pool.submit(part, number) for number in range(1, -(-source.size // step) + 1)]
        try:
            return [each.result() for each in running]
        except StoreError:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
