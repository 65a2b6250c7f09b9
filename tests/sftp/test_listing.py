"""A directory's names take a bounded part of the memory of a mount's server. Without a mount, on a real SSH server."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore.fuse.ops import ROOT_INO, Caller, Fh
from datastore.fuse.sftp.filesystem import SFTPFilesystem
from datastore.fuse.sftp.listing import LINE, LINE_BYTES
from tests.driving import resolve
from tests.mount.mounts import fails
from tests.promises import promise
from tests.sftp.mounts import unmounted
from tests.sftp.sshd import SSHServer

pytestmark = [pytest.mark.plain_user, pytest.mark.timeout(300)]
NAMES = {b"%03d" % number for number in range(300)}
EACH = LINE_BYTES + LINE.size + len(b"000") + 1
ROOM = (len(NAMES) + 2) * EACH
"""For all of them, and for . and .., nearly."""
ME = Caller(0, 0, os.getpid())


class _Budget:
    """Of an answer that takes 50 names."""

    def __init__(self) -> None:
        self.left = 50

    def take(self, name_length: int) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.fixture
def fs(sshd: SSHServer, tmp_path: Path) -> Iterator[SFTPFilesystem]:
    (tmp_path / "served").mkdir()
    (tmp_path / "state").mkdir()
    for name in NAMES:
        (tmp_path / "served" / os.fsdecode(name)).touch()
    with unmounted(sshd, tmp_path / "served", tmp_path / "state", listing_bytes=ROOM) as made:
        yield made


def listed(fs: SFTPFilesystem, fh: Fh) -> set[bytes]:
    """In parts, as the kernel asks."""
    found: list[bytes] = []
    while part := resolve(fs.readdir(ROOT_INO, fh, len(found), _Budget(), True)):
        found += [entry.name for entry in part]
        assert part[-1].offset == len(found)
    assert len(found) == len(set(found))
    return set(found) - {b".", b".."}


def opened(fs: SFTPFilesystem) -> Fh:
    return resolve(fs.opendir(ME, ROOT_INO)).fh


@promise("S-312")
def test_the_names_of_directories_that_are_read_take_no_more_memory_than_they_may(fs: SFTPFilesystem) -> None:
    """What one has taken is free for another when it is closed."""
    first, second = opened(fs), opened(fs)
    assert listed(fs, first) == NAMES
    assert listed(fs, first) == NAMES, "read again, it takes the same room"
    fails(errno.ENOMEM, listed, fs, second)
    fs.releasedir(ROOT_INO, first)
    assert listed(fs, second) == NAMES
    fs.releasedir(ROOT_INO, second)
    fs.releasedir(ROOT_INO, opened(fs))
    assert listed(fs, opened(fs)) == NAMES
