"""A supervisor that can't be started or watched, and one that dies when its mount is about to end."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore import controlclient, frames, mountinfo, ourprocess
from datastore.api.mountspec import MountSpec
from datastore.api.source import GlusterFSLocation, NFSLocation, S3Location, SFTPLocation, Source
from datastore.controlclient import Answer
from datastore.csi.commands import Commands
from datastore.csi.errors import NotAnswering, Unsent
from datastore.csi.handle import MountHandle
from datastore.csi.mountdaemon import daemon as mountdaemon
from datastore.csi.mountdaemon import supervisor
from datastore.csi.mountdaemon.cgroups import Cgroup, Cgroups
from datastore.csi.mountdaemon.daemon import MountDaemon
from datastore.csi.mountdaemon.supervisor import MountRequest, SupervisedMount
from datastore.errors import MountFailed
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise

READY: dict[str, object] = {"mounted": {}}
S3 = S3Location(bucket="b")
NFS = NFSLocation(server="h", path="/p")
SFTP = SFTPLocation(host="h", path="/p")
GLUSTERFS = GlusterFSLocation(servers=("h",), volume="v")


class Started(list[tuple[subprocess.Popen[bytes], socket.socket]]):
    """The started supervisors, and the other ends of their channels. Supervisors of existing mounts are ready."""

    makes_the_mount = False
    """Whether the next one is to make a mount, and to say so."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started()

    def start(*_: object, **__: object) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        if not made.makes_the_mount:
            frames.send(theirs, READY)
        made.append((process, theirs))
        return process, ours

    monkeypatch.setattr(ourprocess, "start", start)
    return made


def request_for(tmp_path: Path, source: Source = S3) -> MountRequest:
    spec = MountSpec(
        name="v", mountpoint=str(tmp_path / "m"), source=source, state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    return MountRequest(volume_id="v", spec=spec)


def mount_of(tmp_path: Path) -> SupervisedMount:
    """Return a volume's mount that is not started."""
    return SupervisedMount(request_for(tmp_path), Cgroup(None), lambda _: None)


def mount_by(daemon: MountDaemon, request: MountRequest, started: Started) -> None:
    """Have the daemon mount a volume; its supervisor says that it has made the mount."""
    started.makes_the_mount, number = True, len(started)

    def share() -> None:
        eventually(lambda: len(started) > number)
        with open(os.devnull, "rb") as null:
            frames.send(started[number][1], READY, (null.fileno(), null.fileno()))

    sharing = threading.Thread(target=share)
    sharing.start()
    daemon.mount(request).close()
    sharing.join()
    started.makes_the_mount = False


def handle_of(mount: SupervisedMount) -> MountHandle:
    """Return the handle that an earlier daemon had of it."""
    device_fd, opens_fd = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
    return MountHandle(
        volume_id="v", spec=mount.spec, ephemeral=False, negotiated={}, device_fd=device_fd, opens_fd=opens_fd
    )  # fmt: skip


@promise("S-153")
def test_a_system_that_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    """A supervisor without a watching thread would hold its volume for ever."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(MountFailed, match="starts no thread"):
        mount_of(tmp_path).start()
    assert started == []


def test_a_supervisor_that_ends_while_it_shares_its_descriptors(tmp_path: Path, started: Started) -> None:
    """Otherwise the kernel would hold a connection without a server, and users of the mount would wait for ever."""
    device, other = os.pipe()
    started.makes_the_mount = True

    def share() -> None:
        eventually(lambda: bool(started))
        message, descriptors = frames.receive(started[0][1], PATIENCE_S)
        assert (message["adopt"], descriptors) == (None, [])
        socket.send_fds(started[0][1], [b"\x10\0\0\0{"], [device])
        started[0][1].close()

    sharing = threading.Thread(target=share)
    sharing.start()
    with pytest.raises(MountFailed, match="gave no answer"):
        mount_of(tmp_path).start()
    sharing.join()
    os.close(device)
    with pytest.raises(BrokenPipeError):
        os.write(other, b"x")
    os.close(other)


@promise("S-153")
def test_an_adopted_mount_continues_once_a_supervisor_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """Otherwise it would have no server, and would not end either, since its descriptors stay open."""
    starts, refusals = ourprocess.start, iter((True, True))

    def start(*arguments: Any, **options: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if next(refusals, False):
            raise BlockingIOError("Resource temporarily unavailable")
        return starts(*arguments, **options)

    monkeypatch.setattr(ourprocess, "start", start)
    mount = mount_of(tmp_path)
    handle = handle_of(mount)
    assert mount.start(handle) is handle
    eventually(lambda: mount.supervisor_pid != 0)
    _, descriptors = frames.receive(started[0][1], PATIENCE_S)
    given = (handle.device_fd, handle.opens_fd)
    assert [os.path.sameopenfile(*each) for each in zip(descriptors, given, strict=True)] == [True, True]
    for descriptor in descriptors:
        os.close(descriptor)
    mount.kill()
    assert mount.over.wait(PATIENCE_S)
    started[0][1].close()


@promise("S-89")
def test_a_supervisor_that_dies_during_a_flush_is_replaced_since_the_mount_may_have_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """Otherwise the remaining mount would have no server, and the next call would take it for an ended one."""

    def flush(*_: object) -> Answer:
        started[0][0].kill()
        eventually(lambda: len(started) == 2, "another supervisor")
        return {"ok": False, "errors": ["x: access denied"]}

    monkeypatch.setattr(controlclient, "brief_status", lambda *_: {"ok": True})
    monkeypatch.setattr(controlclient, "ask", flush)
    daemon = MountDaemon(Cgroups(own=tmp_path / "none"))
    mount_by(daemon, request_for(tmp_path), started)
    with pytest.raises(Unsent, match="stays mounted: x: access denied"):
        daemon.unmount("v", "", force=False)
    eventually(lambda: [each.supervisor_pid for each in daemon.states()] == [started[1][0].pid])
    daemon.abandon()
    assert daemon.states() == []
    for _, theirs in started:
        theirs.close()


@promise("S-87")
def test_at_the_shutdown_of_a_node_all_servers_upload_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """One after the other, a storage that is away would take the pod's grace period from all but the first two."""
    together = threading.Barrier(3)

    def flush(state_dir: Path, *_: object) -> Answer:
        together.wait(PATIENCE_S)
        if state_dir.name == "b":
            raise NotAnswering("no answer")
        return {"ok": True}

    monkeypatch.setattr(controlclient, "ask", flush)
    daemon = MountDaemon(Cgroups(own=tmp_path / "none"))
    for name in "abc":
        request = request_for(tmp_path)
        spec = replace(request.spec, mountpoint=str(tmp_path / "at" / name), state_dir=str(tmp_path / name))
        mount_by(daemon, replace(request, volume_id=name, spec=spec), started)
    daemon.flush(PATIENCE_S)
    assert not together.broken
    daemon.abandon()
    for _, theirs in started:
        theirs.close()


def test_a_mount_that_is_killed_while_its_supervisor_is_replaced_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    mount = mount_of(tmp_path)
    monkeypatch.setattr(supervisor, "GONE_TIMEOUT_S", 0.0)
    starts = ourprocess.start

    def start(*arguments: Any, **options: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if started:
            mount.kill()
        return starts(*arguments, **options)

    monkeypatch.setattr(ourprocess, "start", start)
    mount.start(handle_of(mount))
    started[0][0].kill()
    assert mount.over.wait(PATIENCE_S)
    assert [process.poll() for process, _ in started] == [-9, -9]
    for _, theirs in started:
        theirs.close()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """All servers have uploaded everything. Their supervisors are simulated and do not end by themselves."""
    monkeypatch.setattr(controlclient, "brief_status", lambda *_: {"ok": True})
    monkeypatch.setattr(controlclient, "ask", lambda *_: {"ok": True, "errors": []})
    monkeypatch.setattr(mountdaemon, "ENDED_TIMEOUT_S", 0.0)


@promise("S-85", "S-265", "S-274")
@pytest.mark.parametrize(
    ("source", "files", "stays"),
    [
        (S3, ["staging/file"], True),
        (S3, ["nodes.log"], False),
        (NFS, ["hidden.log"], True),
        (NFS, ["nodes.log"], False),
        (SFTP, ["mount-id"], True),
        (SFTP, ["nodes.log"], False),
        (GLUSTERFS, ["client.log"], False),
    ],
)
@pytest.mark.usefixtures("answering")
def test_a_volume_that_has_left_the_node_leaves_only_what_the_next_mount_needs(
    tmp_path: Path, started: Started, source: Source, files: list[str], stays: bool
) -> None:
    daemon, state_dir = MountDaemon(Cgroups(own=tmp_path / "none")), tmp_path / "state"
    for name in files:
        (state_dir / name).parent.mkdir(parents=True)
        (state_dir / name).write_text("x")
    mount_by(daemon, request_for(tmp_path, source), started)
    daemon.unmount("v", "", force=False)
    assert state_dir.exists() is stays
    for _, theirs in started:
        theirs.close()


@pytest.mark.usefixtures("answering")
def test_mounts_below_a_state_directory_are_unmounted_before_its_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """A GlusterFS client that was killed during its start has left the volume mounted there."""
    daemon, below = MountDaemon(Cgroups(own=tmp_path / "none")), tmp_path / "state" / "client"
    mount_by(daemon, request_for(tmp_path, GLUSTERFS), started)
    below.mkdir()
    mounts = [mountinfo.Mount("0:1", str(below), False, "fuse.glusterfs", "v")]

    def umount(self: Commands, command: list[str], *, place: str) -> bytes:
        assert (command[0], place, below.exists()) == ("umount", str(below), True)
        mounts.clear()
        return b""

    monkeypatch.setattr(mountinfo, "read", lambda: mountinfo.MountTable(list(mounts)))
    monkeypatch.setattr(Commands, "run", umount)
    daemon.unmount("v", "", force=False)
    assert (mounts, below.exists()) == ([], False)
    for _, theirs in started:
        theirs.close()
