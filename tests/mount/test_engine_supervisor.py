"""The supervisor: a mount that outlives its servers, ends in order, and leaves nothing behind when it can't begin."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from datastore import frames, mountinfo
from datastore.fuse.kernel import device
from datastore.fuse.supervisor.serverprocess import ServerProcess
from tests.memfs import pattern
from tests.mount.engine import BUILDER, CHECKOUT, Supervisor, kept, spec
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user]


def test_a_mount_is_described_used_and_stopped(tmp_path: Path) -> None:
    with kept(spec(tmp_path)) as supervisor:
        assert supervisor.said["ready"] is True
        assert supervisor.said["mountpoint"] == str(supervisor.path)
        assert (supervisor.path / "d" / "007").read_bytes() == pattern(7)
        described = supervisor.described()
        assert described["supervisorPid"] == supervisor.process.pid
        assert described["source"]["credentials"] == "default chain"
        assert (supervisor.state / "mount.json").stat().st_mode & 0o777 == 0o600
        assert supervisor.state.stat().st_mode & 0o777 == 0o700
        (status,) = supervisor.ask(op="status")
        assert status["ok"]
        assert status["serverPid"] == described["serverPid"]
        assert status["files"] == 202
        assert status["requests"]["READ"] >= 1
        memory = Path(f"/proc/{supervisor.process.pid}/status").read_text()
        assert int(memory.split("VmRSS:")[1].split()[0]) < 24_000, "the supervisor stays small"
        assert supervisor.ask(op="stop") == [{"ok": True, "errors": [], "inMemory": 0}]
        assert supervisor.wait() == 0
        assert not os.path.ismount(supervisor.path)
        assert sorted(os.listdir(supervisor.state)) == ["lock", "mount.log"]


def test_control_requests_get_an_answer(tmp_path: Path) -> None:
    """Also those that make no sense; warming reports its progress."""
    with kept(spec(tmp_path)) as supervisor:
        for request in ({"op": "dance"}, {"up": 1}, {"op": "warm", "path": 5}):
            (answer,) = supervisor.ask(**request)
            assert not answer["ok"]
        with supervisor.connected():
            assert supervisor.ask(op="status")[0]["ok"], "one silent client holds up nobody"
        lines = supervisor.ask(op="warm", path="d")
        assert [line["progress"]["done"] for line in lines[:-1]] == [1, 2, 3]
        assert lines[-1] == {"ok": True, "files": 3}


@promise("S-191")
def test_a_busy_mount_is_not_stopped_unless_forced(tmp_path: Path) -> None:
    """Nor is one by a stop that is read after its time: who asked for it has said by then that the mount stays."""
    with kept(spec(tmp_path)) as supervisor:
        with (supervisor.path / "d" / "000").open("rb"):
            (answer,) = supervisor.ask(op="stop")
            assert not answer["ok"]
            assert f"pid {os.getpid()} " in answer["errors"][0]
            assert (supervisor.path / "d" / "001").read_bytes() == pattern(1), "it goes on"
        (answer,) = supervisor.ask(op="stop", withinSeconds=1, asked=time.monotonic() - 2)
        assert not answer["ok"]
        assert os.path.ismount(supervisor.path)
        assert supervisor.ask(op="stop", withinSeconds=60, asked=time.monotonic())[0]["ok"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_mount_even_when_it_is_in_use(tmp_path: Path, number: signal.Signals) -> None:
    with kept(spec(tmp_path)) as supervisor:
        with (supervisor.path / "d" / "000").open("rb") if number is signal.SIGTERM else (tmp_path / "x").open("wb"):
            supervisor.process.send_signal(number)
            eventually(lambda: not os.path.ismount(supervisor.path))
        assert supervisor.wait() == 0


def test_a_mount_unmounted_by_hand_ends(tmp_path: Path) -> None:
    with kept(spec(tmp_path)) as supervisor:
        command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
        subprocess.run([*command, str(supervisor.path)], check=True, timeout=60)
        assert supervisor.wait() == 0


WRONG = [
    ({"labels": {"wrong": "key"}}, "CredentialsInvalid", "AKIAEXAMPLE is unknown"),
    ({"labels": {"defect": "1"}}, "MountFailed", "could not start: RuntimeError"),
    ({"mountpoint": "/nowhere/at/all"}, "MountFailed", "does not exist"),
    ({"mountpoint": "/usr"}, "MountFailed", "not empty"),
    ({"mountpoint": "/proc"}, "MountFailed", "already a mount of"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), WRONG)
def test_what_can_not_begin_says_why_and_mounts_nothing(
    tmp_path: Path, changes: dict[str, object], kind: str, words: str
) -> None:
    wanted = spec(tmp_path, **changes)
    with kept(wanted, mounted_after=wanted.mountpoint == "/proc") as supervisor:
        assert supervisor.said["kind"] == kind
        assert words in supervisor.said["error"]
        assert supervisor.wait() == 1
        assert not (supervisor.state / "mount.json").exists()
        assert not (supervisor.state / "control.sock").exists()


def test_one_state_directory_serves_one_mount(tmp_path: Path) -> None:
    with kept(spec(tmp_path)):
        other = tmp_path / "other"
        other.mkdir()
        with kept(spec(tmp_path, mountpoint=str(other))) as second:
            assert "mounted already" in second.said["error"]
            assert second.wait() == 1


def test_a_specification_that_is_none_is_refused() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "datastore.fuse"], input=b'{"version": 9}', capture_output=True, cwd=CHECKOUT, timeout=90
    )
    assert finished.returncode == 1
    assert b"InvalidManifest" in finished.stdout


def test_who_asked_and_went_away_leaves_no_mount(tmp_path: Path) -> None:
    wanted = spec(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "datastore.fuse", "--builder", "tests.memfs:build"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=CHECKOUT,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.communicate(wanted.to_json().encode())
    assert process.wait(90) == 1
    assert not os.path.ismount(wanted.mountpoint)


@promise("S-153")
def test_a_full_disk_ends_no_supervisor(tmp_path: Path) -> None:
    """A limit of the size of files stands for the disk."""
    with kept(spec(tmp_path)) as supervisor:
        limited(supervisor, resource.RLIMIT_FSIZE, 0)
        before = supervisor.kill_server()
        assert (supervisor.path / "d" / "011").read_bytes() == pattern(11)
        (status,) = supervisor.ask(op="status")
        assert status["serverPid"] != before
        assert supervisor.server_pid() == before, "the supervisor could not write that down"
        limited(supervisor, resource.RLIMIT_FSIZE)
        eventually(lambda: supervisor.server_pid() == status["serverPid"])


@promise("S-153")
def test_a_system_that_starts_no_process_ends_no_supervisor(tmp_path: Path) -> None:
    """A limit of descriptors stands for one of processes."""
    with kept(spec(tmp_path)) as supervisor, ThreadPoolExecutor(1) as reader:
        output = f"/proc/{supervisor.process.pid}/fd/1"
        eventually(lambda: os.readlink(output) == str(supervisor.state / "mount.log"), "it has begun to keep")
        limited(supervisor, resource.RLIMIT_NOFILE, 0)

        def none_starts() -> bool:
            """Also none of those that were about to start when the limit came."""
            for server in psutil.Process(supervisor.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    server.kill()
            return supervisor.log().count("could not start") >= 5

        none_starts()
        waiting = reader.submit((supervisor.path / "d" / "011").read_bytes)
        eventually(none_starts)
        assert supervisor.log().count("could not start") < 20, "it is not tried all the time"
        limited(supervisor, resource.RLIMIT_NOFILE)
        assert waiting.result(60) == pattern(11)


@promise("S-153")
def test_a_state_directory_that_can_not_be_written_gives_no_mount(tmp_path: Path) -> None:
    """Nobody could find and unmount it."""
    (tmp_path / "state" / "mount.json.new").mkdir(parents=True)
    with kept(spec(tmp_path)) as supervisor:
        assert "can't write to the state directory" in supervisor.said["error"]
        assert supervisor.wait() == 1


def limited(supervisor: Supervisor, kind: int, soft: int | None = None) -> None:
    """Change a limit of the supervisor's process; None: as far as may be."""
    _, hard = resource.prlimit(supervisor.process.pid, kind)
    resource.prlimit(supervisor.process.pid, kind, (hard if soft is None else soft, hard))


@pytest.mark.root_only  # passthrough is root's
def test_files_open_by_passthrough_and_otherwise_go_on_after_a_death(tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(pattern(0))
    with kept(spec(tmp_path, labels={"local": str(local)})) as supervisor:
        by_passthrough, otherwise = supervisor.path / "d" / "000", supervisor.path / "d" / "001"
        with by_passthrough.open("rb") as one, otherwise.open("rb") as other:
            before = supervisor.kill_server()
            eventually(lambda: supervisor.server_pid() != before)
            assert one.read() == pattern(0)
            assert other.read() == pattern(1)
            # opens beside those of the dead server have to be of the same kind, or the kernel says EIO
            assert by_passthrough.read_bytes() == pattern(0)
            assert otherwise.read_bytes() == pattern(1)
            assert supervisor.ask(op="status")[0]["passthroughOpen"] == 1
        eventually(lambda: supervisor.ask(op="status")[0]["passthroughOpen"] == 0)


@promise("S-60")
def test_the_directory_beneath_is_unwritable_until_the_end(tmp_path: Path) -> None:
    """After a crash as well, so that nothing lands on the disk below; an orderly end gives its mode back."""
    (tmp_path / "m").mkdir(mode=0o755)
    before = (tmp_path / "m").stat().st_mode
    beneath = os.open(tmp_path / "m", os.O_RDONLY)
    try:
        with kept(spec(tmp_path)) as supervisor:
            assert stat.S_IMODE(os.fstat(beneath).st_mode) == 0o555
            if may_be_immutable(tmp_path):
                with pytest.raises(PermissionError):
                    os.open("stray", os.O_WRONLY | os.O_CREAT, dir_fd=beneath)
            supervisor.process.kill()
            supervisor.process.wait()
            supervisor.kill_server()
            eventually(lambda: fails_to_list(supervisor.path), "a dead mount is not an empty directory")
            device.unmount(str(supervisor.path), lazy=True)
            assert stat.S_IMODE(os.fstat(beneath).st_mode) == 0o555
        with kept(spec(tmp_path)) as supervisor:
            assert supervisor.ask(op="stop")[0]["ok"]
            assert supervisor.wait() == 0
            assert (tmp_path / "m").stat().st_mode == before
            (tmp_path / "m" / "file").touch()
    finally:
        os.close(beneath)


def fails_to_list(path: Path) -> bool:
    try:
        os.listdir(path)
    except OSError:
        return True
    return False


def may_be_immutable(directory: Path) -> bool:
    """Whether chattr(1) works here for us."""
    probe = directory / "probe"
    probe.mkdir()
    done = subprocess.run(["chattr", "+i", str(probe)], capture_output=True, check=False, timeout=60)
    subprocess.run(["chattr", "-i", str(probe)], capture_output=True, check=False, timeout=60)
    return done.returncode == 0


@promise("S-59")
@pytest.mark.parametrize("kernel", [{}, {"kernel": "old"}], ids=["this kernel", "an old kernel"])
def test_a_server_is_replaced_on_request_under_readers(tmp_path: Path, kernel: dict[str, str]) -> None:
    """By one that imports its code anew, while the old one serves."""
    with (
        kept(spec(tmp_path, labels={"delay": "0.002", **kernel})) as supervisor,
        (supervisor.path / "d" / "199").open("rb") as held,
    ):
        for _ in range(3):
            before = supervisor.server_pid()
            supervisor.process.send_signal(signal.SIGUSR2)
            while supervisor.server_pid() == before:
                assert (supervisor.path / "d" / "011").read_bytes() == pattern(11)
            assert os.pread(held.fileno(), 100, 50) == pattern(199)[50:150]
        assert "died" not in supervisor.log()


@promise("S-59")
@pytest.mark.root_only
def test_a_server_serves_under_a_supervisor_that_is_older(tmp_path: Path) -> None:
    """Which sends the device alone, without a clone: a restart after an upgrade replaces the server only."""
    wanted = spec(tmp_path)
    Path(wanted.state_dir).mkdir()
    server = ServerProcess(BUILDER, None)
    described = {"spec": wanted.to_json(), "builder": BUILDER, "log": str(tmp_path / "log"), "resumed": False}
    try:
        assert frames.receive(server.channel, 60)[0] == {"prepared": True}
        frames.send(server.channel, {**described, "restarts": 0})
        assert frames.receive(server.channel, 60)[0] == {"probed": True}
        device_fd = device.mount(wanted.mountpoint, "memory")
        frames.send(server.channel, {"serve": True, "negotiated": None}, (device_fd,))
        os.close(device_fd)
        assert "negotiated" in frames.receive(server.channel, 60)[0]
        assert (Path(wanted.mountpoint) / "d" / "011").read_bytes() == pattern(11)
    finally:
        device.unmount(wanted.mountpoint, lazy=True)
        server.end(30)
        server.channel.close()


@promise("S-424")
def test_calls_in_flight_end_when_a_server_dies_under_an_old_kernel(tmp_path: Path) -> None:
    """It would keep them for the server that is gone, and their callers could not even be killed. A kernel may ask the
    next server for the page of a failed read."""
    labels = {"kernel": "old", "delay": "3"}
    with kept(spec(tmp_path, labels=labels)) as supervisor, ThreadPoolExecutor(1) as reader:
        for _ in range(2):  # the second time it is a server that took over which dies
            reading = reader.submit((supervisor.path / "d" / "011").read_bytes)
            eventually(lambda: supervisor.ask(op="status")[0]["inFlight"] == 1)
            before = supervisor.kill_server()
            with suppress(ConnectionAbortedError):
                assert reading.result(60) == pattern(11)
            assert sorted(os.listdir(supervisor.path))[0] == "d", "later calls wait for the next server"
            assert supervisor.server_pid() != before


@promise("S-59", "S-153")
def test_a_new_server_that_does_not_start_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation costs nothing; mount.json says why, as soon as it can be written."""
    broken = tmp_path / "python" / "tests"
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'python'}{os.pathsep}{CHECKOUT}")
    with kept(spec(tmp_path)) as supervisor:
        before = supervisor.server_pid()
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text("raise ImportError('half installed')")
        in_the_way = supervisor.state / "mount.json.new"
        in_the_way.mkdir()
        supervisor.process.send_signal(signal.SIGUSR2)
        eventually(lambda: "half installed" in supervisor.log())
        eventually(lambda: "mount.json can't be written" in supervisor.log())
        in_the_way.rmdir()
        eventually(lambda: "does not start" in supervisor.described().get("refused", ""))
        assert supervisor.server_pid() == before
        assert (supervisor.path / "d" / "011").read_bytes() == pattern(11)


@promise("S-61")
def test_a_mount_without_a_server_refuses_after_a_while_and_works_again(tmp_path: Path) -> None:
    """Nobody hangs for ever, and mount.json says why."""
    flag = tmp_path / "broken"
    unlucky = spec(tmp_path, labels={"broken while": str(flag)})
    with kept(unlucky, "--down-limit", "1") as supervisor, (supervisor.path / "d" / "011").open() as held:
        flag.touch()
        before = supervisor.kill_server()
        eventually(lambda: bool(supervisor.described().get("trouble")))
        eventually(lambda: fails_to_list(supervisor.path / "d"))
        eventually(lambda: supervisor.log().count("could not start") >= 2, "it is tried again")
        assert mountinfo.read().at(str(supervisor.path)), "a crash never unmounts"
        assert "refused" in supervisor.log()
        flag.unlink()
        eventually(lambda: "trouble" not in supervisor.described())
        assert held.read().encode() == pattern(11)
        assert supervisor.server_pid() != before


@promise("S-61")
@pytest.mark.root_only
def test_a_forced_unmount_while_callers_are_refused(tmp_path: Path) -> None:
    """What it has told and kept is taken away, as after any other unmount, and no server is tried any more."""
    flag = tmp_path / "broken"
    with kept(spec(tmp_path, labels={"broken while": str(flag)}), "--down-limit", "1") as supervisor:
        flag.touch()
        supervisor.kill_server()
        eventually(lambda: "is refused" in supervisor.log(), "callers are refused")
        for options in (["-f"], ["-f", "-l"]):
            subprocess.run(["umount", *options, str(supervisor.path)], check=False)
        assert supervisor.wait() == 0
        assert "Traceback" not in supervisor.log()
        assert sorted(os.listdir(supervisor.state)) == ["lock", "mount.log"]
