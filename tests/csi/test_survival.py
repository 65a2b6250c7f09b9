"""Whichever of our processes dies or is replaced on a node, programs see a pause and no error."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datastore import mountinfo
from tests.csi.driver import Driver, Pod, context_of, ended, until
from tests.promises import promise
from tests.servers import Server, reserved_port

pytestmark = pytest.mark.fuse
Pods = Callable[..., Pod]


class Application:
    """application.py, running in a directory of the mount."""

    def __init__(self, directory: Path, output: Path) -> None:
        self._directory, self._output = directory, output

    def rounds(self) -> int:
        return self._output.read_text().count("\n")

    def goes_on(self) -> None:
        """Wait for three more rounds."""
        reached = self.rounds() + 3
        until(lambda: self.rounds() >= reached or self._process.poll() is not None, f"round {reached}")
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


@promise("S-89")
def test_a_mount_server_is_killed(driver: Driver, pod: Pods, application: Application) -> None:
    for _ in range(3):
        before = driver.state(pod().volume_id).server_pid
        os.kill(before, signal.SIGKILL)
        until(lambda: driver.state(pod().volume_id).server_pid not in {0, before}, "another server")  # noqa: B023
        application.goes_on()


@promise("S-89")
def test_a_supervisor_is_killed(driver: Driver, pod: Pods, application: Application) -> None:
    before = driver.state(pod().volume_id).supervisor_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: driver.state(pod().volume_id).supervisor_pid not in {0, before}, "another supervisor")
    application.goes_on()


@promise("S-153")
def test_a_supervisor_is_killed_while_the_system_starts_no_process(
    driver: Driver, pod: Pods, application: Application
) -> None:
    """A limit of descriptors stands in for a limit of processes."""
    assert driver.mount_daemon.popen is not None
    daemon, kind = driver.mount_daemon.popen.pid, resource.RLIMIT_NOFILE
    supervisor = driver.state(pod().volume_id).supervisor_pid
    soft, hard = resource.prlimit(daemon, kind)
    resource.prlimit(daemon, kind, (0, hard))
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: driver.logs().count("a supervisor could not start") >= 3, "three tries")
    resource.prlimit(daemon, kind, (soft, hard))
    application.goes_on()


@promise("S-89")
@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_plugin_is_replaced(driver: Driver, pod: Pods, application: Application, how: str) -> None:
    getattr(driver.plugin, how)()
    application.goes_on()
    driver.plugin.start()
    driver.wait()
    pod().publish()
    application.goes_on()


@promise("S-89")
@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_mount_daemon_is_replaced(driver: Driver, pod: Pods, application: Application, how: str) -> None:
    state = driver.state(pod().volume_id)
    getattr(driver.mount_daemon, how)()
    until(lambda: ended(state.server_pid), "the server ends too")
    driver.mount_daemon.start()
    application.goes_on()
    pod().publish_again()
    assert mountinfo.read().count(str(pod().target)) == 1


@promise("S-89")
def test_first_the_plugin_is_replaced_then_the_mount_daemon(
    driver: Driver, pod: Pods, application: Application
) -> None:
    driver.plugin.kill()
    driver.plugin.start()
    driver.wait()
    driver.mount_daemon.kill()
    driver.mount_daemon.start()
    application.goes_on()
    pod().publish_again()


@promise("S-139")
@pytest.mark.parametrize("replaced", ["mount_daemon", "server"])
def test_settings_changed_during_a_replacement_reach_the_next_server(driver: Driver, pod: Pods, replaced: str) -> None:
    """The next server was started with the old settings."""
    first = pod()
    (first.start() / "x").write_text("x")
    state = driver.state(first.volume_id)
    if replaced == "server":
        os.kill(state.server_pid, signal.SIGKILL)
    else:
        driver.mount_daemon.end()
        driver.mount_daemon.start()
        until(driver.has_adopted, "the mount is adopted", log=driver.logs)
    assert (pod("pod-b", group="2000").publish() / "x").stat().st_gid == 2000


@promise("S-85")
def test_a_node_that_is_shut_down_uploads_what_is_left(
    driver: Driver, pod: Pods, versitygw: Server, bucket: str, stored: Callable[[str], bytes]
) -> None:
    (pod(context=context_of(versitygw, bucket, writeBack={"maxDelay": "3600s"})).start() / "x").write_text("x")
    for process in (driver.mount_daemon, driver.plugin):
        assert process.popen is not None
        process.popen.send_signal(signal.SIGTERM)
    assert driver.mount_daemon.end() == 0
    assert stored("x") == b"x"


@promise("S-85")
def test_files_of_a_volume_that_does_not_return_after_a_reboot_are_counted_until_it_does(
    driver: Driver, pod: Pods, versitygw: Server, bucket: str, stored: Callable[[str], bytes]
) -> None:
    first = pod(context=context_of(versitygw, bucket, writeBack={"maxDelay": "3600s"}))
    (first.start() / "x").write_text("x")
    driver.close()
    with reserved_port() as port:
        driver.plugin.environment = {**driver.plugin.environment, "HTTP_PORT": str(port)}
        driver.start()

        def counted() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                return f'datastore_csi_left_files{{volume="{first.volume_id}"}} 1.0' in page.read().decode()

        first.end()
        assert counted()
        first.start()
        assert stored("x") == b"x"
        assert not counted()
