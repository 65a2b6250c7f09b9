"""The mount as a whole: refusals, read-only, deaths and remounts (docs/SEMANTICS.md, The mount)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from datastore.fuse.kernel import device
from tests.mount.conftest import ONE_SERVER, Mounter, new_bucket
from tests.mount.mounts import Area, Mount, error_of, fails, runs
from tests.patience import eventually
from tests.promises import promise
from tests.servers import Server
from tests.tools.mounting import NAME, manifest

pytestmark = pytest.mark.fuse
WAYS = ONE_SERVER

HANGS_S = 45.0
"""Less than a request is tried for (60 s), and more than two interpreters need to start on a busy machine, and 5 s."""
ACCESS, STORAGE = 3, 4


@pytest.fixture
def machine(clean_environment: Path, way: tuple[Server, str]) -> Iterator[Mount]:
    """A machine on which nothing is mounted yet."""
    server, transport = way
    made = Mount(server, new_bucket(server), Path(tempfile.mkdtemp(prefix="m", dir=clean_environment)), transport)
    yield made
    made.end()


WRONG: dict[str, tuple[dict[str, dict[str, object]], int, str]] = {
    "key": ({"stringData": {"AWS_ACCESS_KEY_ID": "nobody"}}, ACCESS, "access key"),
    "secret": ({"stringData": {"AWS_SECRET_ACCESS_KEY": "wrong"}}, ACCESS, "signature"),
    "bucket": ({"s3": {"bucket": "no-such-bucket", "create": False}}, STORAGE, "NoSuchBucket"),
    "region": ({"s3": {"region": "mars-north-1"}}, STORAGE, "region"),
    "endpoint": ({"s3": {"endpoint": "CLOSED"}}, STORAGE, "refused"),
    "host": ({"s3": {"endpoint": "http://no-such-host.invalid"}}, STORAGE, "no-such-host.invalid"),
    "silent": ({"s3": {"endpoint": "SILENT"}}, STORAGE, "no answer"),
}


@promise("S-39")
@pytest.mark.parametrize("way", ["versitygw-kernel", "minio-kernel"], indirect=True, scope="module")
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_mounted(machine: Mount, wrong: str) -> None:
    """Which of key, bucket, region or endpoint, with the server's words, within 5 s, by exit code."""
    changes, code, words = WRONG[wrong]
    with contextlib.ExitStack() as stack:
        text = manifest(machine.server, machine.bucket)
        for field, values in changes.items():
            for name, given in values.items():
                text = changed(text, field, name, endpoint(given, stack) if name == "endpoint" else given)
        began = time.monotonic()
        done = machine.try_mount(text=text)
        took = time.monotonic() - began
    assert done.returncode == code, done.stderr
    assert words.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert machine.server.secret_key not in done.stderr
    assert took < HANGS_S
    assert not os.path.ismount(machine.path)
    assert json.loads(machine.command("list", "-o", "json").stdout) == []
    assert not machine.path.exists(), "a directory that was made for the mount goes with it"


def changed(text: str, field: str, name: str, given: object) -> str:
    """The manifest with one value replaced; field: 's3' or 'stringData'."""
    documents = list(yaml.safe_load_all(text))
    holder = documents[0]["spec"] if field == "s3" else documents[1]
    holder[field][name] = given
    return str(yaml.safe_dump_all(documents))


def endpoint(given: object, stack: contextlib.ExitStack) -> object:
    """An address that refuses, or one that accepts and never answers."""
    if given == "CLOSED":
        taken = stack.enter_context(socket.socket())  # so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"
    if given == "SILENT":
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"
    return given


@promise("S-40")
def test_a_read_only_datastore(machine: Mount) -> None:
    """Everything can be read, every change is EROFS."""
    objects = machine.objects
    objects.put("dir/file", b"content")
    objects.put("dir/link.rclonelink", b"file")
    machine.spec["readOnly"] = True
    machine.mount()
    file, new = machine.path / "dir/file", machine.path / "dir/new"
    assert (machine.path / "dir/link").read_bytes() == b"content"
    for call in (
        lambda: file.open("r+b"),
        lambda: file.open("wb"),
        lambda: new.open("wb"),
        lambda: os.truncate(file, 0),
        lambda: new.mkdir(),
        lambda: new.symlink_to("file"),
        lambda: os.mknod(new, stat.S_IFIFO | 0o600),
        lambda: file.unlink(),
        lambda: file.rename(new),
        lambda: (machine.path / "dir").rmdir(),
        lambda: file.chmod(0o600),
        lambda: os.chown(file, 1, 1),
        lambda: os.utime(file, (1, 1)),
        lambda: os.setxattr(file, "user.a", b"b"),
    ):
        fails(errno.EROFS, call)
    assert sorted(objects.keys()) == ["dir/file", "dir/link.rclonelink"]
    assert objects.get("dir/file") == b"content"


@promise("S-40")
def test_read_only_by_option(machine: Mount) -> None:
    """`mount --read-only` whatever the manifest says."""
    assert machine.try_mount("--read-only").returncode == 0
    fails(errno.EROFS, (machine.path / "new").write_bytes, b"x")
    assert machine.umount().returncode == 0


@promise("S-41", "S-43")
def test_node_ids_are_the_same_at_the_next_mount(area: Area) -> None:
    """St_ino of files, directories and links, seen by stat and by readdir; not through libfuse's own ids."""
    (area.path / "dir/sub").mkdir(parents=True)
    (area.path / "dir/file").write_bytes(b"x")
    (area.path / "link").symlink_to("dir")

    def ids() -> dict[str, int]:
        found = {}
        for top, directories, files in os.walk(area.path):
            for name in (*directories, *files):
                path = os.path.join(top, name)
                found[os.path.relpath(path, area.path)] = os.lstat(path).st_ino
            with os.scandir(top) as entries:
                for entry in entries:
                    assert entry.inode() == entry.stat(follow_symlinks=False).st_ino
        return found

    before = ids()
    assert set(before) == {"dir", "dir/sub", "dir/file", "link"}
    assert len(set(before.values())) == 4
    area.mount.remount()
    assert ids() == before


LOOP = """
import os, sys

path, number = sys.argv[1], 0
print("ready", flush=True)
while not os.path.exists(sys.argv[2]):
    name = f"{path}/{number % 20}"
    if sys.argv[3] == "write":
        with open(name, "wb") as file:
            file.write(b"%d" % number * 1000)
            os.fsync(file.fileno())
        seen = open(name, "rb").read()
        assert seen == b"%d" % number * 1000, (number, len(seen), seen[:20])
    else:
        os.stat(path + "/kept")
        assert open(path + "/kept", "rb").read() == b"kept" * 10_000
        assert "kept" in os.listdir(path)
    number += 1
print(number)
"""


@promise("S-41")
def test_the_death_of_the_server_is_not_noticed(mount_with: Mounter, tmp_path: Path) -> None:
    """Kill -9 of the server under readers and writers, three times: no error, no lost byte, the same files."""
    with mount_with() as mount:
        (mount.path / "kept").write_bytes(b"kept" * 10_000)
        opened = (mount.path / "kept").open("rb", buffering=0)
        loops = [
            subprocess.Popen(
                [sys.executable, "-c", LOOP, mount.path, tmp_path / "stop", kind], stdout=subprocess.PIPE, text=True
            )
            for kind in ("write", "read", "read")
        ]
        try:
            for loop in loops:
                assert loop.stdout is not None
                assert loop.stdout.readline() == "ready\n"
            for _ in range(3):
                mount.kill_server()
                await_new_server(mount)
                assert os.pread(opened.fileno(), 4, 4000) == b"kept"
        finally:
            (tmp_path / "stop").touch()
            ends = [(loop.wait(120), loop.communicate()[0]) for loop in loops]
            opened.close()
        assert [code for code, _ in ends] == [0, 0, 0]
        assert all(int(text) > 0 for _, text in ends)
        for number in range(20):
            if mount.objects.exists(str(number)):
                assert (mount.path / str(number)).read_bytes() == mount.objects.get(str(number))


def await_new_server(mount: Mount) -> None:
    """Until another server answers."""

    def other() -> int:
        status = mount.status()
        return int(status["serverPid"]) if status["state"] == "mounted" and status["serverPid"] != mount.pids[1] else 0

    mount.pids[1] = eventually(other, "another server serves")


@promise("S-41", "S-18")
def test_a_writer_goes_on_after_the_death_of_the_server(mount_with: Mounter) -> None:
    """An open file with unsent bytes: what was written before and after is in the store at close."""
    with mount_with() as mount:
        file = (mount.path / "file").open("wb", buffering=0)
        file.write(b"before ")
        mount.kill_server()
        file.write(b"after")
        file.close()
        assert mount.objects.get("file") == b"before after"
        assert (mount.path / "file").read_bytes() == b"before after"
        await_new_server(mount)


@promise("S-41", "S-43")
@pytest.mark.parametrize("transport", ["kernel", "libfuse"])
def test_when_all_processes_die(mount_with: Mounter, transport: str) -> None:
    """Errors, never an empty directory; list and status say so; umount cleans up."""
    with mount_with(transport=transport) as mount:
        (mount.path / "file").write_bytes(b"content")
        mount.kill()
        for call in (
            lambda: os.listdir(mount.path),
            lambda: (mount.path / "file").read_bytes(),
            lambda: (mount.path / "new").write_bytes(b"x"),
        ):
            assert error_of(call) in (errno.ENOTCONN, errno.ECONNABORTED)
        (listed,) = json.loads(mount.command("list", "-o", "json").stdout)
        assert (listed["name"], listed["state"]) == (NAME, "crashed")
        assert mount.status()["state"] == "crashed"
        done = mount.umount()
        assert done.returncode == 0, done.stderr
        assert not os.path.lexists(mount.path) or os.listdir(mount.path) == []
        assert json.loads(mount.command("list", "-o", "json").stdout) == []
        mount.mount()
        assert (mount.path / "file").read_bytes() == b"content"


@promise("S-43")
def test_libfuse_does_not_survive_its_server(mount_with: Mounter) -> None:
    """Through libfuse the death of the server ends the mount: errors, no new server, umount cleans up."""
    with mount_with(transport="libfuse") as mount:
        (mount.path / "file").write_bytes(b"content")
        mount.kill_server()
        eventually(lambda: not runs(mount.pids[0]), "the supervisor has ended")
        fails(errno.ENOTCONN, os.stat, mount.path / "file")
        (listed,) = json.loads(mount.command("list", "-o", "json").stdout)
        assert listed["state"] == "crashed"
        assert mount.umount().returncode == 0
        mount.mount()
        assert (mount.path / "file").read_bytes() == b"content"


@promise("S-60")
def test_the_directory_beneath_is_given_back_after_a_crash(machine: Mount) -> None:
    """Whoever took the dead mount away; to another Datastore that is mounted there as well."""
    machine.path.mkdir(parents=True)
    machine.path.chmod(0o750)
    machine.mount()
    (machine.path / "file").write_bytes(b"content")
    machine.kill()
    device.unmount(str(machine.path), lazy=True)
    assert stat.S_IMODE(machine.path.stat().st_mode) == 0o550
    text = manifest(machine.server, machine.bucket).replace(f"name: {NAME}", "name: another")
    (machine.folder / "another.yaml").write_text(text)
    done = machine.command("mount", machine.folder / "another.yaml", "another", machine.path)
    assert done.returncode == 0, done.stderr
    removed = machine.command("umount", NAME)
    assert removed.returncode == 0, removed.stderr
    assert (machine.path / "file").read_bytes() == b"content", "the other mount is not the crashed one"
    assert machine.umount().returncode == 0
    assert stat.S_IMODE(machine.path.stat().st_mode) == 0o750
    (machine.path / "stray").touch()
    (machine.path / "stray").unlink()
    assert json.loads(machine.command("list", "-o", "json").stdout) == []
