"""The attributes of a file as SFTP version 3 has them: how they are asked for, compared, and set."""

from __future__ import annotations

import stat
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from asyncssh import SFTPAttrs, SFTPClient

from ..ops import NOW, ROOT_INO, SetAttr
from .nodes import Node

SECOND_NS = 1_000_000_000
LATEST_S = (1 << 32) - 1
"""The latest time: SFTP version 3 has 32 bits for its seconds. A time out of range becomes the nearest one."""
COMPARED_TIMES = 3
"""How often an open file that is being written is compared with what has its name."""


class Owner(NamedTuple):
    """The local owner that is shown for what the login (remote_uid, remote_gid) owns on the server. remote_uid: None if
    it is unknown; then everything is shown as the login's."""

    uid: int
    gid: int
    remote_uid: int | None
    remote_gid: int

    def shown(self, given: SFTPAttrs) -> tuple[int, int, int]:
        """Return the mode, the user and the group that are shown for these attributes."""
        mode, uid, gid = given.permissions or 0, given.uid or 0, given.gid or 0
        if self.remote_uid is None or uid == self.remote_uid:
            uid = self.uid
        elif not stat.S_ISLNK(mode):
            # The login's groups are unknown too: give all others the group's permissions, and let the server refuse.
            mode |= (mode & stat.S_IRWXG) >> 3
        return mode, uid, self.gid if self.remote_uid is None or gid == self.remote_gid else gid


def kind_of(given: SFTPAttrs) -> int:
    """Return the type bits of a mode; a server that tells none means a regular file."""
    return stat.S_IFMT(given.permissions or 0) or stat.S_IFREG


def version_of(given: SFTPAttrs) -> tuple[int, int]:
    """Return (mtime, size), by which one version of a file is told from another."""
    return given.mtime or 0, given.size or 0


async def stat_at(sftp: SFTPClient, path: bytes, node: Node | None) -> SFTPAttrs:
    """Return the attributes of what is at `path`. The mounted directory itself may be a symbolic link to one."""
    return await (sftp.stat(path) if node is not None and node.ino == ROOT_INO else sftp.lstat(path))


async def compared(
    ask_open: Callable[[], Awaitable[SFTPAttrs | None]], ask_name: Callable[[], Awaitable[SFTPAttrs]]
) -> tuple[SFTPAttrs, bool]:
    """Return the attributes of what has a file's name, and whether it is another file than the one that is open. SFTP
    has no inode numbers, so that this is seen by time and size only. The open file is asked before and after its name,
    because it may be being written; if it changes all the time, it counts as the same."""
    before = await ask_open()
    there = await ask_name()
    for _ in range(COMPARED_TIMES):
        if before is None or version_of(there) == version_of(before):
            return there, False
        after = await ask_open()
        if after is not None and version_of(after) == version_of(before):
            return there, True
        before, there = after, await ask_name()
    return there, False


async def with_mode(sftp: SFTPClient, path: bytes, given: SFTPAttrs, mode: int) -> SFTPAttrs:
    """Give a new object the permissions of `mode` that the server's umask took away; return its attributes."""
    missing = mode & 0o777 & ~(given.permissions or 0)
    if not missing:
        return given
    await sftp.setstat(path, SFTPAttrs(permissions=(given.permissions or 0) & 0o7777 | mode & 0o777))
    return await sftp.lstat(path)


def to_set(changes: SetAttr, present: SFTPAttrs, owner: Owner) -> SFTPAttrs | None:
    """Return the attributes to set besides the size, or None. Version 3 sets owner and group together; times too."""
    wanted = SFTPAttrs()
    if changes.mode is not None:
        wanted.permissions = changes.mode & 0o7777
    if changes.uid is not None or changes.gid is not None:
        theirs = owner.remote_uid if owner.remote_uid is not None else present.uid
        their_group = owner.remote_gid if owner.remote_uid is not None else present.gid
        uid = theirs if changes.uid == owner.uid else changes.uid
        gid = their_group if changes.gid == owner.gid else changes.gid
        wanted.uid, wanted.gid = (present.uid if uid is None else uid), (present.gid if gid is None else gid)
    if changes.atime_ns is not None or changes.mtime_ns is not None:
        wanted.atime = _seconds(changes.atime_ns, present.atime)
        wanted.mtime = _seconds(changes.mtime_ns, present.mtime)
    nothing = wanted.permissions is None and wanted.uid is None and wanted.atime is None
    return None if nothing else wanted


def _seconds(wanted_ns: int | None, present: int | None) -> int:
    if wanted_ns is None:
        return present or 0
    return min(max(int(time.time()) if wanted_ns == NOW else wanted_ns // SECOND_NS, 0), LATEST_S)
