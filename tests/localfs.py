"""Calls an ops.Filesystem by paths, as a process would through the kernel; for tests without a mount.

It caches nothing: every step looks the name up anew, so that tests see what the file system answers.
"""

from __future__ import annotations

import errno
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from datastore.errors import DatastoreError
from datastore.fuse.errnos import errno_of
from datastore.fuse.ops import (
    ROOT_INO,
    Attr,
    Caller,
    DirEntry,
    Fh,
    Filesystem,
    FSError,
    Ino,
    OpenRequest,
    SetAttr,
)
from datastore.retry import Call, current_call, one_call
from tests.driving import resolve

T = TypeVar("T")
ME = Caller(1000, 1000, 1)


class _Calls:
    """The file system's methods as system calls: each blocks, has one budget of retries and raises OSError."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._fs, name)

        def call(*arguments: object) -> Any:
            try:
                with one_call(current_call() or Call(time.monotonic())):
                    reply = method(*arguments)
                    return resolve(reply) if inspect.iscoroutine(reply) else reply
            except FSError as error:
                raise OSError(error.errno, error.strerror or os.strerror(error.errno or 0)) from error
            except DatastoreError as error:
                raise OSError(errno_of(error), str(error)) from error

        return call


class _Unlimited:
    def take(self, name_length: int) -> bool:
        return True


class File:
    """An open file."""

    def __init__(self, fs: Filesystem, ino: Ino, fh: Fh) -> None:
        self._call, self.ino, self._fh = _Calls(fs), ino, fh

    def read(self, offset: int = 0, size: int = 1 << 30) -> bytes:
        end = min(offset + size, self.stat().size)
        out = b""
        while offset < end:
            piece = bytes(self._call.read(self.ino, self._fh, offset, min(1 << 20, end - offset)))
            if not piece:
                break
            out += piece
            offset += len(piece)
        return out

    def write(self, content: bytes, offset: int = 0) -> int:
        return int(self._call.write(self.ino, self._fh, offset, memoryview(content), False))

    def truncate(self, size: int) -> None:
        self._call.setattr(ME, self.ino, self._fh, SetAttr(size=size))

    def stat(self) -> Attr:
        return cast("Attr", self._call.getattr(self.ino, self._fh).attr)

    def fsync(self) -> None:
        self._call.fsync(self.ino, self._fh, False)

    def fallocate(self, mode: int, offset: int, length: int) -> None:
        self._call.fallocate(self.ino, self._fh, offset, length, mode)

    def close(self) -> None:
        """Flush, then release; an error of flush is raised after the release."""
        if not self._fh:
            return
        try:
            self._call.flush(self.ino, self._fh)
        finally:
            self._call.release(self.ino, self._fh)


class LocalFs:
    """The system calls of one caller, by path."""

    def __init__(self, fs: Filesystem, caller: Caller = ME) -> None:
        self.fs = fs
        self._call = _Calls(fs)
        self._caller = caller

    def lookup(self, path: str | bytes) -> Attr:
        parent, name = self._split(path)
        return self._child(parent, name) if name else self._call.getattr(parent, Fh(0)).attr

    stat = lookup

    def exists(self, path: str | bytes) -> bool:
        try:
            self.lookup(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: str | bytes, flags: int = os.O_RDONLY, mode: int = 0o644) -> File:
        return self._walked(lambda: self._open(path, flags, mode))

    @staticmethod
    def _walked(call: Callable[[], T]) -> T:
        """Make a call; upon ESTALE walk the path once more, as the kernel does (do_filp_open, retry_estale)."""
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return call()

    def _open(self, path: str | bytes, flags: int, mode: int) -> File:
        parent, name = self._split(path)
        if flags & os.O_CREAT:
            try:
                found = self._child(parent, name)
            except FileNotFoundError:
                entry, reply = self._call.create(self._caller, parent, name, 0o100000 | mode, OpenRequest(flags=flags))
                assert entry.attr is not None
                return File(self.fs, entry.attr.ino, reply.fh)
            if flags & os.O_EXCL:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        else:
            found = self._child(parent, name)
        return self._opened(found.ino, flags & ~os.O_CREAT)

    def _opened(self, ino: Ino, flags: int) -> File:
        try:
            reply = self._call.open(self._caller, ino, OpenRequest(flags=flags))
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            return File(self.fs, ino, Fh(0))  # the kernel goes on without a handle
        return File(self.fs, ino, reply.fh)

    @contextmanager
    def opened(self, path: str | bytes, flags: int = os.O_RDONLY, mode: int = 0o644) -> Iterator[File]:
        file = self.open(path, flags, mode)
        try:
            yield file
        finally:
            file.close()

    def read(self, path: str | bytes) -> bytes:
        with self.opened(path) as file:
            return file.read()

    def write(self, path: str | bytes, content: bytes) -> None:
        with self.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            for at in range(0, len(content), 1 << 20):
                file.write(content[at : at + (1 << 20)], at)

    def listdir(self, path: str | bytes = "") -> list[bytes]:
        return sorted(name for name, _ in self.scandir(path))

    def scandir(self, path: str | bytes = "", *, plus: bool = False) -> list[tuple[bytes, int]]:
        """Return (name, type bits) of each entry but "." and ".."."""
        return [(entry.name, entry.mode & 0o170000) for entry in self._listed(self._directory(path), plus=plus)]

    def told(self, path: str | bytes = "") -> int:
        """Return for how many entries a listing has the attributes too, so that they need no lookup."""
        return sum(1 for each in self._listed(self._directory(path), plus=True) if each.entry and each.entry.attr_ttl_s)

    def _directory(self, path: str | bytes) -> Ino:
        parent, name = self._split(path)
        return self._child(parent, name).ino if name else parent

    def _listed(self, ino: Ino, *, plus: bool) -> list[DirEntry]:
        fh = self._call.opendir(self._caller, ino).fh
        entries = self._call.readdir(ino, fh, 0, _Unlimited(), plus)
        self.fs.loop.call(lambda: self.fs.releasedir(ino, fh))
        return [entry for entry in entries if entry.name not in (b".", b"..")]

    def tree(self) -> dict[str, bytes]:
        """Return the whole tree as `cp -r` reads it: a file's content, a link's target, and b"" for all else."""
        found: dict[str, bytes] = {}
        waiting = [("", ROOT_INO)]
        while waiting:
            path, ino = waiting.pop()
            for entry in self._listed(ino, plus=True):
                inner = path + os.fsdecode(entry.name)
                attr = entry.entry.attr if entry.entry and entry.entry.attr else self._child(ino, entry.name)
                if attr.mode & 0o170000 == 0o040000:
                    waiting.append((f"{inner}/", attr.ino))
                    found[f"{inner}/"] = b""
                else:
                    found[inner] = self._content(attr)
        return found

    def _content(self, attr: Attr) -> bytes:
        if attr.mode & 0o170000 == 0o120000:
            return bytes(self._call.readlink(attr.ino))
        if attr.mode & 0o170000 != 0o100000:
            return b""
        file = self._opened(attr.ino, os.O_RDONLY)
        try:
            return file.read()
        finally:
            file.close()

    def mkdir(self, path: str | bytes, mode: int = 0o755) -> None:
        self._call.mkdir(self._caller, *self._new(path), mode)

    def mknod(self, path: str | bytes, mode: int, rdev: int = 0) -> None:
        self._call.mknod(self._caller, *self._new(path), mode, rdev)

    def symlink(self, target: bytes, path: str | bytes) -> None:
        self._call.symlink(self._caller, *self._new(path), target)

    def readlink(self, path: str | bytes) -> bytes:
        return bytes(self._call.readlink(self.lookup(path).ino))

    def unlink(self, path: str | bytes) -> None:
        self._call.unlink(self._caller, *self._split(path))

    def rmdir(self, path: str | bytes) -> None:
        self._call.rmdir(self._caller, *self._split(path))

    def rename(self, old: str | bytes, new: str | bytes, flags: int = 0) -> None:
        parent, name = self._split(old)
        new_parent, new_name = self._split(new)
        self._call.rename(self._caller, parent, name, new_parent, new_name, flags)

    def setattr(self, path: str | bytes, changes: SetAttr) -> Attr:
        reply = self._walked(lambda: self._call.setattr(self._caller, self.lookup(path).ino, Fh(0), changes))
        return cast("Attr", reply.attr)

    def chmod(self, path: str | bytes, mode: int) -> None:
        self.setattr(path, SetAttr(mode=mode))

    def truncate(self, path: str | bytes, size: int) -> None:
        self.setattr(path, SetAttr(size=size))

    def setxattr(self, path: str | bytes, name: bytes, content: bytes, flags: int = 0) -> None:
        self._walked(lambda: self._call.setxattr(self._caller, self.lookup(path).ino, name, content, flags))

    def getxattr(self, path: str | bytes, name: bytes) -> bytes:
        return bytes(self._call.getxattr(self.lookup(path).ino, name))

    def listxattr(self, path: str | bytes) -> list[bytes]:
        return list(self._call.listxattr(self.lookup(path).ino))

    def removexattr(self, path: str | bytes, name: bytes) -> None:
        self._call.removexattr(self._caller, self.lookup(path).ino, name)

    def _new(self, path: str | bytes) -> tuple[Ino, bytes]:
        """Return parent and name of something to create. Errors: EEXIST, as the kernel's, if the name exists."""
        parent, name = self._split(path)
        entry = self._call.lookup(self._caller, parent, name)
        if entry.attr is not None:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        return parent, name

    def _split(self, path: str | bytes) -> tuple[Ino, bytes]:
        parts = [part for part in os.fsencode(path).split(b"/") if part]
        ino = ROOT_INO
        for part in parts[:-1]:
            attr = self._child(ino, part)
            if attr.mode & 0o170000 != 0o040000:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            ino = attr.ino
        return ino, parts[-1] if parts else b""

    def _child(self, parent: Ino, name: bytes) -> Attr:
        entry = self._call.lookup(self._caller, parent, name)
        if entry.attr is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if entry.attr_ttl_s <= 0:
            try:
                return cast("Attr", self._call.getattr(entry.attr.ino, Fh(0)).attr)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            entry = self._call.lookup(self._caller, parent, name)  # as the kernel does
            if entry.attr is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return cast("Attr", entry.attr)
