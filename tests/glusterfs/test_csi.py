"""A GlusterFS volume on a node: both processes of the driver, over gRPC."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator

import pytest

from datastore import mountinfo
from tests.csi.driver import Driver, Pod, running, until
from tests.glusterfs.server import GlusterServer
from tests.mount.mounts import error_of
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(900)]


@pytest.fixture
def driver(gluster: GlusterServer) -> Iterator[Driver]:
    """Both processes, in the server's network."""
    with running() as made:
        yield made


@promise("S-309")
def test_a_volume_lives_as_long_as_the_mount_daemon(gluster: GlusterServer, driver: Driver) -> None:
    """The plugin may be replaced. With the mount daemon the client ends: the next daemon mounts the volume anew,
    running pods get ENOTCONN and are told so, and what is published from then on works.
    """
    spec = {"glusterfs": {"servers": [gluster.address], "volume": "digits"}}
    context = {"datastore.dev/spec": json.dumps(spec)}
    pod = Pod(driver=driver, volume_id="team/volume/1234", context=context, secrets={})
    target = pod.start()
    (target / "written").write_text("by a pod")
    assert (gluster.directory / "bricks/digits/written").read_text() == "by a pod"
    there = mountinfo.read().at(str(target))
    assert there is not None
    assert there.fstype == "fuse.glusterfs"

    opened = os.open(target / "written", os.O_RDWR)
    driver.plugin.kill()
    driver.plugin.start()
    driver.wait()
    assert os.pwrite(opened, b"BY", 0) == 2

    # A supervisor that dies leaves its client to the next one.
    client = driver.mounted_client(pod.volume_id)
    supervisor = driver.state(pod.volume_id).supervisor_pid
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: driver.state(pod.volume_id).supervisor_pid not in (0, supervisor), "another one", log=driver.logs)
    until(lambda: driver.mounted_client(pod.volume_id) == client, "it goes on with the client", log=driver.logs)
    assert os.pwrite(opened, b"By", 0) == 2

    driver.mount_daemon.kill()
    os.kill(client, signal.SIGKILL)  # as all processes of a container, also those that lost their parent
    until(lambda: error_of(os.listdir, target) == errno.ENOTCONN, "pods get errors")
    driver.mount_daemon.start()
    until(lambda: not error_of(os.listdir, pod.staging), "the volume is mounted anew", log=driver.logs)
    assert error_of(os.pwrite, opened, b"no", 0) == errno.ENOTCONN
    error_of(os.close, opened)
    until(lambda: "has ended; the pod has to be restarted" in pod.condition(), "the condition says so")
    # The kubelet repeats this: a container that is started again finds the volume.
    until(lambda: "written" in os.listdir(pod.publish()), "it is published anew", log=driver.logs)
    assert (target / "written").read_text() == "By a pod"
    until(lambda: "GlusterFS's own client" in pod.condition(), "the client answers again", log=driver.logs)
    pod.end()
    assert list(driver.settings.state_root.iterdir()) == [], "nothing is left on the node"
    assert not [each for each in mountinfo.read().mounts if str(driver.directory) in each.mountpoint]
