"""A file that is being changed: a sparse local copy which holds what was written and, of the rest, what was needed.

The base is the version that was changed; ranges of it are fetched only where a read, a partly overwritten block or the
upload needs them. What the file holds is whole blocks of 4 KiB, so that after a crash SEEK_DATA tells what is there.

INVARIANT: every byte of [0, size) is in the file (present), comes from the base ([0, base_size) and not present), or
is zero.
INVARIANT: dirty_ranges is within present and [0, size).
The node's lock covers it, but for read_present(). Threads: the loop; sync(), read(), whole() and put() also in a lane,
which change nothing that the loop looks at.
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
    """A multipart upload of a staging file; vfs/upload/delivery.py."""

    async def abort(self) -> None:
        """Drop it."""
        ...


class StagedFile:
    """One staging file; `base` None: nothing comes from the store."""

    def __init__(self, path: Path | str, base: ObjectVersion | None, since_ns: int) -> None:
        self._path = os.fspath(path)
        self.name = self._path.rpartition("/")[2]
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._named = False
        """Its name in the directory is on the disk."""
        self.base = base
        self.base_size = base.size if base else 0
        self.size = self.base_size
        self.present = Extents()
        self.dirty_ranges = Extents()
        self.streamed = Extents()
        """What a multipart upload under way has been given, and was not changed since."""
        self.rewrites = 0
        """How often something of that was changed."""
        self.stream: Stream | None = None
        self.stream_at: float = math.inf
        """The size from which on there may be a part to send while the file is still written."""
        self.expects: ETag | None = None
        """The version that the upload must replace, '' for none; None: whatever is there."""
        self.stuck = False
        """Sending it again is no use: what it was made from is gone or was changed. A person decides."""
        self.due = 0.0
        """Monotonic seconds at which it is to be sent although nobody waits for that; 0: when it is closed."""
        self.times_set = False
        """Its times are somebody's choice, not that of the last write."""
        self.dirty = False
        """The store does not have this content, or not these attributes, which the next upload takes along."""
        self.appended = True
        """What changed since the store had it was written at the end."""
        self.grows_since = self.written_at = 0.0
        """Monotonic seconds of the first and the last write that the store does not have; the file system's clock."""
        self.published = False
        """The store has it from an upload before the close: another client may have closed its own since."""
        self.journaled = False
        """The journal has a row for it."""
        self.since_ns = since_ns
        self.error = ""
        """Why the last upload failed, one line."""
        self.attempt: Mapping[str, str] | None = None
        """Metadata of an upload that may have taken effect although no answer came."""
        if self.size:
            # Never to 0: ext4 would then write the bytes to the disk when the file is closed (auto_da_alloc).
            os.ftruncate(self.fd, self.size)

    @classmethod
    def recovered(cls, path: Path, base: ObjectVersion | None, base_size: int, since_ns: int) -> StagedFile:
        """Take up a file that an earlier process left: all that it holds counts as changed."""
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
        """Where it is."""
        return Path(self._path)

    def read_present(self, offset: int, size: int) -> bytes | None:
        """Bytes as read() gives them; None when some must be fetched. Needs no lock: it may be uploading."""
        if self.fd < 0 or self.missing(offset, min(offset + size, self.size)):
            return None
        return self.read(offset, size)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Ranges that must be fetched from the base before [start, stop) can be read: what its blocks lack."""
        if start >= min(stop, self.base_size):
            return []
        return self.present.missing(start - start % BLOCK, min(-(-stop // BLOCK) * BLOCK, self.base_size))

    def missing_for_write(self, offset: int, length: int) -> list[tuple[int, int]]:
        """What must be fetched before a write, so that present blocks are whole."""
        stop = offset + length
        gaps = []
        for block in {offset // BLOCK, (stop - 1) // BLOCK}:
            start = block * BLOCK
            if start < offset or start + BLOCK > stop:
                gaps += self.missing(start, start + BLOCK)
        return gaps

    def put(self, offset: int, content: bytes) -> None:
        """Write bytes of the base where nothing is present; `present` is the caller's to tell, on the loop."""
        for start, stop in self.present.missing(offset, offset + len(content)):
            write_fully(self.fd, memoryview(content)[start - offset : stop - offset], start)

    def fill(self, offset: int, content: bytes) -> None:
        """Put bytes of the base in; parts that were written meanwhile stay."""
        self.put(offset, content)
        self.present.add(offset, offset + len(content))

    def read(self, offset: int, size: int) -> bytes:
        """Bytes that are present or zero; nothing beyond the end."""
        return os.pread(self.fd, max(0, min(size, self.size - offset)), offset)

    def part_for_stream(self, start: int, stop: int) -> FilePart:
        """A part that is sent while the file may be written: what is changed from now on is noticed. OSError."""
        self.streamed.add(start, stop)
        return FilePart(os.dup(self.fd), start, stop)

    def whole(self) -> bytes:
        """The content; every byte must be present or zero."""
        return self.read(0, self.size)

    def sync(self) -> None:
        """Bring what was written, and the file's name, to the disk itself: it outlives a power cut. OSError."""
        os.fdatasync(self.fd)
        if not self._named:
            directory = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self._named = True

    def write(self, offset: int, content: bytes | memoryview) -> int:
        """Write; missing_for_write() must be empty. OSError (ENOSPC, EIO) of the local disk."""
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
        """Cut or extend by zeros."""
        if size or self.size:
            os.ftruncate(self.fd, size)
        self.base_size = min(self.base_size, size)
        self.present.truncate(size)
        self.streamed.truncate(size)
        self.size = size
        self.appended = False
        self.dirty_ranges.truncate(size)
        self.dirty = True

    def zero(self, offset: int, length: int) -> None:
        """Make a range zero, a few MiB at most (hole punching); missing_for_write() must be empty. The size stays."""
        length = min(length, self.size - offset)
        if length > 0:
            self.write(offset, bytes(length))

    def uploaded(self, version: ObjectVersion) -> None:
        """The store has exactly this content now, as `version`; what is not present can be had from there."""
        self.moved(version)
        self.base_size = self.size
        self.streamed, self.dirty_ranges = Extents(), Extents()
        self.dirty = False
        self.due, self.times_set, self.stream, self.stream_at = 0.0, False, None, math.inf
        self.error, self.attempt = "", None

    def moved(self, version: ObjectVersion) -> None:
        """The base is the same bytes under another key or etag now."""
        self.base = version
        if self.expects is not None:
            self.expects = version.etag

    @property
    def complete(self) -> bool:
        """Whether the file holds every byte."""
        return not self.missing(0, self.size)

    def close(self, *, remove: bool) -> None:
        """Close, and remove the file; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if remove:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
