"""Serves a Filesystem through libfuse's path-based interface (mfusepy): on macOS, and on hosts without /dev/fuse.

The adapter is thin and has libfuse's limits: each call walks its path again; a file that is unlinked while it is open
becomes `.fuse_hidden*` until it is closed; there is no passthrough, the mount does not survive a crash of the server,
and the kernel gets no invalidations (it drops old pages when the file is opened instead).
Threads: libfuse's threads wait for coroutines of the event loop, which a thread of its own turns.
Importing this module loads libfuse (FUSE_LIBRARY_PATH names it where it is not found).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

import mfusepy

from datastore.errors import MountFailed
from datastore.retry import Call, one_call

from .. import ops
from ..errnos import errno_of
from ..kernel.abi import SECOND_NS
from ..kernel.reply import Budget
from ..ops import NOW, ROOT_INO, Attr, Caller, Entry, Fh, FSError, Ino, OpenReply, OpenRequest, SetAttr

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
UTIME_NOW = (1 << 30) - 1  # utimensat(2), in tv_nsec
UTIME_OMIT = (1 << 30) - 2
LISTING_BYTES = 64 << 10
KEPT_LOOKUPS = 10_000
"""Of how many inodes lookups are kept; without them the Filesystem would forget each directory after each call."""


def _st(attr: Attr) -> dict[str, int]:
    told = {f"st_{name.removesuffix('_ns')}": number for name, number in attr._asdict().items() if name != "used"}
    return {**told, "st_blocks": attr.blocks()}


def _caller() -> Caller:
    return Caller(*mfusepy.fuse_get_context())


class Adapter(mfusepy.Operations):  # type: ignore[misc]  # mfusepy ships no types
    """Has one method for each call of libfuse. Paths are text, with surrogates for bytes that are not UTF-8."""

    use_ns = True

    def __init__(self, filesystem: ops.Filesystem, ttl_s: float, ready: Callable[[], None]) -> None:
        self._fs = filesystem
        self._ttl_s = ttl_s
        self._ready = ready
        self._inodes: dict[int, Ino] = {}  # the inodes of open files, by handle
        self._directories: dict[int, Ino] = {}  # of open directories, whose handles are numbered separately
        self._kept: OrderedDict[Ino, int] = OrderedDict()
        """How many lookups of each inode are not given back yet. Only the loop's thread may use it."""

    def _call(self, method: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with one_call(Call(time.monotonic())):
                return self._fs.loop.run(method(*args, **kwargs))
        except Exception as error:
            number = errno_of(error)
            if number is None:
                log.exception("an unexpected error was answered with EIO")
            raise mfusepy.FuseOSError(number or errno.EIO) from error

    # -- paths

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[Ino]:
        """Yield the inode at a path; the lookups that found it are given back some time afterwards."""
        names = [name for name in os.fsencode(path).split(b"/") if name]
        found: list[Ino] = []
        try:
            if names:
                self._call(self._walk, _caller(), names, found)
            yield found[-1] if found else ROOT_INO
        finally:
            self._give_back(found)

    async def _walk(self, caller: Caller, names: list[bytes], found: list[Ino]) -> None:
        for name in names:
            entry = await self._fs.lookup(caller, found[-1] if found else ROOT_INO, name)
            if entry.attr is None:
                raise FSError(errno.ENOENT)
            found.append(entry.attr.ino)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[Ino, bytes]]:
        head, _, name = path.rstrip("/").rpartition("/")
        with self._at(head) as parent:
            yield parent, os.fsencode(name)

    def _by_path(self, path: str, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """Call the method with the inode at the path and with args."""
        with self._at(path) as ino:
            return self._call(method, ino, *args)

    def _by_name(self, path: str, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """Call the method with the caller, the inode of the path's directory, its last name, and args."""
        with self._parent(path) as (parent, name):
            return self._call(method, _caller(), parent, name, *args)

    def _made(self, entry: Entry) -> int:
        """Give back the lookup of an entry that libfuse does not keep, and return 0 for success."""
        if entry.attr is not None:
            self._give_back([entry.attr.ino])
        return 0

    def _give_back(self, inos: list[Ino]) -> None:
        """Keep these lookups, and forget the oldest ones beyond KEPT_LOOKUPS: nodes are often wanted again soon."""

        def keep() -> None:
            for ino in inos:
                self._kept[ino] = self._kept.pop(ino, 0) + 1
            while len(self._kept) > KEPT_LOOKUPS:
                self._fs.forget(*self._kept.popitem(last=False))

        if inos:
            self._fs.loop.soon(keep)

    def _handle(self, fi: Any) -> tuple[Ino, Fh]:
        return self._inodes[fi.fh], Fh(fi.fh)

    def _at_open(self, path: str | None, fi: Any, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """Call the method with the inode and handle of an open file, or those of the path (handle 0), and with args."""
        if fi is not None and fi.fh in self._inodes:
            return self._call(method, *self._handle(fi), *args)
        return self._by_path(path or "/", method, Fh(0), *args)

    # -- the session

    def init_with_config(self, conn: Any, config: Any) -> None:
        """Make the settings that libfuse takes only here, and report that it is set up."""
        if conn is not None:
            conn.max_write = conn.max_readahead = 1 << 20
            conn.max_background = 64
        if config is not None:  # libfuse 3
            config.use_ino = 1
            config.nullpath_ok = 1
            config.entry_timeout = config.attr_timeout = config.negative_timeout = self._ttl_s
        self._ready()

    # -- names

    def getattr(self, path: str | None, fi: Any = None) -> dict[str, int]:
        return _st(self._at_open(path, fi, self._fs.getattr).attr)

    def readlink(self, path: str) -> str:
        return os.fsdecode(self._by_path(path, self._fs.readlink))

    def mknod(self, path: str, mode: int, dev: int) -> int:
        return self._made(self._by_name(path, self._fs.mknod, mode, dev))

    def mkdir(self, path: str, mode: int) -> int:
        return self._made(self._by_name(path, self._fs.mkdir, mode))

    def unlink(self, path: str) -> None:
        self._by_name(path, self._fs.unlink)

    def rmdir(self, path: str) -> None:
        self._by_name(path, self._fs.rmdir)

    def symlink(self, target: str, source: str) -> int:
        """Create a symbolic link. The names are mfusepy's: `target` is the path of the link, `source` its content."""
        return self._made(self._by_name(target, self._fs.symlink, os.fsencode(source)))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        with self._parent(new) as (new_parent, new_name):
            self._by_name(old, self._fs.rename, new_parent, new_name, flags)

    def link(self, target: str, source: str) -> int:
        with self._at(source) as ino, self._parent(target) as (parent, name):
            return self._made(self._call(self._fs.link, _caller(), ino, parent, name))

    # -- attributes

    def change(self, path: str | None, fi: Any, changes: SetAttr) -> None:
        """Carry out chmod, chown, truncate or utimens."""
        self._at_open(path, fi, partial(self._fs.setattr, _caller()), changes)

    def chmod(self, path: str | None, mode: int, fi: Any = None) -> None:
        self.change(path, fi, SetAttr(mode=mode))

    def chown(self, path: str | None, uid: int, gid: int, fi: Any = None) -> None:
        wanted = SetAttr(uid=None if uid == -1 else uid, gid=None if gid == -1 else gid, kill_suidgid=True)
        self.change(path, fi, wanted)

    def truncate(self, path: str | None, length: int, fi: Any = None) -> None:
        self.change(path, fi, SetAttr(size=length))

    def utimens(self, path: str | None, times: tuple[int | None, int | None] | None = None, fi: Any = None) -> None:
        atime_ns, mtime_ns = times or (NOW, NOW)
        self.change(path, fi, SetAttr(atime_ns=atime_ns, mtime_ns=mtime_ns))

    def statfs(self, path: str) -> dict[str, int]:
        s = self._by_path(path, self._fs.statfs)
        sizes = {"f_bsize": s.block_size, "f_frsize": s.block_size, "f_namemax": s.name_max}
        free = {"f_bfree": s.blocks_free, "f_bavail": s.blocks_free, "f_ffree": s.files_free, "f_favail": s.files_free}
        return {**sizes, **free, "f_blocks": s.blocks, "f_files": s.files}

    def getxattr(self, path: str, name: str, *_position: int) -> bytes:
        return self._by_path(path, self._fs.getxattr, os.fsencode(name))

    def setxattr(self, path: str, name: str, value: bytes, options: int, *_position: int) -> None:
        self._by_path(path, partial(self._fs.setxattr, _caller()), os.fsencode(name), value, options)

    def listxattr(self, path: str) -> list[str]:
        return [os.fsdecode(name) for name in self._by_path(path, self._fs.listxattr)]

    def removexattr(self, path: str, name: str) -> None:
        self._by_path(path, partial(self._fs.removexattr, _caller()), os.fsencode(name))

    # -- files; fi is libfuse's fuse_file_info (raw_fi)

    def _opened(self, ino: Ino, reply: OpenReply, fi: Any) -> int:
        self._inodes[reply.fh] = ino
        fi.fh, fi.keep_cache, fi.direct_io = reply.fh, int(reply.keep_cache), int(reply.direct_io)
        return 0

    def open(self, path: str, fi: Any) -> int:
        with self._at(path) as ino:
            return self._opened(ino, self._call(self._fs.open, _caller(), ino, OpenRequest(flags=fi.flags)), fi)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        entry, reply = self._by_name(path, self._fs.create, mode, OpenRequest(flags=fi.flags))
        if entry.attr is None:
            raise FSError(errno.EIO)
        self._made(entry)
        return self._opened(entry.attr.ino, reply, fi)

    def read(self, path: str | None, size: int, offset: int, fi: Any) -> bytes:
        return bytes(self._call(self._fs.read, *self._handle(fi), offset, size))

    def write(self, path: str | None, content: bytes, offset: int, fi: Any) -> int:
        return self._call(self._fs.write, *self._handle(fi), offset, memoryview(content), True)

    def flush(self, path: str | None, fi: Any) -> None:
        self._call(self._fs.flush, *self._handle(fi))

    def fsync(self, path: str | None, datasync: int, fi: Any) -> None:
        self._call(self._fs.fsync, *self._handle(fi), bool(datasync))

    def release(self, path: str | None, fi: Any) -> None:
        ino, fh = self._handle(fi)
        del self._inodes[fh]
        self._call(self._fs.release, ino, fh)

    def fallocate(self, path: str | None, mode: int, offset: int, size: int, fi: Any) -> None:
        self._call(self._fs.fallocate, *self._handle(fi), offset, size, mode)

    # -- directories

    def opendir(self, path: str) -> int:
        with self._at(path) as ino:
            fh = self._call(self._fs.opendir, _caller(), ino).fh
            self._directories[fh] = ino
            return fh

    def readdir_with_offset(self, path: str | None, offset: int, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """Yield all lines from cursor `offset` on; libfuse stops taking them when its buffer is full."""
        ino = self._directories[fh]
        while lines := self._call(self._fs.readdir, ino, Fh(fh), offset, Budget(LISTING_BYTES, plus=False), False):
            for line in lines:
                yield os.fsdecode(line.name), {"st_ino": line.ino, "st_mode": line.mode}, line.offset
            offset = lines[-1].offset

    def releasedir(self, path: str | None, fh: int) -> None:
        ino = self._directories.pop(fh)
        self._fs.loop.call(partial(self._fs.releasedir, ino, Fh(fh)))


class Loop(mfusepy.FUSE):  # type: ignore[misc]  # mfusepy ships no types
    """Passes on what mfusepy's own loop drops from libfuse 3: rename's flags, the open file, UTIME_NOW, UTIME_OMIT."""

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        self.operations.rename(os.fsdecode(old), os.fsdecode(new), flags)
        return 0

    def chmod_fuse_3(self, path: bytes | None, mode: int, fip: Any) -> int:
        return _done(self.operations.chmod, path, mode, fip=fip)

    def chown_fuse_3(self, path: bytes | None, uid: int, gid: int, fip: Any) -> int:
        signed = (ctypes.c_int32(uid).value, ctypes.c_int32(gid).value)
        return _done(self.operations.chown, path, *signed, fip=fip)

    def truncate_fuse_3(self, path: bytes | None, length: int, fip: Any) -> int:
        return _done(self.operations.truncate, path, length, fip=fip)

    def utimens_fuse_3(self, path: bytes | None, buffer: Any, fip: Any) -> int:
        times = (_time(buffer.contents.actime), _time(buffer.contents.modtime)) if buffer else None
        return _done(self.operations.utimens, path, times, fip=fip)


def _done(method: Callable[..., None], path: bytes | None, *args: object, fip: Any) -> int:
    method(None if path is None else os.fsdecode(path), *args, fip.contents if fip else None)
    return 0


def _time(spec: Any) -> int | None:
    if spec.tv_nsec == UTIME_OMIT:
        return None
    return NOW if spec.tv_nsec == UTIME_NOW else spec.tv_sec * SECOND_NS + spec.tv_nsec


def serve(
    filesystem: ops.Filesystem,
    *,
    mountpoint: str,
    name: str,
    read_only: bool,
    allow_other: bool,
    ttl_s: float,
    ready: Callable[[], None],
) -> str:
    """Mount, serve until unmounted; return how it ended. ready: called when libfuse is set up. Errors: MountFailed."""
    loop, over = filesystem.loop, threading.Event()

    def turn() -> None:
        with loop.turning():
            while not over.is_set():
                loop.turn()
            loop.close()

    turning = threading.Thread(target=turn, name="loop", daemon=True)
    turning.start()
    loop.call(partial(filesystem.start, ops.Notifier()))
    adapter = Adapter(filesystem, ttl_s, ready)
    try:
        Loop(
            adapter,
            mountpoint,
            raw_fi=True,
            foreground=True,
            fsname=name.replace(",", "\\,"),
            subtype="datastore",
            default_permissions=True,
            ro=read_only,
            allow_other=allow_other or os.geteuid() == 0,
        )
    except RuntimeError as error:
        raise MountFailed(
            f"libfuse could not mount at {mountpoint} (exit code {error}); its own words are above"
        ) from error
    finally:
        loop.run(filesystem.stop())
        loop.soon(over.set)
        turning.join()
    return "unmounted"
