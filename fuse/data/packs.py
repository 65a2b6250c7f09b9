"""Small versions on disk: many share one file, a pack, because a file for each would cost more than its bytes.

A pack consists of groups, each written by one system call: a head, a row for each body, then the bodies. (A body is a
block of a version; blockcache.py names them.) Only the process that made a pack appends to it; evictors unlink whole
packs. An index in memory says where each body lies, in 20 bytes; learn() reads what earlier and other processes have
kept. A body is valid only if its CRC-32, which begins with its name, is that of its row, so anything damaged by a power
failure, by hand or by a dying process counts as not held.
Does I/O. Safe for threads. Appending and learning may wait for the disk; reading waits for one pread(2).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from isal.isal_zlib import crc32

from ..store.base import Body
from .blockfile import page_rounded, write_fully
from .cachespace import CacheSpace
from .openfiles import TOUCH_S, OpenFile, OpenFiles

OPEN_PACKS = 64
"""How many packs are kept open."""
_GROUP_ROWS = 500
"""The most rows of one group; a group is written by one pwritev(2), which takes at most 1,024 buffers."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MAGIC = b"DSPACK01"
_HEAD = struct.Struct("<8sII")
"""The head of a group: magic, number of rows, CRC-32 of the rows."""
_ROW = struct.Struct("<8sII")
"""A row: fingerprint, size of the body, CRC-32 of name and body. The bodies follow in the order of their rows."""
_ENTRY = struct.Struct("<8sIII")
"""An entry of the index in memory: fingerprint, number of the pack, offset of the body there, CRC-32."""
_NUMBER = struct.Struct(">I")
"""The number of a pack; its file is named by these bytes in hexadecimal."""
_NONE = bytearray()
_SHARD_BYTES = 64 * _ENTRY.size
"""The bytes of the largest shard (entries whose fingerprints begin with the same 2 bytes): 4 million in all, 84 MB."""


class Small(NamedTuple):
    """A body to be kept: the fingerprint of its name, the CRC-32 of name and body, and the body."""

    fingerprint: bytes
    crc: int
    body: Body


class _Group(NamedTuple):
    """The rows of a group, where its bodies begin in its pack, and where it ends."""

    rows: bytes
    at: int
    end: int


class Packs:
    """The packs of one cache directory, by number. A body is found by its name, which may be any unique bytes."""

    def __init__(self, space: CacheSpace, monotonic: Callable[[], float]) -> None:
        """This does no I/O."""
        self._space = space
        self._monotonic = monotonic
        self.appending = threading.Lock()
        """Held by a caller that adds a pack or appends to one, and while learn() runs; taken before _lock."""
        self._lock = threading.Lock()
        """Guards the index."""
        self._shards: dict[bytes, bytearray] = {}
        """The index: _ENTRYs by the first two bytes of their fingerprints, in each shard the oldest first."""
        self._ends: dict[int, int] = {}
        """For each known pack, up to which offset its groups are in the index."""
        self.files: OpenFiles[int, OpenFile] = OpenFiles(OPEN_PACKS, monotonic)
        self._own = -1
        """The number of the pack that this process appends to; -1: none."""
        self._learn_due_s = float("-inf")

    def read(self, name: bytes, size: int) -> bytes | None:
        """Return the whole body of `size` bytes; None if it is not held or can't be read."""
        fingerprint = _fingerprint(name)
        found = self._find(fingerprint)
        if found is None:
            return None
        file, offset, crc = found
        try:
            body = os.pread(file.fd, size, offset)
        except OSError:
            return None
        if len(body) != size or crc32(body, crc32(name)) != crc:
            self._forget(fingerprint)
            return None
        return body

    def holds(self, name: bytes) -> bool:
        """Whether the body of this name is recorded as held (its checksum may still turn out wrong)."""
        return self._find(_fingerprint(name)) is not None

    def absent(self, bodies: Iterable[tuple[bytes, Body]]) -> list[Small]:
        """Return those of the (name, body) that are not held, or only by an evicted pack that is still open here."""
        absent = []
        for name, body in bodies:
            fingerprint = _fingerprint(name)
            found = self._find(fingerprint)
            if found is None or found[0].unlinked:
                absent.append(Small(fingerprint, crc32(body, crc32(name)), body))
        return absent

    def growth(self, smalls: Sequence[Small], pack_bytes: int) -> int:
        """How many more bytes of disk append() will take. The caller holds `appending` from here to append()."""
        end = self._ends.get(self._own, 0)
        end = end if end < pack_bytes else 0
        return page_rounded(end + _size_of(smalls)) - page_rounded(end)

    def append(self, smalls: Sequence[Small], pack_bytes: int) -> None:
        """Keep a group made by in_groups(); the caller holds `appending`.
        pack_bytes: a pack of this size and more is full. Errors: OSError; no body of the group is kept then."""
        rows = b"".join([_ROW.pack(one.fingerprint, len(one.body), one.crc) for one in smalls])
        head = _HEAD.pack(_MAGIC, len(smalls), crc32(rows))
        file, start = self._appendable(pack_bytes)
        at, end = start + len(head) + len(rows), start + _size_of(smalls)
        try:
            parts = [head, rows, *[one.body for one in smalls]]
            written = os.pwritev(file.fd, parts, start)
            if written < end - start:
                write_fully(file.fd, memoryview(b"".join(parts))[written:], start + written)
        except OSError:
            self._give_up(file, start)
            raise
        self._remember(self._own, _Group(rows, at, end))

    def learn(self, within_s: float, *, when_due: bool = False) -> None:
        """Index what the packs hold, the pack used last first; after `within_s` no further pack is begun.
        when_due: at most every TOUCH_S, sooner after a call that had no time for all packs. Errors: OSError."""
        if when_due and self._monotonic() < self._learn_due_s:
            return
        self._learn_due_s = self._monotonic() + TOUCH_S
        with self.appending:
            until_s = self._monotonic() + within_s
            listed = self._listed()
            for number in self._ends.copy().keys() - {number for _, number, _ in listed}:
                self._let_go(number)
            for _, number, size in listed:
                if size > self._ends.get(number, 0):
                    if self._monotonic() >= until_s:
                        self._learn_due_s = until_s + within_s  # a later call reads the rest
                        return
                    with contextlib.suppress(OSError):  # the rest of this pack stays unknown
                        self._walk(number, size)

    def _appendable(self, pack_bytes: int) -> tuple[OpenFile, int]:
        """Return this process's pack, open, and where it ends; a new pack, if the present one is full or evicted."""
        end = self._ends.get(self._own, pack_bytes)
        file = self._opened(self._own) if end < pack_bytes else None
        if file is not None and not file.unlinked:
            return file, end
        (number,) = _NUMBER.unpack(os.urandom(_NUMBER.size))
        path = self._path(number)
        self._space.make_directory(path)
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        self._own, self._ends[number] = number, 0
        return self.files.keep(self._own, OpenFile(fd, self._monotonic())), 0

    def _give_up(self, file: OpenFile, end: int) -> None:
        """After a group could not be written: cut the pack back to `end`, and append nothing to it any more."""
        own, self._own = self._own, -1
        with contextlib.suppress(OSError):
            os.ftruncate(file.fd, end)
            if end == 0:
                os.unlink(self._path(own))
        if end == 0:
            self._let_go(own)

    def _path(self, number: int) -> str:
        return f"{self._space.packs}/{_NUMBER.pack(number).hex()}.pack"

    def _listed(self) -> list[tuple[int, int, int]]:
        """Return (mtime, number, size) of each pack, the latest mtime first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._space.packs):
                with contextlib.suppress(FileNotFoundError, ValueError, struct.error):
                    (number,) = _NUMBER.unpack(bytes.fromhex(entry.name.removesuffix(".pack")))
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, number, facts.st_size))
        return sorted(found, reverse=True)

    def _walk(self, number: int, size: int) -> None:
        """Index the complete groups of a pack up to offset `size`; newer entries of a name stay. Errors: OSError."""
        fd = os.open(self._path(number), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            while group := _group_at(fd, self._ends.get(number, 0), size):
                self._remember(number, group, older=True)
        finally:
            os.close(fd)

    def _remember(self, pack: int, group: _Group, *, older: bool = False) -> None:
        """Add to the index the next group of a pack. older: whether all present entries are newer than the group."""
        at = group.at
        with self._lock:
            self._ends[pack] = group.end
            for fingerprint, size, crc in _ROW.iter_unpack(group.rows):
                shard = self._shards.setdefault(fingerprint[:2], bytearray())
                _, known_at = self._entry(fingerprint)
                entry = _ENTRY.pack(fingerprint, pack, at, crc)
                at += size
                if older:
                    if known_at < 0 and len(shard) < _SHARD_BYTES:
                        shard[:0] = entry
                    continue
                if known_at >= 0:
                    del shard[known_at : known_at + _ENTRY.size]
                if len(shard) >= _SHARD_BYTES:
                    del shard[: _SHARD_BYTES // 2]
                shard += entry

    def _find(self, fingerprint: bytes) -> tuple[OpenFile, int, int] | None:
        """Return the open pack that holds a body, the offset there, and the CRC-32 to expect; None if not held."""
        with self._lock:
            shard, at = self._entry(fingerprint)
            if at < 0:
                return None
            _, number, offset, crc = _ENTRY.unpack_from(shard, at)
        file = self._opened(number)
        if file is None:
            if number not in self._ends:  # else the pack exists, and may be readable another time
                self._forget(fingerprint)
            return None
        return file, offset, crc

    def _opened(self, number: int) -> OpenFile | None:
        """Return a pack, opened if need be; None if it was evicted or can't be opened."""
        try:
            return self.files.find(number, self._open_pack) if number in self._ends else None
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self._let_go(number)
            return None

    def _open_pack(self, number: int) -> OpenFile:
        return OpenFile(os.open(self._path(number), _FLAGS))

    def _let_go(self, number: int) -> None:
        """Forget an evicted pack; idempotent. Its entries are removed when they are looked up."""
        self.files.drop(number)
        self._ends.pop(number, None)

    def _forget(self, fingerprint: bytes) -> None:
        with self._lock:
            shard, at = self._entry(fingerprint)
            if at >= 0:
                del shard[at : at + _ENTRY.size]

    def _entry(self, fingerprint: bytes) -> tuple[bytearray, int]:
        """Return the fingerprint's shard, and the offset of its entry there, -1 for none. The caller holds _lock."""
        shard = self._shards.get(fingerprint[:2], _NONE)
        at = shard.find(fingerprint)
        while at > 0 and at % _ENTRY.size:
            at = shard.find(fingerprint, at + 1)
        return shard, at


def in_groups(smalls: Iterable[Small], pack_bytes: int) -> Iterator[list[Small]]:
    """Split bodies into groups for append(): at most _GROUP_ROWS bodies, and pack_bytes bytes (or a single body)."""
    group, size = list[Small](), 0
    for one in smalls:
        if len(group) == _GROUP_ROWS or (group and size + len(one.body) > pack_bytes):
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one.body)
    if group:
        yield group


def _group_at(fd: int, start: int, size: int) -> _Group | None:
    """Return the group that begins at `start`; None if no valid group ends within `size`. Errors: OSError."""
    head = os.pread(fd, _HEAD.size, start)
    if len(head) < _HEAD.size:
        return None
    magic, rows_count, crc = _HEAD.unpack(head)
    if magic != _MAGIC or not 0 < rows_count <= _GROUP_ROWS:
        return None
    rows = os.pread(fd, rows_count * _ROW.size, start + _HEAD.size)
    if len(rows) != rows_count * _ROW.size or crc32(rows) != crc:
        return None
    at = start + _HEAD.size + len(rows)
    end = at + sum(row[1] for row in _ROW.iter_unpack(rows))
    return _Group(rows, at, end) if end <= size else None


def _fingerprint(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=8).digest()


def _size_of(smalls: Sequence[Small]) -> int:
    """The size of a group of these bodies, in bytes."""
    return _HEAD.size + sum([_ROW.size + len(one.body) for one in smalls])
