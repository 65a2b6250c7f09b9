"""What our engine agrees upon with the kernel: caching, invalidation, interrupts, passthrough, privileges."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from datastore.errors import MountFailed
from datastore.fuse.kernel import device
from datastore.fuse.kernel.session import Settings
from datastore.fuse.ops import Ino
from tests.memfs import MemFs, pattern
from tests.mount.engine import mounted
from tests.mount.mounts import python
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]
needs_root = pytest.mark.root_only  # passthrough and other users' mounts


def filled(**options: object) -> MemFs:
    filesystem = MemFs(**options)  # type: ignore[arg-type]  # passed on as they are
    filesystem.populate()
    return filesystem


def test_reads_come_in_pieces_of_a_mebibyte(tmp_path: Path) -> None:
    filesystem = filled(keep_cache=False)
    filesystem.nodes[Ino(1000)].content[:] = bytes(16 << 20)
    with mounted(tmp_path / "m", filesystem) as mount:
        assert mount.session.negotiated is not None
        assert mount.session.negotiated.max_pages == 256
        device.tune_read_ahead(str(mount.path))
        before = filesystem.calls["read"]
        with (mount.path / "d" / "000").open("rb", buffering=0) as opened:
            while opened.read(1 << 20):
                pass
        pieces = filesystem.calls["read"] - before
        assert pieces <= (40 if os.geteuid() == 0 else 140)  # a plain user's read-ahead stays at 128 KiB


def test_what_a_walk_brought_is_not_asked_again_and_every_open_is_released(tmp_path: Path) -> None:
    """Names and attributes come together."""
    filesystem = filled(ttl_s=3600.0)
    with mounted(tmp_path / "m", filesystem) as mount:
        with os.scandir(mount.path / "d") as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        assert sizes["007"] == len(pattern(7))
        assert filesystem.calls["readdirplus"] > 0
        for number in range(20):
            (mount.path / "d" / f"{number:03d}").read_bytes()
        assert filesystem.calls["lookup"] <= 2
        eventually(lambda: not filesystem.open_handles, "RELEASE and RELEASEDIR come for every open")
        before = filesystem.calls.total()
        for _ in range(50):
            os.stat(mount.path / "d" / "150")  # who reads makes the kernel ask for the time of access
        assert filesystem.calls.total() == before


def test_another_clients_change_is_seen_when_it_is_announced(tmp_path: Path) -> None:
    filesystem = filled(ttl_s=3600.0, keep_cache=True)
    with mounted(tmp_path / "m", filesystem) as mount:
        path = mount.path / "d" / "005"
        assert path.read_bytes() == pattern(5)
        filesystem.nodes[Ino(1005)].content[:6] = b"CHANGE"
        assert path.read_bytes() == pattern(5), "pages are kept until they are invalidated"
        assert filesystem.notifier is not None
        filesystem.notifier.inval_inode(Ino(1005))
        eventually(lambda: path.read_bytes().startswith(b"CHANGE"))
        filesystem.nodes[Ino(2)].children[b"new"] = filesystem.nodes[Ino(2)].children.pop(b"006")
        filesystem.notifier.inval_entry(Ino(2), b"006")
        eventually(lambda: not (mount.path / "d" / "006").exists())


def test_announcing_while_requests_wait_does_not_deadlock(tmp_path: Path) -> None:
    filesystem = filled(ttl_s=0.0, keep_cache=False, delay_s=0.002, blocking=["read", "lookup"])
    with mounted(tmp_path / "m", filesystem) as mount:
        assert filesystem.notifier is not None
        for number in range(100):
            filesystem.notifier.inval_inode(Ino(1000 + number))
            filesystem.notifier.inval_entry(Ino(2), b"%03d" % number)
            assert (mount.path / "d" / f"{number:03d}").read_bytes() == pattern(number)


def test_a_timer_signal_does_not_disturb_a_slow_read(tmp_path: Path) -> None:
    filesystem = filled(delay_s=0.4, blocking=["read"])
    code = (
        "import os, signal, sys, ctypes\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        "buffer = ctypes.create_string_buffer(100)\n"
        "got = ctypes.CDLL(None, use_errno=True).read(fd, buffer, 100)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print(got)\n"
    )
    with mounted(tmp_path / "m", filesystem) as mount:
        assert python(code, mount.path / "d" / "003") == "100\n"


@pytest.fixture
def backing(tmp_path: Path) -> Iterator[int]:
    """A local file for passthrough."""
    (tmp_path / "backing").write_bytes(b"local" * 1000)
    fd = os.open(tmp_path / "backing", os.O_RDWR)
    yield fd
    os.close(fd)


@needs_root
def test_passthrough_reads_and_writes_never_reach_us(tmp_path: Path, backing: int) -> None:
    filesystem = filled()
    filesystem.nodes[Ino(1000)].content[:] = bytes(5000)
    filesystem.passthrough_fd = lambda ino: backing if ino == 1000 else -1
    with mounted(tmp_path / "m", filesystem) as mount:
        if not mount.session.modes.enabled:
            pytest.skip("this kernel has no FUSE passthrough (Linux 6.9)")
        with (mount.path / "d" / "000").open("r+b") as one, (mount.path / "d" / "000").open("rb") as other:
            assert one.read() == b"local" * 1000
            one.seek(0)
            one.write(b"LOCAL")
            one.flush()
            assert other.read(5) == b"LOCAL"
            assert mount.session.modes.count() == 1
        assert os.pread(backing, 5, 0) == b"LOCAL"
        assert (filesystem.calls["read"], filesystem.calls["write"]) == (0, 0)
        eventually(lambda: mount.session.modes.count() == 0)
        assert (mount.path / "d" / "001").read_bytes() == pattern(1)


@needs_root
def test_an_inode_open_through_us_can_not_be_opened_by_passthrough_and_still_opens(
    tmp_path: Path, backing: int
) -> None:
    filesystem = filled()
    with mounted(tmp_path / "m", filesystem) as mount, (mount.path / "d" / "003").open("rb") as first:
        assert first.read(10) == pattern(3)[:10]
        filesystem.passthrough_fd = lambda _: backing
        with (mount.path / "d" / "003").open("rb") as second:
            assert second.read(10) == pattern(3)[:10]


def test_without_big_requests_everything_still_works(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", filled(), Settings(max_write=128 << 10, buffers=4)) as mount:
        (mount.path / "x").write_bytes(pattern(100))
        assert (mount.path / "x").read_bytes() == pattern(100)


def test_a_busy_mount_says_who_uses_it(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", filled()) as mount:
        with (mount.path / "d" / "000").open("rb"), pytest.raises(device.Busy, match=f"pid {os.getpid()} "):
            device.unmount(str(mount.path))
        with pytest.raises(MountFailed, match="already a mount of memory"):
            device.mount(str(mount.path), "again")


@promise("S-197")
def test_who_only_looks_at_a_mount_does_not_keep_it(tmp_path: Path) -> None:
    """A file on its way through a socket: the mount is in use, and no process can be found that uses it."""
    with mounted(tmp_path / "m", filled()) as mount, ExitStack() as ends:
        sending, receiving = map(ends.enter_context, socket.socketpair())
        with (mount.path / "d" / "000").open("rb") as opened:
            socket.send_fds(sending, [b"-"], [opened.fileno()])
        with pytest.raises(device.Busy):
            device.unmount(str(mount.path), retry_s=0.0)
        looked = threading.Timer(0.3, receiving.close)
        ends.callback(looked.join)
        looked.start()
        device.unmount(str(mount.path), retry_s=30.0)
        assert not os.path.ismount(mount.path)


def test_unmounting_lazily_lets_open_files_go_on(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", filled()) as mount, (mount.path / "d" / "009").open("rb") as opened:
        device.unmount(str(mount.path), lazy=True)
        assert not os.path.ismount(mount.path)
        assert opened.read() == pattern(9)
