"""Descriptors that Linux has and not every Python offers: of memory (memfd_create(2)) and of a process (pidfd_open(2)).

The Pythons of uv and of conda are compiled for older systems, so that their `os` lacks both. The kernel still has them.
"""

from __future__ import annotations

import os

_PIDFD_OPEN = 434
"""The number of the system call, the same on all processors (asm-generic/unistd.h)."""
_MFD_CLOEXEC = 1


def memfd(name: str) -> int:
    """Return a descriptor of an empty file in memory. name: what /proc shows. Errors: OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return _called("memfd_create", name.encode(), _MFD_CLOEXEC)


def pidfd(pid: int) -> int:
    """Return a descriptor of a process; select() reports it as readable once the process has ended. Errors: OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _called("syscall", _PIDFD_OPEN, pid, 0)


def _called(name: str, *arguments: bytes | int) -> int:
    """Call a function of the C library that returns a descriptor. Errors: OSError."""
    import ctypes  # imported here: it takes 10 ms, and other Pythons don't need it

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = getattr(libc, name)(*arguments)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
