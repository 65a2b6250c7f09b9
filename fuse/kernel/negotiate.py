"""INIT: what the kernel offers, what we want, what both then keep to. Pure; linux/fuse.h fuse_init_in and _out.

The result is plain data, because a restarted server gets it from its supervisor: the kernel says INIT once per mount.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import abi
from .wire import InitRequest

MAX_WRITE = 1 << 20
"""Bytes of the largest READ and WRITE."""
_MAX_READAHEAD = 4 << 20
"""Bytes; read_ahead_kb may use that much."""
_MAX_BACKGROUND, _CONGESTED = 64, 48
"""Read-ahead and background requests that the kernel keeps in flight."""
_STACK_DEPTH = 1
"""Of passthrough's backing file systems; this leaves room for overlayfs on top of us."""
FEATURES = {
    abi.ASYNC_READ: "async_read", abi.ATOMIC_O_TRUNC: "atomic_o_trunc", abi.BIG_WRITES: "big_writes",
    abi.DO_READDIRPLUS: "readdirplus", abi.READDIRPLUS_AUTO: "readdirplus_auto", abi.ASYNC_DIO: "async_dio",
    abi.PARALLEL_DIROPS: "parallel_dirops", abi.ABORT_ERROR: "abort_error", abi.MAX_PAGES: "max_pages",
    abi.HANDLE_KILLPRIV_V2: "handle_killpriv_v2", abi.INIT_EXT: "init_ext", abi.HAS_EXPIRE_ONLY: "expire_only",
    abi.PASSTHROUGH: "passthrough", abi.HAS_RESEND: "resend",
}  # fmt: skip
"""Those that we want, and their names. Not AUTO_INVAL_DATA: it drops our own pages after each of our own writes (the
mtime moves); the file system says keep_cache or inval_inode instead. Not EXPLICIT_INVAL_DATA either: a size that
changed under the kernel still drops pages, the cautious half of the same rule. No lock flags: the kernel keeps flock
and fcntl locks itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """What INIT settled, for as long as the mount lives."""

    minor: int
    flags: int
    max_readahead: int
    max_write: int
    max_pages: int

    def has(self, feature: int) -> bool:
        """Whether both sides know it."""
        return bool(self.flags & feature)

    def names(self) -> list[str]:
        """The features, for people."""
        return [name for bit, name in FEATURES.items() if self.flags & bit]


def negotiate(offer: InitRequest, max_write: int = MAX_WRITE) -> Negotiated:
    """Settle on what both know."""
    return Negotiated(
        minor=min(offer.minor, abi.MINOR),
        flags=offer.flags & sum(FEATURES),
        max_readahead=max(offer.max_readahead, _MAX_READAHEAD),
        max_write=max_write,
        max_pages=max_write // abi.PAGE_SIZE,
    )


def init_reply(unique: int, settled: Negotiated) -> bytes:
    """The frame that answers INIT."""
    return abi.INIT_REPLY.pack(
        abi.INIT_REPLY.size, 0, unique,
        abi.MAJOR, settled.minor, settled.max_readahead, settled.flags & 0xFFFFFFFF,
        _MAX_BACKGROUND, _CONGESTED, settled.max_write,
        1,  # time_gran: nanoseconds
        settled.max_pages, 0, settled.flags >> 32, _STACK_DEPTH if settled.flags & abi.PASSTHROUGH else 0, 0,
    )  # fmt: skip
