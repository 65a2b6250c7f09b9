"""An SSH server's directory on a node: a hand-written PersistentVolume, mounted by the driver's two processes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.csi.driver import Driver, Pod, running
from tests.csi.takenover import check_confined, check_reaches_nothing
from tests.promises import promise
from tests.sftp.sshd import SSHServer

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(600)]


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Both processes, running."""
    with running() as made:
        yield made


@promise("S-215")
def test_a_mount_server_of_sftp_reaches_nothing_of_others(
    driver: Driver, sshd: SSHServer, clean_environment: Path
) -> None:
    """Two volumes of two tenants, and one's server is taken over by what it logs in to."""
    keys = {"username": sshd.user, "ssh-privatekey": sshd.private_key}
    pods = []
    for name in "ab":
        shown = Path(tempfile.mkdtemp(prefix="n", dir=clean_environment))
        sftp = {"host": "127.0.0.1", "port": sshd.port, "path": str(shown), "knownHosts": sshd.known_hosts}
        context = {"datastore.dev/spec": json.dumps({"sftp": sftp})}
        pod = Pod(driver, f"team-{name}/data/1", context, keys, name=name)
        (pod.start() / "file").write_text(name)
        assert (shown / "file").read_text() == name
        check_confined(driver, pod)
        pods.append(pod)
    check_reaches_nothing(driver, *pods)
    for pod in pods:
        assert (pod.target / "file").read_text() == pod.name
        pod.end()
    assert list(driver.settings.state_root.iterdir()) == [], "nothing is left on the node"
