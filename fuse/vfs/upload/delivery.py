"""How a staging file becomes an object: one PUT, or parts, and whose object it is when the answer was lost.

Callers hold the lock of whoever owns the staging file, so nothing changes it meanwhile.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from datastore.errors import AlreadyExists, NotFound, PreconditionFailed, Unsupported
from datastore.logs import fields

from ...data.multipart import Part, plan_upload, scheduled_parts
from ...data.staging import StagedFile
from ...loop import Semaphore
from ...ops import FSError
from ...store.base import ETag, ObjectInfo, ObjectVersion, WriteOptions, WriteResult, user_metadata
from ...store.etags import etag_of, joined_etag
from ..tree.core import Core
from .streaming import REWRITES_MAX, WIDTH, Stream

log = logging.getLogger(__name__)
SMALL = 1 << 20
"""So many bytes of each file that is sent do not matter, nor does the time that the loop takes to send them."""
CONFLICT = "another client changed this file since it was opened; what was written is kept on disk (datastore unsent)"


class Destination(NamedTuple):
    """Where a staging file is to be written, and as what. elsewhere: not over the object that it was made from."""

    key: str
    options: WriteOptions
    elsewhere: bool = False


class Delivered(NamedTuple):
    """A new version and the metadata that it has. body: all its bytes, where they were at hand."""

    result: WriteResult
    metadata: Mapping[str, str]
    body: bytes = b""


class Delivery:
    """Sends staging files."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._places = Semaphore(WIDTH)
        self._conditions = True
        """Whether the store takes If-Match and If-None-Match, as far as is known."""
        self._large = Semaphore(WIDTH)
        """Files in memory, whole, at once; each is bounded by SINGLE_MAX and the store's deadline."""

    # -- the rest of the base

    async def fill(self, staged: StagedFile, gaps: list[tuple[int, int]]) -> None:
        """Fetch ranges of the base into the staging file. FSError(ESTALE) when another client replaced the base."""
        for start, stop in gaps:
            try:
                await self._fetch(staged, start, stop)
            except (PreconditionFailed, NotFound) as error:
                if not await self._recognised(staged):
                    raise FSError(errno.ESTALE, "another client replaced the object that was being changed") from error
                await self._fetch(staged, start, stop)

    async def _fetch(self, staged: StagedFile, start: int, stop: int) -> None:
        assert staged.base is not None
        content = await self._core.reader.fetch(staged.base, start, stop - start)
        if len(content) > SMALL:
            await self._core.on_disk(staged.put, start, content)
            staged.present.add(start, start + len(content))
        else:
            staged.fill(start, content)

    # -- while it is written

    def stream(self, staged: StagedFile, key: str, options: WriteOptions) -> None:
        """Send what a sequential writer has left behind (S-45)."""
        if staged.base_size or staged.rewrites > REWRITES_MAX or staged.error:
            staged.stream_at = float("inf")
            return
        if not isinstance(staged.stream, Stream):
            staged.stream = Stream(self._core, self._places, staged, key, options)
        staged.stream_at = staged.stream.advance()

    @staticmethod
    async def drop_stream(staged: StagedFile) -> None:
        """Nobody wants what was sent ahead."""
        stream, staged.stream = staged.stream, None
        if stream is not None:
            await stream.abort()

    # -- the whole

    async def write(self, staged: StagedFile, to: Destination) -> Delivered | None:
        """Make the object. StoreError; FSError(ESTALE) when the base is gone, or another client was first.

        None: nothing was written to a new file, and by now the name is another client's.
        """
        conditional = staged.expects is not None and not to.elsewhere and self._conditions
        try:
            return await self._write(staged, to, conditional=conditional)
        except Unsupported as error:
            if not conditional or self._core.settings.refuse_conflicts:
                raise
            log.warning("the store knows no conditions: the last close wins", extra=fields(error=str(error)))
            self._conditions = False
            return await self._write(staged, to, conditional=False)
        except FSError as error:
            if error.errno != errno.ESTALE:
                raise
            if await self._recognised(staged):
                return await self._write(staged, to, conditional=conditional)
            if not conditional:
                raise
            return await self._conflict(staged, to, error)
        finally:
            staged.attempt = to.options.metadata

    async def _conflict(self, staged: StagedFile, to: Destination, error: FSError) -> Delivered | None:
        """As write, which was refused with ESTALE: who was first?"""
        gives_way = not self._core.settings.refuse_conflicts
        try:
            info: ObjectInfo | None = await self._core.store.head(to.key)
        except NotFound:
            info = None
        if (info.etag if info is not None else "") == staged.expects:
            raise error  # nobody: trying again helps
        if info is None:
            if gives_way:
                # Removed since: nobody's bytes are replaced.
                staged.expects = ETag("")
                with suppress(FSError):
                    return await self._write(staged, to, conditional=True)
        elif gives_way and staged.expects == "" and not staged.size:
            return None
        elif staged.complete and info.size == staged.size and info.etag == await self._core.on_disk(_etag, staged):
            return Delivered(WriteResult(info.etag, info.mtime_ns), info.metadata)
        elif staged.attempt is not None and user_metadata(info.metadata) == user_metadata(staged.attempt):
            # An upload of ours whose answer was lost; what was written since is not in it.
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
                return await self._core.in_lane(self._put, staged, to.key, options)
        except (PreconditionFailed, AlreadyExists) as error:
            if not conditional and not parts:
                raise
            raise FSError(errno.ESTALE, "another client replaced the object that was being changed") from error

    async def _put(self, staged: StagedFile, key: str, options: WriteOptions) -> Delivered:
        """In a lane, but for SMALL files."""
        body = staged.whole()
        result = await self._core.store.put(key, body, options)
        return Delivered(result, options.metadata, body if len(body) <= SMALL else b"")

    async def _write_parts(
        self, staged: StagedFile, key: str, options: WriteOptions, planned: tuple[Part, ...]
    ) -> Delivered:
        stream = staged.stream
        parts: Iterable[Part] = scheduled_parts(staged.size)
        if not isinstance(stream, Stream) or stream.key != key or staged.base_size or not await stream.begins():
            await self.drop_stream(staged)
            copies = any(part.copied for part in planned)
            stream, parts = Stream(self._core, self._places, staged, key, options, copies=copies), planned
        staged.stream = None
        done = await stream.finish(list(parts), options, lambda wanted: self.fill(staged, staged.missing(*wanted)))
        return Delivered(done, stream.options.metadata)

    # -- whose object is it

    async def _recognised(self, staged: StagedFile) -> bool:
        """Whether the base was replaced by an upload of ours whose answer was lost; then that is the base from now on.

        What is not in the staging file is the same in both; the times in the metadata set equal files apart.
        """
        base = staged.base
        if base is None or staged.attempt is None:
            return False
        try:
            info = await self._core.store.head(base.key)
        except NotFound:
            return False
        if user_metadata(info.metadata) != user_metadata(staged.attempt):
            return False
        staged.moved(ObjectVersion(base.key, ETag(info.etag), info.size))
        return True


def _etag(staged: StagedFile) -> str:
    """In a lane."""
    if not plan_upload(staged.size, 0, staged.dirty_ranges):
        return etag_of(staged.whole())
    return joined_etag(
        etag_of(staged.read(start, stop - start)) for _, (start, stop), _ in scheduled_parts(staged.size)
    )
