"""A GlusterFS volume on a laptop: the same commands, and a client that dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.glusterfs.mounts import made
from tests.glusterfs.server import GlusterServer
from tests.mount.mounts import error_of, runs
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(900)]


@promise("S-305")
def test_the_same_commands_mount_show_and_end_a_volume(gluster: GlusterServer, clean_environment: Path) -> None:
    """Servers that do not answer are passed over; what is written lies on the brick."""
    brick = gluster.directory / "bricks/digits"
    with made(gluster, clean_environment, glusterfs={"servers": ["10.97.0.9", gluster.address]}) as mount:
        mount.mount()
        (mount.path / "a").mkdir()
        (mount.path / "a/b").write_bytes(b"x" * 100_000)
        os.link(mount.path / "a/b", mount.path / "hard")
        assert (brick / "a/b").read_bytes() == b"x" * 100_000
        told = mount.status()
        assert told["state"] == "mounted"
        assert told["location"] == "glusterfs://10.97.0.9/digits"
        assert told["dirty"] == []
        listed = json.loads(mount.command("list", "-o", "json").stdout)
        assert [(each["name"], each["state"]) for each in listed] == [("work", "mounted")]
        doctor = mount.command("doctor", mount.folder / "datastore.yaml")
        assert f"{gluster.address} serves the volume" in doctor.stdout, doctor.stdout
        done = mount.umount()
        assert done.returncode == 0, done.stderr
        assert not os.path.ismount(mount.path)
        eventually(lambda: not any(map(runs, mount.pids)), "supervisor and client end")
        assert mount.command("list", "-o", "json").stdout.strip() == "[]"


@promise("S-305")
def test_a_directory_of_a_volume_is_mounted_and_read_only_holds(
    gluster: GlusterServer, clean_environment: Path
) -> None:
    brick = gluster.directory / "bricks/digits"
    with made(gluster, clean_environment) as whole:
        whole.mount()
        (whole.path / "sub/deeper").mkdir(parents=True)
        (whole.path / "sub/deeper/f").write_text("there")
        with made(gluster, clean_environment, glusterfs={"path": "/sub/deeper"}, readOnly=True) as part:
            part.mount()
            assert os.listdir(part.path) == ["f"]
            assert error_of((part.path / "g").write_text, "no") == errno.EROFS
            assert part.umount().returncode == 0
        assert (brick / "sub/deeper/f").read_text() == "there"
        with (whole.path / "open").open("w") as busy:
            refused = whole.umount()
            assert refused.returncode != 0
            assert "is busy" in refused.stderr
            busy.write("still")
        assert whole.umount().returncode == 0


@promise("S-306")
@pytest.mark.parametrize(
    ("glusterfs", "said"),
    [
        ({"volume": "nope"}, "no volume nope"),
        ({"path": "/not/there"}, "has no directory /not/there"),
        ({"servers": ["10.97.0.9"]}, "none of the servers 10.97.0.9 answers"),
    ],
)
def test_a_failed_mount_is_reported_and_leaves_nothing(
    gluster: GlusterServer, clean_environment: Path, glusterfs: dict[str, object], said: str
) -> None:
    """By the command, and beforehand by doctor where the servers know."""
    with made(gluster, clean_environment, glusterfs=glusterfs) as mount:
        done = mount.try_mount()
        assert done.returncode != 0
        assert said in done.stderr
        assert not os.path.lexists(mount.path)
        assert mount.command("list", "-o", "json").stdout.strip() == "[]"
        if "path" not in glusterfs:
            assert mount.command("doctor", mount.folder / "datastore.yaml").returncode != 0
    assert f" {mount.folder}/" not in Path("/proc/self/mounts").read_text()


@promise("S-306")
def test_a_volume_that_is_stopped_is_told_by_doctor(gluster: GlusterServer, clean_environment: Path) -> None:
    gluster.volume("ended")
    with made(gluster, clean_environment, glusterfs={"volume": "ended"}) as mount:
        manifest = mount.folder / "datastore.yaml"
        manifest.write_text(mount.manifest())
        assert mount.command("doctor", manifest).returncode == 0
        gluster.cli("volume", "stop", "ended")
        doctor = mount.command("doctor", manifest)
        assert doctor.returncode == 4
        assert "has the volume ended, but none of its bricks runs (gluster volume start ended" in doctor.stdout


@promise("S-307")
def test_a_client_that_died_is_replaced(gluster: GlusterServer, clean_environment: Path) -> None:
    """Until then ENOTCONN or ECONNABORTED, never an empty directory; what was open stays dead."""
    with made(gluster, clean_environment) as mount, contextlib.ExitStack() as ended:
        mount.mount()
        (mount.path / "kept").write_text("kept")
        opened = os.open(mount.path / "kept", os.O_RDWR)
        ended.callback(error_of, os.close, opened)
        seen: set[object] = set()

        def again(before: int) -> bool:
            another = mount.told()["serverPid"] not in (0, before)  # first: the one before may serve until it is gone
            try:
                seen.add("kept" in os.listdir(mount.path))
            except OSError as error:
                seen.add(error.errno)
                return False
            return another

        for _ in range(2):
            client = mount.told()["serverPid"]
            os.kill(client, signal.SIGKILL)
            eventually(partial(again, client), "another client serves")
        assert seen <= {True, errno.ENOTCONN, errno.ECONNABORTED}
        assert (mount.path / "kept").read_text() == "kept"
        assert error_of(os.pwrite, opened, b"lost", 0) == errno.ENOTCONN
        ended.close()
        assert mount.told()["restarts"] >= 2
        mount.pids = [mount.told()["supervisorPid"], mount.told()["serverPid"]]
        done = mount.umount()
        assert done.returncode == 0, done.stderr
        assert not os.path.ismount(mount.path)


@promise("S-307")
def test_a_dead_supervisor_is_seen_and_cleared_up(gluster: GlusterServer, clean_environment: Path) -> None:
    """Kill -9 of everything: the mount gives errors, `umount` takes it away, and it can be mounted again."""
    with made(gluster, clean_environment) as mount:
        mount.mount()
        mount.kill()
        assert mount.status()["state"] == "crashed"
        assert mount.umount().returncode == 0
        mount.mount()
        (mount.path / "again").write_text("again")
        assert mount.umount().returncode == 0


@promise("S-308")
def test_a_server_that_is_away_and_comes_back(gluster: GlusterServer, clean_environment: Path) -> None:
    """Without the only brick programs get ENOTCONN; the client goes on by itself; `status` says that it is silent."""
    with made(gluster, clean_environment) as mount:
        mount.mount()
        (mount.path / "before").write_text("before")
        gluster.kill()
        eventually(lambda: error_of((mount.path / "during").write_text, "lost") == errno.ENOTCONN, "an error at once")
        eventually(lambda: mount.told()["storage"], "the silence is told")
        assert "not answered since" in mount.command("status", mount.path).stdout
        gluster.start()
        eventually(lambda: not error_of((mount.path / "after").write_text, "after"), "it goes on")
        assert (mount.path / "before").read_text() == "before"
        eventually(lambda: not mount.told()["storage"], "and says so")
        assert mount.told()["restarts"] == 0
        assert mount.umount().returncode == 0
