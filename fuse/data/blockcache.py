"""On-disk cache of object versions, keyed by (store, credentials, key, etag, size), shared by all mounts of one user.

Caching is a favour: no method raises OSError or CacheCorrupt. A version that can't be read, fails its checksum or was
evicted is "not held"; one that can't be written (disk full, broken, busy) is "not kept", and writing pauses for
PAUSE_S. Shell. Safe for threads (the loop's among them: a hit is two or three system calls) and for several processes
at once:
 - a version of 1 MiB and more has files of its own. A creator and an evictor exclude each other by
   CacheSpace.exclusive(); readers take no lock. An evictor unlinks the sidecar before the data, and a reader opens the
   sidecar, then the data, then checks that the sidecar is still linked: if it is, both belong together. Files that are
   unlinked while open stay readable.
 - the blocks of smaller ones lie in packs, each for itself.
 - directory/objects/xx/<stem>.data, .blocks (blockfile.py); directory/objects/packs/*.pack (packs.py);
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

from ..store.base import Body, ObjectVersion
from .blockfile import BLOCK_BYTES, BlockFile, Place, create_files, file_records, page_rounded, whole_blocks
from .cachespace import CacheFullError, CacheSpace
from .openfiles import OpenFiles
from .packs import Packs, in_groups

OPEN_FILES = 128
"""Versions kept open, two descriptors each: a quarter of the usual limit of 1,024."""
PAUSE_S = 5.0
"""How long writing stays off after the disk failed or was full."""
PACK_BYTES = 8 << 20
"""A pack of this size is full, or of a 32nd of the cache: packs are evicted whole. At least PACK_BYTES_MIN."""
PACK_BYTES_MIN = 64 << 10
LEARN_S = 1.0
"""How long a mount may look at its start for what the packs hold: 300,000 small versions."""
LEARN_MORE_S = 0.2
"""How long a lane may that adds to them."""
SMALL_BYTES = 1 << 20
"""Versions below this size share files: the kernel reads none of them by itself."""
INLINE_VERIFY_BYTES = 4 << 20
"""The most that open_for_passthrough() checks by itself: about 2 ms."""


_STEP_BYTES = 8 << 20
"""Of a file that is copied into the cache."""
T = TypeVar("T")


class BlockCache:
    """INVARIANT: an entry of _open is a BlockFile of exactly that version."""

    def __init__(
        self, directory: Path, size_bytes: int, namespace: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """directory: made when needed, readable by its owner only. namespace: names endpoint, bucket and credentials.

        Touches no disk beyond reading the kernel's boot id.
        """
        self._space = CacheSpace(directory, size_bytes)
        self._packs = Packs(self._space, monotonic)
        self._namespace = as_json(namespace)
        self._monotonic = monotonic
        self._boot_id = _boot_id()
        self._open: OpenFiles[ObjectVersion, BlockFile] = OpenFiles(OPEN_FILES, monotonic)
        self._off_until_s = float("-inf")

    def learn(self) -> None:
        """Find out what small versions the cache has, before the first one is asked for; at most LEARN_S."""
        with contextlib.suppress(OSError):
            self._packs.learn(LEARN_S)

    def read(self, version: ObjectVersion, offset: int, size: int) -> bytes | None:
        """The bytes (short only at the object's end), or None unless wholly held and valid."""
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
        """Keep the whole blocks of `body`; whether they are kept now. Idempotent."""
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
                    if entry.unlinked:  # it was itself what had to make room
                        entry = self._create(version)
                    entry.write(offset, body)
            return True
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error, writing=True)
            return False

    def write_small(self, bodies: Iterable[tuple[ObjectVersion, int, Body]]) -> bool:
        """The same for several small versions, each with an offset and what is there; whether all are kept now."""
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
        """Take over a complete local file with the bytes of `version`; reads all of it once, for the checksums.

        Its inode then belongs to the cache and nobody may write to it again. False: not kept, as a small one never is,
        the file is still at `path`.
        """
        too_large = version.size > self._space.limit_bytes
        if version.size < SMALL_BYTES or too_large or self._monotonic() < self._off_until_s:
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
        # It is kept by now, or evicted already; at worst the checksums are gone through once more.
        with contextlib.suppress(OSError, CacheCorrupt):
            self._open.keep(version, BlockFile(place)).vouch()
        return True

    def open_for_passthrough(self, version: ObjectVersion) -> int | None:
        """A descriptor to read and write a wholly held, checked version, the caller's; one at a time in all processes.

        Who writes to it has to drop the version before. It is in use for as long as anybody, the kernel too, has the
        descriptor or a copy. None also for a large version that this process has not checked yet and that has no valid
        seal: see verify().
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
        """Check a version that is not small against its checksums now, waiting for the disk; whether it is whole."""
        return bool(self._asked(version, BlockFile.verify))

    def drop(self, version: ObjectVersion) -> None:
        """Remove a version that is not small; idempotent. Readers of open descriptors are not disturbed."""
        self._open.drop(version)
        with contextlib.suppress(OSError):
            self._space.remove(self._place(version).stem)

    def usage(self) -> tuple[int, int]:
        """(bytes on disk, bytes that it may take there); 0 bytes when the directory can't be read.

        The second is the limit, or less where the disk has no room for that.
        """
        try:
            used = self._space.used_bytes()
            return used, max(used, self._space.room_bytes(used))
        except OSError:
            return 0, self._space.limit_bytes

    def resize(self, limit_bytes: int) -> None:
        """Another limit; what is over it goes now."""
        self._space.limit_bytes = limit_bytes
        if self.usage()[0] > limit_bytes:
            self.make_room(0)

    def recount(self) -> None:
        """Have usage() say what is on the disk, after much that did not fit; what is over the limit goes."""
        with contextlib.suppress(OSError):
            self._space.recount()
        self.resize(self._space.limit_bytes)

    def make_room(self, size_bytes: int) -> int:
        """Evict what was used longest ago until `size_bytes` fit beside the rest; bytes freed."""
        try:
            freed = self._space.evict(size_bytes)
        except OSError:
            return 0
        self.tidy()
        return freed

    def tidy(self) -> None:
        """Let go of what others evicted, so that the disk gets it back; a busy cache does so itself every TOUCH_S."""
        self._packs.files.tidy()
        self._open.tidy()

    def close(self) -> None:
        """Let go of all descriptors; idempotent. The cache stays usable."""
        self._packs.files.close()
        self._open.close()

    def _asked(self, version: ObjectVersion, ask: Callable[[BlockFile], T | None]) -> T | None:
        """What the files of a version that is not small say; None: there are none, or they are broken."""
        try:
            entry = self._find(version)
            return None if entry is None else ask(entry)
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error)
            return None

    def _forgive(self, version: ObjectVersion, error: CacheCorrupt | OSError, *, writing: bool = False) -> None:
        """The error only means 'no cache'."""
        if isinstance(error, CacheCorrupt):
            self.drop(version)
            return
        if not isinstance(error, CacheFullError):
            self._open.drop(version)
        if writing:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        """It could not be written. Who only finds no room may soon, unless the disk is full of others' files."""
        if not isinstance(error, CacheFullError) or self.usage()[1] < self._space.limit_bytes:
            self._off_until_s = self._monotonic() + PAUSE_S

    def _find(self, version: ObjectVersion) -> BlockFile | None:
        """The open entry, opened where there are good files. OSError."""
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
        """Count `size_bytes` as taken, evicting where needed. CacheFullError, OSError.

        They are not taken when the disk fails meanwhile, so that the count never outgrows the disk. What a failing
        write left of whole blocks counts again from the next eviction on.
        """
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
        """The entry, with new files unless another process was quicker. OSError, CacheCorrupt."""
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
        """Of the blocks [first, last) of a small version."""
        label = self._label(version)
        return [b"%b%d" % (label, index) for index in range(first, last)]

    def _blocks(self, version: ObjectVersion, offset: int, body: Body) -> Iterator[tuple[bytes, Body]]:
        """The blocks of a small version that lie wholly in `body`, which is at `offset`, by their names."""
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


def _boot_id() -> bytes:
    """This boot of the machine, 16 bytes; b"" where the kernel has no such thing (macOS): checksums do it there."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


def _same_disk(path: Path, other: Path) -> bool:
    return path.stat().st_dev == other.stat().st_dev
