"""A job's image on this machine, by podman (S-335): the image has a shell and nothing of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.promises import promise
from tests.servers import boto_client
from tests.training.laptop import PATIENCE_S, Laptop, gone, kill_launcher

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="podman of a plain user needs subordinate user ids"),
]

IMAGE = "localhost/datastore-test-shell:1"
SETTINGS = """
[containers]
# This root has no CAP_SYS_RESOURCE, so podman's defaults can't be raised to.
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
# crun refuses cgroup v1 beside v2.
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Podman with storage of its own, and an image made of busybox."""
    shell = shutil.which("busybox")
    if shutil.which("podman") is None or shutil.which("runc") is None or shell is None:
        assert os.environ.get("CI") != "true", "podman, runc or busybox is missing: make e2e-training installs them"
        pytest.skip("podman, runc or busybox is missing: make e2e-training installs them")
    (tmp_path / "containers.conf").write_text(SETTINGS)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    archive = tmp_path / "image.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(shell, "bin/busybox")
        for name in ("sh", "cat", "echo", "ls", "sleep"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    subprocess.run(["podman", "import", str(archive), IMAGE], check=True, capture_output=True)
    yield
    left = subprocess.run(["podman", "ps", "--all", "--quiet"], check=True, capture_output=True, text=True).stdout
    assert left == ""


def job(laptop: Laptop, name: str, line: str, more: str = "") -> Path:
    return laptop.manifest(
        name,
        f"  framework: none\n  image: {IMAGE}\n{more}  command: [sh, -c, '{line}']\n"
        "  datastores: [{name: data, path: /data, readOnly: true}, {name: out, path: /out}]\n",
    )


@promise("S-335")
def test_the_image_sees_its_datastores_and_its_place(laptop: Laptop, podman: None) -> None:
    line = "ls / /data; echo no > /data/x || echo refused; echo $DATASTORE_ROLE > /out/$DATASTORE_RANK; exit $CODE"
    more = '  backoffLimit: 0\n  env: [{name: CODE, value: "0"}]\n  roles: {worker: {}}\n'
    done = laptop.run("job", "submit", "-f", job(laptop, "boxed", line, more), "--container", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    log = laptop.logs("boxed", "worker")
    assert "digits.npz" in log
    assert "usr" not in log.split()
    assert "refused" in log
    assert laptop.stored() == {"0", "1"}


@promise("S-335", "S-331")
def test_a_container_is_ended_and_nothing_stays(laptop: Laptop, podman: None) -> None:
    done = laptop.run("job", "submit", "-f", job(laptop, "endless", "echo up; sleep 600"), "--container")
    assert done.returncode == 0, done.stderr
    eventually(lambda: laptop.logs("endless") == "up\n", patience_s=PATIENCE_S)
    assert laptop.run("job", "free", "endless").returncode == 0
    assert laptop.until("endless", "Failed")["status"]["freedSeconds"] < 300


@promise("S-333")
def test_the_containers_of_a_killed_launcher_end_without_another_command(laptop: Laptop, podman: None) -> None:
    """Also the shell in it, which ignores SIGTERM as every first process of a container does by default."""
    done = laptop.run("job", "submit", "-f", job(laptop, "orphaned", "echo up; sleep 600"), "--container")
    assert done.returncode == 0, done.stderr
    eventually(lambda: laptop.logs("orphaned") == "up\n", patience_s=PATIENCE_S)
    kill_launcher("orphaned")
    listing = ["podman", "ps", "--all", "--quiet"]
    eventually(lambda: subprocess.run(listing, check=True, capture_output=True).stdout == b"", patience_s=PATIENCE_S)
    eventually(lambda: gone(laptop, "orphaned"), patience_s=PATIENCE_S)
    assert "its launcher was killed" in laptop.until("orphaned", "Failed")["status"]["message"]


@promise("S-335", "S-325")
def test_a_suspended_container_is_resumed_as_one(laptop: Laptop, podman: None) -> None:
    done = laptop.run("job", "submit", "-f", job(laptop, "again", "ls /; [ -e /out/x ] || sleep 600"), "--container")
    assert done.returncode == 0, done.stderr
    eventually(lambda: "out" in laptop.logs("again"), patience_s=PATIENCE_S)
    assert laptop.run("job", "suspend", "again").returncode == 0
    boto_client(laptop.server).put_object(Bucket=laptop.out, Key="x", Body=b"")
    assert laptop.run("job", "resume", "again").returncode == 0
    laptop.until("again", "Succeeded")
    assert "usr" not in laptop.logs("again").split()


@promise("S-335")
def test_a_bad_image_is_reported(laptop: Laptop, podman: None) -> None:
    file = job(laptop, "imageless", "true")
    file.write_text(file.read_text().replace(IMAGE, "localhost/no-such-image:1"))
    laptop.run("job", "submit", "-f", file, "--container")
    found = laptop.until("imageless", "Failed")
    told = "podman probably could not pull or start the image localhost/no-such-image:1"
    assert f"master-0 ended with exit code 125 ({told}); its log says: Error: " in found["status"]["message"]
    assert "no-such-image" in laptop.logs("imageless")
