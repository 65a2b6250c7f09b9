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
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from json.encoder import encode_basestring_ascii as as_json
from pathlib import Path
from typing import NamedTuple

from datastore.errors import CacheCorrupt

from ..store.base import Body, ObjectVersion
from .blockfile import (
    BLOCK_BYTES,
    BlockFile,
    Identity,
    create_files,
    draft_sidecar,
    file_records,
    page_rounded,
    whole_blocks,
)
from .cachespace import CacheSpace
from .packs import TOUCH_S, Packs, in_groups

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


class _Place(NamedTuple):
    """Where a version's files are, and what they must say."""

    data_path: str
    sidecar_path: str
    identity: Identity


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
        self._lock = threading.Lock()
        self._open: OrderedDict[ObjectVersion, BlockFile] = OrderedDict()
        self._off_until_s = float("-inf")
        self._tidied_s = float("-inf")

    def learn(self) -> None:
        """Find out what small versions the cache has, before the first one is asked for; at most LEARN_S."""
        with contextlib.suppress(OSError):
            self._packs.learn(LEARN_S)

    def read(self, version: ObjectVersion, offset: int, size: int) -> bytes | None:
        """The bytes (short only at the object's end), or None unless wholly held and valid."""
        stop = min(offset + size, version.size)
        if offset >= stop:
            return b""
        try:
            if is_small(version):
                return self._read_small(version, offset, stop)
            entry = self._find(version)
            return None if entry is None else entry.read(offset, stop)
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error)
            return None

    def holds(self, version: ObjectVersion, start: int, stop: int) -> bool:
        """Whether [start, stop) is recorded as held (its checksums may still turn out wrong)."""
        stop = min(stop, version.size)
        if start >= stop:
            return True
        try:
            if is_small(version):
                return all(map(self._packs.holds, self._block_names(version, start, stop)))
            entry = self._find(version)
            return entry is not None and entry.holds(start, stop)
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error)
            return False

    def present(self, version: ObjectVersion) -> bool:
        """Whether the whole version is recorded as held."""
        return self.holds(version, 0, version.size)

    def write(self, version: ObjectVersion, offset: int, body: Body) -> bool:
        """Keep the whole blocks of `body`; whether they are kept now. Idempotent."""
        if not body or self._monotonic() < self._off_until_s:
            return not body
        if is_small(version):
            return self.write_small([(version, offset, body)])
        try:
            entry = self._find(version)
            if entry is None or entry.unlinked:
                entry = self._create(version)
            fresh = 0 if entry is None else entry.fresh_bytes(offset, offset + len(body))
            if fresh and not self._reserve(fresh):
                return False
            with self._given_back(fresh):
                if fresh and entry is not None and entry.unlinked:  # it was itself what had to make room
                    entry = self._create(version)
                if entry is not None:
                    entry.write(offset, body)
            return entry is not None
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error, writing=True)
            return False

    def write_small(self, bodies: Iterable[tuple[ObjectVersion, int, Body]]) -> bool:
        """The same for several small versions, each with an offset and what is there; whether all are kept now."""
        if self._monotonic() < self._off_until_s:
            return False
        try:
            self._packs.learn_when_due(LEARN_MORE_S)
            absent = self._packs.absent(block for each in bodies for block in self._blocks(*each))
            pack_bytes = max(PACK_BYTES_MIN, min(PACK_BYTES, self._space.limit_bytes // 32))
            for group in in_groups(absent, pack_bytes):
                taken_bytes = self._packs.growth(group, pack_bytes)
                if not self._reserve(taken_bytes):
                    return False
                with self._given_back(taken_bytes):
                    self._packs.append(group, pack_bytes)
            return True
        except OSError:
            self._off_until_s = self._monotonic() + PAUSE_S
            return False

    def adopt(self, version: ObjectVersion, path: Path, *, keep: bool = False) -> bool:
        """Take over a complete local file with the bytes of `version`; reads all of it once, for the checksums.

        Its inode then belongs to the cache and nobody may write to it again. keep: copy instead, the file stays the
        caller's. False: not kept, as a small one never is, the file is still at `path`.
        """
        if is_small(version) or self._monotonic() < self._off_until_s:
            return False
        try:
            return self._adopt(version, path, keep=keep)
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error, writing=True)
            return False

    def open_for_passthrough(self, version: ObjectVersion) -> int | None:
        """A descriptor to read and write a wholly held, checked version, the caller's; one at a time in all processes.

        Who writes to it has to drop the version before. It is in use for as long as anybody, the kernel too, has the
        descriptor or a copy. None also for a large version that this process has not checked yet and that has no valid
        seal: see verify().
        """
        if is_small(version):
            return None
        try:
            entry = self._find(version)
            if entry is None or not (entry.whole or (version.size <= INLINE_VERIFY_BYTES and entry.verify())):
                return None
            fd = entry.reopen(self._place(version).data_path)
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error)
            return None
        if fd is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                return None
        return fd

    def verify(self, version: ObjectVersion) -> bool:
        """Check a version that is not small against its checksums now, waiting for the disk; whether it is whole."""
        try:
            entry = self._find(version)
            return entry is not None and (entry.whole or entry.verify())
        except (CacheCorrupt, OSError) as error:
            self._forgive(version, error)
            return False

    def drop(self, version: ObjectVersion) -> None:
        """Remove a version that is not small; idempotent. Readers of open descriptors are not disturbed."""
        self._let_go(version)
        with contextlib.suppress(OSError):
            self._space.remove(self._place(version).data_path)

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
        self._tidied_s = self._monotonic()
        self._packs.tidy()
        with self._lock:
            for version in [version for version, entry in self._open.items() if entry.unlinked]:
                del self._open[version]

    def close(self) -> None:
        """Let go of all descriptors; idempotent. The cache stays usable."""
        self._packs.close()
        with self._lock:
            self._open.clear()

    def _forgive(self, version: ObjectVersion, error: CacheCorrupt | OSError, *, writing: bool = False) -> None:
        """The error only means 'no cache'."""
        if isinstance(error, CacheCorrupt):
            self.drop(version)
            return
        self._let_go(version)
        if writing:
            self._off_until_s = self._monotonic() + PAUSE_S

    def _let_go(self, version: ObjectVersion) -> None:
        with self._lock:
            self._open.pop(version, None)

    def _find(self, version: ObjectVersion) -> BlockFile | None:
        """The open entry, opened where there are good files. OSError."""
        with self._lock:
            entry = self._open.get(version)
            if entry is not None:
                self._open.move_to_end(version)
        if entry is None:
            try:
                entry = BlockFile(*self._place(version))
            except FileNotFoundError:
                return None
            except CacheCorrupt:
                self.drop(version)
                return None
            entry = self._remember(version, entry)
        return entry if self._touch(version, entry) else None

    def _remember(self, version: ObjectVersion, entry: BlockFile) -> BlockFile:
        with self._lock:
            entry = self._open.setdefault(version, entry)
            while len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        return entry

    def _touch(self, version: ObjectVersion, entry: BlockFile) -> bool:
        """Say on disk, now and then, that it is in use; False (and let go) when it was evicted meanwhile."""
        now_s = self._monotonic()
        if now_s < entry.touched_s + TOUCH_S:
            return True
        entry.touched_s = now_s
        if now_s >= self._tidied_s + TOUCH_S:
            self.tidy()
        if entry.unlinked:
            self._let_go(version)
            return False
        entry.touch()
        return True

    def _reserve(self, size_bytes: int) -> bool:
        """Count `size_bytes` as taken, evicting where needed; False when there is no room. OSError."""
        if size_bytes > self._space.limit_bytes:
            return False
        if self._space.reserve(size_bytes):
            return True
        self.make_room(size_bytes)
        if self._space.reserve(size_bytes):
            return True
        if self.usage()[1] < self._space.limit_bytes:  # the disk is full of others' files, and will be for some time
            self._off_until_s = self._monotonic() + PAUSE_S
        return False

    @contextlib.contextmanager
    def _given_back(self, size_bytes: int) -> Iterator[None]:
        """What was reserved for the block is not taken when the disk fails, so that the count never outgrows the disk.

        What a failing write left of whole blocks counts again from the next eviction on.
        """
        try:
            yield
        except OSError:
            self._space.reserve(-size_bytes)
            raise

    def _create(self, version: ObjectVersion) -> BlockFile | None:
        """The entry, with new files unless another process was quicker; None: no room. OSError, CacheCorrupt."""
        self._let_go(version)
        place = self._place(version)
        taken_bytes = page_rounded(place.identity.sidecar_bytes)
        if not self._reserve(taken_bytes):
            return None
        with self._given_back(taken_bytes):
            self._space.make_directory(place.data_path)
            with self._space.exclusive():
                try:
                    entry = BlockFile(*place)
                except (FileNotFoundError, CacheCorrupt):
                    create_files(*place)
                    entry = BlockFile(*place)
        entry.touched_s = self._monotonic()
        return self._remember(version, entry)

    def _adopt(self, version: ObjectVersion, path: Path, *, keep: bool) -> bool:
        place = self._place(version)
        data_path, sidecar_path, identity = place
        if path.stat().st_size != version.size:
            return False
        if not self._reserve(page_rounded(identity.sidecar_bytes) + page_rounded(version.size)):
            return False
        parent = Path(data_path).parent
        self._space.make_directory(data_path)
        copied = keep or not _same_disk(path, parent)
        source = Path(f"{data_path}.{os.getpid()}-{threading.get_ident()}") if copied else path
        try:
            if copied:
                shutil.copyfile(path, source)
            records = file_records(source)
            with self._space.exclusive():
                draft = draft_sidecar(sidecar_path, identity.head() + records, identity.sidecar_bytes)
                Path(sidecar_path).unlink(missing_ok=True)
                source.replace(data_path)
                os.replace(draft, sidecar_path)
        finally:
            if copied:
                source.unlink(missing_ok=True)
        if not keep:
            path.unlink(missing_ok=True)
        self._let_go(version)
        with contextlib.suppress(OSError):  # it is kept by now; at worst the checksums are gone through once more
            self._remember(version, BlockFile(*place)).vouch()
        return True

    def _read_small(self, version: ObjectVersion, start: int, stop: int) -> bytes | None:
        parts = []
        at = start // BLOCK_BYTES * BLOCK_BYTES
        for name in self._block_names(version, start, stop):
            block = self._packs.read(name, min(BLOCK_BYTES, version.size - at))
            if block is None:
                return None
            parts.append(block[max(0, start - at) : stop - at])
            at += BLOCK_BYTES
        return b"".join(parts)

    def _block_names(self, version: ObjectVersion, start: int, stop: int) -> Iterator[bytes]:
        """Of the blocks that [start, stop) of a small version touches."""
        label = self._label(version)
        return (b"%b%d" % (label, index) for index in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))

    def _blocks(self, version: ObjectVersion, offset: int, body: Body) -> Iterator[tuple[bytes, Body]]:
        """The blocks of a small version that lie wholly in `body`, which is at `offset`, by their names."""
        first, last = whole_blocks(offset, offset + len(body), version.size)
        view, at = memoryview(body), first * BLOCK_BYTES - offset
        for name in self._block_names(version, first * BLOCK_BYTES, last * BLOCK_BYTES):
            yield name, view[at : at + BLOCK_BYTES]
            at += BLOCK_BYTES

    def _label(self, version: ObjectVersion) -> bytes:
        # ASCII JSON keeps the surrogates that stand for a key's non-UTF-8 bytes.
        return f"[{self._namespace}, {as_json(version.key)}, {as_json(version.etag)}, {version.size}]".encode("ascii")

    def _place(self, version: ObjectVersion) -> _Place:
        label = self._label(version)
        stem = self._space.place(hashlib.blake2b(label, digest_size=16).hexdigest())
        identity = Identity(label=label, size=version.size, boot_id=self._boot_id)
        return _Place(f"{stem}.data", f"{stem}.blocks", identity)


def is_small(version: ObjectVersion) -> bool:
    """Whether it shares files with others."""
    return version.size < SMALL_BYTES


def _boot_id() -> bytes:
    """This boot of the machine, 16 bytes; b"" where the kernel has no such thing (macOS): checksums do it there."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


def _same_disk(path: Path, other: Path) -> bool:
    return path.stat().st_dev == other.stat().st_dev
