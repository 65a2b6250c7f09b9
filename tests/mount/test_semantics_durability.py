"""What happens to bytes when the storage fails (docs/SEMANTICS.md, Reading and writing, S-18 to S-20)."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mount.conftest import new_bucket
from tests.mount.mounts import PATIENCE_S, TTL, Mount, error_of, fails, mounted
from tests.mount.outages import Breakable, breakable
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server

pytestmark = pytest.mark.fuse

BODY = bytes(range(256)) * 1000
UNSYNCED = 6


@pytest.fixture(scope="module")
def storage(versitygw: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    """The server of this module (versitygw is asked for so that its absence is reported once)."""
    with breakable(str(tmp_path_factory.mktemp("objects"))) as made:
        yield made


@pytest.fixture(scope="module", params=["kernel", "libfuse"])
def mount(request: pytest.FixtureRequest, storage: Breakable, clean_environment: Path) -> Iterator[Mount]:
    """One mount of it; tests leave the server running and nothing unsent."""
    storage.run()
    with mounted(storage.server, new_bucket(storage.server), clean_environment, request.param, metadataTTL=TTL) as made:
        yield made
        storage.run()


@pytest.fixture(autouse=True)
def works_again(storage: Breakable, mount: Mount) -> Iterator[None]:
    yield
    storage.run()


def unsent(mount: Mount) -> list[str]:
    return [each["path"] for each in mount.status()["dirty"]]


def write_refused(mount: Mount, storage: Breakable, name: str) -> None:
    """A file whose bytes the storage does not take."""
    storage.refuse_writes()
    file = (mount.path / name).open("wb", buffering=0)
    file.write(BODY)
    assert error_of(file.close) in (errno.EACCES, errno.EIO)


@promise("S-19")
def test_a_failed_upload_is_reported_and_kept(mount: Mount, storage: Breakable) -> None:
    """Close fails, the bytes are still read, status and list name them, the next fsync sends them."""
    write_refused(mount, storage, "failed")
    assert not mount.objects.exists("failed")
    assert (mount.path / "failed").read_bytes() == BODY
    (dirty,) = mount.status()["dirty"]
    assert (dirty["path"], dirty["bytes"]) == ("failed", len(BODY))
    assert "AccessDenied" in dirty["error"]
    (listed,) = json.loads(mount.command("list", "-o", "json").stdout)
    assert (listed["unsent"], listed["failed"]) == (1, 1)
    # The server is started while no descriptor is open: a child that is forked closes its copies, which sends too.
    fd = os.open(mount.path / "failed", os.O_RDWR)
    assert error_of(os.fsync, fd) in (errno.EACCES, errno.EIO)
    assert error_of(os.close, fd) in (errno.EACCES, errno.EIO)
    storage.run()
    fd = os.open(mount.path / "failed", os.O_RDWR)
    os.fsync(fd)
    assert mount.objects.get("failed") == BODY
    os.close(fd)
    assert unsent(mount) == []


@promise("S-19")
def test_umount_says_what_is_not_sent_and_sends_it_when_it_can(mount: Mount, storage: Breakable) -> None:
    """Umount ends with 6, names the file and stays mounted; when the storage works it sends and unmounts."""
    write_refused(mount, storage, "kept")
    refused = mount.umount()
    assert refused.returncode == UNSYNCED
    assert "kept" in refused.stderr
    assert "still mounted" in refused.stderr
    assert (mount.path / "kept").read_bytes() == BODY
    storage.run()
    assert mount.umount().returncode == 0
    assert mount.objects.get("kept") == BODY
    mount.mount()


@promise("S-19", "S-20")
def test_a_forced_umount_keeps_it_for_the_next_mount(mount: Mount, storage: Breakable) -> None:
    """--force unmounts, says what is left, and the next mount there sends it."""
    write_refused(mount, storage, "forced")
    forced = mount.umount("--force")
    assert forced.returncode == UNSYNCED
    assert "forced" in forced.stderr
    assert not os.path.ismount(mount.path)
    (listed,) = json.loads(mount.command("list", "-o", "json").stdout)
    assert (listed["state"], listed["unsent"]) == ("not mounted", 1)
    assert "files are not uploaded" in mount.command("doctor").stdout
    storage.run()
    mount.mount()
    assert mount.objects.get("forced") == BODY
    assert unsent(mount) == []
    assert (mount.path / "forced").read_bytes() == BODY


@promise("S-20")
def test_what_was_written_when_everything_died(mount: Mount, storage: Breakable) -> None:
    """Kill -9 of all processes with a failed file and one still open: both are sent at the next mount."""
    write_refused(mount, storage, "failed-then-killed")
    still_open = (mount.path / "open-when-killed").open("wb", buffering=0)
    still_open.write(BODY)
    mount.kill()
    assert error_of(still_open.close) != 0
    (listed,) = json.loads(mount.command("list", "-o", "json").stdout)
    assert (listed["state"], listed["unsent"]) == ("crashed", 2)
    assert mount.umount().returncode == UNSYNCED
    storage.run()
    mount.mount()
    assert mount.objects.get("failed-then-killed") == BODY
    assert mount.objects.get("open-when-killed") == BODY
    assert unsent(mount) == []


@promise("S-19")
def test_reading_what_is_held_needs_no_server(mount: Mount, storage: Breakable) -> None:
    """An outage does not take away a file that is open and was read.

    For libfuse the kernel asks for the attributes before it reads its pages, when these are older than metadataTTL:
    then the read waits for the server, as everything that needs one.
    """
    mount.objects.put("held", BODY)
    eventually((mount.path / "held").exists, "the file is seen")
    with (mount.path / "held").open("rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:
        assert file.read(len(BODY)) == BODY
        storage.stop()
        reading = reader.submit(os.pread, file.fileno(), len(BODY), 0)
        try:
            if mount.transport == "kernel":
                assert reading.result(PATIENCE_S) == BODY
        finally:
            storage.run()
        assert reading.result(PATIENCE_S) == BODY
    fails(errno.ENOENT, os.stat, mount.path / "never-there")


@promise("S-195")
def test_an_upload_limit_is_kept_and_slows_nothing_else(mount: Mount, clean_environment: Path) -> None:
    """20 MiB at 2 MiB/s, the first 8 at once, take 6 s at least; reads wait for none of it."""
    limited = mounted(mount.server, mount.bucket, clean_environment, mount.transport, uploadLimit="2Mi")
    mount.objects.put("there", BODY)
    limited_s = 5.9
    with limited as second, ThreadPoolExecutor(1) as pool:
        body = os.urandom(20 << 20)
        began = time.monotonic()
        writing = pool.submit((second.path / "large").write_bytes, body)
        reads = 0
        while not writing.done():
            assert (second.path / "there").read_bytes() == BODY
            reads += not writing.done()
            time.sleep(0.1)
        writing.result()
        took_s = time.monotonic() - began
        print(f"20 MiB with uploadLimit 2Mi: {took_s:.1f} s, {reads} reads meanwhile")
        assert took_s > limited_s
        assert reads >= 3, "they wait for the upload"
        assert mount.objects.get("large") == body
        second.spec["uploadLimit"] = "1Gi"
        second.remount()

        def is_quicker() -> bool:
            """Not always the first time: the machine may be busy."""
            began = time.monotonic()
            (second.path / "large").write_bytes(body)
            return time.monotonic() - began < limited_s

        eventually(is_quicker, "the old limit is gone")
