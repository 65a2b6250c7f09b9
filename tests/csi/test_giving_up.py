"""A call fails within its deadline while something is away or hangs, and succeeds afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from datastore import mountinfo
from datastore.csi.mountdaemon.protocol import handles_of
from tests.csi.driver import Driver, Pod, answered, context_of, secrets_of, until
from tests.promises import promise
from tests.servers import Server

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]
AT_ONCE_S = 40.0
HANGS_S = 90.0
"""Well before the kubelet gives a call up, after two minutes, also on a busy machine."""


@contextmanager
def unavailable(said: str, within_s: float) -> Iterator[None]:
    """Check that the call fails with this text, within this time."""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as refused:
        yield
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert said in str(refused.value.details())
    assert time.monotonic() - began < within_s


@promise("S-122")
def test_while_the_mount_daemon_is_away_calls_end_at_once_and_work_when_it_is_back(driver: Driver, pod: Pods) -> None:
    first, second = pod("pod-a"), pod("pod-b")
    (first.start() / "x").write_text("x")
    driver.mount_daemon.kill()
    for call in (second.publish, first.unstage, first.stage):
        with unavailable("the datastore-mount-daemon pod of node node-1 is starting, or is not there", AT_ONCE_S):
            call()
    first.unpublish()  # needs nobody
    assert not first.target.exists()
    driver.mount_daemon.start()
    until(
        lambda: answered(second.publish, grpc.StatusCode.UNAVAILABLE), "the mount daemon answers again", log=driver.logs
    )
    assert (second.target / "x").read_text() == "x"
    second.end()
    assert mountinfo.read().at(first.staging) is None
    assert driver.daemon().states() == []


@promise("S-122")
def test_a_server_that_hangs_keeps_its_volume_and_lets_it_go_when_it_answers(driver: Driver, pod: Pods) -> None:
    first = pod()
    (first.start() / "x").write_text("x")
    server = driver.state(first.volume_id).server_pid
    os.kill(server, signal.SIGSTOP)
    try:
        began = time.monotonic()
        first.unpublish()
        assert time.monotonic() - began < AT_ONCE_S
        with unavailable("stays mounted for now: the mount server does not answer", HANGS_S):
            first.unstage()
    finally:
        os.kill(server, signal.SIGCONT)
    first.unstage()
    assert mountinfo.read().at(first.staging) is None


@promise("S-153")
def test_a_volume_on_a_node_whose_disk_is_full_is_refused_with_the_directory(driver: Driver, pod: Pods) -> None:
    first, disk = pod(), driver.settings.state_root
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], check=True)
    try:
        with pytest.raises(grpc.RpcError) as refused:
            first.stage()
        said = str(refused.value.details())
        assert f"the disk of the state directory {disk}/" in said
        assert said.endswith("is full: make room on it")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    (first.start() / "x").write_text("x")
    first.end()


@promise("S-207")
def test_a_write_on_a_full_disk_takes_the_place_of_cached_data(
    directory: Path, versitygw: Server, bucket: str, versitygw_put: Callable[[str, bytes], None]
) -> None:
    disk = directory / "plugin"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", disk], check=True)
    driver = Driver(directory)
    try:
        driver.start()
        versitygw_put("read", bytes(32 << 20))
        pod = Pod(
            driver=driver, volume_id="team/data/1", context=context_of(versitygw, bucket), secrets=secrets_of(versitygw)
        )
        with (pod.start() / "written").open("wb", buffering=0) as file, (disk / "filler").open("wb") as filler:
            file.write(b"x")
            assert len((pod.target / "read").read_bytes()) == 32 << 20
            free = os.statvfs(disk)
            filler.write(bytes(free.f_bavail * free.f_frsize))
            filler.flush()
            for _ in range(8):
                file.write(bytes(1 << 20))
        pod.end()
    finally:
        driver.close()  # that unmounts the disk as well


@promise("S-121")
def test_how_full_a_volume_is_outlives_its_server(driver: Driver, pod: Pods) -> None:
    first = pod()
    first.start()
    (handle,) = handles_of(driver.settings.daemon_socket)
    handle.close()
    filled = replace(handle.spec, used_bytes=5_000_000, used_files=3)
    driver.daemon().mount(handle.volume_id, filled, ephemeral=False).close()

    def shown() -> tuple[int, int]:
        found = os.statvfs(first.target)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree

    assert shown() == (5_001_216, 3)
    first.publish()  # the kubelet's, which knows nothing of it
    before = driver.state(first.volume_id).server_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: driver.state(first.volume_id).server_pid not in {0, before}, "another server")
    assert shown() == (5_001_216, 3)
