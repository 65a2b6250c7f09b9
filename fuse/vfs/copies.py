"""Copies on the server, of objects of any size."""

from __future__ import annotations

import logging

from datastore.errors import DatastoreError, StoreError
from datastore.logs import fields

from ..data.multipart import COPY_MAX, PARTS_MAX
from ..data.version import ObjectVersion
from ..state.rows import UploadNote
from ..store.base import ByteRange, ETag, PartNumber, UploadId, WriteOptions, WriteResult
from .core import Core

log = logging.getLogger(__name__)
COPY_OBJECT_MAX = 5 << 30
"""Largest object that CopyObject takes (S3 API reference)."""


def copy_object(
    core: Core, source: ObjectVersion, target: str, replace: WriteOptions | None = None, *, alone: bool = True
) -> WriteResult:
    """Copy one version to a key, in parts above 5 GiB; replace: new metadata. PreconditionFailed, NotFound.

    alone False: the caller is one of core.io's tasks, which must not wait for others, so parts follow one another.
    """
    if source.size <= COPY_OBJECT_MAX:
        return core.store.copy(source.key, target, replace=replace, if_source_match=source.etag)
    return _copy_parts(core, source, target, replace or _same_metadata(core, source), alone=alone)


def _same_metadata(core: Core, source: ObjectVersion) -> WriteOptions:
    info = core.store.head(source.key)
    return WriteOptions(metadata=info.metadata, content_type=info.content_type)


def _copy_parts(core: Core, source: ObjectVersion, target: str, options: WriteOptions, *, alone: bool) -> WriteResult:
    step = max(COPY_MAX, -(-source.size // PARTS_MAX))
    note = core.db.upload_begun(target, core.now_ns())
    upload_id = core.store.create_upload(target, options)
    core.db.upload_known(note, upload_id)

    def copy(number: int) -> tuple[PartNumber, ETag]:
        part = PartNumber(number)
        byte_range = ByteRange((number - 1) * step, min(number * step, source.size))
        return part, core.store.upload_part_copy(target, upload_id, part, source.key, byte_range, source.etag)

    try:
        numbers = range(1, -(-source.size // step) + 1)
        parts = core.each(copy, numbers) if alone else list(map(copy, numbers))
        result = core.store.complete_upload(target, upload_id, parts, options)
    except (DatastoreError, OSError, RuntimeError):  # a lost task is a TimeoutError, a mount that ends a RuntimeError
        abort_upload(core, note, target, upload_id)
        raise
    core.db.upload_ended(note)
    return result


def abort_upload(core: Core, note: UploadNote, key: str, upload_id: UploadId) -> None:
    """Drop a multipart upload. What the store does not let us drop stays in the journal for the next start (S-46)."""
    try:
        core.store.abort_upload(key, upload_id)
    except StoreError as error:
        log.warning("an unfinished upload stays behind", extra=fields(key=key, error=str(error)))
    else:
        core.db.upload_ended(note)
