"""Which request is which call: a table by opcode of (decode, call, encode, undo).

Knows ops.Filesystem and the wire's functions, no file descriptors. Threads: the loop's. `call` makes the coroutine that
serves the request; `undo` comes after the answer was encoded, when it turned out not to be wanted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errnos import errno_of
from ..ops import Caller, DirEntry, Entry, Filesystem, FSError, Ino, KnowsFilesByName, OpenReply, OpenRequest
from . import abi, reply, wire
from .passthrough import OpenModes
from .reply import Frame

Serving = Coroutine[Any, Any, Any]
Header = tuple[int, int, int, Ino, int, int, int, int, int]
"""len opcode unique nodeid uid gid pid total_extlen padding, as abi.IN_HEADER unpacks it."""


class Operation(NamedTuple):
    """How one opcode is served. Any, because each row has types of its own.

    encode: the answer's frame, of its number and the result; explain: the same, where the request is needed for it.
    undo: takes back what the answer would have given (a lookup count, an open handle).
    """

    decode: Callable[[memoryview], Any]
    call: Callable[[Header, Any], Serving]
    encode: Callable[[int, Any], Frame] = reply.empty
    explain: Callable[[Header, Any, Any], Frame] | None = None
    undo: Callable[[Header, Any], Serving | None] | None = None


def _caller(header: Header) -> Caller:
    return Caller(header[4], header[5], header[6])


def _by_inode(method: Callable[..., Serving]) -> Callable[[Header, Any], Serving]:
    return lambda h, args: method(h[3], *args)


def _by_caller(method: Callable[..., Serving]) -> Callable[[Header, Any], Serving]:
    return lambda h, args: method(Caller(h[4], h[5], h[6]), h[3], *args)


def _xattr(h: Header, args: tuple[int, ...], content: bytes) -> Frame:
    room = args[0]
    if not room:
        return reply.xattr_size(h[2], len(content))
    return reply.error(h[2], errno.ERANGE) if len(content) > room else reply.body(h[2], content)


def operations(fs: Filesystem, modes: OpenModes) -> list[Operation | None]:
    """The table for one file system, by opcode; None is ENOSYS, which the kernel takes as 'not supported' and mostly
    does not ask again."""

    def forget(_header: Header, result: Entry) -> None:
        if result.attr is not None:
            fs.forget(result.attr.ino, 1)

    def forget_lines(header: Header, lines: Sequence[DirEntry]) -> None:
        for line in lines:
            if line.entry is not None:
                forget(header, line.entry)

    def opened(h: Header, args: tuple[OpenRequest], result: OpenReply) -> bytes:
        return reply.opened(h[2], result.fh, *modes.opened(h[3], args[0].flags, result))

    def created(h: Header, args: wire.CreateRequest, result: tuple[Entry, OpenReply]) -> bytes:
        entry, opened = result
        if entry.attr is None:
            raise ValueError("create() answered a negative entry")
        return reply.created(h[2], entry, opened.fh, *modes.opened(entry.attr.ino, args.request.flags, opened))

    def unopen(h: Header, result: OpenReply) -> Serving:
        modes.released(h[3])
        return fs.release(h[3], result.fh)

    async def uncreate(_header: Header, result: tuple[Entry, OpenReply]) -> None:
        entry, opened = result
        if entry.attr is not None:
            modes.released(entry.attr.ino)
            await fs.release(entry.attr.ino, opened.fh)
            fs.forget(entry.attr.ino, 1)

    def readdir(*, plus: bool) -> Callable[[Header, Any], Serving]:
        return lambda h, a: fs.readdir(h[3], a[0], a[1], reply.Budget(a[2], plus=plus), plus)

    async def releasedir(h: Header, args: Any) -> None:
        fs.releasedir(h[3], *args)

    rows = {
        abi.LOOKUP: Operation(wire.name, _by_caller(fs.lookup), reply.entry, undo=forget),
        abi.MKNOD: Operation(wire.mknod, _by_caller(fs.mknod), reply.entry, undo=forget),
        abi.MKDIR: Operation(wire.mkdir, _by_caller(fs.mkdir), reply.entry, undo=forget),
        abi.SYMLINK: Operation(wire.symlink, _by_caller(fs.symlink), reply.entry, undo=forget),
        abi.LINK: Operation(wire.link, lambda h, a: fs.link(_caller(h), a[0], h[3], a[1]), reply.entry, undo=forget),
        abi.UNLINK: Operation(wire.name, _by_caller(fs.unlink)),
        abi.RMDIR: Operation(wire.name, _by_caller(fs.rmdir)),
        abi.RENAME: Operation(wire.rename, _by_caller(fs.rename)),
        abi.RENAME2: Operation(wire.rename2, _by_caller(fs.rename)),
        abi.READLINK: Operation(wire.nothing, _by_inode(fs.readlink), reply.body),
        abi.OPEN: Operation(wire.open, _by_caller(fs.open), explain=opened, undo=unopen),
        abi.CREATE: Operation(wire.create, _by_caller(fs.create), explain=created, undo=uncreate),
        abi.READ: Operation(wire.read, _by_inode(fs.read), reply.body),
        abi.WRITE: Operation(wire.write, _by_inode(fs.write), reply.written),
        abi.FLUSH: Operation(wire.handle, _by_inode(fs.flush)),
        abi.FSYNC: Operation(wire.fsync, _by_inode(fs.fsync)),
        abi.RELEASE: Operation(wire.handle, _by_inode(fs.release)),
        abi.FALLOCATE: Operation(wire.fallocate, _by_inode(fs.fallocate)),
        abi.LSEEK: Operation(wire.lseek, _by_inode(fs.lseek), reply.position),
        abi.OPENDIR: Operation(
            wire.nothing,
            _by_caller(fs.opendir),
            reply.opened_directory,
            undo=lambda h, found: fs.releasedir(h[3], found.fh),
        ),
        abi.READDIR: Operation(wire.read, readdir(plus=False), reply.directory),
        abi.READDIRPLUS: Operation(wire.read, readdir(plus=True), reply.directory_plus, undo=forget_lines),
        abi.RELEASEDIR: Operation(wire.handle, releasedir),
        abi.GETATTR: Operation(wire.getattr, _by_inode(fs.getattr), reply.attributes),
        abi.SETATTR: Operation(wire.setattr, _by_caller(fs.setattr), reply.attributes),
        abi.STATFS: Operation(wire.nothing, _by_inode(fs.statfs), reply.statfs),
        abi.SETXATTR: Operation(wire.setxattr, _by_caller(fs.setxattr)),
        abi.GETXATTR: Operation(wire.getxattr, lambda h, a: fs.getxattr(h[3], a[1]), explain=_xattr),
        abi.LISTXATTR: Operation(
            wire.listxattr,
            lambda h, _: fs.listxattr(h[3]),
            explain=lambda h, a, names: _xattr(h, a, b"".join(name + b"\0" for name in names)),
        ),
        abi.REMOVEXATTR: Operation(wire.removexattr, _by_caller(fs.removexattr)),
    }
    return [rows.get(opcode) for opcode in range(abi.OPCODE_LIMIT)]


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
        request: OpenRequest = args.request
        args = args._replace(request=replace(request, flags=request.flags & ~os.O_EXCL))
    try:
        return await operation.call(header, args)
    except Exception as error:
        number = errno_of(error)
        if (opcode in DONE_ALREADY and number == errno.ENOENT) or (opcode, number) in EXTENDED:
            if opcode in (abi.RENAME, abi.RENAME2) and isinstance(filesystem, KnowsFilesByName):
                await filesystem.renamed_before(header[3], args.name, args.new_parent, args.new_name)
            return None
        if opcode in THERE_ALREADY and number == errno.EEXIST:
            return await _found(filesystem, header, args)
        raise


async def _found(filesystem: Filesystem, header: Header, args: Any) -> Entry:
    """What stands under the name that was to be made: (name, ...), or for LINK (ino, name)."""
    name = args[1] if header[1] == abi.LINK else args[0]
    entry = await filesystem.lookup(_caller(header), header[3], name)
    if entry.attr is None:
        raise FSError(errno.EEXIST)
    return entry
