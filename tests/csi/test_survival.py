"""Whatever of ours dies or is replaced on a node, who reads and writes sees a pause and never an error."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datastore import mountinfo
from datastore.csi.errors import KeeperAway
from tests.csi.driver import Driver, Pod, ended, until

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]


class Application:
    """application.py at work in a directory of the mount."""

    def __init__(self, directory: Path, output: Path) -> None:
        self._directory, self._output = directory, output

    def rounds(self) -> int:
        return self._output.read_text().count("\n")

    def goes_on(self) -> None:
        """Three more rounds."""
        reached = self.rounds() + 3
        until(lambda: self.rounds() >= reached or self._process.poll() is not None, f"round {reached}", 60)
        assert self._process.poll() is None, self._output.with_suffix(".err").read_text()

    @contextmanager
    def running(self) -> Iterator[Application]:
        program = [sys.executable, str(Path(__file__).with_name("application.py")), str(self._directory)]
        with self._output.open("wb") as out, self._output.with_suffix(".err").open("wb") as err:
            self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd="/")
        try:
            self.goes_on()
            yield self
            self.goes_on()
        finally:
            self._process.kill()
            self._process.wait(60)


@pytest.fixture
def application(pod: Pods, tmp_path: Path) -> Iterator[Application]:
    (pod().start() / "work").mkdir()
    with Application(pod().target / "work", tmp_path / "rounds").running() as running:
        yield running


def test_a_mount_server_is_killed(driver: Driver, pod: Pods, application: Application) -> None:
    """S-89"""
    for _ in range(3):
        before = driver.state(pod().volume_id).server_pid
        os.kill(before, signal.SIGKILL)
        until(lambda: driver.state(pod().volume_id).server_pid not in {0, before}, "another server")  # noqa: B023
        application.goes_on()


def test_a_keeper_is_killed(driver: Driver, pod: Pods, application: Application) -> None:
    """S-89"""
    before = driver.state(pod().volume_id).keeper_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: driver.state(pod().volume_id).keeper_pid not in {0, before}, "another keeper")
    application.goes_on()


def test_a_keeper_is_killed_while_the_system_starts_no_process(
    driver: Driver, pod: Pods, application: Application
) -> None:
    """S-153: a limit of descriptors stands for one of processes."""
    assert driver.host.popen is not None
    host, kind = driver.host.popen.pid, resource.RLIMIT_NOFILE
    keeper = driver.state(pod().volume_id).keeper_pid
    soft, hard = resource.prlimit(host, kind)
    resource.prlimit(host, kind, (0, hard))
    os.kill(keeper, signal.SIGKILL)
    until(lambda: driver.logs().count("a keeper could not start") >= 3, "three tries")
    resource.prlimit(host, kind, (soft, hard))
    application.goes_on()


@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_plugin_is_replaced(driver: Driver, pod: Pods, application: Application, how: str) -> None:
    """S-89"""
    getattr(driver.plugin, how)()
    application.goes_on()
    driver.plugin.start()
    driver.wait()
    pod().publish()
    application.goes_on()


@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_keepers_host_is_replaced(driver: Driver, pod: Pods, application: Application, how: str) -> None:
    """S-89"""
    state = driver.state(pod().volume_id)
    getattr(driver.host, how)()
    until(lambda: ended(state.server_pid), "the server ends too")
    driver.host.start()
    application.goes_on()
    driver.wait()
    pod().publish()
    assert mountinfo.read().count(str(pod().target)) == 1


def test_first_the_plugin_is_replaced_then_the_keepers_host(
    driver: Driver, pod: Pods, application: Application
) -> None:
    """S-89"""
    driver.plugin.kill()
    driver.plugin.start()
    driver.wait()
    driver.host.kill()
    driver.host.start()
    application.goes_on()
    pod().publish()


@pytest.mark.parametrize("replaced", ["host", "server"])
def test_what_changes_while_a_server_is_replaced_reaches_the_next_one(driver: Driver, pod: Pods, replaced: str) -> None:
    """S-139: that one was started with what is old, and nobody would tell it later."""
    first = pod()
    (first.start() / "x").write_text("x")
    state = driver.state(first.volume_id)
    if replaced == "server":
        os.kill(state.server_pid, signal.SIGKILL)
    else:
        driver.host.end()
        driver.host.start()
        until(lambda: _keeps_one(driver), "the mount is adopted", log=driver.logs)
    assert (pod("pod-b", group="2000").publish() / "x").stat().st_gid == 2000


def _keeps_one(driver: Driver) -> bool:
    try:
        return len(driver.keeper().states()) == 1
    except KeeperAway:
        return False
