"""The mount as a whole: refusals, read-only, deaths and remounts (docs/SEMANTICS.md, The mount)."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
    made = Mount(
        server,
        new_bucket(server),
        folder=Path(tempfile.mkdtemp(prefix="m", dir=clean_environment)),
        transport=transport,
    )
    yield made
    made.end()


WRONG: dict[str, tuple[dict[str, str], int, str]] = {
    "key": ({"access_key": "nobody"}, ACCESS, "access key"),
    "secret": ({"secret_key": "wrong-secret-key"}, ACCESS, "signature"),
    "bucket": ({"bucket": "no-such-bucket"}, STORAGE, "NoSuchBucket"),
    "region": ({"region": "mars-north-1"}, STORAGE, "region"),
    "endpoint": ({"endpoint": "CLOSED"}, STORAGE, "refused"),
    "host": ({"endpoint": "http://no-such-host.invalid"}, STORAGE, "no-such-host.invalid"),
    "silent": ({"endpoint": "SILENT"}, STORAGE, "no answer"),
}


@pytest.fixture
def addresses() -> Iterator[dict[str, str]]:
    """One that refuses, and one that accepts and never answers."""
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))  # so that nobody else listens there
        both = {"CLOSED": closed, "SILENT": silent}
        yield {name: f"http://127.0.0.1:{each.getsockname()[1]}" for name, each in both.items()}


@promise("S-39")
@pytest.mark.parametrize("way", ["versitygw-kernel"], indirect=True, scope="module")
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_mounted(machine: Mount, addresses: dict[str, str], wrong: str) -> None:
    """Which of key, bucket, region or endpoint, with the server's words, within 5 s, by exit code."""
    changes, code, words = WRONG[wrong]
    given: dict[str, Any] = {name: addresses.get(text, text) for name, text in changes.items()}
    bucket = given.pop("bucket", machine.bucket)
    text = manifest(replace(machine.server, **given), bucket)
    if bucket != machine.bucket:
        text = text.replace("create: true", "create: false")
    began = time.monotonic()
    done = machine.try_mount(text=text)
    took = time.monotonic() - began
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words.lower() in done.stderr.lower()
    assert (done.stderr.startswith("error: "), done.stderr.count("\n")) == (True, 1), done.stderr
    assert given.get("secret_key", machine.server.secret_key) not in done.stderr
    assert took < HANGS_S
    assert not os.path.ismount(machine.path)
    assert json.loads(machine.command("list", "-o", "json").stdout) == []
    assert not machine.path.exists(), "a directory that was made for the mount goes with it"


FOR_AN_OLDER_LINUX = """
import os, signal
for name in ("memfd_create", "pidfd_open", "copy_file_range", "getrandom", "pidfd_send_signal"):
    for module in (os, signal):
        if hasattr(module, name):
            delattr(module, name)
"""


@promise("S-423")
@pytest.mark.parametrize("way", ["versitygw-kernel"], indirect=True, scope="module")
def test_a_python_that_was_compiled_for_an_older_linux(
    machine: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of uv and conda lack these functions, although the kernel has the system calls."""
    (tmp_path / "sitecustomize.py").write_text(FOR_AN_OLDER_LINUX)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    machine.mount()
    (machine.path / "file").write_text("content")
    with (machine.path / "file").open() as opened:
        machine.kill_server()
        assert opened.read() == "content"
    assert machine.umount().returncode == 0
    assert machine.objects.get("file") == b"content"


@promise("S-40")
@pytest.mark.parametrize("said", ["in the manifest", "by option"])
def test_a_read_only_datastore(machine: Mount, said: str) -> None:
    """Everything can be read, every change is EROFS; `mount --read-only` whatever the manifest says."""
    objects = machine.objects
    objects.put("dir/file", b"content")
    objects.put("dir/link.rclonelink", b"file")
    machine.spec["readOnly"] = said == "in the manifest"
    machine.options = ("--read-only",) if said == "by option" else ()
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


@promise("S-41", "S-43")
@pytest.mark.parametrize(("transport", "died"), [("kernel", "all"), ("libfuse", "all"), ("libfuse", "server")])
def test_when_no_server_follows(mount_with: Mounter, transport: str, died: str) -> None:
    """Errors, never an empty directory; list and status say so; umount cleans up.

    When all processes die, and through libfuse when the server does, which ends the supervisor.
    """
    with mount_with(transport=transport) as mount:
        (mount.path / "file").write_bytes(b"content")
        if died == "all":
            mount.kill()
        else:
            mount.kill_server()
            eventually(lambda: not runs(mount.pids[0]), "the supervisor has ended")
            fails(errno.ENOTCONN, os.stat, mount.path / "file")
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


@promise("S-59", "S-153")
@pytest.mark.root_only
def test_a_restart_with_a_full_disk_ends_when_the_new_server_serves(clean_environment: Path, versitygw: Server) -> None:
    """The supervisor can't write down then which server serves."""
    machine = Mount(versitygw, new_bucket(versitygw), folder=Path(tempfile.mkdtemp(prefix="m", dir=clean_environment)))
    disk = machine.folder / "state"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    try:
        machine.mount()
        (machine.path / "f").write_bytes(b"bytes")
        with (disk / "filling").open("wb", buffering=0) as filling:
            while error_of(filling.write, bytes(512)) != errno.ENOSPC:
                pass
        for _ in range(2):
            old = machine.told()["serverPid"]
            done = machine.command("restart", machine.path)
            assert done.returncode == 0, done.stderr
            assert f"in the place of {old} " in done.stderr
        assert (machine.path / "f").read_bytes() == b"bytes"
    finally:
        (disk / "filling").unlink()
        machine.end()
        subprocess.run(["umount", "--lazy", disk], check=True)


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
    (machine.folder / "another.yaml").write_text(manifest(machine.server, machine.bucket, "another"))
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
