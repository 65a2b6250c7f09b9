"""The fstab line and the systemd unit of docs/reference/cli.md (docs/SEMANTICS.md, S-197)."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter, new_bucket
from tests.mount.mounts import Mount
from tests.promises import promise
from tests.servers import Server
from tests.tools.mounting import COMMAND, COMMAND_TIMEOUT_S, Client, manifest

pytestmark = pytest.mark.fuse

REFERENCE = Path(__file__).parents[2] / "docs/reference/cli.md"
HELPERS = ("mount.datastore", "umount.fuse.datastore")


def blocks(language: str) -> list[str]:
    """The code blocks of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", REFERENCE.read_text(), re.MULTILINE | re.DOTALL)


def on_a_machine_with_helpers(mount: Mount, script: str) -> str:
    """What a script prints that root runs in a mount namespace of its own, where /sbin has our two programs only."""
    sbin = mount.folder / "sbin"
    sbin.mkdir()
    for name in HELPERS:
        (sbin / name).symlink_to(Path(sys.executable).with_name(name))
    # Its copies of what others have mounted would keep that from ending.
    theirs = "grep -o '^[0-9]* [0-9]* [^ ]* [^ ]* [^ ]* .* - fuse' /proc/self/mountinfo | cut -d' ' -f5"
    begin = f"""
        {theirs} | while read place; do umount --internal-only --lazy "$(printf "$place")"; done
        set -eu; cd {mount.folder}; mount --bind {sbin} {os.path.realpath("/sbin")}
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", begin + script],
        env=Client(mount.folder).environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def machine(versitygw: Server, clean_environment: Path) -> Iterator[Mount]:
    """A machine with a manifest, on which nothing is mounted."""
    folder = Path(tempfile.mkdtemp(prefix="m", dir=clean_environment))
    made = Mount(versitygw, new_bucket(versitygw), folder=folder)
    for directory in (made.folder / "run", made.path):
        directory.mkdir(mode=0o700)
    yield made
    made.command("umount", "--all", "--force")


@promise("S-194", "S-197")
@pytest.mark.root_only
def test_a_line_of_fstab_mounts_and_umount_uploads_what_is_left(machine: Mount) -> None:
    """The line of the documentation, with the names of this machine."""
    text = manifest(machine.server, machine.bucket, writeBack={"maxDelay": "1h"})
    (machine.folder / "photos.yaml").write_text(text)
    (line,) = blocks("fstab")
    for documented, here in (
        ("/etc/datastore/photos.yaml", machine.folder / "photos.yaml"),
        ("/mnt/photos", machine.path),
        ("name=photos", "name=work"),
        ("uid=www-data", "uid=1234"),
    ):
        assert documented in line
        line = line.replace(documented, str(here))
    (machine.folder / "fstab").write_text(line)
    machine.objects.put("of-another-tool")
    printed = on_a_machine_with_helpers(
        machine,
        f"""
        mount --fstab fstab --all; mount --fstab fstab --all
        grep -c ' {machine.path} ' /proc/self/mountinfo
        stat --format '%u %a' mnt/of-another-tool
        printf left > mnt/file
        umount mnt
        grep -c ' {machine.path} ' /proc/self/mountinfo || true
        """,
    )
    assert printed.split() == ["1", "1234", "640", "0"]
    assert machine.objects.get("file") == b"left"


@promise("S-197")
@pytest.mark.root_only
def test_what_goes_wrong_has_the_exit_codes_of_mount(machine: Mount) -> None:
    """1 for an option that there is not, 32 for what fails; what can't be uploaded stays mounted."""
    (machine.folder / "work.yaml").write_text(manifest(machine.server, machine.bucket, writeBack={"maxDelay": "1h"}))
    printed = on_a_machine_with_helpers(
        machine,
        f"""
        mount -t datastore work.yaml mnt -o noexec 2>&1 || echo "code $?"
        mkdir full; touch full/file
        mount -t datastore work.yaml full 2>/dev/null || echo "code $?"
        mount -t datastore work.yaml mnt
        printf left > mnt/file
        rm -r {machine.server.data_dir}/{machine.bucket}
        umount mnt 2>/dev/null || echo "code $?"
        cat mnt/file; echo
        umount --force mnt 2>&1 || echo "code $?"
        """,
    )
    assert "option 'noexec' is unknown" in printed
    assert "it is kept on disk" in printed
    assert re.findall(r"^(?:code \d+|left)$", printed, re.MULTILINE) == [
        "code 1",
        "code 32",
        "code 32",
        "left",
        "code 32",
    ]


@promise("S-197")
def test_a_unit_of_systemd_mounts_and_unmounts(machine: Mount) -> None:
    """ExecStart twice, as after a crash, then ExecStop."""
    (unit,) = blocks("ini")
    (machine.folder / ".local/bin").mkdir(parents=True)
    (machine.folder / ".local/bin/datastore").symlink_to(COMMAND)
    (machine.folder / "datastores.yaml").write_text(manifest(machine.server, machine.bucket))
    place = machine.folder / "data/work"
    for setting, is_mounted in (("ExecStart", True), ("ExecStart", True), ("ExecStop", False)):
        (line,) = re.findall(rf"^{setting}=(.*)$", unit, re.MULTILINE)
        command = shlex.split(line.replace("%h", str(machine.folder)).replace("%i", "work"))
        done = subprocess.run(
            command, env=Client(machine.folder).environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        assert os.path.ismount(place) is is_mounted
        if is_mounted:
            (place / setting).touch()
    assert machine.objects.keys() == ["ExecStart"]


@promise("S-194")
def test_the_owner_of_what_has_none(mount_with: Mounter) -> None:
    """What was written with an owner keeps it, and nothing is written for the others."""
    with mount_with(options=("--uid", "1234", "--gid", "2345", "--umask", "077")) as mount:
        mount.objects.put("plain/file")
        (mount.path / "ours").touch(mode=0o640)
        shown = [
            (seen.st_uid, seen.st_gid, stat.S_IMODE(seen.st_mode))
            for seen in map(os.stat, (mount.path, mount.path / "plain", mount.path / "plain/file", mount.path / "ours"))
        ]
        assert shown == [(1234, 2345, 0o700)] * 2 + [(1234, 2345, 0o600), (os.getuid(), os.getgid(), 0o640)]
        assert mount.objects.head("plain/file")["Metadata"] == {}
