"""The staging file: a sparse local copy of a file that is being changed.

It holds what was written, and those ranges of the base (the object version that is changed) that a read, a partly
overwritten block or the upload needed; only these are fetched. It holds whole blocks of 4 KiB, so that after a crash
SEEK_DATA tells what is there.

INVARIANT: every byte of [0, size) is in the file (present), comes from the base ([0, base_size) and not present), or
is zero.
INVARIANT: dirty_ranges is within present and [0, size).
The node's lock guards a staging file, except for read_present(). Threads: the event loop's; a pool thread ("lane") may
call sync(), read() and put(), which change no attribute that the loop reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..store.base import ETag, FilePart, ObjectVersion
from .blockfile import write_fully
from .extents import Extents

BLOCK = 4096


class Stream(Protocol):
    """A multipart upload of a staging file, as in vfs/upload/delivery.py."""

    async def abort(self) -> None:
        """Drop the upload."""
        ...


class StagedFile:
    """One staging file. base: None when nothing comes from the store."""

    def __init__(self, path: Path | str, base: ObjectVersion | None, since_ns: int) -> None:
        self._path = os.fspath(path)
        self.name = self._path.rpartition("/")[2]
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._named = False
        """Whether sync() has brought the file's directory entry to the disk."""
        self.base = base
        self.base_size = base.size if base else 0
        self.size = self.base_size
        self.present = Extents()
        self.dirty_ranges = Extents()
        self.streamed = Extents()
        """The ranges that a multipart upload under way was given and that were not changed since."""
        self.rewrites = 0
        """How often a range in `streamed` was changed."""
        self.stream: Stream | None = None
        self.stream_at: float = math.inf
        """The file size at which a part may be ready to send while the file is still written."""
        self.expects: ETag | None = None
        """The version that the upload must replace, '' for none; None: it replaces whatever is there."""
        self.stuck = False
        """Whether another upload would be useless, because the base is gone or was changed; a person has to decide."""
        self.due = 0.0
        """When the write-back sends the file, in monotonic seconds; 0: the file is sent when it is closed."""
        self.times_set = False
        """Whether a caller chose the file's times; else they are those of the last write."""
        self.dirty = False
        """Whether the store lacks this content, or attributes that the next upload takes along."""
        self.appended = True
        """Whether each change since this object was made was a write at the end of the file or beyond it."""
        self.grows_since = self.written_at = 0.0
        """The times of the first and the last write that the store lacks, in monotonic seconds of the mount's clock."""
        self.published = False
        """Whether the content was uploaded before the close; another client may have written the object since."""
        self.journaled = False
        """Whether the journal has a row for the file."""
        self.since_ns = since_ns
        self.error = ""
        """Why the last upload failed, in one line."""
        self.attempt: Mapping[str, str] | None = None
        """The metadata of an upload that may have taken effect although no answer came."""
        if self.size:
            # Never to size 0: ext4 would then write the bytes to the disk when the file is closed (auto_da_alloc).
            os.ftruncate(self.fd, self.size)

    @classmethod
    def recovered(cls, path: Path, base: ObjectVersion | None, base_size: int, since_ns: int) -> StagedFile:
        """Open a staging file that an earlier process left; all that it holds counts as changed."""
        staged = cls(path, None, since_ns)
        staged.base, staged.size = base, os.fstat(staged.fd).st_size
        staged.base_size = min(base_size, staged.size)
        at = 0
        while at < staged.size:  # the parts of a sparse file that hold data
            try:
                start = os.lseek(staged.fd, at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(staged.fd, start, os.SEEK_HOLE)
            staged.present.add(start, at)
            staged.dirty_ranges.add(start, at)
        staged.dirty = True
        return staged

    @property
    def path(self) -> Path:
        return Path(self._path)

    def read_present(self, offset: int, size: int) -> bytes | None:
        """Return bytes as read() does, None when some must be fetched. Needs no lock, also during an upload."""
        if self.fd < 0 or self.missing(offset, min(offset + size, self.size)):
            return None
        return self.read(offset, size)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of the base that must be fetched, as whole blocks, before [start, stop) can be read."""
        if start >= min(stop, self.base_size):
            return []
        return self.present.missing(start - start % BLOCK, min(-(-stop // BLOCK) * BLOCK, self.base_size))

    def missing_for_write(self, offset: int, length: int) -> list[tuple[int, int]]:
        """Return the ranges of the base that must be fetched before a write, so that each present block is whole."""
        stop = offset + length
        gaps = []
        for block in {offset // BLOCK, (stop - 1) // BLOCK}:
            start = block * BLOCK
            if start < offset or start + BLOCK > stop:
                gaps += self.missing(start, start + BLOCK)
        return gaps

    def put(self, offset: int, content: bytes) -> None:
        """Write bytes of the base; ranges that were written since their fetch began stay as they are. The caller then
        updates `present`, in the loop's thread."""
        for start, stop in self.present.missing(offset, offset + len(content)):
            write_fully(self.fd, memoryview(content)[start - offset : stop - offset], start)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes, which must all be present or zero; none beyond the end."""
        return os.pread(self.fd, max(0, min(size, self.size - offset)), offset)

    def part_for_stream(self, start: int, stop: int) -> FilePart:
        """Return a part to send; later writes to the file take their ranges out of `streamed`. Errors: OSError."""
        self.streamed.add(start, stop)
        return FilePart(os.dup(self.fd), start, stop)

    def sync(self) -> None:
        """Bring the file's content and name to the disk itself, so that they outlive a power cut. Errors: OSError."""
        os.fdatasync(self.fd)
        if not self._named:
            directory = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self._named = True

    def write(self, offset: int, content: bytes | memoryview) -> int:
        """Write bytes; missing_for_write() must be empty. Errors: OSError (ENOSPC, EIO) of the local disk."""
        stop = offset + len(content)
        write_fully(self.fd, memoryview(content), offset)
        self.appended &= offset >= self.size
        self.present.add(offset, stop)
        self.size = max(self.size, stop)
        if self.streamed.overlaps(offset, stop):
            self.streamed.remove(offset, stop)
            self.rewrites += 1
        self.dirty_ranges.add(offset, stop)
        self.dirty = True
        return len(content)

    def truncate(self, size: int) -> None:
        """Set the size; new bytes are zero."""
        if size or self.size:
            os.ftruncate(self.fd, size)
        self.base_size = min(self.base_size, size)
        self.present.truncate(size)
        self.streamed.truncate(size)
        self.size = size
        self.appended = False
        self.dirty_ranges.truncate(size)
        self.dirty = True

    def uploaded(self, version: ObjectVersion) -> None:
        """Note that the store has exactly this content now: `version` is the base of all that is not present."""
        self.moved(version)
        self.base_size = self.size
        self.streamed, self.dirty_ranges = Extents(), Extents()
        self.dirty = False
        self.due, self.times_set, self.stream, self.stream_at = 0.0, False, None, math.inf
        self.error, self.attempt = "", None

    def moved(self, version: ObjectVersion) -> None:
        """Note that the base has another key or etag now, with the same bytes."""
        self.base = version
        if self.expects is not None:
            self.expects = version.etag

    def copied(self, original: ETag, key: str, etag: ETag) -> None:
        """Note that a version which may be the base, or the one to replace, is the object of this key and etag now."""
        if self.expects == original:
            self.expects = etag
        if self.base is not None and self.base.etag == original:
            self.moved(ObjectVersion(key, etag, self.base.size))

    @property
    def complete(self) -> bool:
        """Whether the file holds every byte."""
        return not self.missing(0, self.size)

    def close(self, *, remove: bool) -> None:
        """Close the file. remove: unlink it too. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if remove:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
