"""A test cluster leaves others alone, and nothing behind. That it is a real one is shown by the tests that use it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import cluster as clusters
from tests.cluster.fixtures import Site
from tests.cluster.kube import Kube
from tests.cluster.layout import CGROUP_ROOT, Layout
from tests.cluster.node_init import MNT_DETACH

pytestmark = [pytest.mark.e2e_cluster, pytest.mark.timeout(900, func_only=True)]


@contextlib.contextmanager
def hanging_mount() -> Iterator[tuple[Path, int]]:
    """A FUSE mount of somebody else, whose server answers nothing; and the server's end of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        try:
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
            assert libc.mount(b"other", folder.encode(), b"fuse.datastore", 0, options) == 0, ctypes.get_errno()
            try:
                yield Path(folder), device
            finally:
                libc.umount2(folder.encode(), MNT_DETACH)
        finally:
            os.close(device)


def is_gone(device: int) -> bool:
    """Whether the file system of this server is mounted nowhere: not in any namespace."""
    try:
        os.read(device, 1 << 18)
    except OSError as error:
        return error.errno == errno.ENODEV
    return False


@pytest.mark.own_node
def test_clusters_run_side_by_side_and_leave_nothing_behind(site: Site) -> None:
    name = f"beside-{uuid.uuid4().hex[:8]}"
    with hanging_mount() as (place, device), contextlib.ExitStack() as ending:
        other = clusters.up(name, api_only=True)
        ending.callback(other.end)
        assert str(place) not in Path(f"/proc/{other.record.init_pid}/mountinfo").read_text()
        assert not is_gone(device)
        ctypes.CDLL(None).umount2(str(place).encode(), 0)
        site.kube.wait_for("end of a mount that the cluster found", lambda: is_gone(device), limit_s=60)
        assert Kube(other.kubeconfig).get("namespace", "default")
        processes = other.processes()
        assert len(processes) >= 4
    assert not Layout(name=name).state.exists()
    assert not list(CGROUP_ROOT.glob(f"*/{Layout(name=name).cgroup}"))
    assert not [each for each in processes if each.is_running()]
    assert clusters.find(name) is None
    assert site.kube.get("namespace", "default"), "the other cluster is still there"
