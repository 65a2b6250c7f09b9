"""How long the kernel's requests took and what they carried: plain counters that are read now and then.

Measured: 0.3 us of the loop's time per request. Threads: `at_once` belongs to the loop, the rest may come from any.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from typing import Any

from datastore.histogram import Histogram, added, quantile_s

from . import abi
from .dispatch import Header
from .reply import Frame
from .wire import WRITE_BODY

_CLASSES = {
    "stat": (abi.LOOKUP, abi.GETATTR, abi.READLINK, abi.STATFS, abi.GETXATTR, abi.LISTXATTR, abi.ACCESS, abi.STATX),
    "open": (abi.OPEN, abi.CREATE, abi.OPENDIR, abi.TMPFILE),
    "read": (abi.READ, abi.LSEEK),
    "write": (abi.WRITE, abi.FALLOCATE, abi.COPY_FILE_RANGE),
    "list": (abi.READDIR, abi.READDIRPLUS),
    "close": (abi.FLUSH, abi.RELEASE, abi.RELEASEDIR),
    "sync": (abi.FSYNC, abi.FSYNCDIR, abi.SYNCFS),
    "change": (
        *(abi.SETATTR, abi.SYMLINK, abi.MKNOD, abi.MKDIR, abi.UNLINK, abi.RMDIR, abi.RENAME, abi.RENAME2, abi.LINK),
        *(abi.SETXATTR, abi.REMOVEXATTR),
    ),
}
_OTHER = "other"
_REFUSAL_BYTES = 16
"""An answer that is a header alone carries an errno."""


class _Side:
    """What one side counts; one thread at a time."""

    __slots__ = ("by_class", "by_opcode", "read_bytes", "written_bytes")

    def __init__(self) -> None:
        self.by_class = {name: Histogram() for name in (*_CLASSES, _OTHER)}
        self.by_opcode = [self.by_class[_OTHER]] * abi.OPCODE_LIMIT
        for name, opcodes in _CLASSES.items():
            for opcode in opcodes:
                self.by_opcode[opcode] = self.by_class[name]
        self.read_bytes = self.written_bytes = 0

    def count(self, header: Header, began_ns: int, frame: Frame) -> None:
        """An answer has been sent."""
        opcode = header[1]
        self.by_opcode[opcode].add(time.monotonic_ns() - began_ns)
        if opcode == abi.READ:
            if not isinstance(frame, bytes):
                self.read_bytes += len(frame[1])
        elif opcode == abi.WRITE and len(frame) > _REFUSAL_BYTES:
            self.written_bytes += header[0] - WRITE_BODY


class Traffic:
    """One session's. Bytes that the kernel moves by itself (its page cache, passthrough) are not seen here."""

    def __init__(self) -> None:
        self._loop, self._pool = _Side(), _Side()
        self._lock = threading.Lock()
        self._errors: Counter[int] = Counter()
        self.at_once = self._loop.count
        """at_once(header, began_ns, frame): the loop has answered by itself."""

    def later(self, header: Header, began_ns: int, frame: Frame) -> None:
        """A worker has answered."""
        with self._lock:
            self._pool.count(header, began_ns, frame)

    def failed(self, number: int) -> None:
        """A request was answered with an errno because something failed (a missing name is no failure)."""
        with self._lock:
            self._errors[number] += 1

    def snapshot(self) -> dict[str, Any]:
        """readBytes, writtenBytes, errors by name, latency by class: count, seconds, p50Seconds, p99Seconds, buckets.

        The edges of the buckets are histogram.EDGES_S. Classes that were not asked for are left out.
        """
        with self._lock:
            sides = (self._loop, self._pool)
            latency = {name: _summed([side.by_class[name] for side in sides]) for name in self._loop.by_class}
            return {
                "readBytes": sum(side.read_bytes for side in sides),
                "writtenBytes": sum(side.written_bytes for side in sides),
                "errors": {errno.errorcode.get(number, str(number)): n for number, n in sorted(self._errors.items())},
                "latency": {name: row for name, row in latency.items() if row["count"]},
            }


def _summed(histograms: list[Histogram]) -> dict[str, Any]:
    first, second = histograms
    buckets = added(first.buckets(), second.buckets())
    return {
        "count": sum(buckets),
        "seconds": round((first.total_ns + second.total_ns) / 1e9, 6),
        "p50Seconds": quantile_s(buckets, 0.5),
        "p99Seconds": quantile_s(buckets, 0.99),
        "buckets": buckets,
    }
