"""DeviceNotifier: waits for nobody, merges what it can, forgets the oldest names first."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

import pytest

from datastore.fuse.kernel import abi, notify, reply
from datastore.fuse.kernel.notify import DeviceNotifier
from datastore.fuse.ops import Held, Ino
from tests.patience import eventually


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def frames_of(notifier: DeviceNotifier, read_fd: int, count: int) -> list[bytes]:
    """The first `count` notifications; a pipe does not keep boundaries, the length in front does."""
    notifier.start(expire_only=True)
    found = []
    for _ in range(count):
        head = os.read(read_fd, 16)
        found.append(head + os.read(read_fd, struct.unpack_from("<I", head)[0] - 16))
    notifier.stop()
    return found


def test_what_waits_is_delivered_once_per_inode_and_name(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    notifier = DeviceNotifier(write_fd)
    for offset in (-1, 0, -1):
        notifier.inval_inode(Ino(7), offset)
        notifier.inval_entry(Ino(1), b"name")
    first, second = frames_of(notifier, read_fd, 2)
    assert struct.unpack("<IiQQqq", first) == (40, abi.NOTIFY_INVAL_INODE, 0, 7, 0, 0)
    assert second.endswith(b"name\0")


def test_names_are_bounded_and_the_oldest_goes(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "NAME_LIMIT", 2)
    read_fd, write_fd = pipe
    notifier = DeviceNotifier(write_fd)
    for name in (b"one", b"two", b"three"):
        notifier.inval_entry(Ino(1), name)
    assert [frame[32:-1] for frame in frames_of(notifier, read_fd, 2)] == [b"two", b"three"]


def test_a_refused_notification_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[bytes] = []

    def write(_fd: int, frame: bytes) -> int:
        refused.append(frame)
        raise OSError(errno.ENOENT, "no such inode")

    monkeypatch.setattr(os, "write", write)
    notifier = DeviceNotifier(-1)
    notifier.start(expire_only=False)
    notifier.inval_inode(Ino(7))
    notifier.inval_inode(Ino(8))
    eventually(lambda: len(refused) == 2)
    notifier.stop()
    notifier.stop()


def test_nodes_are_given_up_in_one_notification(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    notifier = DeviceNotifier(write_fd)
    notifier.release([Held(Ino(5), Ino(1), b"a"), Held(Ino(6), Ino(1), b"")])
    (frame,) = frames_of(notifier, read_fd, 1)
    assert struct.unpack("<IiQIIQQQ", frame) == (48, abi.NOTIFY_PRUNE, 0, 2, 0, 0, 5, 6)


def test_a_kernel_that_cannot_prune_gives_up_files_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.18 it says EINVAL; a directory, in which a process may stand, is left alone then."""
    written: list[bytes] = []
    refused: list[bytes] = []

    def write(_fd: int, frame: bytes) -> int:
        if reply.is_prune(frame):
            refused.append(frame)
            raise OSError(errno.EINVAL, "no such notification")
        written.append(frame)
        return len(frame)

    monkeypatch.setattr(os, "write", write)
    notifier = DeviceNotifier(-1)
    notifier.start(expire_only=True)
    notifier.release([Held(Ino(5), Ino(1), b"refused")])
    eventually(lambda: refused)
    notifier.release([Held(Ino(6), Ino(1), b""), Held(Ino(7), Ino(1), b"f")])
    eventually(lambda: written)
    notifier.stop()
    assert written == [reply.inval_entry(1, b"f", expire_only=False)]
