"""OpenModes: one way per inode until its last release, also across a restart."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from datastore.fuse.kernel import abi, passthrough
from datastore.fuse.kernel.passthrough import TABLE_BYTES, OpenModes
from datastore.fuse.ops import Fh, OpenReply
from datastore.linuxfds import memfd
from tests.promises import promise

LOCAL = OpenReply(Fh(1), passthrough_fd=5)
CACHED = OpenReply(Fh(1), keep_cache=True)


class Device:
    """The ioctls: ids count up, closed ones are kept; with `refuse` BACKING_OPEN fails."""

    def __init__(self) -> None:
        self.last = 0
        self.closed: list[int] = []
        self.refuse = False

    def ioctl(self, _fd: int, request: int, argument: bytes | bytearray) -> int:
        if request == abi.IOC_BACKING_CLOSE:
            self.closed.append(int.from_bytes(argument, "little"))
            return 0
        if self.refuse:
            raise PermissionError(1, "Operation not permitted")
        self.last += 1
        return self.last


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(fcntl, "ioctl", device.ioctl)
    return device


@pytest.fixture
def table_fd() -> Iterator[int]:
    fd = memfd("opens")
    os.ftruncate(fd, TABLE_BYTES)
    yield fd
    os.close(fd)


def modes(table_fd: int = -1) -> OpenModes:
    made = OpenModes(0, table_fd)
    made.enabled = True
    return made


def test_all_opens_of_an_inode_share_one_backing_id_closed_at_the_last_release(device: Device) -> None:
    table = modes()
    first, second = table.opened(7, os.O_RDWR, LOCAL), table.opened(7, os.O_RDWR, CACHED)
    assert first == second == (abi.FOPEN_PASSTHROUGH, 1)
    table.released(7)
    assert (device.closed, table.count()) == ([], 1)
    table.released(7)
    assert (device.closed, table.count()) == ([1], 0)


def test_an_inode_open_through_us_stays_so_until_its_last_release(device: Device) -> None:
    table = modes()
    assert table.opened(7, os.O_RDWR, CACHED) == (abi.FOPEN_KEEP_CACHE, 0)
    assert table.opened(7, os.O_RDWR, LOCAL) == (0, 0)
    table.released(7)
    table.released(7)
    assert table.opened(7, os.O_RDWR, LOCAL)[1] == 1


def test_a_refused_backing_file_is_read_through_us(device: Device) -> None:
    device.refuse = True
    assert modes().opened(7, os.O_RDONLY, LOCAL) == (abi.FOPEN_NOFLUSH, 0)


def test_without_passthrough_nothing_is_counted_and_flags_follow_the_reply(device: Device) -> None:
    table = OpenModes(0)
    assert table.opened(7, os.O_WRONLY, LOCAL) == (0, 0)
    assert table.opened(7, os.O_WRONLY, OpenReply(Fh(1), direct_io=True)) == (abi.FOPEN_DIRECT_IO, 0)
    table.released(7)
    assert device.last == 0


@promise("S-29")
def test_only_where_readers_stay_right_are_writes_not_cached(device: Device) -> None:
    table, alone = OpenModes(0), OpenReply(Fh(1), uncached=True)
    assert table.opened(7, os.O_WRONLY, alone) == (0, 0)
    table.drops_pages = True
    assert table.opened(7, os.O_WRONLY, alone) == (abi.FOPEN_DIRECT_IO, 0)


def test_a_restarted_server_goes_on_with_the_ways_of_the_dead_one(device: Device, table_fd: int) -> None:
    before = modes(table_fd)
    before.opened(7, os.O_RDWR, LOCAL)
    before.opened(8, os.O_RDWR, CACHED)
    after = modes(table_fd)
    assert after.opened(7, os.O_RDWR, CACHED) == (abi.FOPEN_PASSTHROUGH, 1)
    assert after.opened(8, os.O_RDWR, LOCAL)[1] == 0
    after.released(7)
    after.released(7)
    assert device.closed == [1]


def test_with_a_full_table_files_are_read_through_us(device: Device, table_fd: int) -> None:
    table = modes(table_fd)
    for ino in range(1, passthrough.SLOTS + 1):
        table.opened(ino, os.O_RDWR, CACHED)
    for again in (table, modes(table_fd)):
        assert again.opened(99_999_999, os.O_RDWR, LOCAL)[1] == 0
        again.released(99_999_999)


@promise("S-52")
def test_an_open_past_the_local_file_keeps_the_mode_of_the_inode(device: Device) -> None:
    table = modes()
    assert table.is_local(7) is False
    table.opened(7, os.O_RDONLY, LOCAL)
    assert table.is_local(7) is True
    flags, backing_id = table.opened(7, os.O_WRONLY, OpenReply(Fh(2), direct_io=True))
    assert (flags, backing_id) == (abi.FOPEN_PASSTHROUGH | abi.FOPEN_DIRECT_IO, 1)
    table.released(7)
    table.released(7)
    assert table.is_local(7) is False
    assert OpenModes(0).is_local(7) is None


@promise("S-53")
def test_why_files_are_not_read_by_passthrough(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    table = modes()
    assert table.why_not() == ""
    device.refuse = True
    table.opened(7, os.O_RDONLY, LOCAL)
    assert "refused" in table.why_not()
    table.enabled = False
    assert "Linux 6.9" in table.why_not() or "root" in table.why_not()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in table.why_not()
