"""An append-only log of the node ids that the kernel knows and their names, so that a restarted server keeps the ids.

A record has ino, parent ino, kind, length and bytes of the key's tail (text, surrogateescape), length and bytes of the
local name. The last record of an ino counts (the node was renamed or, with parent 0, dropped). A torn last record is
ignored. A record is written by write(2) before the kernel gets the id, so it survives the death of the server; after a
reboot, which unmounts, the log is not needed.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_NOBODY = 0
_HEAD = struct.Struct("<QQIHH")


class NodeRecord(NamedTuple):
    """One node: `kind` is a file type as in stat.S_IFREG; `tail` is what its key adds to its parent's prefix."""

    ino: int
    parent: int
    kind: int
    tail: str
    name: bytes


class NodeLog:
    """Owns one file. It has no lock: its owner makes one call after another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = 0
        """How many records the file has, including those that later records replace."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, records: list[NodeRecord], dropped: Sequence[int] = ()) -> None:
        """Record in one write which nodes were dropped, then `records`. Errors: OSError; nothing is recorded then."""
        content = b"".join(map(_encode, records))
        if dropped:
            content = b"".join(_HEAD.pack(ino, _NOBODY, 0, 0, 0) for ino in dropped) + content
        if not content:
            return
        written = os.write(self._fd, content)
        if written < len(content):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)  # a torn record would hide all that follow
            raise OSError(errno.ENOSPC, "the disk of the state directory is full")
        self.records += len(records) + len(dropped)

    def load(self) -> dict[int, NodeRecord]:
        """Return the last record of each ino. A torn end is cut off, so that records appended later can be read."""
        content = self._path.read_bytes()
        records: dict[int, NodeRecord] = {}
        self.records = 0
        at = 0
        while (tail_at := at + _HEAD.size) <= len(content):
            ino, parent, kind, tail_length, name_length = _HEAD.unpack_from(content, at)
            name_at, end = tail_at + tail_length, tail_at + tail_length + name_length
            if end > len(content):
                break
            at = end
            self.records += 1
            records.pop(ino, None)
            if parent != _NOBODY:
                tail = content[tail_at:name_at].decode("utf-8", "surrogateescape")
                records[ino] = NodeRecord(ino, parent, kind, tail, content[name_at:end])
        if at < len(content):
            os.ftruncate(self._fd, at)
        return records

    def rewrite(self, records: list[NodeRecord]) -> None:
        """Replace the log: by no records in a fresh mount, later by those of the nodes that the kernel still knows."""
        temporary = self._path.with_suffix(".new")
        temporary.write_bytes(b"".join(map(_encode, records)))
        fd = os.open(temporary, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            temporary.replace(self._path)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self.records = fd, len(records)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _encode(record: NodeRecord) -> bytes:
    tail = record.tail.encode("utf-8", "surrogateescape")
    return _HEAD.pack(record.ino, record.parent, record.kind, len(tail), len(record.name)) + tail + record.name
