"""What is away or hangs is told in the call's own time, and the same call works once that is over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from datastore import mountinfo
from datastore.csi.keeper.protocol import export_of
from tests.csi.driver import Driver, Pod, until

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]
AT_ONCE_S = 10.0
HANGS_S = 40.0
"""Well before the kubelet gives a call up, after two minutes."""


@contextmanager
def unavailable(said: str, within_s: float) -> Iterator[None]:
    """The call is refused so, and in this time."""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as refused:
        yield
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert said in str(refused.value.details())
    assert time.monotonic() - began < within_s


def repeated(call: Callable[[], object]) -> bool:
    """Once more, as the kubelet does; whether it went well."""
    try:
        call()
    except grpc.RpcError as refused:
        if refused.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


def test_while_the_keeper_is_away_calls_end_at_once_and_work_when_it_is_back(driver: Driver, pod: Pods) -> None:
    """S-122"""
    first, second = pod("pod-a"), pod("pod-b")
    (first.start() / "x").write_text("x")
    driver.host.kill()
    for call in (second.publish, first.unstage, first.stage):
        with unavailable("the datastore-keeper pod of node node-1 is starting, or is not there", AT_ONCE_S):
            call()
    first.unpublish()  # needs nobody
    assert not first.target.exists()
    driver.host.start()
    until(lambda: repeated(second.publish), "the keeper answers again", log=driver.logs)
    assert (second.target / "x").read_text() == "x"
    second.end()
    assert mountinfo.read().at(first.staging) is None
    assert driver.keeper().states() == []


def test_a_server_that_hangs_keeps_its_volume_and_lets_it_go_when_it_answers(driver: Driver, pod: Pods) -> None:
    """S-122"""
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


def test_how_full_a_volume_is_outlives_its_server(driver: Driver, pod: Pods) -> None:
    """S-121"""
    first = pod()
    first.start()
    (held,) = export_of(driver.settings.holder_socket)
    held.close()
    filled = replace(held.spec, used_bytes=5_000_000, used_files=3)
    driver.keeper().mount(held.volume_id, filled, ephemeral=False).close()

    def shown() -> tuple[int, int]:
        found = os.statvfs(first.target)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree

    assert shown() == (5_001_216, 3)
    first.publish()  # the kubelet's, which knows nothing of it
    before = driver.state(first.volume_id).server_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: driver.state(first.volume_id).server_pid not in {0, before}, "another server")
    assert shown() == (5_001_216, 3)
