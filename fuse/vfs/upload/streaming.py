"""Multipart uploads: side by side within bounds, and begun while a file is still being written (S-45).

What a sequential writer has left behind is sent from the staging file, so that its close sends only the tail. A part
that is changed after it was sent is sent again under its number before the upload is completed. Every upload is in the
journal from before it begins until it was completed or aborted: what a dead process left is found and dropped (S-46).

The upload's creation and each part are tasks. All others run with node.lock held, advance() without waiting.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from datastore.errors import DatastoreError

from ...data import multipart
from ...data.multipart import Part
from ...data.staging import StagedFile
from ...loop import Semaphore, Task, all_of
from ...ops import FSError
from ...state.rows import UploadNote
from ...store.base import ByteRange, ETag, FilePart, PartNumber, UploadId, WriteOptions, WriteResult
from ..tree.core import Core
from .copies import abort_upload, begin_upload

WIDTH = 8
"""Parts of a mount on their way at once: 64 MiB of memory while files are below 8 GiB, and what a fast line needs."""
REWRITES_MAX = 8
"""A file of which so many sent parts were changed again is not written in sequence: the rest waits for the close."""


_Upload = tuple[UploadNote, UploadId]
"""One that the store has begun."""


class _Sent(NamedTuple):
    byte_range: ByteRange
    etag: Task[ETag]


@dataclass(eq=False, repr=False)
class Stream:
    """One multipart upload of a staging file. copies: some of its parts are the base's.

    places: for the parts of all uploads of a mount.

    INVARIANT: a part counts as sent only while staged.streamed has its whole range: the range is put in before its
    bytes are read, and taken out by every later change of them.
    """

    _core: Core
    _places: Semaphore
    _staged: StagedFile
    key: str
    options: WriteOptions
    copies: bool = False
    _sent: dict[PartNumber, _Sent] = field(default_factory=dict)
    _next: int = 1
    _created: Task[_Upload] | None = None
    _dropped: bool = False

    @property
    def failed(self) -> bool:
        """It could not be begun: another one has to be."""
        return self._created is not None and self._created.error is not None

    async def begins(self) -> bool:
        """Wait for its beginning, where that is under way; False when it could not be begun: another one has to be."""
        if self._created is not None:
            with suppress(Exception):
                await self._created
        return not self.failed

    # -- while the file is written

    def advance(self) -> int:
        """Send what the writer has left behind; the size of the file at which there may be more to send."""
        staged = self._staged
        while True:
            part = multipart.scheduled(self._next)
            due = part.byte_range.stop + multipart.PART_SIZE
            if staged.size < due or self.failed or not staged.dirty_ranges.contains(*part.byte_range):
                return due
            self._begin()
            self._send(part)
            self._next += 1

    def _begin(self) -> None:
        if self._created is None:
            beginning = begin_upload(self._core, self.key, self.options, copies=self.copies)
            self._created = self._core.loop.spawn(beginning)

    def _send(self, part: Part) -> None:
        self._sent[part.number] = _Sent(part.byte_range, self._core.loop.spawn(self._put(part)))

    async def _put(self, part: Part) -> ETag:
        assert self._created is not None
        _, upload_id = await self._created
        number, byte_range, copied = part
        staged, base = self._staged, self._staged.base
        async with self._places:
            if self._dropped:
                raise FSError(errno.ECANCELED)
            if copied and base is not None:
                copy = self._core.store.upload_part_copy
                return await copy(self.key, upload_id, number, base.key, byte_range, base.etag)
            return await self._core.in_lane(self._put_body, upload_id, number, staged.part_for_stream(*byte_range))

    async def _put_body(self, upload_id: UploadId, number: PartNumber, body: FilePart) -> ETag:
        """In a lane."""
        with body:
            return await self._core.store.upload_part(self.key, upload_id, number, body)

    # -- at the close

    async def finish(
        self, parts: Sequence[Part], options: WriteOptions, fill: Callable[[ByteRange], Awaitable[None]]
    ) -> WriteResult:
        """Send what is not sent, and complete. DatastoreError; the upload is dropped then.

        options: the conditions. fill: fetches what the staging file lacks of a range. Nothing else changes that file
        meanwhile.
        """
        try:
            self._begin()
            fresh = {part.number for part in parts} - set(self._sent)
            for part in parts:
                if not part.copied:
                    await fill(part.byte_range)
                if part.number in fresh:
                    self._send(part)
            note, upload_id = await self._wait()
            for part in parts:
                if part.number not in fresh and not self._is_sent(part):
                    self._send(part)
            etags = await all_of(self._sent[part.number].etag for part in parts)
            done = [(part.number, etag) for part, etag in zip(parts, etags, strict=True)]
            result = await self._core.store.complete_upload(self.key, upload_id, done, options)
        except (DatastoreError, OSError):
            await self.abort()
            raise
        self._core.db.upload_ended(note)
        return result

    def _is_sent(self, part: Part) -> bool:
        sent = self._sent.get(part.number)
        if sent is None or part.copied or sent.byte_range != part.byte_range:
            return False
        return sent.etag.error is None and self._staged.streamed.contains(*part.byte_range)

    async def _wait(self) -> _Upload:
        """Until nothing is under way: a part that is sent again must not be overtaken by its former self.

        One that was never sent need not wait for that.
        """
        assert self._created is not None
        upload = await self._created
        for sent in list(self._sent.values()):
            with suppress(Exception):
                await sent.etag
        return upload

    async def abort(self) -> None:
        """Drop the upload. What the store does not let us drop stays in the journal for the next start."""
        self._dropped = True
        if self._created is None or not await self.begins():
            # Whether it exists the next start finds out: the journal has its key.
            return
        note, upload_id = await self._wait()
        await abort_upload(self._core, note, self.key, upload_id)
