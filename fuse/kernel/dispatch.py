"""A table that says for each opcode how its request is decoded, served by a file system, answered and undone.

It knows ops.Filesystem and the wire's functions, but no file descriptors. Only the loop's thread may use it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errnos import errno_of
from ..ops import Caller, DirEntry, Entry, Fh, Filesystem, FSError, Ino, KnowsFilesByName, OpenReply, OpenRequest
from . import abi, reply, wire
from .passthrough import OpenModes
from .reply import Frame

Serving = Coroutine[Any, Any, Any]
Header = tuple[int, int, int, Ino, int, int, int, int, int]
"""(len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding), as abi.IN_HEADER unpacks a request's header."""


class Operation(NamedTuple):
    """How the requests of one opcode are served. The types are Any, because each row of the table has types of its own.

    method: makes the coroutine that serves a request, from the caller (only if by_caller), the inode and what `decode`
    returned. encode: makes the answer's frame from `unique` and the result; explain, if set, makes it from the header,
    the decoded arguments and the result instead. undo: takes back what an encoded answer would have given (a lookup
    count, an open handle), when nobody waits for that answer any more.
    """

    decode: Callable[[memoryview], Any]
    method: Callable[..., Serving]
    encode: Callable[[int, Any], Frame] = reply.empty
    explain: Callable[[Header, Any, Any], Frame] | None = None
    undo: Callable[[Header, Any], Serving | None] | None = None
    by_caller: bool = False


def _xattr(h: Header, args: tuple[int, ...], content: bytes) -> Frame:
    room = args[0]
    if not room:
        return reply.xattr_size(h[2], len(content))
    return reply.error(h[2], errno.ERANGE) if len(content) > room else reply.body(h[2], content)


def operations(fs: Filesystem, modes: OpenModes) -> list[Operation | None]:
    """Return the table of one file system, indexed by opcode. None: no coroutine of the file system serves the opcode;
    Session._special() does, mostly with ENOSYS, which the kernel takes as 'not supported' and mostly asks only once.
    After that it takes a file for one piece of data at LSEEK (SEEK_DATA, SEEK_HOLE)."""

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

    def readdir(*, plus: bool) -> Callable[..., Serving]:
        return lambda ino, fh, offset, size: fs.readdir(ino, fh, offset, reply.Budget(size, plus=plus), plus)

    async def releasedir(ino: Ino, fh: Fh) -> None:
        fs.releasedir(ino, fh)

    def link(caller: Caller, parent: Ino, ino: Ino, name: bytes) -> Serving:
        return fs.link(caller, ino, parent, name)

    rows = {
        abi.LOOKUP: Operation(wire.name, fs.lookup, reply.entry, undo=forget, by_caller=True),
        abi.MKNOD: Operation(wire.mknod, fs.mknod, reply.entry, undo=forget, by_caller=True),
        abi.MKDIR: Operation(wire.mkdir, fs.mkdir, reply.entry, undo=forget, by_caller=True),
        abi.SYMLINK: Operation(wire.symlink, fs.symlink, reply.entry, undo=forget, by_caller=True),
        abi.LINK: Operation(wire.link, link, reply.entry, undo=forget, by_caller=True),
        abi.UNLINK: Operation(wire.name, fs.unlink, by_caller=True),
        abi.RMDIR: Operation(wire.name, fs.rmdir, by_caller=True),
        abi.RENAME: Operation(wire.rename, fs.rename, by_caller=True),
        abi.RENAME2: Operation(wire.rename2, fs.rename, by_caller=True),
        abi.READLINK: Operation(wire.nothing, fs.readlink, reply.body),
        abi.OPEN: Operation(wire.open, fs.open, explain=opened, undo=unopen, by_caller=True),
        abi.CREATE: Operation(wire.create, fs.create, explain=created, undo=uncreate, by_caller=True),
        abi.READ: Operation(wire.read, fs.read, reply.body),
        abi.WRITE: Operation(wire.write, fs.write, reply.written),
        abi.FLUSH: Operation(wire.handle, fs.flush),
        abi.FSYNC: Operation(wire.fsync, fs.fsync),
        abi.RELEASE: Operation(wire.handle, fs.release),
        abi.FALLOCATE: Operation(wire.fallocate, fs.fallocate),
        abi.OPENDIR: Operation(
            wire.nothing,
            fs.opendir,
            reply.opened_directory,
            by_caller=True,
            undo=lambda h, found: fs.releasedir(h[3], found.fh),
        ),
        abi.READDIR: Operation(wire.read, readdir(plus=False), reply.directory),
        abi.READDIRPLUS: Operation(wire.read, readdir(plus=True), reply.directory_plus, undo=forget_lines),
        abi.RELEASEDIR: Operation(wire.handle, releasedir),
        abi.GETATTR: Operation(wire.getattr, fs.getattr, reply.attributes),
        abi.SETATTR: Operation(wire.setattr, fs.setattr, reply.attributes, by_caller=True),
        abi.STATFS: Operation(wire.nothing, fs.statfs, reply.statfs),
        abi.SETXATTR: Operation(wire.setxattr, fs.setxattr, by_caller=True),
        abi.GETXATTR: Operation(wire.getxattr, lambda ino, _room, name: fs.getxattr(ino, name), explain=_xattr),
        abi.LISTXATTR: Operation(
            wire.listxattr,
            lambda ino, _room: fs.listxattr(ino),
            explain=lambda h, a, names: _xattr(h, a, b"".join(name + b"\0" for name in names)),
        ),
        abi.REMOVEXATTR: Operation(wire.removexattr, fs.removexattr, by_caller=True),
    }
    return [rows.get(opcode) for opcode in range(abi.OPCODE_LIMIT)]


DONE_ALREADY = {abi.UNLINK, abi.RMDIR, abi.RENAME, abi.RENAME2}
THERE_ALREADY = {abi.MKNOD, abi.MKDIR, abi.SYMLINK, abi.LINK}
EXTENDED = {(abi.SETXATTR, errno.EEXIST), (abi.REMOVEXATTR, errno.ENODATA)}
"""(opcode, errno): how SETXATTR with XATTR_CREATE, and REMOVEXATTR, fail when they were carried out before."""
_OTHERS = {abi.CREATE, abi.OPEN, abi.WRITE, abi.FALLOCATE, abi.SETATTR, abi.SETXATTR, abi.REMOVEXATTR}
EXCLUSIVE = DONE_ALREADY | THERE_ALREADY | _OTHERS
"""Opcodes that the kernel sends while it holds the inode's lock exclusively; OPEN only with O_TRUNC."""
ORDERED = EXCLUSIVE | {abi.LOOKUP, abi.READDIR, abi.READDIRPLUS}
"""Opcodes that the kernel sends while it holds the inode's lock, exclusively or shared."""


def inodes_of(header: Header, args: Any) -> set[int]:
    """Return the inodes whose locks the kernel holds during a request; if that is about names, their directories."""
    return {header[3], getattr(args, "new_parent", header[3])}


async def call_again(
    operation: Operation, header: Header, who: tuple[Any, ...], args: Any, filesystem: Filesystem
) -> Any:
    """Serve a re-sent request. An error such as EEXIST may mean success: the server that died may have done it.
    who: the arguments that the operation's method takes before the decoded ones."""
    opcode = header[1]
    if opcode == abi.CREATE:
        request: OpenRequest = args.request
        args = args._replace(request=replace(request, flags=request.flags & ~os.O_EXCL))
    try:
        return await operation.method(*who, *args)
    except Exception as error:
        number = errno_of(error)
        if (opcode in DONE_ALREADY and number == errno.ENOENT) or (opcode, number) in EXTENDED:
            if opcode in (abi.RENAME, abi.RENAME2) and isinstance(filesystem, KnowsFilesByName):
                await filesystem.renamed_before(header[3], args.name, args.new_parent, args.new_name)
            return None
        if opcode in THERE_ALREADY and number == errno.EEXIST:
            return await _found(filesystem, who, args[1] if opcode == abi.LINK else args[0])
        raise


async def _found(filesystem: Filesystem, who: tuple[Any, ...], name: bytes) -> Entry:
    """Return the entry of the name that the request was to make. Errors: FSError(EEXIST) when the name is not found."""
    caller, parent = who
    entry = await filesystem.lookup(caller, parent, name)
    if entry.attr is None:
        raise FSError(errno.EEXIST)
    return entry
