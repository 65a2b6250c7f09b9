"""Sends staging files, by a PUT or a multipart upload, and finds out whose object exists if an answer was lost.

The caller holds the lock of the node, or of the OrphanedUpload, that owns the staging file, so nothing changes it.
Several parts are sent at a time, and already while a file is written (S-45): the parts that a sequential writer has
finished are sent from the staging file, so that its close sends only the rest. A part that is changed after it was sent
is sent again under its number before the upload is completed. The journal has every upload from before it begins until
it is completed or aborted, so that the uploads of a dead process are found and aborted (S-46).
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from datastore.errors import (
    AlreadyExists,
    DatastoreError,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unsupported,
)
from datastore.logs import fields

from ...data import multipart
from ...data.multipart import Part, plan_upload, scheduled, scheduled_parts
from ...data.staging import StagedFile
from ...loop import Semaphore, Task, all_of, now
from ...ops import FSError
from ...state.rows import UploadNote
from ...store.base import (
    ByteRange,
    ETag,
    FilePart,
    ObjectVersion,
    PartNumber,
    UploadId,
    WriteOptions,
    WriteResult,
    user_metadata,
)
from ...store.etags import etag_of, joined_etag
from ..tree.core import Core

log = logging.getLogger(__name__)
WIDTH = 8
"""How many parts a mount sends at a time: 64 MiB of memory while files are below 8 GiB, and enough for a fast line."""
REWRITES_MAX = 8
"""A file with more changes of sent parts than this is not written in sequence: its rest waits for the close."""
SMALL = 1 << 20
"""Up to this size, in bytes, a file is sent on the loop and kept in memory for readers: both cost little."""
CONFLICT = "another client changed this file since it was opened; what was written is kept on disk (datastore unsent)"


class Destination(NamedTuple):
    """Where and how a staging file is sent. elsewhere: not to the key of the object that the file was made from."""

    key: str
    options: WriteOptions
    elsewhere: bool = False


class Delivered(NamedTuple):
    """A new version of an object, and its metadata. body: its bytes, if it is one of up to SMALL bytes; else b''."""

    result: WriteResult
    metadata: Mapping[str, str]
    body: bytes = b""


class _Sent(NamedTuple):
    byte_range: ByteRange
    etag: Task[ETag]


@dataclass(eq=False, repr=False)
class Stream:
    """One multipart upload of a staging file, or of a version that is copied whole. copies: some parts are copied.

    _places: limits how many parts are sent at a time. The upload's creation and each part are tasks of their own; the
    other methods run with the file's lock held, and advance() does not wait.
    INVARIANT: a part counts as sent only while staged.streamed has its whole range: the range is added before its
    bytes are read, and every later change of them removes what it overlaps.
    """

    _core: Core
    _places: Semaphore
    _what: StagedFile | ObjectVersion
    key: str
    options: WriteOptions
    copies: bool = False
    copy_refused: bool = False
    """Whether the store refused to copy a part."""
    _sent: dict[PartNumber, _Sent] = field(default_factory=dict)
    _next: int = 1
    _created: Task[tuple[UploadNote, UploadId]] | None = None
    _dropped: bool = False

    @property
    def failed(self) -> bool:
        """Whether the upload could not be created; another one is needed then."""
        return self._created is not None and self._created.error is not None

    async def begins(self) -> bool:
        """Wait until a creation that is under way ends; return False if it failed: another upload is needed then."""
        if self._created is not None:
            with suppress(Exception):
                await self._created
        return not self.failed

    # -- while the file is written

    def advance(self) -> int:
        """Send the parts that the writer has finished; return the file size at which another part may be due."""
        staged = self._what
        assert isinstance(staged, StagedFile)
        while True:
            part = scheduled(self._next)
            due = part.byte_range.stop + multipart.PART_SIZE
            if staged.size < due or self.failed or not staged.dirty_ranges.contains(*part.byte_range):
                return due
            self._begin()
            self._send(part)
            self._next += 1

    def _begin(self) -> None:
        if self._created is None:
            self._created = self._core.loop.spawn(self._create())

    async def _create(self) -> tuple[UploadNote, UploadId]:
        """Create the upload, after the journal has a row for it."""
        db = self._core.db
        note = db.upload_begun(self.key, self._core.clock.time_ns())
        upload_id = await self._core.store.create_upload(self.key, self.options, copies=self.copies)
        db.upload_known(note, upload_id)
        return note, upload_id

    def _send(self, part: Part) -> None:
        self._sent[part.number] = _Sent(part.byte_range, self._core.loop.spawn(self._put(part)))

    async def _put(self, part: Part) -> ETag:
        assert self._created is not None
        _, upload_id = await self._created
        number, byte_range, copied = part
        what = self._what
        base = what.base if isinstance(what, StagedFile) else what
        async with self._places:
            if self._dropped:
                raise FSError(errno.ECANCELED)
            if copied and base is not None:
                copy = self._core.store.upload_part_copy
                try:
                    return await copy(self.key, upload_id, number, base.key, byte_range, base.etag)
                except (InvalidRequest, Unsupported):
                    self.copy_refused = True
                    raise
            assert isinstance(what, StagedFile)
            body = what.part_for_stream(*byte_range)
            return await self._core.loop.lane(lambda: now(self._put_body(upload_id, number, body)))

    async def _put_body(self, upload_id: UploadId, number: PartNumber, body: FilePart) -> ETag:
        """Send a part; runs in a lane (a thread of the loop's pool)."""
        with body:
            return await self._core.store.upload_part(self.key, upload_id, number, body)

    # -- at the close

    async def finish(
        self,
        parts: Sequence[Part],
        options: WriteOptions,
        fill: Callable[[ByteRange], Awaitable[None]] | None = None,
    ) -> WriteResult:
        """Send the parts that are not sent and complete the upload. Errors: DatastoreError; the upload is aborted then.

        options: the conditions of the write. fill: fetches the bytes of a range that the staging file lacks; nothing
        else changes that file during the call.
        """
        try:
            self._begin()
            fresh = {part.number for part in parts} - set(self._sent)
            for part in parts:
                if fill is not None and not part.copied:
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
        sent, staged = self._sent[part.number], self._what
        assert isinstance(staged, StagedFile)
        unchanged = sent.byte_range == part.byte_range and staged.streamed.contains(*part.byte_range)
        return unchanged and sent.etag.error is None

    async def _wait(self) -> tuple[UploadNote, UploadId]:
        """Wait until no part is under way, so that a part that is sent again is not overtaken by its older bytes.
        A part that was never sent need not wait for that.
        """
        assert self._created is not None
        upload = await self._created
        for sent in list(self._sent.values()):
            with suppress(Exception):
                await sent.etag
        return upload

    async def abort(self) -> None:
        """Abort the upload. If the store does not let us, it stays in the journal for the next start."""
        self._dropped = True
        if self._created is None or not await self.begins():
            # The next start finds out whether the upload exists: the journal has its key.
            return
        note, upload_id = await self._wait()
        try:
            await self._core.store.abort_upload(self.key, upload_id)
        except StoreError as error:
            log.warning("an unfinished upload stays behind", extra=fields(key=self.key, error=str(error)))
        else:
            self._core.db.upload_ended(note)


class Delivery:
    """Sends staging files."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._places = Semaphore(WIDTH)
        self._conditions = True
        """Whether the store takes If-Match and If-None-Match; assumed until it refuses them."""
        self._large = Semaphore(WIDTH)
        """Limits how many whole files above SMALL are in memory; SINGLE_MAX and the store's deadline limit each."""

    # -- bytes that the staging file lacks

    async def fill(self, staged: StagedFile, gaps: list[tuple[int, int]]) -> None:
        """Fetch ranges of the base into the staging file. Errors: FSError(ESTALE) when another client replaced it."""
        for start, stop in gaps:
            content = await self._fetch(staged, start, stop)
            if len(content) > SMALL:
                await self._core.loop.on_disk(staged.put, start, content)
            else:
                staged.put(start, content)
            staged.present.add(start, start + len(content))

    async def read(self, staged: StagedFile, offset: int, size: int) -> bytes:
        """Read a file, and fetch what it lacks: into the file, or for this read only if the disk is full (S-50).
        Errors: as fill()."""
        stop = min(offset + size, staged.size)
        try:
            await self.fill(staged, staged.missing(offset, stop))
            return staged.read(offset, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        body = bytearray(staged.read(offset, size))
        for start, end in staged.missing(offset, stop):
            first, last = max(start, offset), min(end, stop)
            body[first - offset : last - offset] = await self._fetch(staged, first, last)
        return bytes(body)

    async def _fetch(self, staged: StagedFile, start: int, stop: int) -> bytes:
        """Fetch a range of the base. Errors: FSError(ESTALE) when another client replaced it."""
        assert staged.base is not None
        try:
            return await self._core.reader.fetch(staged.base, start, stop - start)
        except (PreconditionFailed, NotFound) as error:
            if not await self._recognised(staged):
                raise FSError(errno.ESTALE, "another client replaced the object that was being changed") from error
            return await self._core.reader.fetch(staged.base, start, stop - start)

    # -- while the file is written

    def stream(self, staged: StagedFile, key: str, options: WriteOptions) -> None:
        """Send the parts that a sequential writer has finished (S-45)."""
        if staged.rewrites > REWRITES_MAX or staged.error:
            staged.stream_at = math.inf
            return
        if not isinstance(staged.stream, Stream):
            staged.stream = Stream(self._core, self._places, staged, key, options)
        staged.stream_at = staged.stream.advance()

    @staticmethod
    async def drop_stream(staged: StagedFile) -> None:
        """Abort the upload of the parts that were sent before the close."""
        stream, staged.stream = staged.stream, None
        if stream is not None:
            await stream.abort()

    # -- the upload of a file

    async def write(self, staged: StagedFile, to: Destination) -> Delivered | None:
        """Write the object. Errors: StoreError; FSError(ESTALE) when the base is gone, or another client was first.
        Return None when nothing was written to a new file and another client has taken the name since.
        """
        conditional = staged.expects is not None and not to.elsewhere and self._conditions
        try:
            if to.elsewhere:
                await self._check_source(staged)
            return await self._write(staged, to, conditional=conditional)
        except Unsupported as error:
            if not conditional or self._core.settings.refuse_conflicts:
                raise
            log.warning("the store supports no conditional writes: the last close wins", extra=fields(error=str(error)))
            self._conditions = False
            return await self._write(staged, to, conditional=False)
        except FSError as error:
            if await self._recognised(staged):
                return await self._write(staged, to, conditional=conditional)
            if not conditional:
                raise
            return await self._conflict(staged, to, error)
        finally:
            staged.attempt = to.options.metadata

    async def _check_source(self, staged: StagedFile) -> None:
        """Check that no other client has written the object from which a file was made: the rename will remove it.
        Errors: FSError(ESTALE)."""
        if staged.expects and staged.base is not None:
            info = await self._core.head(staged.base.key)
            if info is not None and info.etag != staged.expects:
                raise FSError(errno.ESTALE, CONFLICT)

    async def _conflict(self, staged: StagedFile, to: Destination, error: FSError) -> Delivered | None:
        """Find out which client was first when a write failed with ESTALE; return or raise what write() has to."""
        gives_way = not self._core.settings.refuse_conflicts
        info = await self._core.head(to.key)
        if (info.etag if info is not None else "") == staged.expects:
            raise error  # no other client was first: a later try can succeed
        if info is None:
            if gives_way:
                # Another client removed the object: a new one replaces nobody's bytes.
                staged.expects = ETag("")
                with suppress(FSError):
                    return await self._write(staged, to, conditional=True)
        elif gives_way and staged.expects == "" and not staged.size:
            return None
        elif staged.complete and info.size == staged.size and info.etag == await self._core.loop.on_disk(_etag, staged):
            return Delivered(WriteResult(info.etag, info.mtime_ns), info.metadata)
        elif staged.attempt is not None and user_metadata(info.metadata) == user_metadata(staged.attempt):
            # This is our own upload whose answer was lost; it lacks what was written since.
            staged.expects = ETag(info.etag)
            return await self._write(staged, to, conditional=True)
        staged.stuck = True
        raise FSError(errno.ESTALE, CONFLICT) from error

    async def _write(self, staged: StagedFile, to: Destination, *, conditional: bool) -> Delivered:
        options = to.options
        if conditional:
            options = replace(options, if_match=staged.expects or None, if_none_match=not staged.expects)
        parts = plan_upload(staged.size, staged.base_size, staged.dirty_ranges)
        try:
            if parts:
                return await self._write_parts(staged, to.key, options, parts)
            if staged.stream is not None:
                await self.drop_stream(staged)
            if gaps := staged.missing(0, staged.size):
                await self.fill(staged, gaps)
            if staged.size <= SMALL:
                return await self._put(staged, to.key, options)
            async with self._large:
                return await self._core.loop.lane(lambda: now(self._put(staged, to.key, options)))
        except (PreconditionFailed, AlreadyExists) as error:
            raise FSError(errno.ESTALE, "another client replaced the object that was being changed") from error

    async def _put(self, staged: StagedFile, key: str, options: WriteOptions) -> Delivered:
        """Send the file by one PUT; runs in a lane, unless the file is SMALL."""
        body = staged.read(0, staged.size)
        result = await self._core.store.put(key, body, options)
        return Delivered(result, options.metadata, body if len(body) <= SMALL else b"")

    async def _write_parts(
        self, staged: StagedFile, key: str, options: WriteOptions, planned: tuple[Part, ...]
    ) -> Delivered:
        stream = staged.stream
        parts: Sequence[Part] = tuple(scheduled_parts(staged.size))
        if not isinstance(stream, Stream) or stream.key != key or not await stream.begins():
            await self.drop_stream(staged)
            copies = any(part.copied for part in planned)
            stream, parts = Stream(self._core, self._places, staged, key, options, copies=copies), planned
        staged.stream = None
        try:
            done = await stream.finish(parts, options, lambda wanted: self.fill(staged, staged.missing(*wanted)))
        except StoreError as error:
            if not stream.copy_refused:
                raise
            log.warning("the store copies no part, so the whole file is sent", extra=fields(key=key, error=str(error)))
            return await self._write_parts(staged, key, options, plan_upload(staged.size, 0, staged.dirty_ranges))
        return Delivered(done, stream.options.metadata)

    # -- whose object is it

    async def _recognised(self, staged: StagedFile) -> bool:
        """Return whether an upload of ours whose answer was lost replaced the base; then it is the base from now on.

        Both have the same bytes where the staging file lacks them. Its metadata shows that the upload is ours: their
        times tell it from another client's file of the same content.
        """
        base = staged.base
        if base is None or staged.attempt is None:
            return False
        info = await self._core.head(base.key)
        if info is None or user_metadata(info.metadata) != user_metadata(staged.attempt):
            return False
        staged.moved(ObjectVersion(base.key, ETag(info.etag), info.size))
        return True


def _etag(staged: StagedFile) -> str:
    """Compute the ETag that an upload of the file would have; runs in a lane."""
    if not plan_upload(staged.size, 0, staged.dirty_ranges):
        return etag_of(staged.read(0, staged.size))
    return joined_etag(
        etag_of(staged.read(start, stop - start)) for _, (start, stop), _ in scheduled_parts(staged.size)
    )
