"""On-disk cache of object versions, keyed by (store, credentials, key, etag, size), shared by all mounts of one user.

Caching is best effort: no method raises OSError or CacheCorrupt. A version that can't be read, fails its checksum or
was evicted is "not held"; a version that can't be written (disk full, broken, busy) is "not kept", and writing pauses
for PAUSE_S. Does I/O. Safe for threads (the event loop calls it too: a hit takes two or three system calls) and for
several processes at once:
 - A version of 1 MiB and more has files of its own. A creator and an evictor exclude each other by
   CacheSpace.exclusive(); readers take no lock. An evictor unlinks the sidecar before the data, and a reader opens the
   sidecar, then the data, then checks that the sidecar is still linked: if it is, both belong together. Files that are
   unlinked while open stay readable.
 - The blocks of smaller versions lie in packs, which are files that many versions share; each block is an entry there.
 - Files: directory/objects/xx/<stem>.data, .blocks (blockfile.py); directory/objects/packs/*.pack (packs.py);
   directory/usage, directory/evicting (cachespace.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, starmap
from json.encoder import encode_basestring_ascii as as_json
from pathlib import Path
from typing import TypeVar

from datastore.errors import CacheCorrupt
from datastore.ourprocess import boot_id

from ..store.base import Body, ObjectVersion
from .blockfile import BLOCK_BYTES, BlockFile, Place, create_files, file_records, page_rounded, whole_blocks
from .cachespace import CacheFullError, CacheSpace
from .openfiles import OpenFiles
from .packs import Packs, in_groups

OPEN_FILES = 128
"""How many versions are kept open, with two descriptors each: a quarter of the usual limit of 1,024 descriptors."""
PAUSE_S = 5.0
"""How long writing stays off after the disk failed or was full."""
PACK_BYTES = 8 << 20
"""The size at which a pack is full: this, or a 32nd of the cache if that is less (packs are evicted whole), but at
least PACK_BYTES_MIN."""
PACK_BYTES_MIN = 64 << 10
LEARN_S = 1.0
"""How long a mount may read, at its start, what the packs hold; enough for 300,000 small versions."""
LEARN_MORE_S = 0.2
"""How long a pool thread that writes small versions may read what other processes have added to the packs."""
SMALL_BYTES = 1 << 20
"""Versions below this size lie in packs; the kernel never reads these by passthrough."""
INLINE_VERIFY_BYTES = 4 << 20
"""The largest version that open_for_passthrough() checks itself, in bytes; this takes about 2 ms."""


_STEP_BYTES = 8 << 20
"""How many bytes at a time of a file are copied into the cache."""
T = TypeVar("T")


class BlockCache:
    """INVARIANT: an entry of _open is a BlockFile of exactly that version."""

    def __init__(
        self, directory: Path, size_bytes: int, namespace: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """directory: made when needed, readable by its owner only. namespace: names endpoint, bucket and credentials.
        This does no I/O but to read the kernel's boot id."""
        self._space = CacheSpace(directory, size_bytes)
        self._packs = Packs(self._space, monotonic)
        self._namespace = as_json(namespace)
        self._monotonic = monotonic
        self._boot_id = bytes.fromhex(boot_id().replace("-", ""))
        """b"" where there is none: no seals then, each block is checked."""
        self._open: OpenFiles[ObjectVersion, BlockFile] = OpenFiles(OPEN_FILES, monotonic)
        self._off_until_s = float("-inf")

    def learn(self) -> None:
        """Find out which small versions the cache has, within LEARN_S. Call this before the first read."""
        with contextlib.suppress(OSError):
            self._packs.learn(LEARN_S)

    def read(self, version: ObjectVersion, offset: int, size: int) -> bytes | None:
        """Return the bytes (fewer only at the object's end), None unless all are held and valid."""
        stop = min(offset + size, version.size)
        if offset >= stop:
            return b""
        if version.size < SMALL_BYTES:
            return self._read_small(version, offset, stop)
        return self._asked(version, lambda entry: entry.read(offset, stop))

    def holds(self, version: ObjectVersion, start: int, stop: int) -> bool:
        """Whether [start, stop) is recorded as held (its checksums may still turn out wrong)."""
        stop = min(stop, version.size)
        if start >= stop:
            return True
        if version.size < SMALL_BYTES:
            return all(map(self._packs.holds, self._names(version, start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))))
        return bool(self._asked(version, lambda entry: entry.holds(start, stop)))

    def present(self, version: ObjectVersion) -> bool:
        """Whether the whole version is recorded as held."""
        return self.holds(version, 0, version.size)

    def write(self, version: ObjectVersion, offset: int, body: Body) -> bool:
        """Keep the blocks that lie wholly in `body`; return whether they are kept now. Idempotent."""
        if not body or self._monotonic() < self._off_until_s:
            return not body
        if version.size < SMALL_BYTES:
            return self.write_small([(version, offset, body)])
        try:
            entry = self._find(version)
            if entry is None or entry.unlinked:
                entry = self._create(version)
            fresh = entry.fresh_bytes(offset, offset + len(body))
            if fresh:
                with self._reserved(fresh):
                    if entry.unlinked:  # making room evicted this very version
                        entry = self._create(version)
                    entry.write(offset, body)
            return True
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error, writing=True)
            return False

    def write_small(self, bodies: Iterable[tuple[ObjectVersion, int, Body]]) -> bool:
        """Keep (version, offset, body) of several small versions, as write() does; return whether all are kept now."""
        if self._monotonic() < self._off_until_s:
            return False
        try:
            self._packs.learn(LEARN_MORE_S, when_due=True)
            absent = self._packs.absent(chain.from_iterable(starmap(self._blocks, bodies)))
            pack_bytes = max(PACK_BYTES_MIN, min(PACK_BYTES, self._space.limit_bytes // 32))
            for group in in_groups(absent, pack_bytes):
                with self._packs.appending, self._reserved(self._packs.growth(group, pack_bytes)):
                    self._packs.append(group, pack_bytes)
            return True
        except OSError as error:
            self._pause(error)
            return False

    def adopt(self, version: ObjectVersion, path: Path) -> bool:
        """Take over a complete local file with the bytes of `version`; all of it is read once, for the checksums.
        Its inode then belongs to the cache, and nobody may write to it again. False: the version is not kept (a small
        one never is), and the file is still at `path`."""
        if version.size < SMALL_BYTES or self._monotonic() < self._off_until_s or version.size > self.usage()[1]:
            return False
        place = self._place(version)
        try:
            if path.stat().st_size != version.size:
                return False
            self._space.make_directory(place.stem)
            if not _same_disk(path, Path(place.stem).parent):
                with open(path, "rb") as file:
                    starts = range(0, version.size, _STEP_BYTES)
                    kept = all(self.write(version, start, file.read(_STEP_BYTES)) for start in starts)
                if kept := kept and self.present(version):
                    path.unlink()
                return kept
            with self._reserved(page_rounded(place.sidecar_bytes) + page_rounded(version.size)):
                records = file_records(path)
                with self._space.exclusive():
                    create_files(place, records, path)
        except OSError as error:
            self._forgive(version, error, writing=True)
            return False
        self._open.drop(version)
        # The version is kept by now, or evicted already; if this fails, a later reader checks the checksums again.
        with contextlib.suppress(OSError, CacheCorrupt):
            self._open.keep(version, BlockFile(place)).vouch()
        return True

    def open_for_passthrough(self, version: ObjectVersion) -> int | None:
        """Return a descriptor to read and write a wholly held, checked version; the caller closes it.

        Only one such descriptor of a version exists in all processes, until each copy, the kernel's too, is closed. A
        caller that writes to it has to drop() the version before. None when the version is not wholly held or its
        descriptor is taken, and for a large version that has no valid seal and was not checked by verify() before.
        """

        def opened(entry: BlockFile) -> int | None:
            return entry.reopen() if entry.whole or (version.size <= INLINE_VERIFY_BYTES and entry.verify()) else None

        fd = None if version.size < SMALL_BYTES else self._asked(version, opened)
        if fd is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                return None
        return fd

    def verify(self, version: ObjectVersion) -> bool:
        """Check the checksums of a version that is not small, which waits for the disk; return whether it is whole."""
        return bool(self._asked(version, BlockFile.verify))

    def drop(self, version: ObjectVersion) -> None:
        """Remove a version that is not small; idempotent. Open descriptors still read it."""
        self._open.drop(version)
        with contextlib.suppress(OSError):
            self._space.remove(self._place(version).stem)

    def usage(self) -> tuple[int, int]:
        """Return (bytes on disk, the most that the cache may take there), (0, the limit) if that can't be read.
        The second is the limit, or less if the disk has no room for that."""
        try:
            used = self._space.used_bytes()
            return used, max(used, self._space.room_bytes(used))
        except OSError:
            return 0, self._space.limit_bytes

    def resize(self, limit_bytes: int) -> None:
        """Set another limit, and evict at once what exceeds it."""
        self._space.limit_bytes = limit_bytes
        if self.usage()[0] > limit_bytes:
            self.make_room(0)

    def recount(self) -> None:
        """Count the files again, for usage() after many writes that found no room; evict what exceeds the limit."""
        with contextlib.suppress(OSError):
            self._space.recount()
        self.resize(self._space.limit_bytes)

    def make_room(self, size_bytes: int) -> int:
        """Evict the least recently used files until `size_bytes` fit; return the bytes freed."""
        try:
            freed = self._space.evict(size_bytes)
        except OSError:
            return 0
        self.tidy()
        return freed

    def tidy(self) -> None:
        """Close the files that were evicted, which frees their disk space; a busy cache does so every TOUCH_S."""
        self._packs.files.tidy()
        self._open.tidy()

    def close(self) -> None:
        """Close all descriptors; idempotent. The cache stays usable."""
        self._packs.files.close()
        self._open.close()

    def _asked(self, version: ObjectVersion, ask: Callable[[BlockFile], T | None]) -> T | None:
        """Return what `ask` returns for the files of a version that is not small; None if they are absent or broken."""
        try:
            entry = self._find(version)
            return None if entry is None else ask(entry)
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error)
            return None

    def _forgive(self, version: ObjectVersion, error: CacheCorrupt | OSError, *, writing: bool = False) -> None:
        """Handle an error, so that its only effect is that the version is not cached."""
        if isinstance(error, CacheCorrupt):
            self.drop(version)
            return
        if not isinstance(error, CacheFullError):
            self._open.drop(version)
        if writing:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        """Pause writing after an error. Room comes soon after a CacheFullError, unless other files fill the disk."""
        if not isinstance(error, CacheFullError) or self.usage()[1] < self._space.limit_bytes:
            self._off_until_s = self._monotonic() + PAUSE_S

    def _find(self, version: ObjectVersion) -> BlockFile | None:
        """Return the version's open files, opened if need be; None if they are absent or broken. Errors: OSError."""
        try:
            return self._open.find(version, self._opened)
        except FileNotFoundError:
            return None
        except CacheCorrupt:
            self.drop(version)
            return None

    def _opened(self, version: ObjectVersion) -> BlockFile:
        return BlockFile(self._place(version))

    @contextlib.contextmanager
    def _reserved(self, size_bytes: int) -> Iterator[None]:
        """Count `size_bytes` as taken, evicting where needed. Errors: CacheFullError when there is no room, OSError.
        When the `with` body raises OSError they are given back, so that the count never outgrows the disk. The whole
        blocks that a failed write left are counted again by the next eviction."""
        if size_bytes > self._space.limit_bytes:
            raise CacheFullError("it is larger than the cache")
        if not self._space.reserve(size_bytes):
            self.make_room(size_bytes)
            if not self._space.reserve(size_bytes):
                raise CacheFullError("the cache is full")
        try:
            yield
        except OSError:
            self._space.reserve(-size_bytes)
            raise

    def _create(self, version: ObjectVersion) -> BlockFile:
        """Open the version's files, made here unless another process has made them. Errors: OSError, CacheCorrupt."""
        self._open.drop(version)
        place = self._place(version)
        with self._reserved(page_rounded(place.sidecar_bytes)):
            self._space.make_directory(place.stem)
            with self._space.exclusive():
                try:
                    entry = BlockFile(place)
                except (FileNotFoundError, CacheCorrupt):
                    create_files(place)
                    entry = BlockFile(place)
        entry.touched_s = self._monotonic()
        return self._open.keep(version, entry)

    def _read_small(self, version: ObjectVersion, start: int, stop: int) -> bytes | None:
        parts, first = [], start // BLOCK_BYTES
        for index, name in enumerate(self._names(version, first, -(-stop // BLOCK_BYTES)), first):
            at = index * BLOCK_BYTES
            block = self._packs.read(name, min(BLOCK_BYTES, version.size - at))
            if block is None:
                return None
            parts.append(block[max(0, start - at) : stop - at])
        return b"".join(parts)

    def _names(self, version: ObjectVersion, first: int, last: int) -> list[bytes]:
        """Return the names of the blocks [first, last) of a small version."""
        label = self._label(version)
        return [b"%b%d" % (label, index) for index in range(first, last)]

    def _blocks(self, version: ObjectVersion, offset: int, body: Body) -> Iterator[tuple[bytes, Body]]:
        """Yield (name, bytes) of the blocks of a small version that lie wholly in `body`, which begins at `offset`."""
        first, last = whole_blocks(offset, offset + len(body), version.size)
        view = memoryview(body)[first * BLOCK_BYTES - offset :]
        for name, at in zip(self._names(version, first, last), range(0, len(view), BLOCK_BYTES), strict=False):
            yield name, view[at : at + BLOCK_BYTES]

    def _label(self, version: ObjectVersion) -> bytes:
        # ASCII JSON keeps the surrogates that stand for a key's non-UTF-8 bytes.
        return f"[{self._namespace}, {as_json(version.key)}, {as_json(version.etag)}, {version.size}]".encode("ascii")

    def _place(self, version: ObjectVersion) -> Place:
        label = self._label(version)
        stem = self._space.place(hashlib.blake2b(label, digest_size=16).hexdigest())
        return Place(stem, label, version.size, self._boot_id)


def _same_disk(path: Path, other: Path) -> bool:
    return path.stat().st_dev == other.stat().st_dev
