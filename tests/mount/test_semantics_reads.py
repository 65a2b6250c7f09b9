"""Where reads come from on a real mount: the kernel's pages, a cache file, us (docs/SEMANTICS.md, Speed)."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter
from tests.mount.mounts import TTL, Mount, opened, python, settle
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.root_only]

MIB = 1 << 20
BODY = random.Random(5).randbytes(6 * MIB)
OTHER = random.Random(6).randbytes(6 * MIB)


@pytest.fixture
def mount(mount_with: Mounter) -> Iterator[Mount]:
    """A writable mount on a kernel with passthrough, with `big` in its cache and in none of its open files."""
    with mount_with(metadataTTL=TTL) as made:
        if made.told()["reads"]["path"] != "passthrough":
            pytest.skip("this kernel has no FUSE passthrough (Linux 6.9)")
        made.objects.put("big", BODY)
        settle()
        assert (made.path / "big").read_bytes() == BODY
        eventually(lambda: passed_through(made) == 0, "closed")
        yield made


def passed_through(mount: Mount) -> int:
    """How many inodes are open by passthrough."""
    count = mount.told()["passthroughOpen"]
    assert isinstance(count, int)
    return count


@contextmanager
def reader(mount: Mount, name: str = "big") -> Iterator[int]:
    """A descriptor that the kernel reads by itself."""

    def lent() -> int:
        """The file may still be on its way into the cache, or its last close to us: then it is opened through us."""
        fd = os.open(mount.path / name, os.O_RDONLY)
        if passed_through(mount) == 1:
            return fd
        os.close(fd)
        return -1

    fd = -1
    try:
        fd = eventually(lambda: max(lent(), 0), "open by passthrough")
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def reads(mount: Mount) -> int:
    """READ requests that came to the mount server."""
    count = mount.told()["requests"].get("READ", 0)
    assert isinstance(count, int)
    return count


@promise("S-52", "S-53", "S-54")
def test_a_cached_file_is_read_by_the_kernel(mount: Mount) -> None:
    """Also one that goes from the cache while it is read."""
    before = reads(mount)
    with reader(mount) as fd:
        assert os.pread(fd, len(BODY), 0) == BODY
        for file in (mount.folder / "cache").rglob("*.data"):
            file.unlink()
        assert os.pread(fd, len(BODY), 0) == BODY
    assert reads(mount) == before
    eventually(lambda: passed_through(mount) == 0, "closed")
    assert (mount.path / "big").read_bytes() == BODY


@promise("S-52", "S-29")
def test_what_a_writer_appends_overwrites_and_cuts_is_seen_by_who_reads_a_local_file(mount: Mount) -> None:
    with reader(mount) as fd:
        with opened(mount.path / "big", os.O_WRONLY) as writer:
            os.pwrite(writer, b"changed", 3 * MIB)
            assert os.pread(fd, 7, 3 * MIB) == b"changed"
            os.pwrite(writer, b"appended", len(BODY))
            assert os.pread(fd, 100, len(BODY)) == b"appended"
            assert (mount.path / "big").read_bytes()[3 * MIB :][:7] == b"changed"
        assert os.fstat(fd).st_size == len(BODY) + 8
        os.truncate(mount.path / "big", MIB)
        assert os.pread(fd, 100, MIB - 10) == BODY[MIB - 10 : MIB]
        assert mount.objects.get("big") == BODY[:MIB]
        assert (mount.path / "big").read_bytes() == BODY[:MIB]
        (mount.path / "big").write_bytes(b"short")
        assert os.pread(fd, 100, 0) == b"short"
    assert mount.objects.get("big") == b"short"


@promise("S-52")
def test_a_writer_that_maps_the_file_loses_nothing_and_readers_keep_their_version(mount: Mount) -> None:
    code = """
import mmap, os, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[:6] = b"mapped"
"""
    with reader(mount) as fd:
        python(code, mount.path / "big")
        assert (mount.path / "big").read_bytes() == b"mapped" + BODY[6:]
        assert os.pread(fd, len(BODY), 0) == BODY
    eventually(lambda: mount.objects.get("big") == b"mapped" + BODY[6:], "uploaded")


@promise("S-52", "S-30", "S-31")
def test_a_file_that_grew_elsewhere_is_followed_and_a_replaced_one_is_not(mount: Mount) -> None:
    with reader(mount) as fd:
        mount.objects.put("big", BODY + b"more")
        settle()
        assert (mount.path / "big").stat().st_size == len(BODY) + 4
        assert os.pread(fd, 100, len(BODY)) == b"more"
        mount.objects.put("big", OTHER)
        settle()
        assert (mount.path / "big").read_bytes() == OTHER
        assert os.pread(fd, len(BODY), 0) == BODY


@promise("S-54", "S-41")
def test_reading_goes_on_without_the_server_and_after_it(mount: Mount) -> None:
    with reader(mount) as fd:
        mount.kill_server()
        assert os.pread(fd, len(BODY), 0) == BODY
        assert (mount.path / "big").read_bytes() == BODY
        with open(mount.path / "big", "ab") as file:
            file.write(b"more")
        assert (mount.path / "big").read_bytes() == BODY + b"more"
        assert os.pread(fd, 10, 0) == BODY[:10]
    assert mount.objects.get("big") == BODY + b"more"
    eventually(lambda: passed_through(mount) == 0, "closed")


@promise("S-54")
def test_a_cache_file_that_was_tampered_with_is_fetched_again(mount: Mount) -> None:
    with reader(mount):
        pass  # so that all of it is in the cache before it is tampered with
    eventually(lambda: passed_through(mount) == 0, "closed")
    (data,) = (mount.folder / "cache").rglob("*.data")
    with open(data, "r+b") as file:
        file.write(b"tampered")
    with opened(mount.path / "big") as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, len(BODY), 0) == BODY


@promise("S-51", "S-53", "S-28")
def test_a_readonly_mount_opens_without_asking_and_sees_what_changed(mount_with: Mounter) -> None:
    with mount_with(metadataTTL=TTL, readOnly=True) as mount:
        assert mount.told()["reads"]["path"] == "no-open"
        mount.objects.put("f", b"one")
        mount.objects.put("big", BODY)
        settle()
        assert (mount.path / "f").read_bytes() == b"one"
        assert (mount.path / "big").read_bytes() == BODY
        before = mount.told()["requests"]
        for _ in range(20):
            assert (mount.path / "big").read_bytes() == BODY
        after = mount.told()["requests"]
        # The kernel may drop pages at any time (DAMON does): less than reading it once more is not our doing.
        assert after["OPEN"] == before["OPEN"]
        assert after["READ"] - before["READ"] < len(BODY) >> 20
        with opened(mount.path / "big") as held:
            mount.objects.put("big", OTHER)
            mount.objects.put("f", b"two")
            settle()
            assert (mount.path / "f").read_bytes() == b"two"
            assert (mount.path / "big").read_bytes() == OTHER
            assert os.pread(held, len(BODY), 0) == BODY
        mount.kill_server()
        assert (mount.path / "big").read_bytes() == OTHER


@promise("S-53")
def test_libfuse_says_how_it_reads(mount_with: Mounter) -> None:
    with mount_with(transport="libfuse") as mount:
        told = mount.told()["reads"]
        assert told["path"] == "keep-cache"
        assert told["why"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@promise("S-193")
@pytest.mark.root_only
@pytest.mark.parametrize("limit", ["disk", "size"])
def test_warm_says_what_did_not_fit(mount_with: Mounter, small_disk: Path, limit: str) -> None:
    """On a full disk, and beyond the size of the cache; the numbers of status are those of the disk."""
    cache = {"dir": str(small_disk), "size": "1Gi" if limit == "disk" else "12Mi"}
    with mount_with(cache=cache, readOnly=True) as mount:
        for number in range(8):
            mount.objects.put(f"f{number}", os.urandom(4 << 20))
        began = time.monotonic()
        done = mount.command("warm", mount.path)
        took_s = time.monotonic() - began
        print(f"warm of 32 MiB into a cache of 16 or 12 MiB: {took_s:.1f} s; {done.stderr}")
        assert took_s < 60
        assert done.returncode == 1
        assert "did not fit" in done.stderr
        told = mount.told()
        room = 16 << 20 if limit == "disk" else 12 << 20
        on_disk = sum(each.stat().st_blocks * 512 for each in small_disk.rglob("*") if each.is_file())
        assert 8 << 20 <= on_disk <= told["cache"]["bytes"] + (4 << 20)
        assert told["cache"]["bytes"] <= told["cache"]["limit"] <= room
        fetched = told["store"]["get"]["received_bytes"]
        assert fetched <= room + (8 << 20), "what has no room is not fetched"
        assert (mount.path / "f7").stat().st_size == 4 << 20
        assert len((mount.path / "f7").read_bytes()) == 4 << 20


@promise("S-193")
def test_warm_fetches_what_comes_after_a_file_that_does_not_fit(mount_with: Mounter, tmp_path: Path) -> None:
    with mount_with(cache={"dir": str(tmp_path / "cache"), "size": "16Mi"}, readOnly=True) as mount:
        mount.objects.put("a", bytes(20 << 20))
        for number in range(8):
            mount.objects.put(f"b/{number}", os.urandom(1000))
        done = mount.command("warm", mount.path)
        assert done.returncode == 1
        assert "1 file of 9, 20 MiB, did not fit" in done.stderr
