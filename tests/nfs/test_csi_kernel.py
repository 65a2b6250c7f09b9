"""The node plugin in a guest whose kernel has the NFS client, spoken to over gRPC as the kubelet does."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from datastore.csi.spec import csi_pb2 as csi
from datastore.csi.spec.csi_pb2_grpc import NodeStub
from tests.nfs.host.guest import CHECKOUT, RECOVERED_S, Guest
from tests.nfs.host.server import NFSServer
from tests.patience import eventually
from tests.promises import promise

pytestmark = pytest.mark.timeout(1500, func_only=True)
PLUGIN_DIR = "/run/datastore"
MODES = csi.VolumeCapability.AccessMode
CALL_TIMEOUT_S = 120.0
START_TIMEOUT_S = 180.0
AT_ONCE_S = 40.0
"""Less than an unmount that waits for its server. An emulated machine takes its time; a call has two minutes."""
Export = Callable[..., str]


class Node:
    """The plugin in the guest. Its socket is here too, by ssh."""

    def __init__(self, guest: Guest, directory: Path) -> None:
        self.guest = guest
        self._socket = directory / "csi.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = f"NODE_NAME=guest PLUGIN_DIR={PLUGIN_DIR} HTTP_PORT=9808"
        script = f"cd / && exec env {environment} {CHECKOUT}/.venv/bin/python -m datastore.csi >>/run/plugin.log 2>&1"
        self._process = subprocess.Popen([*self.guest.ssh_command(), script], stdin=subprocess.DEVNULL)
        there = f"test -S {PLUGIN_DIR}/csi.sock && grep -c 'gRPC is served' /run/plugin.log"
        try:
            eventually(lambda: self._says(there), "the plugin serves", START_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.guest.shell('cat /run/plugin.log; ls -l /run/datastore')}") from None
        forward = ["-O", "forward", "-L", f"{self._socket}:{PLUGIN_DIR}/csi.sock"]
        command = self.guest.ssh_command()
        self._socket.unlink(missing_ok=True)
        subprocess.run([*command[:-1], *forward, command[-1]], check=True, timeout=START_TIMEOUT_S)

    def kill(self) -> None:
        """At once, with all that it has started."""
        self.guest.shell("pkill -9 -f 'datastore.csi' || true; rm -f /run/datastore/csi.sock /run/plugin.log")
        command = self.guest.ssh_command()
        forward = ["-O", "cancel", "-L", f"{self._socket}:{PLUGIN_DIR}/csi.sock"]
        ending = [*command[:-1], *forward, command[-1]]
        subprocess.run(ending, check=False, timeout=START_TIMEOUT_S, capture_output=True)
        if self._process is not None:
            self._process.wait(START_TIMEOUT_S)

    def call(self, method: str, request: Any) -> Any:
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            stub: Any = NodeStub(channel)  # type: ignore[no-untyped-call]
            return getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)

    def mounted(self, path: str) -> bool:
        return self._says(f"grep -q ' {path} ' /proc/self/mountinfo")

    def metrics(self) -> str:
        script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9808/metrics').read().decode())"
        return self.guest.run(f"{CHECKOUT}/.venv/bin/python", "-c", script)

    def _says(self, script: str) -> bool:
        try:
            self.guest.shell(script)
        except AssertionError:
            return False
        return True


@pytest.fixture(scope="module")
def node(nfs_client: Guest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(nfs_client, tmp_path_factory.mktemp("node"))
    made.start()
    yield made
    made.kill()


@dataclass
class Volume:
    """An export as a volume of the node, and calls about it as the kubelet makes them."""

    node: Node
    server: str
    path: str
    name: str
    options: tuple[str, ...] = ()
    mode: int = MODES.MULTI_NODE_MULTI_WRITER
    written: Mapping[str, Any] | None = None
    """spec.csi of a PersistentVolume, taken as it is."""

    @property
    def volume_id(self) -> str:
        return str(self.written["volumeHandle"]) if self.written else f"team/{self.name}/1"

    @property
    def context(self) -> dict[str, str]:
        if self.written:
            return dict(self.written["volumeAttributes"])
        source = {"kind": "nfs", "server": self.server, "path": self.path, "options": list(self.options)}
        return {"datastore.dev/spec": '{"nfs": {}}', "datastore.dev/source": json.dumps(source)}

    @property
    def staging(self) -> str:
        return f"/run/kubelet/{self.name}/globalmount"

    def target(self, pod: str = "a") -> str:
        return f"/run/kubelet/pods/{pod}/{self.name}/mount"

    def capability(self) -> csi.VolumeCapability:
        return csi.VolumeCapability(
            mount=csi.VolumeCapability.MountVolume(),
            access_mode=csi.VolumeCapability.AccessMode(mode=self.mode),  # type: ignore[arg-type]
        )

    def stage(self) -> None:
        request = csi.NodeStageVolumeRequest(
            volume_id=self.volume_id,
            staging_target_path=self.staging,
            volume_capability=self.capability(),
            volume_context=self.context,
        )
        self.node.call("NodeStageVolume", request)

    def publish(self, pod: str = "a", *, read_only: bool = False) -> str:
        request = csi.NodePublishVolumeRequest(
            volume_id=self.volume_id,
            staging_target_path=self.staging,
            target_path=self.target(pod),
            volume_capability=self.capability(),
            volume_context=self.context,
            readonly=read_only,
        )
        self.node.call("NodePublishVolume", request)
        return self.target(pod)

    def start(self) -> str:
        self.stage()
        return self.publish()

    def stats(self) -> Any:
        request = csi.NodeGetVolumeStatsRequest(volume_id=self.volume_id, volume_path=self.target())
        return self.node.call("NodeGetVolumeStats", request)

    def well(self) -> Any:
        """Its stats, once it is well: a busy machine may not answer in time."""

        def stats() -> Any:
            found = self.stats()
            return None if found.volume_condition.abnormal else found

        return eventually(stats, f"{self.name} is well")

    def unpublish(self, pod: str = "a") -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id=self.volume_id, target_path=self.target(pod))
        self.node.call("NodeUnpublishVolume", request)

    def unstage(self) -> None:
        request = csi.NodeUnstageVolumeRequest(volume_id=self.volume_id, staging_target_path=self.staging)
        self.node.call("NodeUnstageVolume", request)


@pytest.fixture
def volume(node: Node, nfs_host: NFSServer, export: Export) -> Iterator[Callable[..., Volume]]:
    made: list[Volume] = []

    def make(path: str = "", **more: Any) -> Volume:
        path = path or export(quota_bytes=32 << 20)
        made.append(Volume(node, nfs_host.address, path, f"v{len(made)}-{path.rpartition('/')[2]}", **more))
        return made[-1]

    yield make
    for each in made:
        for pod in ("a", "b"):
            with suppress(grpc.RpcError):
                each.unpublish(pod)
        with suppress(grpc.RpcError):
            each.unstage()


Volumes = Callable[..., Volume]


@contextmanager
def refused(code: grpc.StatusCode, said: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as error:
        yield
    assert (error.value.code(), said in str(error.value.details())) == (code, True), error.value.details()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def bytes_of(stats: Any) -> tuple[int, int]:
    (found,) = [each for each in stats.usage if each.unit == csi.VolumeUsage.BYTES]
    return found.total, found.used


@promise("S-232")
def test_a_volume_from_its_stage_to_its_end(node: Node, nfs_host: NFSServer, volume: Volumes) -> None:
    first = volume()
    place, guest = first.start(), node.guest
    for _ in range(2):
        first.stage()
        first.publish()
    reader = first.publish("b", read_only=True)
    guest.shell(f"echo from-a >{place}/x; chown 1001:1001 {place}/x; ln {place}/x {place}/y; cat {reader}/y")
    assert nfs_host.shell(f"cat {first.path}/x; stat -c %u {first.path}/x").split() == ["from-a", "1001"]
    with pytest.raises(AssertionError, match="Read-only"):
        guest.shell(f"echo no >{reader}/z")
    nfs_host.shell(f"echo from-another >{first.path}/z")
    eventually(lambda: "from-another" in guest.shell(f"cat {place}/z || true"), "it is seen")
    options = guest.shell(f"grep ' {first.staging} ' /proc/self/mountinfo")
    assert all(each in options for each in ("vers=4.2", "hard", "nosuid", "nodev", "acregmax=1"))

    well = first.well()
    assert well.volume_condition.message == "mounted by the kernel's NFS client, version 4.2"
    assert bytes_of(well)[0] == 32 << 20
    told = node.metrics()
    assert f'datastore_csi_volume_mounted{{volume="{first.volume_id}"}} 1.0' in told
    assert f'datastore_csi_volume_transport{{volume="{first.volume_id}",transport="kernel"}} 1.0' in told
    assert f'datastore_mount_up{{volume="{first.volume_id}"}} 1.0' in told
    assert "datastore_csi_stuck_processes 0.0" in told

    first.unpublish("b")
    first.unpublish()
    first.unstage()
    first.unstage()
    assert not node.mounted(first.staging)
    guest.shell(f"test ! -e {first.target()}")


@promise("S-236")
def test_a_quota_is_met_and_grows_while_it_is_mounted(node: Node, nfs_host: NFSServer, volume: Volumes) -> None:
    first = volume()
    place = first.start()
    with pytest.raises(AssertionError, match=r"No space left on device|Disk quota exceeded"):
        node.guest.shell(f"dd if=/dev/zero of={place}/large bs=1M count=48 conv=fsync")
    project = nfs_host.shell(
        f"xfs_quota -x -c 'project -c' /srv; lsattr -pd {first.path} | awk '{{print $1}}'"
    ).split()[-1]
    nfs_host.shell(f"xfs_quota -x -c 'limit -p bhard=64m {project}' /srv")
    request = csi.NodeExpandVolumeRequest(
        volume_id=first.volume_id, volume_path=place, capacity_range=csi.CapacityRange(required_bytes=64 << 20)
    )
    assert node.call("NodeExpandVolume", request).capacity_bytes == 64 << 20
    node.guest.shell(f"dd if=/dev/zero of={place}/large bs=1M count=48 conv=fsync")
    total, used = bytes_of(first.well())
    assert total == 64 << 20
    assert 48 << 20 <= used < 50 << 20


@promise("S-233")
def test_the_error_says_why_an_export_cannot_be_mounted(node: Node, export: Export, volume: Volumes) -> None:
    of_others = volume(export(clients="10.1.2.3"))
    for each in (of_others, volume("/srv/never-made")):
        with pytest.raises(grpc.RpcError, match="has no such export for this machine: the path is wrong, or its"):
            each.stage()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "does not take these options together: "):
        volume(options=("nonsense=1",)).stage()
    away = volume()
    away.server = "10.99.0.77"
    with refused(grpc.StatusCode.UNAVAILABLE, "the NFS server 10.99.0.77 does not answer on port 2049"):
        away.stage()
    assert not node.mounted(of_others.staging)
    assert "nfs" not in node.guest.shell("grep ' /run/kubelet' /proc/self/mountinfo || true")


@promise("S-232")
def test_an_older_version_is_used_where_it_is_asked_for(node: Node, volume: Volumes) -> None:
    first = volume(options=("vers=3", "softerr"))
    place = first.start()
    node.guest.shell(f"echo x >{place}/x; flock {place}/x true")
    assert first.well().volume_condition.message == "mounted by the kernel's NFS client, version 3"
    first.unpublish()
    first.unstage()


@promise("S-235")
def test_a_new_plugin_continues_the_kernel_mounts(node: Node, volume: Volumes) -> None:
    first = volume()
    place = first.start()
    node.guest.shell(f"echo x >{place}/x")
    node.kill()
    assert node.guest.shell(f"cat {place}/x") == "x\n", "the mount needs no process of ours"
    node.start()
    first.well()
    first.publish()
    first.unpublish()
    first.unstage()
    assert not node.mounted(first.staging)


@promise("S-88")
def test_an_export_that_was_made_anew_is_mounted_anew(node: Node, nfs_host: NFSServer, volume: Volumes) -> None:
    """Its old mount answers ESTALE."""
    first = volume()
    place = first.start()
    node.guest.shell(f"echo old >{place}/x")
    nfs_host.shell(f"rm -rf {first.path}; mkdir -m 0777 {first.path}; echo new >{first.path}/x; exportfs -ra")

    def seen() -> bool:
        first.stage()
        first.publish()
        return "new" in node.guest.shell(f"cat {place}/x || true")

    eventually(seen, "the new export is seen")


@promise("S-234")
def test_a_dead_server_delays_no_other_volume(node: Node, nfs_host: NFSServer, volume: Volumes) -> None:
    used, leaving = volume(), volume()
    place = used.start()
    leaving.start()
    guest = node.guest
    guest.shell(f"echo x >{place}/x; echo x >{leaving.target()}/x")
    nfs_host.shell("sync")
    nfs_host.cut_power()
    try:
        for each in (used, leaving):
            writes = f"dd if=/dev/zero of={each.target()}/waits bs=1M count=4 conv=fsync"
            guest.stuck(f"{writes}; echo $? >/run/waited-{each.name}")
        for _ in range(2):
            with within(AT_ONCE_S):
                hanging = used.stats()
            assert hanging.volume_condition.abnormal
            assert f"the NFS server {nfs_host.address} does not answer" in hanging.volume_condition.message
            assert bytes_of(hanging)[0] > 0
        told = node.metrics()
        assert f'datastore_mount_up{{volume="{used.volume_id}"}} 0.0' in told
        with refused(grpc.StatusCode.UNAVAILABLE, "does not answer"), within(AT_ONCE_S):
            used.publish("b")
        with within(AT_ONCE_S):
            leaving.unpublish()
        with within(AT_ONCE_S):
            leaving.unstage()
        assert not node.mounted(leaving.staging)
        assert not node.mounted(leaving.target())
        print(node.metrics().split("datastore_csi_stuck_processes ")[-1].split()[0], "processes left behind")
    finally:
        nfs_host.start()
        nfs_host.ready()
    for each in (used, leaving):
        ended = f"cat /run/waited-{each.name} || true"
        assert eventually(partial(guest.shell, ended), "who waited goes on", RECOVERED_S) == "0\n"
    assert guest.shell(f"stat -c %s {place}/waits").strip() == str(4 << 20)
    used.well()
    used.publish("b")
    leaving.start()
    assert guest.shell(f"cat {leaving.target()}/x") == "x\n"
