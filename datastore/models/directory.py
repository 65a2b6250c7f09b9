"""A store of models in a mounted directory: a local disk, NFS, SFTP, or any other file system with exclusive creation.

A document is replaced under a lock: the symlink `.NAME.lock`, whose creation is exclusive and whose target holds a
token and the owning process. The new content is written to `.NAME.TOKEN.tmp`, the present content is compared, and
rename(2) replaces it. A process that dies in between leaves the lock. Another writer breaks the lock at once when it
sees that the owner is dead, otherwise after STALE_S by the clock of the file system. It first removes the owner's
temporary file, so that an owner that was only suspended can no longer rename it. A new document gets its name by a call
that fails if the name is taken: a mount may believe for a second that it is free, when another client has taken it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from datastore import mountinfo
from datastore.errors import (
    AccessDenied,
    AlreadyExists,
    DeadlineExceeded,
    KeyTooLong,
    NotFound,
    OutOfSpace,
    PreconditionFailed,
    ServerFault,
    StoreError,
    Unsupported,
)
from datastore.models import owner
from datastore.models.errors import SourceChanged, SourceInvalid
from datastore.models.manifest import Entry
from datastore.models.storage import Body, Document, Name, Node, Piece, ReadableTree, Tag, Tree, compare, leads_inside

STALE_S = 60.0
"""Age in seconds at which a lock may be broken; a lock is held for a read and a rename only."""
WAIT_S = 90.0
"""How many seconds a writer waits for a lock beyond the time after which a lock is stale."""
_TRIES = 3
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_SEPARATOR = "|"
_LOCK, _TEMPORARY, _BROKEN = ".lock", ".tmp", ".broken"
_LEFT_OVER = re.compile(r"\..+\.[0-9a-f]{16}\.(tmp|broken)")
"""The name of a temporary file, and of a lock that was being broken: with a token between the dots."""

_NOT_EXCLUSIVE = {
    "fuse.s3fs": "s3fs",
    "fuse.rclone": "rclone",
    "fuse.geesefs": "geesefs",
    "fuse.goofys": "goofys",
    "fuse.mount-s3": "mountpoint-s3",
    "fuse.mountpoint-s3": "mountpoint-s3",
    "fuse.gcsfuse": "gcsfuse",
    "fuse.blobfuse2": "blobfuse2",
}
"""The types of file systems over object stores, where creating a file is exclusive only within one machine."""

_ERRORS: dict[int, type[StoreError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.ENOTEMPTY: AlreadyExists,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.ENOSPC: OutOfSpace,
    errno.EDQUOT: OutOfSpace,
    errno.ENAMETOOLONG: KeyTooLong,
    errno.EOPNOTSUPP: Unsupported,
    errno.ETIMEDOUT: DeadlineExceeded,
}


@contextmanager
def storage_errors(path: str | Path) -> Iterator[None]:
    """Raise an OSError as the StoreError that means the same."""
    try:
        yield
    except OSError as error:
        kind = _ERRORS.get(error.errno or 0, ServerFault)
        raise kind(f"{path}: {error.strerror or error}") from error


class DirectoryStorage:
    """See Storage. root: an absolute path. location: for people, where the data of a mounted directory is."""

    def __init__(self, root: str | Path, *, location: str = "", stale_s: float = STALE_S) -> None:
        self.location = location or str(root)
        self._root = Path(root)
        self._stale_s = stale_s

    def check(self) -> None:
        """See Storage. Refuses file systems on which two machines can create the same file."""
        if not self._root.is_dir():
            raise NotFound(f"{self._root}: there is no such directory; make it, or correct the path of the store")
        if (made_by := _made_by(self._root)) is not None:
            raise Unsupported(
                f"{self._root} is mounted by {made_by}, on which two machines can create the same file, so "
                "versions and aliases are not safe there; give the store as a Datastore with spec.s3"
            )

    def read(self, path: str, limit: int | None = None) -> Document:
        """See Storage. With a limit, the tag is not that of the document, and is of no use."""
        with storage_errors(self._at(path)), self._at(path).open("rb") as file:
            body = file.read() if limit is None else file.read(limit)
        return Document(body, _tag(body))

    def age_s(self, path: str) -> float:
        """See Storage. Both times are from the clock of the file system."""
        at = self._at(path)
        with storage_errors(at):
            written = at.stat().st_mtime
            probe = at.with_name(f".{at.name}.{secrets.token_hex(8)}{_TEMPORARY}")
            probe.touch()
            try:
                return max(0.0, probe.stat().st_mtime - written)
            finally:
                probe.unlink(missing_ok=True)

    def create(self, path: str, body: bytes) -> Tag:
        """See Storage."""
        return self._swap(path, body, None)

    def replace(self, path: str, body: bytes, tag: Tag) -> Tag:
        """See Storage."""
        return self._swap(path, body, tag)

    def remove(self, path: str) -> None:
        """See Storage."""
        with storage_errors(self._at(path)):
            self._at(path).unlink(missing_ok=True)

    def names(self, path: str) -> list[Name]:
        """See Storage. Names that begin with a dot are left out."""
        with storage_errors(self._at(path)):
            try:
                with os.scandir(self._at(path)) as found:
                    return [
                        Name(each.name, each.is_dir(follow_symlinks=False))
                        for each in found
                        if not each.name.startswith(".")
                    ]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def tree(self, path: str) -> DirectoryTree:
        """See Storage."""
        return DirectoryTree(self._at(path), location=f"{self.location}/{path}")

    def sweep(self, path: str) -> int:
        """See Storage. Removes temporary files and locks that are older than any writer waits."""
        at = self._at(path)
        removed = 0
        with storage_errors(at):
            for name in os.listdir(at) if at.is_dir() else ():
                with suppress(FileNotFoundError):  # its writer has just ended
                    if _is_left_over(at / name) and time.time() - os.lstat(at / name).st_mtime > self._stale_s + WAIT_S:
                        (at / name).unlink()
                        removed += 1
        return removed

    def _at(self, path: str) -> Path:
        return self._root / path if path else self._root

    def _swap(self, path: str, body: bytes, expected: Tag | None) -> Tag:
        at = self._at(path)
        with storage_errors(at):
            at.parent.mkdir(parents=True, exist_ok=True)
            if expected is None and at.exists():
                raise AlreadyExists(f"{at}: is there already", key=path)
            for _ in range(_TRIES):
                token = secrets.token_hex(8)
                fresh = at.with_name(f".{at.name}.{token}{_TEMPORARY}")
                try:
                    _write_durably(fresh, body)
                    with self._locked(at, token, fresh.stat().st_mtime) as began:
                        present = _content(at)
                        if expected is None and present is not None:
                            raise AlreadyExists(f"{at}: is there already", key=path)
                        if expected is not None and (present is None or _tag(present) != expected):
                            raise PreconditionFailed(f"{at}: was changed by another writer meanwhile", key=path)
                        publish = _named_first if expected is None else os.rename
                        if time.monotonic() - began < self._stale_s / 2 and _renamed(publish, fresh, at):
                            _sync_directory(at.parent)
                            return _tag(body)
                finally:
                    fresh.unlink(missing_ok=True)
        raise DeadlineExceeded(f"{at}: the file system took too long to answer while the document was locked", key=path)

    @contextmanager
    def _locked(self, at: Path, token: str, now_s: float) -> Iterator[float]:
        """Hold a document's lock; yield the monotonic time at which it was taken. now_s: the file system's time now."""
        lock = at.with_name(f".{at.name}{_LOCK}")
        ours = owner.identity()
        refused = 0
        began = time.monotonic()
        while True:
            try:
                os.symlink(_SEPARATOR.join((token, ours["kernel"], ours["process"])), lock)
                break
            except OSError as error:
                taken, whose = _owner(lock)
                # SFTP (version 3) has no error for "it exists", and the lock that caused the error may be gone by now.
                refused += not isinstance(error, FileExistsError) and not taken
                if refused > _TRIES:
                    raise
            if taken == token:  # our symlink was made, but the answer was lost
                break
            waited_s = time.monotonic() - began
            with suppress(FileNotFoundError):
                stale = now_s + waited_s - os.lstat(lock).st_mtime > self._stale_s
                if taken and (stale or owner.is_dead(whose)):
                    _break(lock, at, taken, token)
                    continue
            if waited_s > self._stale_s + WAIT_S:
                raise DeadlineExceeded(f"{at}: another writer does not let go of it ({lock})")
            time.sleep(0.002 + secrets.randbelow(20) / 1000)
        try:
            yield time.monotonic()
        finally:
            if _owner(lock)[0] == token:
                lock.unlink(missing_ok=True)


def _break(lock: Path, at: Path, dead: str, token: str) -> None:
    """Remove a dead owner's lock. A writer that has it by now loses its temporary file, and has to retry."""
    at.with_name(f".{at.name}.{dead}{_TEMPORARY}").unlink(missing_ok=True)
    broken = lock.with_name(f".{at.name}.{token}{_BROKEN}")
    os.rename(lock, broken)
    moved, _ = _owner(broken)
    if moved and moved != dead:
        at.with_name(f".{at.name}.{moved}{_TEMPORARY}").unlink(missing_ok=True)
    broken.unlink(missing_ok=True)


def _is_left_over(at: Path) -> bool:
    """Return whether a name is that of a temporary file or lock of ours; others keep files in the same directories."""
    if at.name.startswith(".") and at.name.endswith(_LOCK) and at.is_symlink():
        return _SEPARATOR in os.readlink(at)
    return _LEFT_OVER.fullmatch(at.name) is not None


def _renamed(publish: Callable[[Path, Path], None], fresh: Path, at: Path) -> bool:
    """Give a file its name; return False when another writer considered this one dead and removed the file."""
    try:
        publish(fresh, at)
    except FileNotFoundError:
        return False
    return True


def _named_first(fresh: Path, at: Path) -> None:
    """Give a file a name that is free on the server. Errors: FileExistsError. Disks and NFS do it by link(2), SFTP by
    renameat2(2); where neither works (S3), nothing but the lock keeps two writers apart."""
    try:
        os.link(fresh, at)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(at), _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(at))
    os.rename(fresh, at)


def _owner(lock: Path) -> tuple[str, dict[str, str]]:
    """Return a lock's token and the identity of its process (see owner.py); '' when the lock is gone."""
    try:
        token, _, process = os.readlink(lock).partition(_SEPARATOR)
    except FileNotFoundError:
        return "", {}
    kernel, _, number = process.partition(_SEPARATOR)
    return token, {"kernel": kernel, "process": number}


def _content(at: Path) -> bytes | None:
    try:
        return at.read_bytes()
    except FileNotFoundError:
        return None


def _tag(body: bytes) -> Tag:
    return Tag(hashlib.sha256(body).hexdigest())


def _write_durably(path: Path, body: bytes) -> None:
    with path.open("xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some file systems don't sync directories
            raise
    finally:
        os.close(fd)


def _made_by(path: Path) -> str | None:
    """Return which program shows an object store as the file system at a path; None for other file systems."""
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    for mount in mountinfo.read().mounts:
        if mount.device == numbers:
            own = mount.fstype == mountinfo.FSTYPE and mount.source.startswith("s3://")
            return "datastore from a bucket" if own else _NOT_EXCLUSIVE.get(mount.fstype)
    return None


class DirectoryTree:
    """See Tree. within: the directory above, in which a link out of the tree must end; None: links aren't checked.
    location: as in DirectoryStorage."""

    def __init__(self, root: str | Path, *, within: str | Path | None = None, location: str = "") -> None:
        self.location = location or str(root)
        self._root = Path(root)
        self._within = None if within is None else Path(within).resolve()
        self._modes: list[tuple[Path, int]] = []

    @property
    def path(self) -> Path:
        """The path of the directory."""
        return self._root

    def scan(self) -> list[Node]:
        """See Tree."""
        with storage_errors(self._root):
            if not self._root.is_dir():
                if self._root.exists():
                    raise SourceInvalid(f"{self._root}: is no directory; give the directory that it is in")
                raise NotFound(f"{self._root}: there is no such directory")
            return list(self._below(""))

    def read(self, node: Node, start: int, stop: int) -> Piece:
        """See Tree. Each chunk opens the file again, as a scan may find more files than a process can have open."""
        path = self._root / (node.at or node.path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SourceChanged(f"{path}: is gone; save it again when nobody writes there") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise SourceChanged(f"{path}: became a symbolic link while it was read") from None
            with storage_errors(path):
                raise
        try:
            with storage_errors(path):
                self._confine(fd, path)
                body = os.pread(fd, stop - start, start)
                while len(body) < stop - start and (more := os.pread(fd, stop - start - len(body), start + len(body))):
                    body += more
                found = os.fstat(fd)
        finally:
            os.close(fd)
        if len(body) != stop - start or (node.state and _state(found) != node.state):
            raise SourceChanged(f"{path}: changed while it was read; save it again when nobody writes there")
        return Piece(body, found.st_mode)

    def begin(self) -> None:
        """See Tree."""
        with storage_errors(self._root):
            self._root.mkdir(parents=True)

    def write(self, path: str, mode: int, size: int) -> _FileSink:
        """See Tree."""
        return _FileSink(self._root / path, mode)

    def make(self, entry: Entry, *, bare: bool) -> None:
        """See Tree. A directory gets its mode in settle(), because the mode may forbid writing in the directory."""
        at = self._root / entry.path
        with storage_errors(at):
            if entry.kind == "symlink":
                os.symlink(entry.target, at)
                return
            at.mkdir(mode=0o700, exist_ok=True)
            self._modes.append((at, entry.mode))

    def copy(self, source: ReadableTree, node: Node, path: str, mode: int) -> str | None:
        """See Tree. Never possible, so the bytes pass through this process."""
        return None

    def reaches(self, source: ReadableTree, node: Node) -> bool:
        """See Tree."""
        return False

    def adopt(self, tree: Tree, entry: Entry, state: str) -> str | None:
        """See Tree. The file is renamed."""
        if not isinstance(tree, DirectoryTree):
            return None
        there, here = tree._root / entry.path, self._root / entry.path
        with storage_errors(here):
            try:
                found = os.lstat(there)
                if _state(found, renamed=True) != state or stat.S_IMODE(found.st_mode) != entry.mode:
                    return None
                os.rename(there, here)
            except FileNotFoundError:
                return None
            return state

    def settle(self, entries: Sequence[Entry]) -> None:
        """See Tree."""
        with storage_errors(self._root):
            for at, mode in reversed(self._modes):
                at.chmod(mode)
            self._modes.clear()
            compare(self.location, entries, list(self._below("")))
            for entry in entries:
                if entry.kind == "directory":
                    _sync_directory(self._root / entry.path)
            _sync_directory(self._root)
            _sync_directory(self._root.parent)

    def is_quiet(self) -> bool:
        """See Tree. Always true, because a system call has ended when it returns."""
        return True

    def discard(self, path: str) -> None:
        """See Tree."""
        with storage_errors(self._root / path):
            (self._root / path).unlink(missing_ok=True)

    def remove(self) -> int:
        """See Tree."""
        with storage_errors(self._root):
            return _remove(self._root)

    def _below(self, path: str) -> Iterator[Node]:
        with os.scandir(self._root / path) as found:
            names = sorted(found, key=lambda each: each.name)
        for each in names:
            below = f"{path}/{each.name}" if path else each.name
            node = self._node(below, each.stat(follow_symlinks=False))
            yield node
            if node.kind == "directory":
                yield from self._below(below)

    def _node(self, path: str, found: os.stat_result) -> Node:
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISREG(found.st_mode):
            return Node(path, "file", found.st_size, mode, at=path, state=_state(found))
        if stat.S_ISDIR(found.st_mode):
            return Node(path, "directory", mode=mode)
        if not stat.S_ISLNK(found.st_mode):
            raise SourceInvalid(f"{self._root / path}: is a device, socket or FIFO, which no version can hold")
        target = os.readlink(self._root / path)
        return self._outside(path, target) or Node(path, "symlink", target=target)

    def _outside(self, path: str, target: str) -> Node | None:
        """Return the file that replaces a link out of the tree; None: the link stays inside, or isn't checked."""
        if self._within is None or leads_inside(path, target):
            return None
        link = self._root / path
        try:
            real = link.resolve(strict=True)
        except (OSError, RuntimeError):
            real = None
        if real is None or not real.is_relative_to(self._within) or not real.is_file():
            where, way = f" of {self._within}", "; `model save --follow-links` does so for a directory of this machine"
            if self._within == Path("/"):  # links are followed already
                where, way = "", ""
            raise SourceInvalid(
                f"{link}: is a symbolic link to {target}, which is no file{where}; a version must hold all that it "
                f"needs, so remove the link, or put the file there{way}"
            )
        found = real.stat()
        mode = stat.S_IMODE(found.st_mode)
        return Node(path, "file", found.st_size, mode, at=str(real), state=_state(found))

    def _confine(self, fd: int, path: Path) -> None:
        """Errors: SourceChanged when an open file is outside the tree, because a directory above it became a link."""
        allowed = self._within or self._root.resolve()
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not real.is_relative_to(allowed):
            raise SourceChanged(f"{path}: is not inside {allowed} any more")


class _FileSink:
    """See Sink."""

    def __init__(self, at: Path, mode: int) -> None:
        self.state = ""
        self._at = at
        self._mode = mode
        self._fd = -1

    def write(self, chunk: Body) -> None:
        """See Sink."""
        view = memoryview(chunk)
        with storage_errors(self._at):
            while view:
                view = view[os.write(self._fd, view) :]

    def __enter__(self) -> Self:
        with storage_errors(self._at):
            self._fd = os.open(self._at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with storage_errors(self._at):
                    os.fchmod(self._fd, self._mode)
                    os.fsync(self._fd)
                    self.state = _state(os.fstat(self._fd), renamed=True)
        except BaseException:
            self._at.unlink(missing_ok=True)
            raise
        finally:
            os.close(self._fd)
        if error is not None:
            self._at.unlink(missing_ok=True)


def _state(found: os.stat_result, *, renamed: bool = False) -> str:
    """Return a text for Node.state. renamed: only what a rename leaves unchanged."""
    return f"{found.st_size}:{found.st_mtime_ns}" + ("" if renamed else f":{found.st_ctime_ns}")


def _remove(at: Path) -> int:
    """Remove a directory and all below it, also what its mode protects; return how many files went."""
    try:
        if not stat.S_ISDIR(os.lstat(at).st_mode):
            at.unlink()
            return 1
        at.chmod(0o700)
        removed = sum(_remove(at / name) for name in os.listdir(at))
        at.rmdir()
    except FileNotFoundError:
        return 0
    return removed
