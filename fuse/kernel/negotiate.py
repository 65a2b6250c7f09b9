"""INIT: what the kernel offers, what we want, what both then keep to. Pure; linux/fuse.h fuse_init_in and _out.

The result is plain data, because a restarted server gets it from its supervisor: the kernel says INIT once per mount.
"""

from __future__ import annotations

from dataclasses import dataclass

from datastore.errors import MountFailed

from . import abi
from .wire import InitRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """max_write: bytes of the largest READ and WRITE. max_readahead: bytes; read_ahead_kb may use that much.

    max_background, congestion_threshold: read-ahead and background requests the kernel keeps in flight.
    cache_symlinks: readlink is asked once per inode; only where a changed target gets a new inode or an inval_inode.
    stack_depth: of passthrough's backing file systems; 1 leaves room for overlayfs on top of us.
    """

    max_write: int = 1 << 20
    max_readahead: int = 4 << 20
    max_background: int = 64
    congestion_threshold: int = 48
    cache_symlinks: bool = False
    passthrough: bool = True
    stack_depth: int = 1

    def flags(self) -> int:
        """The feature bits.

        Not AUTO_INVAL_DATA: it drops our own pages after each of our own writes (the mtime moves); the file system
        says keep_cache or inval_inode instead. Not EXPLICIT_INVAL_DATA either: a size that changed under the kernel
        still drops pages, the cautious half of the same rule. No lock flags: the kernel keeps flock and fcntl locks
        itself.
        """
        wanted = (
            abi.ASYNC_READ | abi.ATOMIC_O_TRUNC | abi.BIG_WRITES | abi.ASYNC_DIO | abi.PARALLEL_DIROPS | abi.MAX_PAGES
            | abi.DO_READDIRPLUS | abi.READDIRPLUS_AUTO | abi.ABORT_ERROR | abi.HANDLE_KILLPRIV_V2 | abi.INIT_EXT
            | abi.HAS_EXPIRE_ONLY | abi.HAS_RESEND
        )  # fmt: skip
        wanted |= abi.CACHE_SYMLINKS if self.cache_symlinks else 0
        return wanted | (abi.PASSTHROUGH if self.passthrough else 0)


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
        return [name for bit, name in abi.FEATURE_NAMES.items() if self.flags & bit]


def negotiate(offer: InitRequest, wanted: Wanted) -> Negotiated:
    """Settle on what both know. Errors: MountFailed for a kernel older than protocol 7.23 (Linux 3.15)."""
    if offer.major < abi.MAJOR or (offer.major == abi.MAJOR and offer.minor < abi.MINOR_OLDEST):
        raise MountFailed(
            f"the kernel speaks FUSE {offer.major}.{offer.minor}; 7.{abi.MINOR_OLDEST} (Linux 3.15) is needed"
        )
    flags = offer.flags & wanted.flags()
    # without MAX_PAGES a request holds 32 pages at most (FUSE_DEFAULT_MAX_PAGES_PER_REQ)
    pages = max(1, wanted.max_write // abi.PAGE_SIZE) if flags & abi.MAX_PAGES else 32
    return Negotiated(
        minor=min(offer.minor, abi.MINOR),
        flags=flags,
        max_readahead=max(offer.max_readahead, wanted.max_readahead),
        max_write=min(wanted.max_write, pages * abi.PAGE_SIZE),
        max_pages=pages,
    )


def init_reply(unique: int, settled: Negotiated, wanted: Wanted) -> bytes:
    """The frame that answers INIT."""
    return abi.INIT_REPLY.pack(
        abi.INIT_REPLY.size, 0, unique,
        abi.MAJOR, settled.minor, settled.max_readahead, settled.flags & 0xFFFFFFFF,
        wanted.max_background, wanted.congestion_threshold, settled.max_write,
        1,  # time_gran: nanoseconds
        settled.max_pages, 0, settled.flags >> 32, wanted.stack_depth if settled.flags & abi.PASSTHROUGH else 0, 0,
    )  # fmt: skip


def version_reply(unique: int) -> bytes:
    """The frame for a kernel of a newer major version: it answers with an INIT of ours."""
    return (
        abi.OUT_HEADER.pack(40, 0, unique)
        + abi.MAJOR.to_bytes(4, "little")
        + abi.MINOR.to_bytes(4, "little")
        + bytes(16)
    )
