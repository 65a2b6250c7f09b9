"""What mounts of another machine's file system share, NFS exports and directories of SSH servers alike.

That machine decides everything and has every byte: nothing is fetched ahead or sent later, and of what a mount is told
while it stands only the time to live and the group mean anything.

Threads: a call begins on the loop, and what asks that machine runs in a lane, so that what is kept here has a lock. The
lock is never held while that machine is waited for.
"""

from __future__ import annotations

import errno
import logging
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from datastore.api.mountspec import MountSpec
from datastore.errors import Unsupported
from datastore.logs import Limiter, fields

from .loop import Future, Loop
from .ops import FSError, Ino, Notifier

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
NAME_MAX = 255
END_S = 20.0
"""How long the end of a mount waits for a server that does not answer."""
BASE_BYTES = 128 << 20
"""Of the mount's process without any node, and with as many uncommitted bytes as there may be."""
NODE_BYTES = 640
"""Of one node with its places in the tables, measured."""
_LIVE = (
    "cache_size_bytes", "capacity_bytes", "conflict", "group", "metadata_ttl_s", "used_bytes", "used_files",
    "write_back_s",
)  # fmt: skip
"""The fields of MountSpec that change while it is mounted; most mean nothing here."""


def ttl_of(spec: MountSpec) -> float:
    """How long the kernel may believe what it is told. libfuse takes one time for all answers, of which the other half
    is what it takes to ask."""
    return spec.metadata_ttl_s / 2 if spec.transport == "libfuse" else spec.metadata_ttl_s


def nodes_within(memory_bytes: int) -> int:
    """How many nodes a process may know that has so much memory."""
    return max(memory_bytes - BASE_BYTES, memory_bytes // 4) // NODE_BYTES


class _Nodes(Protocol):
    @property
    def by_ino(self) -> Mapping[int, object]: ...
    def forget(self, ino: int, nlookup: int) -> None: ...


class FileServerFilesystem:
    """The part of ops.Filesystem that is the same for all. group: everything is shown as of this group, which may do
    what the owner may; None: as it is."""

    def __init__(
        self, nodes: _Nodes, lock: threading.Condition, *, loop: Loop, ttl_s: float, group: int | None
    ) -> None:
        self.loop = loop
        self.group = group
        self._all_nodes = nodes
        self._lock = lock
        self._ttl_s = ttl_s
        self._notifier = Notifier()
        self._limiter = Limiter()

    def __len__(self) -> int:
        """Nodes that the kernel knows."""
        return len(self._all_nodes.by_ino)

    def change(self, ttl_s: float, group: int | None) -> None:
        """Tell the kernel this time to live from now on, and show everything as of this group."""
        with self._lock:
            same, self.group, self._ttl_s = group == self.group, group, ttl_s
            inos = [] if same else list(self._all_nodes.by_ino)
        for ino in inos:
            self._notifier.inval_inode(Ino(ino), -1)

    async def stop(self) -> None:
        """See ops.Filesystem. In no lane: all may be waiting for a machine that does not answer."""
        await self.loop.aside(self._end, "end")

    def _end(self) -> None:
        """Leave nothing behind, within about END_S; idempotent."""
        raise NotImplementedError

    def _lane(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin what asks that machine, in a lane; `await` its result."""
        return self.loop.lane(call, *args, **kwargs)

    def forget(self, ino: Ino, nlookup: int) -> None:
        """See ops.Filesystem."""
        with self._lock:
            self._all_nodes.forget(ino, nlookup)

    def _at_most(self, size: int, content: bytes) -> bytes:
        """The answer to READ for so many bytes. Errors: FSError when it is longer, which the kernel would not take."""
        if len(content) <= size:
            return content
        if self._limiter.allows("read", time.monotonic()):
            told = fields(asked=size, came=len(content), answer="EIO")
            log.error("the server answers READ with more than was asked for", extra=told)
        raise FSError(errno.EIO)

    def _shown(self, mode: int, gid: int) -> tuple[int, int]:
        """Mode and group as the kernel is told them."""
        if self.group is None or stat.S_ISLNK(mode):
            return mode, gid
        mode |= (mode & stat.S_IRWXU) >> 3
        return mode | (stat.S_ISGID if stat.S_ISDIR(mode) else 0), self.group

    # -- what NFS 3 and SFTP do not have: the kernel does it by itself where it can, and does not ask again

    async def _not_supported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FSError(errno.ENOSYS)

    fallocate = lseek = getxattr = setxattr = listxattr = removexattr = _not_supported


F = TypeVar("F", bound=FileServerFilesystem)


class MountedFileServer(Generic[F]):
    """See fuse.server.MountedStore."""

    def __init__(self, filesystem: F, spec: MountSpec) -> None:
        self.filesystem = filesystem
        self._spec = spec

    def apply(self, spec: MountSpec) -> list[str]:
        """See MountedStore. How large and how full it is, the server says."""
        live: dict[str, object] = {name: getattr(spec, name) for name in _LIVE}
        self._spec = replace(self._spec, **live)  # type: ignore[arg-type]
        self.filesystem.change(ttl_of(spec), spec.group)
        return [
            each.name for each in fields_of(MountSpec) if getattr(self._spec, each.name) != getattr(spec, each.name)
        ]

    def warm(self, path: str, progress: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """Errors: Unsupported, always."""
        raise Unsupported(
            f"a mount of {self._spec.source} keeps no files on this machine's disk, so there is nothing to fetch ahead"
        )

    def discard(self, path: str) -> int:
        """Nothing: what could not be written was refused when it was."""
        return 0
