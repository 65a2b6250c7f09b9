"""What a session counts of its requests."""

from __future__ import annotations

import errno

from datastore.errors import Unreachable
from datastore.fuse.kernel import abi
from datastore.fuse.ops import Fh, FSError, Ino
from tests.memfs import MemFs
from tests.wire import frames
from tests.wire.peer import Peer


class Slow(MemFs):
    """Reads wait, and fail when they are told to."""

    error: Exception | None = None

    async def read(self, ino: Ino, fh: Fh, offset: int, size: int) -> bytes | bytearray | memoryview:
        await self.loop.pause()
        if self.error is not None:
            raise self.error
        return b"x" * size


def slow() -> Slow:
    filesystem = Slow()
    filesystem.populate()
    return filesystem


def test_requests_are_counted_by_class_at_once_or_later() -> None:
    with Peer(slow()) as peer:
        peer.init()
        for _ in range(3):
            peer.ask(frames.VALID["getattr"])
        for _ in range(2):
            peer.ask(frames.request(abi.READ, frames.rw(0, 0, 512), ino=1000))
        peer.ask(frames.VALID["write"])
    seen = peer.session.traffic.snapshot()
    assert {name: row["count"] for name, row in seen["latency"].items()} == {"stat": 3, "read": 2, "write": 1}
    assert all(row["seconds"] > 0 and sum(row["buckets"]) == row["count"] for row in seen["latency"].values())
    assert (seen["readBytes"], seen["writtenBytes"]) == (1024, 3)
    assert seen["errors"] == {}


def test_failures_are_counted_by_errno_and_plain_answers_are_none() -> None:
    filesystem = slow()
    read = frames.request(abi.READ, frames.rw(0, 0, 512), ino=1000)
    with Peer(filesystem) as peer:
        peer.init()
        for error in (Unreachable("gone"), FSError(errno.ESTALE), OSError(errno.ENOSPC, ""), FSError(errno.EISDIR)):
            filesystem.error = error
            assert peer.ask(read).error < 0
    seen = peer.session.traffic.snapshot()
    assert seen["errors"] == {"EIO": 1, "ESTALE": 1, "ENOSPC": 1}
    assert seen["readBytes"] == 0
