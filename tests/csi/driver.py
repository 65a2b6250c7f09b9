"""The driver's two processes in a directory of their own, as the two pods run them; and calls as the kubelet's.

The processes are ended like containers are: the whole process tree at once, by SIGKILL, or in order by SIGTERM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from datastore import mountinfo
from datastore.csi.commands import Commands
from datastore.csi.errors import NotAnswering
from datastore.csi.mountdaemon.daemon import MountState
from datastore.csi.mountdaemon.protocol import DaemonClient
from datastore.csi.settings import Settings
from datastore.csi.spec import csi_pb2 as csi
from datastore.csi.spec.csi_pb2_grpc import ControllerStub, IdentityStub, NodeStub
from tests.servers import Server

START_TIMEOUT_S = 100.0
CALL_TIMEOUT_S = 110.0
"""The kubelet's is 120 s."""
END_TIMEOUT_S = 100.0
MODES = csi.VolumeCapability.AccessMode


def until(
    condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S, log: Callable[[], str] = str
) -> None:
    """Poll until the condition holds, within a time limit."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what} {log()[-4000:]}")
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Return whether a process and its threads have ended. A zombie counts as ended: init may reap it seconds later."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def stub(made: Callable[..., Any], channel: grpc.Channel) -> Any:
    """Make a generated client, which has no types."""
    return made(channel)


@dataclass
class Process:
    """A process and its descendants."""

    module: str
    environment: Mapping[str, str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", self.module],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill all of it at once, as when its container is killed."""
        if self.popen is None:
            return
        tree: list[psutil.Process] = []
        found = [psutil.Process(self.popen.pid)]
        # Who is suspended starts nobody: when no more are found, these are all.
        while found:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            tree += found
            found = [each for each in tree[0].children(recursive=True) if each not in tree]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait()
        until(lambda: all(ended(process.pid) for process in tree), f"the end of {self.module}")
        self.popen = None

    def end(self) -> int:
        """End it with SIGTERM, as when its pod is deleted."""
        if self.popen is None:
            return 0
        self.popen.send_signal(signal.SIGTERM)
        code = self.popen.wait(END_TIMEOUT_S)
        self.popen = None
        return code


@dataclass
class Driver:
    """Both processes; directory: what is the kubelet's directory on a node."""

    directory: Path
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = Settings(
            node_id="node-1", plugin_dir=self.directory / "plugin", registry_dir=self.directory / "registry"
        )
        environment = {
            "NODE_NAME": "node-1",
            "PLUGIN_DIR": str(self.settings.plugin_dir),
            "REGISTRY_DIR": str(self.settings.registry_dir),
            "PROVISIONER": "datastore.backends.provisioner:S3Provisioner",
            "ALLOW_RANGES": "127.0.0.0/8",  # where the tests' S3 servers are
            **self.extra,
        }
        self.mount_daemon = Process("datastore.csi.mountdaemon", environment, self.directory / "mount-daemon.log")
        self.plugin = Process("datastore.csi", environment, self.directory / "plugin.log")

    def start(self) -> None:
        self.mount_daemon.start()
        self.plugin.start()
        self.wait()

    def wait(self) -> None:
        """Wait until the plugin is ready."""
        until(self.ready, "the driver is ready", log=self.logs)

    def ready(self) -> bool:
        try:
            with self.channel() as channel:
                return bool(stub(IdentityStub, channel).Probe(csi.ProbeRequest(), timeout=5).ready.value)
        except grpc.RpcError:
            return False

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(f"unix:{self.settings.csi_socket}") as channel:
            yield channel

    def node(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S, *, once: bool = False) -> Any:
        """One call of the node service; again while another call, or the plugin itself, is at work on the volume, as
        the kubelet does. once: not again. Errors: grpc.RpcError."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                with self.channel() as channel:
                    return getattr(stub(NodeStub, channel), method)(request, timeout=timeout_s, wait_for_ready=True)
            except grpc.RpcError as refused:
                if once or refused.code() is not grpc.StatusCode.ABORTED or time.monotonic() > end:
                    raise
            time.sleep(0.02)

    def controller(self, method: str, request: Any) -> Any:
        """Call the controller service. Errors: grpc.RpcError."""
        with self.channel() as channel:
            return getattr(stub(ControllerStub, channel), method)(request, timeout=CALL_TIMEOUT_S, wait_for_ready=True)

    def daemon(self) -> DaemonClient:
        return DaemonClient(self.settings.daemon_socket)

    def has_adopted(self) -> bool:
        """Return whether the mount daemon answers, and has exactly one mount."""
        try:
            return len(self.daemon().states()) == 1
        except NotAnswering:
            return False

    def state(self, volume_id: str) -> MountState:
        return next(each for each in self.daemon().states() if each.volume_id == volume_id)

    def mounted_client(self, volume_id: str) -> int:
        """Return the pid of a volume's server, from its supervisor's state file; 0: none."""
        try:
            told = json.loads(Path(self.state(volume_id).state_dir, "mount.json").read_bytes())
        except (OSError, ValueError):
            return 0
        return int(told["serverPid"])

    def logs(self) -> str:
        """Return all logs of the driver and its mounts."""
        files = [self.mount_daemon.log, self.plugin.log, *self.settings.plugin_dir.glob("state/*/[ms]*.log")]
        return "\n".join(path.read_text(errors="replace") for path in files if path.exists())

    def close_processes(self) -> None:
        """Kill all of our processes on the node at once."""
        for process in (self.plugin, self.mount_daemon):
            process.kill()

    def close(self) -> None:
        self.close_processes()
        below = f"{self.directory}/"
        for mount in reversed(mountinfo.read().mounts):
            if mount.mountpoint.startswith(below):
                Commands().unmount_all(mount.mountpoint)


@dataclass
class Pod:
    """A pod's use of a volume: its staging path and its target path."""

    driver: Driver
    volume_id: str
    context: Mapping[str, str]
    secrets: Mapping[str, str]
    name: str = "pod-a"
    read_only: bool = False
    mode: int = MODES.MULTI_NODE_MULTI_WRITER
    group: str = ""
    flags: tuple[str, ...] = ()

    @property
    def staging(self) -> str:
        return str(self.driver.directory / "staging" / self.volume_id.replace("/", "-") / "globalmount")

    @property
    def target(self) -> Path:
        return self.driver.directory / "pods" / self.name / self.volume_id.replace("/", "-") / "mount"

    def capability(self) -> csi.VolumeCapability:
        return csi.VolumeCapability(
            mount=csi.VolumeCapability.MountVolume(mount_flags=self.flags, volume_mount_group=self.group),
            access_mode=csi.VolumeCapability.AccessMode(mode=self.mode),  # type: ignore[arg-type]
        )

    def stage(self) -> None:
        self.driver.node(
            "NodeStageVolume",
            csi.NodeStageVolumeRequest(
                volume_id=self.volume_id,
                staging_target_path=self.staging,
                volume_capability=self.capability(),
                secrets=self.secrets,
                volume_context=self.context,
            ),
        )

    def publish(self, *, once: bool = False) -> Path:
        inline = self.context.get("csi.storage.k8s.io/ephemeral") == "true"
        self.driver.node(
            "NodePublishVolume",
            csi.NodePublishVolumeRequest(
                volume_id=self.volume_id,
                staging_target_path="" if inline else self.staging,
                target_path=str(self.target),
                volume_capability=self.capability(),
                readonly=self.read_only,
                secrets=self.secrets,
                volume_context=self.context,
            ),
            once=once,
        )
        return self.target

    def unpublish(self, *, once: bool = False) -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id=self.volume_id, target_path=str(self.target))
        self.driver.node("NodeUnpublishVolume", request, once=once)

    def unstage(self) -> None:
        request = csi.NodeUnstageVolumeRequest(volume_id=self.volume_id, staging_target_path=self.staging)
        self.driver.node("NodeUnstageVolume", request)

    def start(self) -> Path:
        self.stage()
        return self.publish()

    def end(self) -> None:
        """End the pod as the kubelet does, which repeats a call that can't succeed yet."""
        until(lambda: answered(self.unpublish, grpc.StatusCode.UNAVAILABLE), "the volume is unpublished")
        until(lambda: answered(self.unstage, grpc.StatusCode.UNAVAILABLE), "the volume is unstaged")

    def publish_again(self) -> None:
        """Publish again, as the kubelet does every minute. A new mount daemon may not listen yet."""
        until(lambda: answered(self.publish, grpc.StatusCode.UNAVAILABLE), "the volume is published")

    def condition(self) -> str:
        """Return what NodeGetVolumeStats says of it."""
        request = csi.NodeGetVolumeStatsRequest(volume_id=self.volume_id, volume_path=str(self.target))
        return str(self.driver.node("NodeGetVolumeStats", request).volume_condition.message)


@contextmanager
def running() -> Iterator[Driver]:
    """Yield both processes, in a directory with a short path, since it holds sockets."""
    directory = Path(tempfile.mkdtemp(prefix="csi-", dir="/tmp"))
    driver = Driver(directory)
    try:
        driver.start()
        yield driver
    finally:
        driver.close()
        shutil.rmtree(directory, ignore_errors=True)


def answered(call: Callable[[], object], unless: grpc.StatusCode) -> bool:
    """Make a call that the kubelet repeats; return False if it fails with `unless`. Errors: grpc.RpcError."""
    try:
        call()
    except grpc.RpcError as refused:
        if refused.code() is not unless:
            raise
        return False
    return True


def context_of(server: Server, bucket: str, **more: Any) -> dict[str, str]:
    """Return volumeAttributes as the controller writes them."""
    spec = {"s3": {"bucket": bucket, "endpoint": server.endpoint}, **more}
    return {"datastore.dev/spec": json.dumps(spec)}


def secrets_of(server: Server) -> dict[str, str]:
    """Return the data of the Secret."""
    return {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
