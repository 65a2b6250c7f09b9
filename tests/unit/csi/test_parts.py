"""The driver's small parts: locks, status codes, messages with descriptors, what is held, cgroups, commands."""

from __future__ import annotations

import inspect
import os
import socket
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from datastore import errors
from datastore.api.mountspec import MountSpec, S3Location, StaticCredentials
from datastore.csi import errors as own
from datastore.csi import frames, mounter
from datastore.csi.health import HealthServer
from datastore.csi.held import Held, Holdings, fetch
from datastore.csi.keeper.cgroups import Cgroups
from datastore.csi.keeper.host import KeptState
from datastore.csi.keeper.metrics import of_mounts
from datastore.csi.keeper.protocol import Keeper, export_of, holder_handler
from datastore.csi.locks import VolumeLocks
from datastore.csi.status import CODES, code_of
from datastore.csi.textformat import Family, rendered
from datastore.csi.unixserver import UnixServer
from datastore.secret import Secret
from tests.patience import eventually
from tests.servers import free_port


def test_a_volume_has_one_call_at_a_time_and_others_are_free() -> None:
    """S-87"""
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


def held(volume_id: str = "v") -> Held:
    keys = StaticCredentials(access_key_id="AKIA", secret_access_key=Secret("canary"))
    spec = MountSpec(
        name="x", mountpoint="/m", s3=S3Location(bucket="b-1", credentials=keys), state_dir="/s", cache_dir="/c"
    )
    return Held(
        volume_id=volume_id,
        spec=spec,
        ephemeral=False,
        negotiated={"minor": 45},
        device_fd=os.open(os.devnull, os.O_RDWR),
        opens_fd=os.memfd_create("opens"),
    )


def test_descriptors_travel_and_each_side_closes_its_own() -> None:
    ours, theirs = socket.socketpair()
    holdings = Holdings()
    holdings.put(held("a"))
    holdings.put(held("b"))
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        sender = threading.Thread(target=holdings.export, args=(ours,))
        sender.start()
        found = fetch(theirs, 5.0)
        sender.join()
        assert [each.volume_id for each in found] == ["a", "b"]
        assert found[0].spec == held("a").spec
        assert "canary" not in repr(found)
        for each in found:
            assert os.fstat(each.device_fd).st_rdev == os.stat(os.devnull).st_rdev
            each.close()
    holdings.clear()
    assert holdings.volumes() == []
    assert holdings.copy("a") is None
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_message_that_is_cut_or_not_ours_leaves_no_descriptor_behind() -> None:
    for sent in (b"\x10\x00\x00\x00{}", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00}{"):
        ours, theirs = socket.socketpair()
        with ours, theirs, open(os.devnull) as null:
            before = len(os.listdir("/proc/self/fd"))
            socket.send_fds(ours, [sent], [null.fileno()])
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(own.KeeperAway):
                frames.receive(theirs, 1.0)
            assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_plugin_holds_is_given_to_a_host_that_asks(tmp_path: Path) -> None:
    holdings = Holdings()
    holdings.put(held("a"))
    server = UnixServer(tmp_path / "s" / "holder.sock", holder_handler(holdings))
    server.start()
    try:
        assert server.path.stat().st_mode & 0o777 == 0o600
        assert server.path.parent.stat().st_mode & 0o777 == 0o700
        (found,) = export_of(server.path)
        found.close()
    finally:
        server.stop()
        holdings.clear()
    with pytest.raises(own.KeeperAway, match="no process answers"):
        export_of(server.path)
    with pytest.raises(own.KeeperAway, match="the datastore-keeper pod of node node-7 is starting"):
        Keeper(server.path, node="node-7").ping()


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """S-87"""
    note = tmp_path / "pid"
    note.touch()
    for timeout_s in (0.5, 5.0, 20.0):  # a busy machine takes its time to start it
        began = time.monotonic()
        with pytest.raises(own.CommandTimeout):
            mounter.run(["sh", "-c", f"sleep 60 & echo $! > {note}; wait"], timeout_s=timeout_s)
        assert time.monotonic() - began < timeout_s + 30
        if note.read_text():
            break
    pid = int(note.read_text())
    eventually(lambda: not _runs(pid), "a busy machine takes its time to end what is killed")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(errors.MountFailed, match="no such place"):
        mounter.run(["sh", "-c", "echo no such place >&2; exit 3"])


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
    """S-118"""
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


def test_without_a_cgroup_a_mount_lives_all_the_same(tmp_path: Path) -> None:
    lines = tmp_path / "own"
    lines.write_text("4:memory:/pods/x\n")
    for cgroups in (Cgroups(tmp_path, lines), Cgroups(tmp_path, tmp_path / "none")):
        made = cgroups.of("v", 1 << 30)
        made.make()
        made.add(1)
        made.remove()
        assert made.directory is None


def test_health_is_told_over_http() -> None:
    states = {"ready": False}
    server = HealthServer(free_port(), ready=lambda: states["ready"], metrics=lambda: "up 1\n")
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


def test_metrics_are_in_the_text_format() -> None:
    families = [Family(name, "counter" if name == "n" else "gauge", "Told.") for name in ("up", "none", "n")]
    samples = [("up", {"volume": 'a"b\n'}, 1.0), ("n", {}, 12345678901), ("up", {"volume": "c"}, 0.0)]
    parsed = {each.name: each for each in text_string_to_metric_families(rendered(families, samples))}
    assert [(each.labels["volume"], each.value) for each in parsed["up"].samples] == [('a"b\n', 1.0), ("c", 0.0)]
    assert parsed["n"].samples[0].value == 12345678901
    assert "none" not in parsed


def test_the_numbers_of_a_mount_carry_its_volume(tmp_path: Path) -> None:
    state = KeptState(volume_id="a/b/c", mountpoint="/m", state_dir=str(tmp_path), keeper_pid=1, server_pid=2)
    assert of_mounts([state]).splitlines()[-1] == 'datastore_mount_up{volume="a/b/c"} 0.0'
