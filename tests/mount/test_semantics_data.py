"""Reading and writing on a real mount (docs/SEMANTICS.md, Reading and writing)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_SERVER
from tests.mount.mounts import Area, fails
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]
WAYS = ONE_SERVER

KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32
MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). Errors: OSError."""
    if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def fd(area: Area) -> Iterator[int]:
    """`file` of the area with 100,000 known bytes, closed once and open again."""
    (area.path / "file").write_bytes(content(100_000))
    opened = os.open(area.path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


def content(size: int, seed: int = 1) -> bytes:
    """Bytes that differ everywhere."""
    return random.Random(seed).randbytes(size)


@promise("S-17", "S-29")
def test_two_processes_append(area: Area) -> None:
    """O_APPEND of two processes loses no line."""
    script = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(200):
    os.write(fd, b"%s %d\\n" % (sys.argv[2].encode(), number))
os.close(fd)
"""
    command = [sys.executable, "-c", script, str(area.path / "log")]
    writers = [subprocess.Popen([*command, name]) for name in ("one", "two")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = area.get("log").decode().splitlines()
    for name in ("one", "two"):
        assert [line for line in lines if line.startswith(name)] == [f"{name} {number}" for number in range(200)]


@promise("S-29")
def test_a_reader_beside_a_writer_sees_what_was_written(area: Area) -> None:
    """Also where what one writes goes past the kernel's pages while another fills them."""
    path, done = area.path / "log", threading.Event()
    wrong: list[str] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"x")

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while not done.is_set() and not wrong:
                seen = os.pread(file.fileno(), 1 << 20, 0)
                if seen.strip(b"x"):
                    wrong.append(f"{len(seen)} bytes, not all written")

    reader = threading.Thread(target=read)
    reader.start()
    size = 1
    with path.open("rb", buffering=0) as file:
        for step in range(300):
            size += os.write(fd, b"x" * (1 + step * 37 % 5000))
            if os.pread(file.fileno(), 1 << 21, 0) != b"x" * size:
                wrong.append(f"after {size} bytes")
                break
    done.set()
    reader.join()
    os.close(fd)
    assert wrong == []
    assert area.get("log") == b"x" * size


@promise("S-17", "S-18")
def test_shared_mmap(area: Area, fd: int) -> None:
    """What is written through a shared mapping is in the store after msync and fsync."""
    with mmap.mmap(fd, 0) as pages:
        pages[10:14] = b"mmap"
        pages.flush()
        assert os.pread(fd, 4, 10) == b"mmap"
        os.fsync(fd)
        assert area.get("file")[10:14] == b"mmap"
        pages[99_990:99_994] = b"last"
        pages.flush()
    os.fsync(fd)
    assert area.get("file")[99_990:99_994] == b"last"
    assert area.get("file")[14:99_990] == content(100_000)[14:99_990]


@promise("S-17")
def test_fallocate(area: Area, fd: int) -> None:
    """Allocate, keep size, punch hole and zero range; the other modes are EOPNOTSUPP."""
    body = bytearray(content(100_000))
    fallocate(fd, KEEP_SIZE, 0, 200_000)
    assert os.fstat(fd).st_size == 100_000
    fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 5_000, 10_000)
    body[5_000:15_000] = bytes(10_000)
    fallocate(fd, 0, 0, 110_000)
    body.extend(bytes(10_000))
    fallocate(fd, ZERO, 105_000, 15_000)
    body.extend(bytes(10_000))
    assert os.pread(fd, 200_000, 0) == bytes(body)
    for mode in (COLLAPSE, INSERT):
        fails(errno.EOPNOTSUPP, fallocate, fd, mode, 0, 4096)
    os.fsync(fd)
    assert area.get("file") == bytes(body)


@promise("S-17")
def test_copies_in_the_kernel(area: Area, fd: int, tmp_path: Path) -> None:
    """Sendfile and copy_file_range, onto the mount and off it."""
    body = content(100_000)
    with (area.path / "copied").open("wb") as to:
        assert sum(iter(lambda: os.copy_file_range(fd, to.fileno(), 40_000), 0)) == 100_000
    with (area.path / "sent").open("wb") as to:
        offset = 0
        while sent := os.sendfile(to.fileno(), fd, offset, 70_000):
            offset += sent
    with (tmp_path / "local").open("wb") as to:
        assert os.sendfile(to.fileno(), fd, 0, 100_000) > 0
    assert area.get("copied") == body
    assert area.get("sent") == body
    assert body.startswith((tmp_path / "local").read_bytes())


@promise("S-17")
def test_seek_data_and_hole(area: Area, fd: int) -> None:
    """A file may be seen as one piece of data."""
    assert os.lseek(fd, 10, os.SEEK_DATA) == 10
    assert os.lseek(fd, 10, os.SEEK_HOLE) == 100_000
    fails(errno.ENXIO, os.lseek, fd, 100_000, os.SEEK_DATA)


@promise("S-18")
def test_closed_means_stored(area: Area) -> None:
    """Bytes, size and attributes of files of several sizes are in the store when close returned."""
    for size in (0, 1, 4096, 1 * MIB + 1, 9 * MIB + 17):
        fd = os.open(area.path / f"file-{size}", os.O_WRONLY | os.O_CREAT, 0o640)
        body = memoryview(content(size, size))
        while body:
            body = body[os.write(fd, body) :]
        os.close(fd)
        assert area.get(f"file-{size}") == content(size, size)
        assert area.metadata(f"file-{size}")["mode"] == str(0o100640)


@promise("S-18")
def test_fsync_means_stored(area: Area) -> None:
    """Fsync and fdatasync, while the file stays open."""
    with (area.path / "file").open("wb", buffering=0) as file:
        file.write(b"one")
        os.fsync(file.fileno())
        assert area.get("file") == b"one"
        file.write(b"two")
        os.fdatasync(file.fileno())
        assert area.get("file") == b"onetwo"
        os.fchmod(file.fileno(), 0o600)
    assert area.metadata("file")["mode"] == str(0o100600)


@promise("S-23")
@pytest.mark.parametrize("size", [1000, 3 * MIB, 66 * MIB])
def test_removed_while_open(area: Area, size: int) -> None:
    """The content stays for who has it open, and can be changed; nothing is left behind.

    Over 64 MiB the server keeps a hidden copy until the last close.
    """
    body, hidden = content(size), ".datastore.unlinked/"
    (area.path / "file").write_bytes(body)
    with (area.path / "file").open("r+b", buffering=0) as file:
        (area.path / "file").unlink()
        assert not area.exists("file")
        assert hidden.rstrip("/") not in os.listdir(area.mount.path)
        assert os.pread(file.fileno(), size, 0) == body
        os.pwrite(file.fileno(), b"new", 5)
        assert os.pread(file.fileno(), 3, 5) == b"new"
        if area.is_native:  # libfuse shows its .fuse_hidden file
            assert os.fstat(file.fileno()).st_nlink == 0
            assert os.listdir(area.path) == []
            assert bool(area.mount.objects.keys(hidden)) == (size > 64 * MIB)
    # A release is not waited for.
    eventually(lambda: area.keys() == [""] and not area.mount.objects.keys(hidden), "nothing is left")


LOCKER = """
import errno, fcntl, sys

lock = fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf
with open(sys.argv[1], "r+") as file:
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        sys.exit(1 if error.errno in (errno.EAGAIN, errno.EACCES) else 2)
"""


@promise("S-24")
@pytest.mark.parametrize("kind", ["flock", "fcntl"])
def test_locks_between_processes(area: Area, kind: str) -> None:
    """Held by one process, refused to another, free after the close."""
    (area.path / "lock").write_bytes(b"")
    command = [sys.executable, "-c", LOCKER, str(area.path / "lock"), kind]
    lock = fcntl.flock if kind == "flock" else fcntl.lockf
    with (area.path / "lock").open("r+") as file:
        lock(file, fcntl.LOCK_EX)
        assert subprocess.run(command, timeout=60, check=False).returncode == 1
        lock(file, fcntl.LOCK_UN)
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
        lock(file, fcntl.LOCK_EX)
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
