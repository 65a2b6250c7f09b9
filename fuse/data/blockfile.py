"""One object version in the disk cache: a sparse data file and a sidecar that says which blocks of it are right.

The sidecar has a head (magic, block size, object size, identity, checksum), a seal, and an 8-byte record for each
block: zero while the block is absent, else its CRC-32 and a tag. A block's bytes are written before its record, so a
record never claims more than was written. A block that a power failure or an edit by hand has damaged fails the CRC
when this process first reads it. The seal spares that check: it says that, in this boot of the machine, the whole data
file was right when it had this inode, mtime and ctime.
Does I/O on two descriptors, raises OSError and CacheCorrupt, and leaves eviction to its callers. Safe for threads and
processes: all writers of a block write the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from datastore.errors import CacheCorrupt

from ..store.base import Body
from .openfiles import OpenFile

BLOCK_BYTES = 128 << 10
"""The unit that is fetched, recorded and checked, in bytes: the kernel's usual random read; its CRC-32 takes 2.5 us."""

_MAGIC = b"DSBLOCK1"
_HEAD = struct.Struct("<8sIIQI")
"""Magic, bytes of a block, of the identity and of the object, then the CRC-32 of all these and the identity."""
_SEAL = struct.Struct("<16sQqqI")
"""Boot id, then inode, mtime and ctime (ns) of the data file, then the CRC-32 of all these."""
_SEAL_AT = 32
_IDENTITY_AT = 80
_RECORD = struct.Struct("<II")
_TAG = 0x6B636F62
_HELD = b"\x01"
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_Stamp = tuple[int, int, int]
"""A data file's inode, mtime and ctime (ns): any write to the file, and any rename or link of it, changes this."""


class Place(NamedTuple):
    """Where a version's two files are, and what the sidecar must say. stem: the files' path without suffix.
    label: the version's identity. size: the object's, in bytes. boot_id: the present boot's; b"" for no seals."""

    stem: str
    label: bytes
    size: int
    boot_id: bytes

    @property
    def data_path(self) -> str:
        """The path of the file with the object's bytes."""
        return f"{self.stem}.data"

    @property
    def sidecar_path(self) -> str:
        """The path of the file that says which blocks are right."""
        return f"{self.stem}.blocks"

    @property
    def records_at(self) -> int:
        """The offset of the records in the sidecar, a multiple of 8, so that no record straddles a sector."""
        return _IDENTITY_AT + -(-len(self.label) // 8) * 8

    @property
    def sidecar_bytes(self) -> int:
        return self.records_at + -(-self.size // BLOCK_BYTES) * _RECORD.size

    def head(self) -> bytes:
        """Return the sidecar's bytes up to its records, without a seal."""
        fixed = _HEAD.pack(_MAGIC, BLOCK_BYTES, len(self.label), self.size, 0)
        fixed = _HEAD.pack(_MAGIC, BLOCK_BYTES, len(self.label), self.size, crc32(fixed + self.label))
        return (fixed.ljust(_IDENTITY_AT, b"\0") + self.label).ljust(self.records_at, b"\0")

    def seal(self, stamp: _Stamp) -> bytes:
        """Return the seal for a data file that is right while it has this stamp; b"" without a boot id."""
        return _SEAL.pack(self.boot_id, *stamp, crc32(_SEAL.pack(self.boot_id, *stamp, 0))) if self.boot_id else b""


class BlockFile(OpenFile):
    """An open version; `fd` is the sidecar's descriptor.

    INVARIANT: _right[i] is 1 only after this process wrote or checked block i, or took over its file's seal.
    INVARIANT: _stamp is set when every block is right, and only then.
    """

    __slots__ = ("_data_fd", "_place", "_right", "_stamp")

    def __init__(self, place: Place) -> None:
        """Open existing files. Errors: FileNotFoundError when there are none, CacheCorrupt when they don't agree."""
        self._data_fd = self.fd = -1
        super().__init__(os.open(place.sidecar_path, _FLAGS))
        self._place = place
        self._right = bytearray(-(-place.size // BLOCK_BYTES))
        self._stamp: _Stamp | None = None
        try:
            self._data_fd = os.open(place.data_path, _FLAGS)
        except FileNotFoundError as error:
            raise CacheCorrupt(f"cache file {place.data_path} is missing; it will be fetched again") from error
        head, expected = os.pread(self.fd, place.records_at, 0), place.head()
        if head[:_SEAL_AT] != expected[:_SEAL_AT] or head[_IDENTITY_AT:] != expected[_IDENTITY_AT:]:
            raise CacheCorrupt(f"the sidecar of cache file {place.data_path} is damaged; it will be fetched again")
        facts, sidecar = os.fstat(self._data_fd), os.fstat(self.fd)
        if (facts.st_size, sidecar.st_size) != (place.size, place.sidecar_bytes):
            raise CacheCorrupt(f"cache file {place.data_path} has the wrong size; it will be fetched again")
        # If the files were evicted and recreated between the two opens, they don't belong together; see blockcache.py.
        if sidecar.st_nlink == 0:
            raise FileNotFoundError(f"cache file {place.data_path} was evicted meanwhile")
        if place.boot_id and head[_SEAL_AT : _SEAL_AT + _SEAL.size] == place.seal(_stamp_of(facts)):
            self._stamp = _stamp_of(facts)
            self._right[:] = _HELD * len(self._right)

    def __del__(self) -> None:
        super().__del__()
        if self._data_fd >= 0:
            os.close(self._data_fd)

    @property
    def whole(self) -> bool:
        """Whether this process knows that every block is right."""
        return self._stamp is not None

    @property
    def unlinked(self) -> bool:
        """Whether either of the two files was evicted; an evictor may have unlinked only one of them yet."""
        return super().unlinked or os.fstat(self._data_fd).st_nlink == 0

    def read(self, start: int, stop: int) -> bytes | None:
        """Return the bytes [start, stop) of the object, None unless all are held. Errors: CacheCorrupt, OSError."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if self._right.find(0, first, last) >= 0:
            block = self._admit(first, last)
            if block is None:
                return None
            if block and last - first == 1:
                at = start - first * BLOCK_BYTES
                return block[at : at + stop - start]
        body = os.pread(self._data_fd, stop - start, start)
        if len(body) != stop - start:
            raise CacheCorrupt("a cache file is shorter than its object")
        # This check follows the read, because a write changes the mtime before the bytes.
        if self._stamp is not None and (facts := os.fstat(self._data_fd)).st_mtime_ns != self._stamp[1]:
            if facts.st_nlink == 0:
                raise CacheCorrupt("a cache file was passed through to the kernel and has been written to")
            self._distrust()
            return self.read(start, stop)
        return body

    def holds(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is recorded as held; its checksums are not checked."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        return self._right.find(0, first, last) < 0 or 0 not in memoryview(self._records(first, last)).cast("Q")

    def verify(self) -> bool:
        """Check every block, if need be by reading all; return whether all are held. Errors: CacheCorrupt, OSError."""
        return self.whole or all(right or self._admit(i, i + 1) is not None for i, right in enumerate(self._right))

    def fresh_bytes(self, start: int, stop: int) -> int:
        """How many more bytes of disk a write of [start, stop) would take."""
        first, last = whole_blocks(start, stop, self._place.size)
        fresh = self._right.count(0, first, max(first, last)) * BLOCK_BYTES
        if first < last == len(self._right) and not self._right[-1]:
            fresh -= last * BLOCK_BYTES - page_rounded(self._place.size)
        return fresh

    def write(self, start: int, body: Body) -> None:
        """Write the blocks that lie wholly in `body`, which begins at byte `start` of the object. Errors: OSError."""
        first, last = whole_blocks(start, start + len(body), self._place.size)
        if first >= last or self._right.find(0, first, last) < 0:
            return
        whole = memoryview(body)[first * BLOCK_BYTES - start : min(last * BLOCK_BYTES, self._place.size) - start]
        write_fully(self._data_fd, whole, first * BLOCK_BYTES)
        records_at = self._place.records_at + first * _RECORD.size
        write_fully(self.fd, memoryview(_records_of(whole)), records_at)
        self._right[first:last] = _HELD * (last - first)
        if self._right.find(0) < 0:
            self.seal()

    def seal(self) -> None:
        """Record on disk that the whole file is right as it is now. Errors: OSError."""
        self._stamp = _stamp_of(os.fstat(self._data_fd))
        write_fully(self.fd, memoryview(self._place.seal(self._stamp)), _SEAL_AT)

    def vouch(self) -> None:
        """Take every block as right: the caller has just computed the records from the file. Errors: OSError."""
        self._right[:] = _HELD * len(self._right)
        self.seal()

    def reopen(self) -> int | None:
        """Return a new descriptor to read and write the data, which the caller closes; None when the data file was
        changed or replaced since every block was right. Errors: OSError."""
        fd = os.open(self._place.data_path, _FLAGS)
        if _stamp_of(os.fstat(fd)) == self._stamp:
            return fd
        os.close(fd)
        self._distrust()
        return None

    def _distrust(self) -> None:
        """Take every block as unchecked, because another program wrote to the data file."""
        self._stamp = None
        self._right[:] = bytes(len(self._right))

    def _records(self, first: int, last: int) -> bytes:
        size = (last - first) * _RECORD.size
        records = os.pread(self.fd, size, self._place.records_at + first * _RECORD.size)
        if len(records) != size:
            raise CacheCorrupt("a cache sidecar is cut short")
        return records

    def _admit(self, first: int, last: int) -> bytes | None:
        """Check those of the blocks [first, last) that are not known to be right. Return the bytes of the last one that
        was checked, b"" for none; None when a block is absent. Errors: CacheCorrupt, OSError."""
        block = b""
        for index, (crc, tag) in enumerate(_RECORD.iter_unpack(self._records(first, last)), first):
            if self._right[index]:
                continue
            if crc == 0 and tag == 0:
                return None
            start = index * BLOCK_BYTES
            size = min(BLOCK_BYTES, self._place.size - start)
            block = os.pread(self._data_fd, size, start)
            if tag != crc ^ _TAG or len(block) != size or crc32(block) != crc:
                raise CacheCorrupt("a block of a cache file does not match its checksum; it will be fetched again")
            self._right[index] = 1
        if self._stamp is None and self._right.find(0) < 0:
            self.seal()
        return block


def create_files(place: Place, records: bytes = b"", source: Path | None = None) -> None:
    """Make a version's files in place of existing ones; the caller excludes other creators. Errors: OSError.
    source: a file with the whole object, which becomes the data file; records: its records. None: no block is held."""
    draft = f"{place.stem}.draft"
    _make(draft, place.sidecar_bytes, place.head() + records)
    for path in (place.sidecar_path, place.data_path):  # unlinked, not overwritten: another process may be reading them
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if source is None:
        _make(place.data_path, place.size)
    else:
        source.replace(place.data_path)
    os.replace(draft, place.sidecar_path)


def file_records(path: Path) -> bytes:
    """Return the records for a complete data file, which is read in steps. Errors: OSError."""
    with open(path, "rb") as file:
        return b"".join(_records_of(memoryview(part)) for part in iter(lambda: file.read(8 * BLOCK_BYTES), b""))


def page_rounded(size_bytes: int) -> int:
    """How many bytes a file of this size takes on disk."""
    return -(-size_bytes // 4096) * 4096


def write_fully(fd: int, body: memoryview, offset: int) -> None:
    """Write all of `body` by pwrite(2). Errors: OSError."""
    while body:
        written = os.pwrite(fd, body, offset)
        body, offset = body[written:], offset + written


def whole_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the blocks [first, last) that lie wholly in [start, stop), the object's short last block among them."""
    last = -(-size // BLOCK_BYTES) if stop >= size else stop // BLOCK_BYTES
    return -(-start // BLOCK_BYTES), last


def _make(path: str, size: int, content: bytes = b"") -> None:
    """Make a sparse file of this size that begins with `content`. Errors: OSError."""
    fd = os.open(path, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_fully(fd, memoryview(content), 0)
        os.ftruncate(fd, size)  # by descriptor, because a confined server may not truncate by path
    finally:
        os.close(fd)


def _stamp_of(facts: os.stat_result) -> _Stamp:
    return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns


def _records_of(body: memoryview) -> bytes:
    """Return the records of the consecutive blocks in `body`."""
    starts = range(0, len(body), BLOCK_BYTES)
    crcs = [crc32(body[start : start + BLOCK_BYTES]) for start in starts]
    return b"".join(_RECORD.pack(crc, crc ^ _TAG) for crc in crcs)
