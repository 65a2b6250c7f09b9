"""Whatever of ours dies or is replaced on a node, who reads and writes sees a pause and never an error."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from datastore.csi import mountinfo
from tests.csi.driver import Driver, Pod, until

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]


def ended(pid: int) -> bool:
    """Gone but for its entry, which its parent has to take."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Application:
    """Writes a file, reads it back by its checksum, reads an older one, lists; until told to stop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rounds = 0
        self.error: BaseException | None = None
        self._sums: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def _round(self) -> None:
        body = os.urandom(50_000)
        self._sums[self.rounds % 16] = hashlib.sha256(body).hexdigest()
        path = self.directory / f"f{self.rounds % 16}"
        with path.open("wb") as file:
            file.write(body[:30_000])
            file.flush()
            file.write(body[30_000:])
        for number, checksum in self._sums.items():
            read = (self.directory / f"f{number}").read_bytes()
            assert hashlib.sha256(read).hexdigest() == checksum, f"f{number} has other bytes"
        assert len(os.listdir(self.directory)) == len(self._sums)

    def goes_on(self) -> None:
        """Three more rounds."""
        reached = self.rounds + 3
        until(lambda: self.rounds >= reached or self.error is not None, f"round {reached}", 60)
        if self.error is not None:
            raise self.error

    @contextmanager
    def running(self) -> Iterator[Application]:
        self._thread.start()
        try:
            self.goes_on()
            yield self
            self.goes_on()
        finally:
            self._stop.set()
            self._thread.join(60)
        assert self.error is None


@pytest.fixture
def application(pod: Pods) -> Iterator[Application]:
    (pod().start() / "work").mkdir()
    with Application(pod().target / "work").running() as running:
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
