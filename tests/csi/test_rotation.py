"""A rotated Secret reaches a live mount by the kubelet's next NodePublishVolume; and no key is ever shown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.csi.accounts import Accounts, run_accounts
from tests.csi.driver import Driver, Pod, context_of, until
from tests.promises import promise
from tests.servers import make_bucket

pytestmark = pytest.mark.fuse
REFUSED = r"Permission denied|Input/output error"
CANARIES = ("canary-first-4711", "canary-second-4712")


@pytest.fixture
def accounts() -> Iterator[Accounts]:
    with run_accounts() as made:
        yield made


@promise("S-86")
def test_rotated_keys_reach_the_live_mount_and_no_text_shows_one(driver: Driver, accounts: Accounts) -> None:
    bucket = make_bucket(accounts.server, "rotated")
    first, second = (accounts.create(f"user-{number}", canary) for number, canary in enumerate(CANARIES))
    pod = Pod(driver=driver, volume_id="team/rotated/1", context=context_of(accounts.server, bucket), secrets=first)
    (pod.start() / "before").write_text("before")
    server = driver.state(pod.volume_id).server_pid

    accounts.remove("user-0")
    with pytest.raises(OSError, match=REFUSED):
        (pod.target / "between").write_text("between")
    pod.secrets = second
    pod.publish()
    (pod.target / "after").write_text("after")
    assert (pod.target / "before").read_text() == "before"
    assert driver.state(pod.volume_id).server_pid == server, "without a restart"

    os.kill(server, 9)
    until(lambda: driver.state(pod.volume_id).server_pid not in {0, server}, "another server")
    (pod.target / "later").write_text("later")

    for text in everything_said(driver):
        assert not any(canary in text for canary in CANARIES)


@promise("S-440")
def test_a_live_mount_goes_on_with_its_keys_when_the_store_refuses_the_new_ones(
    driver: Driver, accounts: Accounts
) -> None:
    bucket = make_bucket(accounts.server, "refused")
    first = accounts.create("user-0", CANARIES[0])
    pod = Pod(driver=driver, volume_id="team/refused/1", context=context_of(accounts.server, bucket), secrets=first)
    (pod.start() / "before").write_text("before")

    pod.secrets = {**first, "AWS_ACCESS_KEY_ID": "user-1"}
    for file in ("refused", "refused again"):
        pod.publish()
        (pod.target / file).write_text("still")
    assert (pod.target / "before").read_text() == "before"
    said = "the store refuses the new keys of a volume; its mount keeps the former ones"
    assert said in driver.mount_daemon.log.read_text()

    server = driver.state(pod.volume_id).server_pid
    os.kill(server, 9)
    until(lambda: driver.state(pod.volume_id).server_pid not in {0, server}, "another server")
    (pod.target / "later").write_text("by a server that was started meanwhile")

    pod.publish()
    accounts.create("user-1", CANARIES[0])
    accounts.remove("user-0")
    (pod.target / "known").write_text("the new keys work by now, and the former ones do not")
    pod.publish()
    (pod.target / "after").write_text("after")


def everything_said(driver: Driver) -> Iterator[str]:
    """Return logs, state files, and the arguments and environments of our processes."""
    yield driver.logs()
    for path in driver.settings.plugin_dir.rglob("*"):
        if path.is_file() and "cache" not in path.parts:
            with suppress(FileNotFoundError):  # its server has just replaced it
                yield path.read_bytes().decode(errors="replace")
    state = driver.daemon().states()[0]
    assert driver.mount_daemon.popen is not None
    assert driver.plugin.popen is not None
    for pid in (driver.mount_daemon.popen.pid, driver.plugin.popen.pid, state.supervisor_pid, state.server_pid):
        for name in ("cmdline", "environ"):
            yield Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")


@promise("S-123")
def test_the_mount_daemons_log_says_what_is_wrong_with_a_mount(driver: Driver, accounts: Accounts) -> None:
    bucket = make_bucket(accounts.server, "logged")
    keys = accounts.create("user-0", CANARIES[0])
    pod = Pod(driver=driver, volume_id="team/logged/1", context=context_of(accounts.server, bucket), secrets=keys)
    pod.start()
    accounts.remove("user-0")
    with pytest.raises(OSError, match=REFUSED):
        (pod.target / "x").write_text("x")
    os.kill(driver.state(pod.volume_id).server_pid, 9)
    for said in ("access key id user-0 is not known to the server", "the mount server died; it is replaced"):
        until(lambda: said in driver.mount_daemon.log.read_text(), said, log=driver.logs)  # noqa: B023


@promise("S-85")
def test_an_unsent_file_keeps_the_volume_on_the_node_until_it_is_sent(driver: Driver, accounts: Accounts) -> None:
    bucket = make_bucket(accounts.server, "unsent")
    first, second = (accounts.create(f"user-{number}", canary) for number, canary in enumerate(CANARIES))
    pod = Pod(driver=driver, volume_id="team/unsent/1", context=context_of(accounts.server, bucket), secrets=first)
    file = (pod.start() / "x").open("w")
    file.write("x")
    accounts.remove("user-0")
    with pytest.raises(OSError, match=REFUSED):
        file.close()
    pod.unpublish()
    with pytest.raises(grpc.RpcError) as refused:
        pod.unstage()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    pod.secrets = second
    assert (pod.start() / "x").exists()
    pod.end()
    assert list(driver.settings.state_root.iterdir()) == [], "nothing is left behind once all is sent"
    assert (pod.start() / "x").read_text() == "x"
