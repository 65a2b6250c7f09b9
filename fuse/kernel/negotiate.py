"""Negotiates INIT: settles what both sides use, from what the kernel offers and what we want. Pure.

Source: fuse_init_in and fuse_init_out in linux/fuse.h. The result is plain data, because the kernel sends INIT only
once per mount, and a restarted server gets the result from its supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import abi
from .wire import InitRequest

MAX_WRITE = 1 << 20
"""The most bytes of one READ or WRITE."""
_MAX_READAHEAD = 4 << 20
"""How many bytes of read-ahead we allow at least; read_ahead_kb may use that much."""
_MAX_BACKGROUND, _CONGESTED = 64, 48
"""The most read-ahead and background requests that the kernel keeps in flight; how many it counts as congestion."""
_STACK_DEPTH = 1
"""How deep passthrough's backing file systems may be stacked; 1 leaves room for an overlayfs on top of the mount."""
FEATURES = {
    abi.ASYNC_READ: "async_read", abi.ATOMIC_O_TRUNC: "atomic_o_trunc", abi.BIG_WRITES: "big_writes",
    abi.DO_READDIRPLUS: "readdirplus", abi.READDIRPLUS_AUTO: "readdirplus_auto", abi.ASYNC_DIO: "async_dio",
    abi.PARALLEL_DIROPS: "parallel_dirops", abi.ABORT_ERROR: "abort_error", abi.MAX_PAGES: "max_pages",
    abi.HANDLE_KILLPRIV_V2: "handle_killpriv_v2", abi.INIT_EXT: "init_ext", abi.HAS_EXPIRE_ONLY: "expire_only",
    abi.PASSTHROUGH: "passthrough", abi.HAS_RESEND: "resend",
}  # fmt: skip
"""The features that we want, and their names. AUTO_INVAL_DATA is not wanted: it drops our own pages after each of our
own writes (the mtime moves); the file system uses keep_cache or inval_inode instead. EXPLICIT_INVAL_DATA is not wanted
either: without it a size that changed under the kernel still drops pages, the cautious half of the same rule. No lock
flags are wanted: the kernel keeps flock and fcntl locks itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """What INIT settled; it holds for as long as the mount lives."""

    minor: int
    flags: int
    max_readahead: int
    max_write: int
    max_pages: int

    def has(self, feature: int) -> bool:
        """Return whether both sides use the feature, a bit of FEATURES."""
        return bool(self.flags & feature)

    def names(self) -> list[str]:
        """Return the names of the features that both sides use, for people to read."""
        return [name for bit, name in FEATURES.items() if self.flags & bit]


def negotiate(offer: InitRequest, max_write: int = MAX_WRITE) -> Negotiated:
    """Settle on what both sides know."""
    return Negotiated(
        minor=min(offer.minor, abi.MINOR),
        flags=offer.flags & sum(FEATURES),
        max_readahead=max(offer.max_readahead, _MAX_READAHEAD),
        max_write=max_write,
        max_pages=max_write // abi.PAGE_SIZE,
    )


def init_reply(unique: int, settled: Negotiated) -> bytes:
    """Return the frame that answers INIT."""
    return abi.INIT_REPLY.pack(
        abi.INIT_REPLY.size, 0, unique,
        abi.MAJOR, settled.minor, settled.max_readahead, settled.flags & 0xFFFFFFFF,
        _MAX_BACKGROUND, _CONGESTED, settled.max_write,
        1,  # time_gran: nanoseconds
        settled.max_pages, 0, settled.flags >> 32, _STACK_DEPTH if settled.flags & abi.PASSTHROUGH else 0, 0,
    )  # fmt: skip
