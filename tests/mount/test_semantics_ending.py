"""How a mount ends while its store hangs or programs use it (docs/SEMANTICS.md, S-191, S-192)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datastore import mountinfo
from tests.mount.conftest import Breaking, Mounter
from tests.mount.mounts import Mount, runs, user
from tests.patience import eventually
from tests.promises import promise
from tests.tools.mounting import COMMAND, Client

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(300)]

HANGS_S = 40.0
"""Less than a store that hangs is waited for (60 s), and more than a busy machine adds to --timeout and two seconds."""


def timed(mount: Mount, *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """`umount`, and its seconds."""
    began = time.monotonic()
    done = mount.umount(*options)
    return done, time.monotonic() - began


OPEN_FILE = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(fd, b"precious")
print("in use", flush=True)
sys.stdin.readline()
os.write(fd, b" bytes")
"""


@promise("S-191")
@pytest.mark.parametrize("forced", [True, False])
def test_an_unmount_ends_in_time_while_the_store_hangs(breaking: Breaking, forced: bool) -> None:
    """At most --timeout and two seconds. By force, what is not uploaded is sent by the next mount there; without, the
    mount stays, also when the store takes everything afterwards."""
    with breaking() as (storage, mount), user(OPEN_FILE, mount.path / "file") as writer:
        storage.freeze()
        assert writer.stdin is not None
        writer.stdin.close()  # it closes the file, which waits for the store
        done, took_s = timed(mount, *(("--force",) if forced else ()), "--timeout", "2s")
        print(f"umount --timeout 2s, by force: {forced}: {took_s:.1f} s")
        assert (done.returncode, "still mounted" in done.stderr) == (6, not forced), done.stderr
        assert took_s < HANGS_S
        storage.thaw()
        if forced:
            assert not os.path.ismount(mount.path)
            eventually(lambda: not any(map(runs, mount.pids)), "the processes have ended")
            mount.mount()
            eventually(lambda: mount.objects.exists("file"), "it is sent")
        else:
            assert writer.wait(60) == 0
            time.sleep(1)
            assert os.path.ismount(mount.path)
        assert mount.objects.get("file") == b"precious bytes"


@promise("S-191")
def test_a_shell_that_stands_in_a_mount_that_was_ended_by_force_is_told_to_leave(mount_with: Mounter) -> None:
    """Its current directory is one that no path leads to, and that answers nothing."""
    with mount_with() as mount:
        script = f"cd {mount.path} && {COMMAND} umount --force {mount.path} && {COMMAND} list"
        environment = Client(mount.folder).environment
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        *_, last = done.stderr.splitlines()
        assert last.startswith("error: the current directory can't be used (")
        assert last.endswith("cd to another one")


@pytest.mark.root_only
def test_a_forced_unmount_of_another_users_mount_says_why_it_is_refused(mount_with: Mounter) -> None:
    """Nothing that could be closed keeps it there."""
    with mount_with() as mount:
        for directory in (mount.folder.parent, mount.folder):
            directory.chmod(0o755)
        script = (
            "import os, sys\nfrom datastore.cli.main import leave, run\n"
            "run(['umount', '--force', '/nowhere'])\n"  # imports what may be out of that user's reach
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "leave(run(['umount', '--force', sys.argv[1]]))\n"
        )
        environment = {**os.environ, "XDG_STATE_HOME": "/nonexistent"}
        done = subprocess.run(
            [sys.executable, "-c", script, mount.path], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 5, done.stderr
        assert f"{mount.path}: can't be unmounted: fusermount3: " in done.stderr
        assert "close what uses it" not in done.stderr
        assert os.path.ismount(mount.path)


@promise("S-60")
def test_a_forced_unmount_without_a_record_gives_the_directory_back(mount_with: Mounter) -> None:
    """Where the state directory is gone nobody knows of the mount, and the directory is not left immutable.

    `doctor` tells a dead one from one that is alive.
    """
    with mount_with() as mount:
        (state_dir,) = (mount.folder / "state/kube-datastore/mounts").iterdir()
        (state_dir / "mount.json").unlink()
        (state_dir / "cli.json").unlink()
        mount.path.parent.chmod(0o700)
        doctor = mount.command("doctor")
        assert f"{mount.path}: a Datastore mount that this user has no record of; it is alive" in doctor.stdout
        mount.kill()
        doctor = mount.command("doctor")
        assert (doctor.returncode, "it is dead" in doctor.stdout) == (0, True), doctor.stdout
        done, took_s = timed(mount, "--force")
        print(f"umount --force without a record: {took_s:.1f} s")
        assert (done.returncode, "no record of this mount" in done.stderr) == (0, True), done.stderr
        assert took_s < HANGS_S
        (mount.path / "file").write_text("can be written again")
        (mount.path / "file").unlink()
        mount.path.rmdir()


@promise("S-192")
def test_a_command_that_leaves_a_user_behind_is_detached_and_loses_nothing(mount_with: Mounter) -> None:
    """`run` says who uses the directory, ends with 76, and what that one still writes is uploaded, even by another
    server: the end of `run` ends its mount only if `run` was killed."""
    with mount_with() as mount:
        assert mount.umount().returncode == 0
        begun, ended = mount.folder / "begun", mount.folder / "ended"
        waits = "import time\nopen(sys.argv[2], 'w')\nwhile not os.path.exists(sys.argv[3]): time.sleep(0.05)"
        program = OPEN_FILE.replace("sys.stdin.readline()", waits)
        script = '"$@" & while [ ! -e "$5" ]; do sleep 0.05; done'
        done = mount.command(  # it does not wait for who is left behind: that one waits for the end of the test
            *("run", "-f", mount.folder / "datastore.yaml", "--mount", f"work={mount.path}", "--"),
            *("sh", "-c", script, "sh", sys.executable, "-c", program, mount.path / "file", begun, ended),
        )
        assert done.returncode == 76, done.stderr
        assert "used by pid" in done.stderr
        assert "it was detached" in done.stderr
        assert not os.path.ismount(mount.path)
        os.kill(mount.told()["serverPid"], signal.SIGKILL)
        ended.touch()
        eventually(
            lambda: mount.objects.exists("file") and mount.objects.get("file") == b"precious bytes", "it is sent"
        )
        eventually(lambda: "work" not in mount.command("list").stdout, "the mount has ended")


@promise("S-192")
@pytest.mark.parametrize("stays", [False, True])
def test_a_namespace_that_still_has_the_mount_holds_nobody_up(mount_with: Mounter, stays: bool) -> None:
    """As a local job has one, where mounts are private, as in most containers. If the directory stays, who has the
    mount is named, and its end is the mount's end; if it goes, the kernel ends the mount there, too.
    """
    with mount_with() as mount:
        if stays:
            assert mount.umount().returncode == 0
            mount.path.mkdir()
            mount.mount()
        apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo apart; exec sleep 600"]
        with subprocess.Popen(apart, stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == b"apart\n"
                began = time.monotonic()
                done = mount.umount()
                took_s = time.monotonic() - began
            finally:
                other.kill()
        print(f"umount, mounted elsewhere too: {took_s:.1f} s")
        assert done.returncode == 0, done.stderr
        assert (f"in the mount namespace of pid {other.pid} (sleep)" in done.stderr) == stays, done.stderr
        assert took_s < HANGS_S
        assert not os.path.ismount(mount.path)
        eventually(lambda: "work" not in mount.command("list").stdout, "the mount has ended")


@promise("S-192")
def test_ctrl_c_of_a_mount_in_the_foreground_detaches_it_from_its_users(mount_with: Mounter) -> None:
    """No mount stays in the tree, and who uses it goes on to its own end."""
    with mount_with() as mount:
        assert mount.umount().returncode == 0
        command = [COMMAND, "mount", "--foreground", str(mount.folder / "datastore.yaml"), "work", str(mount.path)]
        environment = Client(mount.folder).environment
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as foreground:
            assert foreground.stderr is not None
            while "Ctrl-C" not in foreground.stderr.readline():
                assert foreground.poll() is None
            with user(OPEN_FILE, mount.path / "file") as writer:
                began = time.monotonic()
                foreground.send_signal(signal.SIGINT)
                _, said = foreground.communicate(timeout=60)
                took_s = time.monotonic() - began
                print(f"mount --foreground, busy: gone {took_s:.1f} s after Ctrl-C")
                assert took_s < HANGS_S
                assert (foreground.returncode, "it was detached" in said) == (76, True), said
                assert not os.path.ismount(mount.path)
                assert writer.stdin is not None
                writer.stdin.close()
                assert writer.wait(60) == 0
            assert mount.objects.get("file") == b"precious bytes"


@promise("S-192")
def test_a_mount_of_the_kernel_stays_for_the_command_of_a_killed_run(tmp_path: Path) -> None:
    """What the command saves then is in the Datastore, not in the directory below the mount."""
    kept, place, manifest = tmp_path / "kept", tmp_path / "place", tmp_path / "datastore.yaml"
    kept.mkdir()
    manifest.write_text(
        "{apiVersion: datastore.dev/v1alpha1, kind: Datastore, metadata: {name: kept}, "
        f"spec: {{local: {{path: {kept}}}}}}}"
    )
    body = f"trap 'sleep 2; echo saved > {place}/late; exit' TERM; touch {place}/started; while :; do sleep 0.1; done"
    run = [COMMAND, "run", "-f", str(manifest), "--mount", f"kept={place}", "--", "sh", "-c", body]
    with subprocess.Popen(run, cwd="/", env=Client(tmp_path).environment) as process:
        eventually((kept / "started").exists, "the command runs")
        process.kill()
    # os.path.ismount does not see a bind mount of the same disk.
    eventually(lambda: mountinfo.read().at(str(place)) is None, "the mount has ended")
    assert (kept / "late").read_text() == "saved\n"
    assert list(place.iterdir()) == []
