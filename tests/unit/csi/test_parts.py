"""The driver's small parts: locks, status codes, messages with descriptors, handles, cgroups."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from datastore import controlclient, errors
from datastore.api.mountspec import MountSpec
from datastore.api.source import S3Location, StaticCredentials
from datastore.controlclient import SOCKET
from datastore.csi import errors as own
from datastore.csi import frames
from datastore.csi.handle import HandleTable, MountHandle, fetch_handles
from datastore.csi.health import CLIENTS, HealthServer
from datastore.csi.locks import VolumeLocks
from datastore.csi.mountdaemon import metrics, protocol
from datastore.csi.mountdaemon.cgroups import Cgroups
from datastore.csi.mountdaemon.daemon import MountState
from datastore.csi.mountdaemon.metrics import of_mounts
from datastore.csi.mountdaemon.protocol import DaemonClient, handles_handler, handles_of
from datastore.csi.status import CODES, code_of
from datastore.csi.textformat import Family, rendered
from datastore.csi.unixserver import UnixServer
from datastore.fuse.control import first_of
from datastore.linuxfds import memfd
from datastore.listening import UnixListener
from datastore.secret import Secret
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise
from tests.servers import reserved_port


@promise("S-87")
def test_a_volume_has_one_call_at_a_time_and_others_are_free() -> None:
    locks = VolumeLocks()
    with locks.hold("a"):
        with locks.hold("b"):
            pass
        with pytest.raises(own.VolumeBusy), locks.hold("a"):
            raise AssertionError("not reached")
    with locks.hold("a"):
        pass


def test_every_error_has_its_code_and_none_is_shadowed() -> None:
    everything = [each for module in (errors, own) for _, each in inspect.getmembers(module, inspect.isclass)]
    ours = [each for each in everything if issubclass(each, errors.DatastoreError)]
    assert {code_of(each("x")) for each in ours} >= {grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND}
    for number, (kind, _) in enumerate(CODES):
        assert not any(issubclass(kind, earlier) for earlier, _ in CODES[:number]), kind


def test_an_error_keeps_its_class_on_its_way_between_processes() -> None:
    assert isinstance(own.error_named("AccessDenied", "no"), errors.AccessDenied)
    assert isinstance(own.error_named("VolumeBusy", "no"), own.VolumeBusy)
    assert isinstance(own.error_named("os", "no"), errors.MountFailed)


def handle(volume_id: str = "v") -> MountHandle:
    keys = StaticCredentials(access_key_id="AKIA", secret_access_key=Secret("canary"))
    spec = MountSpec(
        name="x", mountpoint="/m", source=S3Location(bucket="b-1", credentials=keys), state_dir="/s", cache_dir="/c"
    )
    return MountHandle(
        volume_id=volume_id,
        spec=spec,
        ephemeral=False,
        negotiated={"minor": 45},
        device_fd=os.open(os.devnull, os.O_RDWR),
        opens_fd=memfd("opens"),
    )


def test_descriptors_travel_and_each_side_closes_its_own() -> None:
    ours, theirs = socket.socketpair()
    handles = HandleTable()
    handles.put(handle("a"))
    handles.put(handle("b"))
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        sender = threading.Thread(target=handles.export, args=(ours,))
        sender.start()
        found = fetch_handles(theirs, PATIENCE_S)
        sender.join()
        assert [each.volume_id for each in found] == ["a", "b"]
        assert found[0].spec == handle("a").spec
        assert "canary" not in repr(found)
        for each in found:
            assert os.fstat(each.device_fd).st_rdev == os.stat(os.devnull).st_rdev
            each.close()
    handles.clear()
    assert handles.volumes() == []
    assert handles.copy("a") is None
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_message_that_is_cut_or_not_ours_leaves_no_descriptor_behind() -> None:
    for sent in (b"\x10\x00\x00\x00{}", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00}{"):
        ours, theirs = socket.socketpair()
        with ours, theirs, open(os.devnull) as null:
            before = len(os.listdir("/proc/self/fd"))
            socket.send_fds(ours, [sent], [null.fileno()])
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(own.NotAnswering):
                frames.receive(theirs, 1.0)
            assert len(os.listdir("/proc/self/fd")) == before


def test_a_restarted_mount_daemon_gets_the_plugins_handles(tmp_path: Path) -> None:
    handles = HandleTable()
    handles.put(handle("a"))
    server = UnixServer(tmp_path / "s" / "handles.sock", handles_handler(handles, DaemonClient(tmp_path / "none")))
    server.start()
    try:
        assert server.path.stat().st_mode & 0o777 == 0o600
        assert server.path.parent.stat().st_mode & 0o777 == 0o700
        (found,) = handles_of(server.path)
        found.close()
    finally:
        server.stop()
        handles.clear()
    with pytest.raises(own.NotAnswering, match="no process answers"):
        handles_of(server.path)
    with pytest.raises(own.NotAnswering, match="the datastore-mount-daemon pod of node node-7 is starting"):
        DaemonClient(server.path, node="node-7").ping()


COUNTS = {
    "memory.limit_in_bytes": ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    "memory.max": ("memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"),
}
"""By the file with the limit: the one in which the kernel counts the kills, and what it writes there."""


@promise("S-118")
@pytest.mark.parametrize(
    ("own_lines", "group", "limit"),
    [
        ("4:memory:/pods/x\n3:cpu:/pods/x\n", "memory/pods/x", "memory.limit_in_bytes"),
        ("4:memory:/pods/x\n", "memory", "memory.limit_in_bytes"),
        ("0::/pods/x\n", "pods/x", "memory.max"),
        ("0::/\n", "", "memory.max"),
    ],
)
def test_a_mount_has_a_cgroup_with_a_ceiling_below_ours(tmp_path: Path, own_lines: str, group: str, limit: str) -> None:
    lines = tmp_path / "own"
    lines.write_text(own_lines)
    place = tmp_path / "fs" / group
    place.mkdir(parents=True)
    (place / "cgroup.procs").write_text("")
    (place / "cgroup.subtree_control").write_text("")
    made = Cgroups(tmp_path / "fs", lines).of("v", 512 << 20)
    made.make()
    made.add(4711)
    assert made.directory is not None
    assert made.directory.parent == place
    assert (made.directory / limit).read_text() == str(896 << 20)
    assert (made.directory / "cgroup.procs").read_text() == "4711"
    counted, text = COUNTS[limit]
    (made.directory / counted).write_text(text)
    assert made.oom_kills() == 3


def test_a_mount_works_without_a_cgroup(tmp_path: Path) -> None:
    lines = tmp_path / "own"
    lines.write_text("4:memory:/pods/x\n")
    for cgroups in (Cgroups(tmp_path, lines), Cgroups(tmp_path, tmp_path / "none")):
        made = cgroups.of("v", 1 << 30)
        made.make()
        made.add(1)
        assert made.oom_kills() == 0
        made.remove()
        assert made.directory is None


ASKING = """
import socket, sys
with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(sys.argv[1])
    stream.settimeout(60)
    try:
        stream.sendall(bytes.fromhex(sys.argv[2]))
        print(stream.recv(65536))
    except ConnectionError:
        print(b"")
"""


@promise("S-211")
@pytest.mark.parametrize("op", ["export", "list", "mount", "unmount"])
def test_a_hacked_mount_server_gets_no_answer_from_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """It gets neither other tenants' keys nor their descriptors."""
    monkeypatch.setattr(protocol, "CONNECT_TIMEOUT_S", PATIENCE_S)
    asked: list[object] = []

    def handler(request: frames.Message, client: socket.socket) -> None:
        asked.append(request["op"])
        frames.send(client, {"ok": True, "keys": "secret"})

    server = UnixServer(tmp_path / "s" / "daemon.sock", handler)
    server.start()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, {"op": op})
        request = theirs.recv(4096)
    supervised = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    try:
        command = [sys.executable, "-c", supervised, ASKING, str(server.path), request.hex()]
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        assert said.stdout == "b''\n"
        DaemonClient(server.path).ping()
    finally:
        server.stop()
    assert asked == ["ping"]


def test_liveness_and_readiness_are_served_over_http() -> None:
    states = {"ready": False}
    with reserved_port() as port:
        server = HealthServer(port, ready=lambda: states["ready"], metrics=lambda: "up 1\n")
        server.start()
    try:
        base = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{base}/metrics") as answer:
            assert answer.read() == b"up 1\n"
        for page in ("healthz", "healthz?verbose", "metrics?x=y"):
            with urllib.request.urlopen(f"{base}/{page}") as answer:
                assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(f"{base}/readyz")
        refused.value.close()
        states["ready"] = True
        with urllib.request.urlopen(f"{base}/readyz") as answer:
            assert answer.read() == b"ok\n"
    finally:
        server.stop()
    server.stop()


@promise("S-212")
def test_a_client_that_holds_connections_does_not_block_others() -> None:
    with reserved_port() as port:
        server = HealthServer(port, ready=lambda: True)
        server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        before = threading.active_count()
        for _ in range(3 * CLIENTS):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            idle.sendall(b"GET /healthz HTTP/1.1\r\nX-Padding: ")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        eventually(lambda: threading.active_count() <= before + CLIENTS)


def test_metrics_are_in_the_text_format() -> None:
    families = [Family(name, "counter" if name == "n" else "gauge", "Told.") for name in ("up", "none", "n")]
    samples = [("up", {"volume": 'a"b\n'}, 1.0), ("n", {}, 12345678901), ("up", {"volume": "c"}, 0.0)]
    parsed = {each.name: each for each in text_string_to_metric_families(rendered(families, samples))}
    assert [(each.labels["volume"], each.value) for each in parsed["up"].samples] == [('a"b\n', 1.0), ("c", 0.0)]
    assert parsed["n"].samples[0].value == 12345678901
    assert "none" not in parsed


def test_the_numbers_of_a_mount_carry_its_volume(tmp_path: Path) -> None:
    state = MountState(
        volume_id="a/b/c", mountpoint="/m", state_dir=str(tmp_path), supervisor_pid=1, server_pid=2, oom_kills=2
    )
    assert 'datastore_mount_up{volume="a/b/c"} 0.0' in of_mounts([state]).splitlines()
    assert 'datastore_mount_oom_kills_total{volume="a/b/c"} 2.0' in of_mounts([state]).splitlines()


LIES: dict[str, bytes] = {
    **{
        name: json.dumps({"ok": True, name: told}).encode() + b"\n"
        for name, told in {"nodes": "x", "unsent": {"bytes": [1]}, "store": {"get": 1}, "restarts": [1]}.items()
    },
    "nested": b"[" * 100_000 + b"\n",
    "no object": b"[]\n",
    "no end": b" " * (16 << 20),
}


@promise("S-212")
@pytest.mark.parametrize("lie", LIES)
def test_a_hacked_mount_server_does_not_block_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(metrics, "STATUS_TIMEOUT_S", PATIENCE_S)
    with contextlib.ExitStack() as stack:
        for name, line in (("a", b'{"ok": true}\n'), ("b", LIES[lie])):
            (tmp_path / name).mkdir()
            listener = UnixListener(tmp_path / name / SOCKET, partial(_say, line), clients=1)
            stack.callback(listener.stop, PATIENCE_S)
            listener.start()
        page = of_mounts(
            MountState(volume_id=name, mountpoint="/m", state_dir=str(tmp_path / name), supervisor_pid=1, server_pid=2)
            for name in "ab"
        )
    assert 'datastore_mount_up{volume="a"} 1.0' in page
    assert 'datastore_mount_up{volume="b"} 0.0' in page


def _say(line: bytes, client: socket.socket) -> None:
    client.recv(1 << 12)
    with contextlib.suppress(OSError):
        client.sendall(line)


@promise("S-217")
def test_only_the_first_of_many_failures_are_reported() -> None:
    """An honest answer therefore stays below the limit."""
    assert first_of(["a", "b"]) == ["a", "b"]
    assert first_of(["x"] * 2000)[-2:] == ["x", "and 1,950 more"]


@promise("S-217")
def test_an_endless_answer_is_read_up_to_its_limit(tmp_path: Path) -> None:
    sent = 0

    def drip(client: socket.socket) -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while sent < 16 << 20:
                sent += client.send(b" " * (1 << 16))

    listener = UnixListener(tmp_path / SOCKET, drip, clients=1)
    listener.start()
    try:
        with pytest.raises(own.NotAnswering, match="more than 1 MiB"):
            controlclient.brief_status(tmp_path, PATIENCE_S)
    finally:
        listener.stop(PATIENCE_S)
    # The system's buffer of a socket holds some hundred KiB.
    assert controlclient.ANSWER_BYTES < sent <= controlclient.ANSWER_BYTES + (1 << 20)
