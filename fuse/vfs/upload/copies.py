"""Copies on the server: of one object of any size, and of all objects below a prefix."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from datastore.errors import StoreError
from datastore.logs import fields

from ...data.multipart import COPY_MAX, PARTS_MAX, Part
from ...loop import Semaphore, each
from ...state.rows import Subject
from ...store.base import (
    ByteRange,
    ETag,
    ListedObject,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    PartNumber,
    WriteOptions,
    WriteResult,
)
from ..tree.core import Core
from .delivery import Stream

log = logging.getLogger(__name__)
COPY_OBJECT_MAX = 5 << 30
"""Largest object that CopyObject takes (S3 API reference)."""
DELETE_MAX = 1000
"""The most keys of one bulk delete (S3 API reference, DeleteObjects)."""
_PARTS_ABREAST = 32
"""How many parts of one object are copied at the same time: half the number of connections."""
_SECOND_NS = 1_000_000_000


async def copy_object(
    core: Core, source: ObjectVersion, target: str, replace: WriteOptions | None = None
) -> WriteResult:
    """Copy one version to a key, in parts above 5 GiB; replace: new metadata. Errors: PreconditionFailed, NotFound."""
    if source.size <= COPY_OBJECT_MAX:
        return await core.store.copy(source.key, target, replace=replace, if_source_match=source.etag)
    if replace is None:
        info = await core.store.head(source.key)
        replace = WriteOptions(metadata=info.metadata, content_type=info.content_type)
    step = max(COPY_MAX, -(-source.size // PARTS_MAX))
    ranges = [ByteRange(start, min(start + step, source.size)) for start in range(0, source.size, step)]
    parts = [Part(PartNumber(number), each, True) for number, each in enumerate(ranges, 1)]
    stream = Stream(core, Semaphore(_PARTS_ABREAST), source, target, replace, copies=True)
    return await stream.finish(parts, replace)


class Copy(NamedTuple):
    """A copy that was made of version `original` of an object."""

    original: ETag
    result: WriteResult


class Copies:
    """Copies every object below a prefix to another prefix, many at a time; `made` has the copies by new key.
    subject: which objects to copy; None: all.
    """

    def __init__(self, core: Core, old_prefix: str, new_prefix: str, subject: Subject | None = None) -> None:
        self._core = core
        self._subject = subject or Subject()
        self._old = old_prefix
        self._new = new_prefix
        self.made: dict[str, Copy] = {}
        self._begun: dict[str, ListedObject] = {}
        """By new key, the objects whose copy was begun; for those that are not in `made`, no answer came."""

    async def make(self, page: ListPage | None = None, *, keep_newer: bool = False) -> None:
        """Copy the objects. page: the first page of their listing, where it is known.
        keep_newer: keep what was written below the new prefix since an earlier attempt.
        """
        page = page or await self._core.store.list_page(self._old)
        while True:
            await self._copy_all(self._meant(page.objects), keep_newer=keep_newer)
            if page.next_token is None:
                return
            page = await self._core.store.list_page(self._old, token=page.next_token)

    async def undo(self, *, keep_marker: bool) -> None:
        """Remove the copies; an error of the store is logged. keep_marker: the new prefix had its marker before."""
        try:
            await self._remove(list(self.made), keep_marker=keep_marker)
            unknown = [key for key in self._begun if key not in self.made]
            there = await each(self._was_made, unknown)
            await self._remove(list(compress(unknown, there)), keep_marker=keep_marker)
        except StoreError as error:
            log.warning("copies of a rename that failed stay", extra=fields(below=self._new, error=str(error)))

    async def _remove(self, keys: Sequence[str], *, keep_marker: bool) -> None:
        keys = [key for key in keys if not (keep_marker and key == self._new)]
        for first in range(0, len(keys), DELETE_MAX):
            await self._core.remove_many(keys[first : first + DELETE_MAX])

    async def _was_made(self, new_key: str) -> bool:
        """Return whether a copy whose answer was lost was made: an object of the original's size counts as the copy."""
        info = await self._core.head(new_key)
        return info is not None and info.size == self._begun[new_key].size

    async def remove_originals(self) -> None:
        """Delete every object below the old prefix; before that, copy what others wrote there since make().
        Errors: StoreError, also when the store does not delete some of them.
        """
        after = ""
        while True:
            page = await self._core.store.list_page(self._old, start_after=after, max_keys=DELETE_MAX)
            if not page.objects:
                return
            meant = self._meant(page.objects)
            if not meant:
                after = page.objects[-1].key
            made = [self.made.get(self._new_key(found)) for found in meant]
            late = [one for one, copy in zip(meant, made, strict=True) if copy is None or copy.original != one.etag]
            await self._copy_all(late, keep_newer=False)
            failures = await self._core.remove_many([found.key for found in meant])
            if failures:
                raise failures[0]
            if page.next_token is None and not late:
                return  # nobody wrote there since; another check would miss later writes as well

    def _meant(self, found: Sequence[ListedObject]) -> list[ListedObject]:
        return [one for one in found if self._subject.includes(one.etag, one.mtime_ns)]

    async def _copy_all(self, found: Sequence[ListedObject], *, keep_newer: bool) -> None:
        copy = partial(self._copy, keep_newer=keep_newer)
        await each(copy, [one for one in found if one.size <= COPY_OBJECT_MAX])
        for one in found:
            if one.size > COPY_OBJECT_MAX:
                await copy(one)  # one by one: each has many parts that are copied at the same time

    async def _copy(self, found: ListedObject, *, keep_newer: bool) -> None:
        new_key = self._new_key(found)
        if keep_newer and (there := await self._superseding(found, new_key)) is not None:
            self.made[new_key] = Copy(found.etag, WriteResult(there.etag, there.mtime_ns))
            return
        version = ObjectVersion(found.key, found.etag, found.size)
        self._begun[new_key] = found
        self.made[new_key] = Copy(found.etag, await copy_object(self._core, version, new_key))

    async def _superseding(self, found: ListedObject, new_key: str) -> ObjectInfo | None:
        """Return the object at the new key if it is the copy, or is newer than the original and than the rename."""
        info, began = await self._core.head(new_key), self._subject.began_ns // _SECOND_NS
        if info is None or (written := info.mtime_ns // _SECOND_NS) < began:
            return None  # there is none, or it is the marker of the empty directory that is replaced
        return info if written > found.mtime_ns // _SECOND_NS or info.etag == found.etag else None

    def _new_key(self, found: ListedObject) -> str:
        return self._new + found.key[len(self._old) :]
