"""Small versions on the disk: many of them in one file, because a file of its own costs more than its bytes.

A pack is a file of groups, each written by one system call: a head, a row for each version, then the bodies. Only the
process that made a pack appends to it; evictors unlink whole packs. What lies where is remembered in memory, 20 bytes
for a version; learn() finds out what earlier processes and others have kept. A body is believed when its CRC-32, begun
with the version's name, is the one in its row, so whatever a power failure, a hand or a dying process left is not held.
Shell. Safe for threads; who appends or learns may wait for the disk, who reads waits for one pread(2).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from ..store.base import Body
from .blockfile import page_rounded, write_fully

OPEN_PACKS = 64
"""Kept open to be read."""
TOUCH_S = 30.0
"""How often a pack in use says so on disk, and how often others' packs are looked for."""
_GROUP_ROWS = 500
"""The most of one group: pwritev(2) takes 1,024 buffers."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_SHARD_ENTRIES = 64
"""The most that are remembered of those that begin with the same two bytes: 4 million in all, 84 MB."""
_MAGIC = b"DSPACK01"
_HEAD = struct.Struct("<8sII")
"""Magic, number of rows, CRC-32 of the rows."""
_ROW = struct.Struct("<8sII")
"""Fingerprint, bytes, CRC-32 of name and body. The bodies follow in the order of their rows."""
_ENTRY = struct.Struct("<8sIII")
"""What is remembered of a version: fingerprint, number of its pack, offset of its body there, CRC-32."""
_NONE = bytearray()


class Small(NamedTuple):
    """A version to be kept: its fingerprint, the CRC-32 of its name and body, and the body."""

    fingerprint: bytes
    crc: int
    body: Body


class _File:
    """An open pack, for as long as somebody reads it."""

    __slots__ = ("fd", "touched_s")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.touched_s = float("-inf")
        """When it was last seen to be there, and said on disk that it is in use."""

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def is_evicted(self) -> bool:
        """Whether nobody can open it any more."""
        return os.fstat(self.fd).st_nlink == 0


class Packs:
    """The packs of one directory. A version is told by its name, any bytes that no other one has.

    INVARIANT: what _walked says of a pack is remembered, as far as there is room for it.
    """

    def __init__(self, directory: Path, monotonic: Callable[[], float]) -> None:
        """directory: made when needed. Touches no disk."""
        self._directory = directory
        self._monotonic = monotonic
        self._appending = threading.Lock()
        """For who adds packs or makes them longer; taken before _lock."""
        self._lock = threading.Lock()
        """For what is remembered."""
        self._shards: dict[bytes, bytearray] = {}
        """_ENTRYs by the first two bytes of their fingerprints."""
        self._names: dict[int, str] = {}
        self._walked: dict[str, tuple[int, int]] = {}
        """The number of each pack, and how many of its bytes are known."""
        self._open: OrderedDict[int, _File] = OrderedDict()
        self._last_number = 0
        self._own = ""
        """The name of the pack that is appended to."""
        self._learned_s = float("-inf")

    def read(self, name: bytes, size: int) -> bytes | None:
        """The whole body of `size` bytes; None: not held. OSError."""
        fingerprint = _fingerprint(name)
        found = self._find(fingerprint)
        if found is None:
            return None
        file, offset, crc = found
        body = os.pread(file.fd, size, offset)
        if len(body) != size or crc32(body, crc32(name)) != crc:
            self._forget(fingerprint)
            return None
        return body

    def holds(self, name: bytes) -> bool:
        """Whether it is recorded as held (its checksum may still turn out wrong). OSError."""
        return self._find(_fingerprint(name)) is not None

    def absent(self, bodies: Iterable[tuple[bytes, Body]]) -> list[Small]:
        """Those of these names and bodies that are not held, or no longer for others. OSError."""
        named = ((_fingerprint(name), name, body) for name, body in bodies)
        return [Small(one, crc32(body, crc32(name)), body) for one, name, body in named if not self._is_kept(one)]

    def growth(self, smalls: Sequence[Small]) -> int:
        """How many more bytes of disk append() will take for them."""
        _, end = self._walked.get(self._own, (0, 0))
        return page_rounded(end + _size_of(smalls)) - page_rounded(end)

    def append(self, smalls: Sequence[Small], pack_bytes: int) -> None:
        """Keep them. pack_bytes: a pack of this size and more gets no more of them. OSError: not all are kept."""
        with self._appending:
            for first in range(0, len(smalls), _GROUP_ROWS):
                self._append(smalls[first : first + _GROUP_ROWS], pack_bytes)

    def learn(self, within_s: float) -> None:
        """Find out what is held; the packs that were used last come first, and no new one after `within_s`. OSError."""
        with self._appending:
            self._learned_s = self._monotonic()
            until_s = self._learned_s + within_s
            packs = self._listed()
            for name in self._walked.keys() - {name for _, name, _ in packs}:
                self._let_go(self._walked[name][0])
            for _, name, size in packs:
                number, end = self._walked.get(name) or (self._last_number + 1, 0)
                if size > end and self._monotonic() < until_s:
                    with contextlib.suppress(FileNotFoundError):
                        self._walk(name, number, end, size)

    def learn_when_due(self, within_s: float) -> None:
        """The same, every TOUCH_S."""
        if self._monotonic() >= self._learned_s + TOUCH_S:
            self.learn(within_s)

    def forget(self, name: bytes) -> None:
        """Hold it no longer; idempotent."""
        self._forget(_fingerprint(name))

    def tidy(self) -> None:
        """Let go of what others evicted, so that the disk gets it back."""
        with self._lock:
            evicted = [number for number, file in self._open.items() if file.is_evicted]
        for number in evicted:
            self._let_go(number)

    def close(self) -> None:
        """Let go of all descriptors; idempotent, the packs stay usable."""
        with self._lock:
            self._open.clear()

    def _append(self, smalls: Sequence[Small], pack_bytes: int) -> None:
        number, file, end = self._appendable(pack_bytes)
        rows = b"".join([_ROW.pack(one.fingerprint, len(one.body), one.crc) for one in smalls])
        group = [_HEAD.pack(_MAGIC, len(smalls), crc32(rows)), rows, *(one.body for one in smalls)]
        try:
            written = os.pwritev(file.fd, group, end)
            if written < _size_of(smalls):
                write_fully(file.fd, memoryview(b"".join(group))[written:], end + written)
        except OSError:
            if end == 0:
                (self._directory / self._own).unlink(missing_ok=True)
            self._own = ""  # what is left of the group gives itself away, and ends its pack
            raise
        self._remember(number, end, rows)

    def _appendable(self, pack_bytes: int) -> tuple[int, _File, int]:
        """The number of a pack with room, the open pack, and its size."""
        number, end = self._walked.get(self._own, (0, pack_bytes))
        file = self._opened(number) if end < pack_bytes else None
        if file is None or file.is_evicted:
            self._own = f"{os.urandom(8).hex()}.pack"
            self._last_number += 1
            number, end = self._last_number, 0
            file = self._create(number)
        return number, file, end

    def _create(self, number: int) -> _File:
        path, flags = self._directory / self._own, _FLAGS | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, flags, 0o600)
        file = self._keep_open(number, self._own, fd)
        file.touched_s = self._monotonic()
        return file

    def _listed(self) -> list[tuple[int, str, int]]:
        """(mtime, name, size) of each pack, the latest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._directory):
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, entry.name, facts.st_size))
        return sorted(found, reverse=True)

    def _walk(self, name: str, number: int, end: int, size: int) -> None:
        """Remember what the whole groups of a pack from `end` to `size` hold. OSError."""
        fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            while rows := _rows_at(fd, end, size):
                self._names[number] = name
                self._last_number = max(self._last_number, number)
                end = self._remember(number, end, rows)
        finally:
            os.close(fd)

    def _remember(self, number: int, start: int, rows: bytes) -> int:
        """A group that begins at `start`, unless its pack was evicted meanwhile; where it ends."""
        at = start + _HEAD.size + len(rows)
        with self._lock:
            if number not in self._names:
                return at
            for fingerprint, size, crc in _ROW.iter_unpack(rows):
                self._drop_entry(fingerprint)
                shard = self._shards.setdefault(fingerprint[:2], bytearray())
                if len(shard) >= _SHARD_ENTRIES * _ENTRY.size:
                    del shard[: _SHARD_ENTRIES // 2 * _ENTRY.size]
                shard += _ENTRY.pack(fingerprint, number, at, crc)
                at += size
            self._walked[self._names[number]] = number, at
        return at

    def _find(self, fingerprint: bytes) -> tuple[_File, int, int] | None:
        """The open pack that holds it, the offset there, and the CRC-32 to expect. OSError."""
        with self._lock:
            shard, at = self._entry(fingerprint)
            if at < 0:
                return None
            _, number, offset, crc = _ENTRY.unpack_from(shard, at)
        file = self._opened(number)
        if file is None:
            self._forget(fingerprint)
            return None
        return file, offset, crc

    def _is_kept(self, fingerprint: bytes) -> bool:
        found = self._find(fingerprint)
        return found is not None and not found[0].is_evicted

    def _opened(self, number: int) -> _File | None:
        """The pack, which says on disk now and then that it is in use; None: evicted. OSError."""
        with self._lock:
            file, name = self._open.get(number), self._names.get(number)
            if file is not None:
                self._open.move_to_end(number)
        if name is None:
            return None
        if file is None:
            try:
                file = self._keep_open(number, name, os.open(self._directory / name, _FLAGS))
            except FileNotFoundError:
                self._let_go(number)
                return None
        now_s = self._monotonic()
        if now_s >= file.touched_s + TOUCH_S:
            file.touched_s = now_s
            if file.is_evicted:
                self._let_go(number)
                return None
            os.utime(file.fd)
        return file

    def _keep_open(self, number: int, name: str, fd: int) -> _File:
        file = _File(fd)
        with self._lock:
            self._names[number] = name
            self._open[number] = file
            while len(self._open) > OPEN_PACKS:
                self._open.popitem(last=False)
        return file

    def _let_go(self, number: int) -> None:
        """Of an evicted pack; its entries go when they are looked for."""
        with self._lock:
            self._open.pop(number, None)
            self._walked.pop(self._names.pop(number, ""), None)

    def _forget(self, fingerprint: bytes) -> None:
        with self._lock:
            self._drop_entry(fingerprint)

    def _drop_entry(self, fingerprint: bytes) -> None:
        shard, at = self._entry(fingerprint)
        if at >= 0:
            del shard[at : at + _ENTRY.size]

    def _entry(self, fingerprint: bytes) -> tuple[bytearray, int]:
        """Its shard, and where it is in there; -1: it isn't. Call with _lock held."""
        shard = self._shards.get(fingerprint[:2], _NONE)
        at = shard.find(fingerprint)
        while at > 0 and at % _ENTRY.size:
            at = shard.find(fingerprint, at + 1)
        return shard, at


def _rows_at(fd: int, start: int, size: int) -> bytes:
    """The rows of the group that begins at `start`; b"": there is no whole one before `size`. OSError."""
    head = os.pread(fd, _HEAD.size, start)
    if len(head) < _HEAD.size:
        return b""
    magic, count, crc = _HEAD.unpack(head)
    if magic != _MAGIC or not 0 < count <= _GROUP_ROWS:
        return b""
    rows = os.pread(fd, count * _ROW.size, start + _HEAD.size)
    bodies = sum(row[1] for row in _ROW.iter_unpack(rows)) if crc32(rows) == crc else size
    return rows if start + _HEAD.size + len(rows) + bodies <= size else b""


def _fingerprint(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=8).digest()


def _size_of(smalls: Sequence[Small]) -> int:
    """Of their groups, in bytes."""
    heads = -(-len(smalls) // _GROUP_ROWS) * _HEAD.size
    return heads + sum(_ROW.size + len(one.body) for one in smalls)
