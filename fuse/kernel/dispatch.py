"""Which request is which call: a table by opcode of (decode, call, encode, undo).

Knows ops.Filesystem and the wire's functions, no file descriptors. Threads: the loop's. `call` makes the coroutine that
serves the request; `undo` comes after `encode`, when the answer turned out not to be wanted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errnos import errno_of
from ..ops import (
    AttrReply,
    Caller,
    DirEntry,
    Entry,
    Fh,
    Filesystem,
    FSError,
    Ino,
    KnowsFilesByName,
    OpenDirReply,
    OpenReply,
    OpenRequest,
    SetAttr,
    StatFs,
)
from . import abi, reply, wire
from .passthrough import OpenModes
from .reply import Body, Frame

T = TypeVar("T")
Serving = Coroutine[Any, Any, T]
Header = tuple[int, int, int, Ino, int, int, int, int, int]
"""len opcode unique nodeid uid gid pid total_extlen padding, as abi.IN_HEADER unpacks it."""


class Operation(NamedTuple):
    """How one opcode is served. Any, because each row has types of its own; the methods below are typed.

    undo: takes back what the answer would have given (a lookup count, an open handle).
    """

    decode: Callable[[memoryview, int], Any]
    call: Callable[[Header, Any], Serving[Any]]
    encode: Callable[[Header, Any, Any], Frame]
    undo: Callable[[Header, Any, Any], Serving[None] | None] | None = None


def _caller(header: Header) -> Caller:
    return Caller(header[4], header[5], header[6])


def _empty(header: Header, _args: object, _result: None) -> bytes:
    return reply.empty(header[2])


def _body(header: Header, _args: object, result: Body) -> list[Body]:
    return reply.body(header[2], result)


def _entry(header: Header, _args: object, result: Entry) -> bytes:
    return reply.entry(header[2], result)


def _attributes(header: Header, _args: object, result: AttrReply) -> bytes:
    return reply.attributes(header[2], result)


def _opened_directory(header: Header, _args: object, result: OpenDirReply) -> bytes:
    flags = (abi.FOPEN_CACHE_DIR if result.cache else 0) | (abi.FOPEN_KEEP_CACHE if result.keep else 0)
    return reply.opened(header[2], result.fh, flags, 0)


class Operations:
    """The table for one file system."""

    def __init__(self, filesystem: Filesystem, modes: OpenModes) -> None:
        self._fs = filesystem
        self._modes = modes

    def table(self) -> list[Operation | None]:
        """By opcode; None is ENOSYS, which the kernel takes as 'not supported' and mostly does not ask again."""
        rows: list[Operation | None] = [None] * abi.OPCODE_LIMIT
        for part in (self._names(), self._files(), self._directories(), self._attributes()):
            for opcode, operation in part.items():
                rows[opcode] = operation
        return rows

    def _names(self) -> dict[int, Operation]:
        forget = self._forget
        fs = self._fs
        return {
            abi.LOOKUP: Operation(wire.name, self._lookup, _entry, forget),
            abi.MKNOD: Operation(wire.mknod, self._mknod, _entry, forget),
            abi.MKDIR: Operation(wire.mkdir, self._mkdir, _entry, forget),
            abi.SYMLINK: Operation(wire.symlink, self._symlink, _entry, forget),
            abi.LINK: Operation(wire.link, self._link, _entry, forget),
            abi.UNLINK: Operation(wire.name, lambda h, name: fs.unlink(_caller(h), h[3], name), _empty),
            abi.RMDIR: Operation(wire.name, lambda h, name: fs.rmdir(_caller(h), h[3], name), _empty),
            abi.RENAME: Operation(wire.rename, self._rename, _empty),
            abi.RENAME2: Operation(wire.rename2, self._rename, _empty),
            abi.READLINK: Operation(wire.nothing, lambda h, _: fs.readlink(h[3]), _body),
        }

    def _files(self) -> dict[int, Operation]:
        return {
            abi.OPEN: Operation(wire.open, self._open, self._opened, self._unopen),
            abi.CREATE: Operation(wire.create, self._create, self._created, self._uncreate),
            abi.READ: Operation(wire.read, self._read, self._content),
            abi.WRITE: Operation(wire.write, self._write, lambda h, _, count: reply.written(h[2], count)),
            abi.FLUSH: Operation(wire.handle, lambda h, fh: self._fs.flush(h[3], fh), _empty),
            abi.FSYNC: Operation(wire.fsync, lambda h, a: self._fs.fsync(h[3], a[0], a[1]), _empty),
            abi.RELEASE: Operation(wire.handle, lambda h, fh: self._fs.release(h[3], fh), _empty),
            abi.FALLOCATE: Operation(
                wire.fallocate, lambda h, a: self._fs.fallocate(h[3], a.fh, a.offset, a.length, a.mode), _empty
            ),
            abi.LSEEK: Operation(wire.lseek, self._lseek, lambda h, _, offset: reply.position(h[2], offset)),
        }

    def _directories(self) -> dict[int, Operation]:
        return {
            abi.OPENDIR: Operation(
                wire.nothing,
                lambda h, _: self._fs.opendir(_caller(h), h[3]),
                _opened_directory,
                lambda h, _, opened: self._fs.releasedir(h[3], opened.fh),
            ),
            abi.READDIR: Operation(wire.read, self._readdir, lambda h, _, lines: reply.directory(h[2], lines)),
            abi.READDIRPLUS: Operation(
                wire.read, self._readdirplus, lambda h, _, lines: reply.directory_plus(h[2], lines), self._forget_lines
            ),
            abi.RELEASEDIR: Operation(wire.handle, self._releasedir, _empty),
        }

    def _attributes(self) -> dict[int, Operation]:
        fs = self._fs
        return {
            abi.GETATTR: Operation(wire.getattr, lambda h, fh: fs.getattr(h[3], fh), _attributes),
            abi.SETATTR: Operation(wire.setattr, self._setattr, _attributes),
            abi.STATFS: Operation(wire.nothing, self._statfs, lambda h, _, s: reply.statfs(h[2], s)),
            abi.SETXATTR: Operation(
                wire.setxattr, lambda h, a: fs.setxattr(_caller(h), h[3], a[0], a[1], a[2]), _empty
            ),
            abi.GETXATTR: Operation(wire.getxattr, lambda h, a: fs.getxattr(h[3], a[1]), self._xattr),
            abi.LISTXATTR: Operation(wire.listxattr, lambda h, _: fs.listxattr(h[3]), self._xattr_list),
            abi.REMOVEXATTR: Operation(
                wire.removexattr, lambda h, name: fs.removexattr(_caller(h), h[3], name), _empty
            ),
        }

    # -- calls

    def _lookup(self, h: Header, name: bytes) -> Serving[Entry]:
        return self._fs.lookup(Caller(h[4], h[5], h[6]), h[3], name)

    def _mknod(self, h: Header, a: wire.MknodRequest) -> Serving[Entry]:
        return self._fs.mknod(_caller(h), h[3], a.name, a.mode, a.rdev)

    def _mkdir(self, h: Header, a: tuple[bytes, int]) -> Serving[Entry]:
        return self._fs.mkdir(_caller(h), h[3], a[0], a[1])

    def _symlink(self, h: Header, a: tuple[bytes, bytes]) -> Serving[Entry]:
        return self._fs.symlink(_caller(h), h[3], a[0], a[1])

    def _link(self, h: Header, a: tuple[int, bytes]) -> Serving[Entry]:
        return self._fs.link(_caller(h), Ino(a[0]), h[3], a[1])

    def _rename(self, h: Header, a: wire.RenameRequest) -> Serving[None]:
        return self._fs.rename(_caller(h), h[3], a.name, Ino(a.new_parent), a.new_name, a.flags)

    def _setattr(self, h: Header, a: tuple[int, SetAttr]) -> Serving[AttrReply]:
        return self._fs.setattr(_caller(h), h[3], Fh(a[0]), a[1])

    def _statfs(self, h: Header, _args: tuple[()]) -> Serving[StatFs]:
        return self._fs.statfs(h[3])

    def _open(self, h: Header, request: OpenRequest) -> Serving[OpenReply]:
        return self._fs.open(Caller(h[4], h[5], h[6]), h[3], request)

    def _create(self, h: Header, a: wire.CreateRequest) -> Serving[tuple[Entry, OpenReply]]:
        return self._fs.create(_caller(h), h[3], a.name, a.mode, a.request)

    def _read(self, h: Header, a: tuple[Fh, int, int]) -> Serving[Body]:
        return self._fs.read(h[3], a[0], a[1], a[2])

    def _write(self, h: Header, a: tuple[Fh, int, memoryview, bool]) -> Serving[int]:
        return self._fs.write(h[3], a[0], a[1], a[2], a[3])

    def _lseek(self, h: Header, a: tuple[int, int, int]) -> Serving[int]:
        return self._fs.lseek(h[3], Fh(a[0]), a[1], a[2])

    def _readdir(self, h: Header, a: tuple[int, int, int]) -> Serving[Sequence[DirEntry]]:
        return self._fs.readdir(h[3], Fh(a[0]), a[1], reply.Budget(a[2], plus=False), False)

    def _readdirplus(self, h: Header, a: tuple[int, int, int]) -> Serving[Sequence[DirEntry]]:
        return self._fs.readdir(h[3], Fh(a[0]), a[1], reply.Budget(a[2], plus=True), True)

    async def _releasedir(self, h: Header, fh: Fh) -> None:
        self._fs.releasedir(h[3], fh)

    # -- answers that need more than the result

    def _content(self, h: Header, a: tuple[int, int, int], content: Body) -> list[Body]:
        if len(content) > a[2]:
            content = memoryview(content)[: a[2]]
        return reply.body(h[2], content)

    def _opened(self, h: Header, request: OpenRequest, result: OpenReply) -> bytes:
        flags, backing_id = self._modes.opened(h[3], request.flags, result)
        return reply.opened(h[2], result.fh, flags, backing_id)

    def _created(self, h: Header, a: wire.CreateRequest, result: tuple[Entry, OpenReply]) -> bytes:
        entry, opened = result
        if entry.attr is None:
            raise ValueError("create() answered a negative entry")
        flags, backing_id = self._modes.opened(entry.attr.ino, a.request.flags, opened)
        return reply.created(h[2], entry, opened.fh, flags, backing_id)

    def _xattr(self, h: Header, a: tuple[int, bytes], content: bytes) -> Frame:
        if not a[0]:
            return reply.xattr_size(h[2], len(content))
        return reply.error(h[2], errno.ERANGE) if len(content) > a[0] else reply.body(h[2], content)

    def _xattr_list(self, h: Header, room: int, names: Sequence[bytes]) -> Frame:
        return self._xattr(h, (room, b""), b"".join(name + b"\0" for name in names))

    # -- undoing

    def _forget(self, _header: Header, _args: object, result: Entry) -> None:
        if result.attr is not None:
            self._fs.forget(result.attr.ino, 1)

    def _forget_lines(self, _header: Header, _args: object, lines: Sequence[DirEntry]) -> None:
        for line in lines:
            if line.entry is not None and line.entry.attr is not None:
                self._fs.forget(line.entry.attr.ino, 1)

    def _unopen(self, h: Header, _args: object, result: OpenReply) -> Serving[None]:
        self._modes.released(h[3])
        return self._fs.release(h[3], result.fh)

    async def _uncreate(self, _header: Header, _args: object, result: tuple[Entry, OpenReply]) -> None:
        entry, opened = result
        if entry.attr is None:
            return
        self._modes.released(entry.attr.ino)
        await self._fs.release(entry.attr.ino, opened.fh)
        self._fs.forget(entry.attr.ino, 1)


DONE_ALREADY = {abi.UNLINK, abi.RMDIR, abi.RENAME, abi.RENAME2}
THERE_ALREADY = {abi.MKNOD, abi.MKDIR, abi.SYMLINK, abi.LINK}
EXTENDED = {(abi.SETXATTR, errno.EEXIST), (abi.REMOVEXATTR, errno.ENODATA)}
"""What XATTR_CREATE and a removal answer when they were carried out before."""
_OTHERS = {abi.CREATE, abi.OPEN, abi.WRITE, abi.FALLOCATE, abi.SETATTR, abi.SETXATTR, abi.REMOVEXATTR}
EXCLUSIVE = DONE_ALREADY | THERE_ALREADY | _OTHERS
"""Sent under the lock of the inode, which nobody else has then: open(2) only with O_TRUNC."""
ORDERED = EXCLUSIVE | {abi.LOOKUP, abi.READDIR, abi.READDIRPLUS}
"""Sent under the lock of the inode, be it one that is shared."""


def inodes_of(header: Header, args: Any) -> set[int]:
    """The inodes whose locks the kernel holds for a request: of names, the directories."""
    return {header[3], getattr(args, "new_parent", header[3])}


async def call_again(operation: Operation, header: Header, args: Any, filesystem: Filesystem) -> Any:
    """Serve a re-sent request: the server that died may have carried it out already, so 'already so' is success."""
    opcode = header[1]
    if opcode == abi.CREATE:
        request = args.request
        unexclusive = OpenRequest(flags=request.flags & ~os.O_EXCL, kill_suidgid=request.kill_suidgid)
        args = args._replace(request=unexclusive)
    try:
        return await operation.call(header, args)
    except Exception as error:
        number = errno_of(error)
        if (opcode in DONE_ALREADY and number == errno.ENOENT) or (opcode, number) in EXTENDED:
            if opcode in (abi.RENAME, abi.RENAME2) and isinstance(filesystem, KnowsFilesByName):
                await filesystem.renamed_before(Ino(header[3]), args.name, Ino(args.new_parent), args.new_name)
            return None
        if opcode in THERE_ALREADY and number == errno.EEXIST:
            return await _found(filesystem, header, args)
        raise


async def _found(filesystem: Filesystem, header: Header, args: Any) -> Entry:
    """What stands under the name that was to be made: args.name, or (name, ...), or for LINK (ino, name)."""
    name = args[1] if header[1] == abi.LINK else args[0]
    entry = await filesystem.lookup(_caller(header), header[3], name)
    if entry.attr is None:
        raise FSError(errno.EEXIST)
    return entry
