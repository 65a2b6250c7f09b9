"""One object version in the disk cache: a sparse data file and a sidecar that says which blocks of it are right.

The sidecar: a head (magic, block size, object size, identity, checksum), a seal, then 8 bytes for each block: zero
while the block is absent, else its CRC-32 and a tag. A block's bytes are written before its record, so a record never
claims more than was written; what a power failure or a hand leaves behind fails the CRC when this process first reads
the block. The seal spares that check: it says that, in this boot of the machine, the whole data file was right at
this inode, mtime and ctime.
Shell: does I/O on two descriptors, raises OSError and CacheCorrupt, knows nothing of eviction. Safe for threads and
processes: writers of one block write the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from datastore.errors import CacheCorrupt

from ..store.base import Body

BLOCK_BYTES = 128 << 10
"""What is fetched, recorded and checked at once: the kernel's usual random read; 2.5 us of CRC-32."""

_MAGIC = b"DSBLOCK1"
_HEAD = struct.Struct("<8sIIQI")
"""Magic, block bytes, identity bytes, object bytes, CRC-32 of all these and the identity."""
_SEAL = struct.Struct("<16sQqqI")
"""Boot id, inode, mtime and ctime (ns) of the data file, CRC-32 of these."""
_SEAL_AT = 32
_IDENTITY_AT = 80
_RECORD = struct.Struct("<II")
_TAG = 0x6B636F62
_HELD = b"\x01"


class Stamp(NamedTuple):
    """How a data file looks; any write, rename or link to it changes this."""

    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> Stamp:
        """From fstat(2)."""
        return cls(facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a cache file holds. label: names the version; size: of the object, bytes; boot_id: b"" for no seals."""

    label: bytes
    size: int
    boot_id: bytes

    @property
    def block_count(self) -> int:
        """Blocks of the object, the last of which may be short."""
        return -(-self.size // BLOCK_BYTES)

    @property
    def records_at(self) -> int:
        """Offset of the records in the sidecar (a multiple of 8: a record never straddles a sector)."""
        return _IDENTITY_AT + -(-len(self.label) // 8) * 8

    @property
    def sidecar_bytes(self) -> int:
        """Size of the sidecar."""
        return self.records_at + self.block_count * _RECORD.size

    def head(self) -> bytes:
        """The sidecar up to its records, without a seal."""
        fixed = _HEAD.pack(_MAGIC, BLOCK_BYTES, len(self.label), self.size, 0)
        fixed = _HEAD.pack(_MAGIC, BLOCK_BYTES, len(self.label), self.size, crc32(fixed + self.label))
        return (fixed.ljust(_IDENTITY_AT, b"\0") + self.label).ljust(self.records_at, b"\0")

    def seal(self, stamp: Stamp) -> bytes:
        """Says that the data file is right while it looks like `stamp`; b"" without a boot id."""
        if not self.boot_id:
            return b""
        body = _SEAL.pack(self.boot_id, *stamp, 0)
        return _SEAL.pack(self.boot_id, *stamp, crc32(body))


def block_records(body: memoryview) -> bytes:
    """The records of consecutive blocks that begin at body[0]."""
    starts = range(0, len(body), BLOCK_BYTES)
    crcs = [crc32(body[start : start + BLOCK_BYTES]) for start in starts]
    return b"".join(_RECORD.pack(crc, crc ^ _TAG) for crc in crcs)


def file_records(path: Path) -> bytes:
    """The records of a whole file, read in steps. OSError."""
    with open(path, "rb") as file:
        return b"".join(block_records(memoryview(part)) for part in iter(lambda: file.read(8 * BLOCK_BYTES), b""))


class BlockFile:
    """An open version. The descriptors live as long as the object: once evicted they close when its last user is done.

    INVARIANT: _right[i] is 1 only after block i's bytes were written or checked by this process.
    INVARIANT: _stamp is set only when every block is right.
    """

    __slots__ = ("_data_fd", "_identity", "_right", "_sidecar_fd", "_stamp", "touched_s")

    def __init__(self, data_path: str, sidecar_path: str, identity: Identity) -> None:
        """Open existing files; FileNotFoundError when there are none, CacheCorrupt when they don't agree."""
        self._data_fd = self._sidecar_fd = -1
        self._sidecar_fd = os.open(sidecar_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._identity = identity
        self._right = bytearray(identity.block_count)
        self._stamp: Stamp | None = None
        self.touched_s = float("-inf")
        """When the owner last told the disk that this version is in use; the owner's clock."""
        try:
            self._data_fd = os.open(data_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise CacheCorrupt(f"cache file {data_path} is missing; it will be fetched again") from error
        seal = self._check_head(data_path)[_SEAL_AT : _SEAL_AT + _SEAL.size]
        facts, sidecar = os.fstat(self._data_fd), os.fstat(self._sidecar_fd)
        if (facts.st_size, sidecar.st_size) != (identity.size, identity.sidecar_bytes):
            raise CacheCorrupt(f"cache file {data_path} has the wrong size; it will be fetched again")
        # Opened between an eviction and a re-creation, the two could be of different generations; see blockcache.py.
        if sidecar.st_nlink == 0:
            raise FileNotFoundError(f"cache file {data_path} was evicted meanwhile")
        if identity.boot_id and seal == identity.seal(Stamp.of(facts)):
            self._stamp = Stamp.of(facts)
            self._right[:] = _HELD * identity.block_count

    def __del__(self) -> None:
        for fd in (self._data_fd, self._sidecar_fd):
            if fd >= 0:
                os.close(fd)

    @property
    def whole(self) -> bool:
        """Whether every block is right, as far as this process has checked."""
        return self._stamp is not None or self._right.find(0) < 0

    @property
    def unlinked(self) -> bool:
        """Whether somebody evicted it: what is written now is lost, what is read is still right."""
        return os.fstat(self._sidecar_fd).st_nlink == 0 or os.fstat(self._data_fd).st_nlink == 0

    def read(self, start: int, stop: int) -> bytes | None:
        """The bytes [start, stop) inside the object, or None unless all are held. CacheCorrupt, OSError."""
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
        # Looked at after the read: a write shows its time before its bytes.
        if self._stamp is not None and (facts := os.fstat(self._data_fd)).st_mtime_ns != self._stamp.mtime_ns:
            if facts.st_nlink == 0:
                raise CacheCorrupt("a cache file was passed through to the kernel and has been written to")
            self._distrust()
            return self.read(start, stop)
        return body

    def holds(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is recorded as held; not checked."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        return self._right.find(0, first, last) < 0 or 0 not in memoryview(self._records(first, last)).cast("Q")

    def verify(self) -> bool:
        """Check every block; whether all are there. Reads the whole file. CacheCorrupt, OSError."""
        blocks = range(self._identity.block_count)
        return all(self._right[i] or self._admit(i, i + 1) is not None for i in blocks) and self.seal()

    def fresh_bytes(self, start: int, stop: int) -> int:
        """How many bytes of disk a write of [start, stop) would newly take."""
        first, last = whole_blocks(start, stop, self._identity.size)
        fresh = self._right.count(0, first, max(first, last)) * BLOCK_BYTES
        if first < last == len(self._right) and not self._right[-1]:
            fresh -= last * BLOCK_BYTES - page_rounded(self._identity.size)
        return fresh

    def write(self, start: int, body: Body) -> None:
        """Keep the whole blocks of `body`, which lies at `start` of the object; edges are left out. OSError."""
        first, last = whole_blocks(start, start + len(body), self._identity.size)
        if first >= last or self._right.find(0, first, last) < 0:
            return
        whole = memoryview(body)[first * BLOCK_BYTES - start : min(last * BLOCK_BYTES, self._identity.size) - start]
        write_fully(self._data_fd, whole, first * BLOCK_BYTES)
        records_at = self._identity.records_at + first * _RECORD.size
        write_fully(self._sidecar_fd, memoryview(block_records(whole)), records_at)
        self._right[first:last] = _HELD * (last - first)
        if self._right.find(0) < 0:
            self.seal()

    def seal(self) -> bool:
        """Note on disk that the whole file is right as it is now; always True. OSError."""
        self._stamp = Stamp.of(os.fstat(self._data_fd))
        write_fully(self._sidecar_fd, memoryview(self._identity.seal(self._stamp)), _SEAL_AT)
        return True

    def vouch(self) -> None:
        """Take every block as right: the caller has just made their records from the file itself. OSError."""
        self._right[:] = _HELD * len(self._right)
        self.seal()

    def touch(self) -> None:
        """Mark as just used: eviction goes by the sidecar's mtime. OSError."""
        os.utime(self._sidecar_fd)

    def reopen(self, data_path: str) -> int | None:
        """A descriptor to read and write the data, the caller's; None: it was changed or replaced. OSError."""
        fd = os.open(data_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if Stamp.of(os.fstat(fd)) == self._stamp:
            return fd
        os.close(fd)
        self._distrust()
        return None

    def _check_head(self, data_path: str) -> bytes:
        """What the sidecar says before its records. CacheCorrupt when it is another version's."""
        expected = self._identity.head()
        head = os.pread(self._sidecar_fd, len(expected), 0)
        if head[:_SEAL_AT] != expected[:_SEAL_AT] or head[_IDENTITY_AT:] != expected[_IDENTITY_AT:]:
            raise CacheCorrupt(f"the sidecar of cache file {data_path} is damaged; it will be fetched again")
        return head

    def _distrust(self) -> None:
        """Somebody wrote into a whole file behind our back: nothing counts until its checksum agrees."""
        self._stamp = None
        self._right[:] = bytes(len(self._right))

    def _records(self, first: int, last: int) -> bytes:
        size = (last - first) * _RECORD.size
        records = os.pread(self._sidecar_fd, size, self._identity.records_at + first * _RECORD.size)
        if len(records) != size:
            raise CacheCorrupt("a cache sidecar is cut short")
        return records

    def _admit(self, first: int, last: int) -> bytes | None:
        """Check blocks [first, last) that others wrote; the last one that was checked, None when one is absent."""
        block = b""
        for index, (crc, tag) in enumerate(_RECORD.iter_unpack(self._records(first, last)), first):
            if self._right[index]:
                continue
            if crc == 0 and tag == 0:
                return None
            start = index * BLOCK_BYTES
            size = min(BLOCK_BYTES, self._identity.size - start)
            block = os.pread(self._data_fd, size, start)
            if tag != crc ^ _TAG or len(block) != size or crc32(block) != crc:
                raise CacheCorrupt("a block of a cache file does not match its checksum; it will be fetched again")
            self._right[index] = 1
        if self._stamp is None and self._right.find(0) < 0:
            self.seal()
        return block


def create_files(data_path: str, sidecar_path: str, identity: Identity) -> None:
    """Make a version's files, empty, in place of any others (the caller excludes other creators). OSError."""
    for path in (sidecar_path, data_path):  # not written over: another process may be reading them
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    fd = os.open(data_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, identity.size)
    finally:
        os.close(fd)
    os.replace(draft_sidecar(sidecar_path, identity.head(), identity.sidecar_bytes), sidecar_path)


def draft_sidecar(sidecar_path: str, content: bytes, size: int) -> str:
    """Write a sidecar beside its place, to be renamed into it; its path. OSError."""
    draft = sidecar_path.removesuffix(".blocks") + ".draft"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_fully(fd, memoryview(content), 0)
        os.ftruncate(fd, size)  # by descriptor: a confined server may not by path
    finally:
        os.close(fd)
    return draft


def page_rounded(size_bytes: int) -> int:
    """What a file of this size takes on disk."""
    return -(-size_bytes // 4096) * 4096


def write_fully(fd: int, body: memoryview, offset: int) -> None:
    """pwrite(2) all of it. OSError."""
    while body:
        written = os.pwrite(fd, body, offset)
        body, offset = body[written:], offset + written


def whole_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """The blocks [first, last) that lie wholly in [start, stop); the object's short last block counts as whole."""
    last = -(-size // BLOCK_BYTES) if stop >= size else stop // BLOCK_BYTES
    return -(-start // BLOCK_BYTES), last
